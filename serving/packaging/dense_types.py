"""How the weights of dense layers are stored, and by which operator they are multiplied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessera.kernels.linear import pack_linear, pack_linear_bf16


@dataclass(frozen=True, kw_only=True)
class DenseType:
    """One way to store a dense layer, called ``name`` in ``--dense-dtype`` and in the manifest.

    Attributes:
        weight_bytes: of a number.
        devices: the kinds of device that have it.
        calibrated: whether the model must be run on a sample of its inputs to package it.
        pack: on a CPU, lays weight ``[N, K]`` and bias ``[N]`` (or None), both float32, out for the
            operator of ``torch.ops.tessera`` called ``operator_name``; None and empty where a CPU does
            not have the type.
    """

    name: str
    weight_bytes: int
    devices: tuple[str, ...] = ("cpu", "cuda")
    calibrated: bool = False
    operator_name: str = ""
    pack: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]] | None = None

    def saved_bytes(self, weight: Tensor) -> int:
        """By how many bytes a float32 ``weight`` is larger than as this type."""
        return weight.numel() * (weight.element_size() - self.weight_bytes)

    @property
    def operator(self) -> Any:
        """``(input, weights, bias, outputs, relu) -> [B, outputs]``; its library must be loaded."""
        return getattr(torch.ops.tessera, self.operator_name)


DENSE_TYPES: dict[str, DenseType] = {
    kind.name: kind
    for kind in (
        DenseType(name="fp32", operator_name="linear", pack=pack_linear, weight_bytes=4),
        DenseType(name="bf16", operator_name="linear_bf16", pack=pack_linear_bf16, weight_bytes=2),
        DenseType(name="fp8", devices=("cuda",), calibrated=True, weight_bytes=1),
    )
}
"""The types that ``package-model --dense-dtype`` offers, the exact one first."""


def dense_operators() -> list[Any]:
    """The operators of all types; none where their library is not loaded."""
    names = [kind.operator_name for kind in DENSE_TYPES.values() if kind.operator_name]
    return [getattr(torch.ops.tessera, name) for name in names if hasattr(torch.ops.tessera, name)]
