"""Modules that take a keyed jagged tensor apart and put it together, for traced models."""

from __future__ import annotations

from torch import nn

from tessera.training.sparse.jagged import JaggedTensor
from tessera.training.sparse.keyed_jagged import KeyedJaggedTensor


class ComputeKJTToJTDict(nn.Module):
    """A keyed jagged tensor as the bags of each feature."""

    def forward(self, keyed_jagged_tensor: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the bags of every feature by its name."""
        return keyed_jagged_tensor.to_dict()


class ComputeJTDictToKJT(nn.Module):
    """The bags of each feature as one keyed jagged tensor."""

    def forward(self, jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """One feature per entry.

        Raises:
            ValueError: no entries, or weights in some only.
        """
        return KeyedJaggedTensor.from_jt_dict(jt_dict)
