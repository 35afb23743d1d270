"""Small functions for code that is also compiled: what runs it, and hints for the compiler.

The hints say what holds of sizes that are not known while a graph is made; code that runs eagerly or
under TorchScript gets its argument back unchanged.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor
from torch._jit_internal import is_scripting
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

T = TypeVar("T")


def is_torchdynamo_compiling() -> bool:
    """Return whether ``torch.compile`` or ``torch.export`` reads this code's bytecode now."""
    return not is_scripting() and is_dynamo_compiling()


def is_pt2_compiling() -> bool:
    """Return whether a graph of this code is being made, by reading its bytecode or by running it."""
    return not is_scripting() and (is_dynamo_compiling() or is_compiling())


def is_non_strict_exporting() -> bool:
    """Return whether ``torch.export`` runs this code (``strict=False``) to make its graph."""
    return not is_scripting() and is_compiling() and not is_dynamo_compiling()


def pt2_checks_tensor_slice(
    tensor: Tensor, start_offset: int, end_offset: int, dim: int = 0
) -> None:
    """Tell the compiler that ``start_offset`` to ``end_offset`` lie within dimension ``dim``."""
    if is_scripting() or not is_pt2_compiling():
        return
    _tell(start_offset >= 0)
    _tell(start_offset <= end_offset)
    _tell(end_offset <= tensor.size(dim))


def pt2_checks_all_is_size(x: list[int]) -> list[int]:
    """Tell the compiler that no number of ``x`` is negative; returns ``x``."""
    if is_scripting() or not is_pt2_compiling():
        return x
    for number in x:
        _tell(number >= 0)
    return x


def pt2_check_size_nonzero(x: Tensor) -> Tensor:
    """Tell the compiler that no dimension of ``x`` is empty; returns ``x``."""
    if is_scripting() or not is_pt2_compiling():
        return x
    for dim in range(x.dim()):
        _tell(x.size(dim) > 0)
    return x


def pt2_guard_or_false(x: bool) -> bool:  # noqa: FBT001 - the signature that TorchRec users know
    """``x``; False where the compiler cannot tell."""
    if is_scripting() or not is_pt2_compiling():
        return x
    return bool(guard_or_false(x))


def pt2_guard_or_true(x: bool) -> bool:  # noqa: FBT001 - the signature that TorchRec users know
    """``x``; True where the compiler cannot tell."""
    if is_scripting() or not is_pt2_compiling():
        return x
    return bool(guard_or_true(x))


@torch.jit.unused
def _tell(holds: bool) -> None:  # noqa: FBT001 - may be a symbol that stands for a bool
    torch._check(holds)  # type: ignore[no-untyped-call] # noqa: SLF001 - documented, and untyped
