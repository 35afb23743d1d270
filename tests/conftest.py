"""What every test shares.

Property tests draw the same examples on every run, so that a rare example cannot decide whether a
change that has nothing to do with it may land.  ``make test-random`` is where new examples are
looked for; what it finds becomes an ``@example`` or a test of its own.
"""

import gc
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, register_random, settings

from tests.slow_files import slow_files_first

# What the collection of tests makes stays: the collector of garbage need not look through it, then or later.
gc.disable()

# No deadlines: how long an example takes says how busy the machine is.
common = settings(
    deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.register_profile("same", common, derandomize=True)
settings.register_profile("random", common, derandomize=False)
settings.load_profile("same")  # pytest's --hypothesis-profile, read after this, has the last word


class TorchRandom:
    """torch's generator, for hypothesis to set before each example, as it does with Python's.

    torch is imported by those who run tests: the process that deals them out begins without those seconds.
    """

    def __init__(self):
        self.base = 0

    def seed(self, number):
        import torch

        torch.manual_seed(self.base + number)

    def getstate(self):
        import torch

        return torch.get_rng_state()

    def setstate(self, state):
        import torch

        torch.set_rng_state(state)


torch_random = TorchRandom()
register_random(torch_random)


def pytest_configure(config):
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        import torch  # noqa: F401 - before what else has libraries of C++
    given = config.getoption("hypothesis_seed", None)
    torch_random.base = int(given) % 2**32 if given else 0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Several processes take the files in the order of the collection (``--no-loadscope-reorder``)."""
    if hasattr(config, "workerinput"):
        paths = [item.nodeid.partition("::")[0] for item in items]
        place = {path: number for number, path in enumerate(slow_files_first(paths))}
        items.sort(key=lambda item: place[item.nodeid.partition("::")[0]])


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _traces_stay_fast():
    from tessera.serving.packaging.trace import generated_code_forgotten

    with generated_code_forgotten():
        yield


@pytest.fixture(autouse=True)
def _same_numbers():
    """What a test draws does not depend on which tests came before it."""
    random.seed(torch_random.base)
    np.random.seed(torch_random.base)  # noqa: NPY002 - for libraries that draw from it
    torch_random.seed(0)
