"""Shared by the tests of the library."""

import pytest
import torch

from tests.devices import device  # noqa: F401 (a fixture)


@pytest.fixture(autouse=True)
def _one_thread():
    """One thread each: other tests run beside these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
