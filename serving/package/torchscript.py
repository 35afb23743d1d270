"""What every user of TorchScript here shares: its preparation for inference, and its silence."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tessera.serving.package.runner import SHARED_METHOD


@contextmanager
def expected_deprecation() -> Iterator[None]:
    """Leave out torch's warnings that TorchScript is deprecated and, from Python 3.14 on, not supported.

    It tells the user nothing that he could change; `tessera.serving.package.runner.Runner` is the place
    where another kind of artifact joins.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*(deprecated|not supported)")
        yield


def optimize(module: Any) -> Any:
    """What every loader does to the scripted module for speed; results may differ in rounding.

    Parameters become constants of the graph, and the dense layers get kernels that know their
    weights.  Side effect: torch's fusion strategy for the process is set to no fusion; the
    fuser's recompilation at each new shape costs a server far more than fused kernels give it.
    """
    on_cpu = all(buffer.device.type == "cpu" for buffer in module.buffers())
    with expected_deprecation():
        torch.jit.set_fusion_strategy([("STATIC", 0)])
        more = [SHARED_METHOD] if on_cpu and hasattr(module, SHARED_METHOD) else []
        frozen = torch.jit.freeze(module.eval(), preserved_attrs=more)
        # What it does beyond freezing is for the CPU.
        return torch.jit.optimize_for_inference(frozen, other_methods=more) if on_cpu else frozen


def put_tensor(module: Any, path: str, tensor: torch.Tensor) -> None:
    """Put ``tensor`` in the place of the one that a scripted module has at ``path``."""
    *parents, last = path.split(".")
    for parent in parents:
        module = getattr(module, parent)
    setattr(module, last, tensor)


def last_line(error: BaseException) -> str:
    """What TorchScript says of an error that its code raised: the last line, behind its trace."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next(filter(None, reversed(lines)), type(error).__name__)
