"""The devices that a test runs on."""

import pytest
import torch


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
