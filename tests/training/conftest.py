"""Shared by the tests of the library."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """One thread each: other tests run beside these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
            ],
        ),
    ]
)
def device(request):
    """The CPU, and a GPU where there is one."""
    return torch.device(request.param)
