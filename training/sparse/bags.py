"""What the tensors of bags share: ids, weights, lengths and offsets, in TorchScript as well."""

from __future__ import annotations

from torch import Tensor

from tessera.training.sparse.layout import known_lengths, known_offsets
from tessera.training.sparse.outside_script import OutsideScript
from tessera.training.sparse.script_types import Device


class Bags(OutsideScript, shared=True):
    """``n`` bags with ``N`` entries, stored one after the other.

    One of the lengths and the offsets is enough; the other is worked out when it is asked for.
    """

    _values: Tensor
    _weights: Tensor | None
    _lengths: Tensor | None
    _offsets: Tensor | None

    def values(self) -> Tensor:
        """``[N]`` (ids) or ``[N, D]`` (vectors), the bags' entries in order."""
        return self._values

    def weights(self) -> Tensor:
        """Return the weights ``[N]``, one per entry.

        Raises:
            ValueError: there are no weights.
        """
        weights = self._weights
        if weights is None:
            raise ValueError("this tensor has no weights; build it with weights=")
        return weights

    def weights_or_none(self) -> Tensor | None:
        """Return the weights, or None."""
        return self._weights

    def lengths(self) -> Tensor:
        """Return the sizes of the bags, ``[n]``."""
        lengths = known_lengths(self._lengths, self._offsets)
        self._lengths = lengths
        return lengths

    def lengths_or_none(self) -> Tensor | None:
        """Return the lengths if they are known without work, else None."""
        return self._lengths

    def offsets(self) -> Tensor:
        """``[n + 1]``, where each bag starts, then ``N``."""
        offsets = known_offsets(self._lengths, self._offsets)
        self._offsets = offsets
        return offsets

    def offsets_or_none(self) -> Tensor | None:
        """Return the offsets if they are known without work, else None."""
        return self._offsets

    def device(self) -> Device:
        """Return the device of the values."""
        return self._values.device
