"""The operator library (built when it is not there yet) and the devices to test it on."""

from __future__ import annotations

import pytest
import torch

from tessera.kernels import build, ops


@pytest.fixture(scope="session", autouse=True)
def operators():
    if not build.LIBRARY.exists():
        build.build()
    ops.load()
    # One thread is what a server's worker has; the test of threads sets its own number.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.ops.tessera
    torch.set_num_threads(before)


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        metafunc.parametrize(
            "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="session"
        )


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
