"""JaggedTensor: the bags of one feature for a batch."""

# ruff: noqa: SLF001 - a class method fills the fields of a new object of its own class

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from tessera.training.sparse.checks import (
    check_jagged,
    is_traced,
    lengths_to_offsets,
    offsets_to_lengths,
)


class JaggedTensor:
    """``B`` bags of different lengths, stored one after the other.

    Args:
        values: ``[N]`` (ids) or ``[N, D]`` (vectors), the bags' entries in order.
        weights: ``[N]`` or None, one weight per value.
        lengths: ``[B]`` int32 or int64, the bags' sizes.
        offsets: ``[B + 1]`` int32 or int64, where each bag starts, then ``N``.

    One of ``lengths`` and ``offsets`` is enough; the other is worked out when asked for.
    Offsets worked out here are int64.

    Raises:
        ValueError: the fields do not fit together.
    """

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        check_jagged(values, weights, lengths, offsets)
        self._values: Tensor = values
        self._weights: Tensor | None = weights
        self._lengths: Tensor | None = lengths
        self._offsets: Tensor | None = offsets

    @classmethod
    def _trusted(
        cls,
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None,
    ) -> JaggedTensor:
        """Build from fields that are known to fit, without looking at them again."""
        jagged = cls.__new__(cls)
        jagged._values, jagged._weights = values, weights
        jagged._lengths, jagged._offsets = lengths, offsets
        return jagged

    @staticmethod
    def empty(
        is_weighted: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> JaggedTensor:
        """No bags at all."""
        return JaggedTensor(
            values=torch.empty(0, dtype=values_dtype, device=device),
            weights=torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            lengths=torch.empty(0, dtype=lengths_dtype, device=device),
        )

    @staticmethod
    def from_dense(values: list[Tensor], weights: list[Tensor] | None = None) -> JaggedTensor:
        """One bag per tensor of ``values`` (each ``[n_i]`` or ``[n_i, D]``).

        Raises:
            ValueError: ``values`` is empty, or weights of other lengths than the values.
        """
        if not values:
            raise ValueError("values is an empty list; use JaggedTensor.empty() for no bags")
        if weights is not None and [len(w) for w in weights] != [len(v) for v in values]:
            raise ValueError("weights and values differ in the lengths of their tensors")
        lengths = torch.tensor([len(value) for value in values], dtype=torch.int64)
        return JaggedTensor(
            values=torch.cat(values),
            weights=None if weights is None else torch.cat(weights),
            lengths=lengths.to(values[0].device),
        )

    @staticmethod
    def from_dense_lengths(
        values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> JaggedTensor:
        """The first ``lengths[i]`` entries of each row of ``values`` ``[B, L]`` or ``[B, L, D]``.

        Raises:
            ValueError: a length is over ``L``.
        """
        width = values.size(1)
        if lengths.numel() and int(lengths.max()) > width:
            raise ValueError(f"lengths holds {int(lengths.max())}, but rows have {width} entries")
        mask = torch.arange(width, device=values.device).unsqueeze(0) < lengths.unsqueeze(1)
        return JaggedTensor(
            values=values[mask],
            weights=None if weights is None else weights[mask],
            lengths=lengths,
        )

    def values(self) -> Tensor:
        """``[N]`` or ``[N, D]``, the bags' entries in order."""
        return self._values

    def lengths(self) -> Tensor:
        """``[B]``, the bags' sizes."""
        if self._lengths is None:
            assert self._offsets is not None
            self._lengths = offsets_to_lengths(self._offsets)
        return self._lengths

    def lengths_or_none(self) -> Tensor | None:
        """The lengths if they are known without work."""
        return self._lengths

    def offsets(self) -> Tensor:
        """``[B + 1]``, where each bag starts, then ``N``."""
        if self._offsets is None:
            assert self._lengths is not None
            self._offsets = lengths_to_offsets(self._lengths)
        return self._offsets

    def offsets_or_none(self) -> Tensor | None:
        """The offsets if they are known without work."""
        return self._offsets

    def weights(self) -> Tensor:
        """``[N]``, one weight per value.

        Raises:
            ValueError: the tensor has no weights.
        """
        if self._weights is None:
            raise ValueError("this JaggedTensor has no weights; build it with weights=")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """The weights, or None."""
        return self._weights

    def device(self) -> torch.device:
        """Where the values live."""
        return self._values.device

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> JaggedTensor:
        """The same bags on ``device``."""
        weights, lengths, offsets = self._weights, self._lengths, self._offsets
        return JaggedTensor._trusted(
            self._values.to(device, non_blocking=non_blocking),
            None if weights is None else weights.to(device, non_blocking=non_blocking),
            None if lengths is None else lengths.to(device, non_blocking=non_blocking),
            None if offsets is None else offsets.to(device, non_blocking=non_blocking),
        )

    def to_dense(self) -> list[Tensor]:
        """One tensor per bag."""
        return _bags(self._values, self.offsets())

    def to_dense_weights(self) -> list[Tensor]:
        """One weight tensor per bag.

        Raises:
            ValueError: the tensor has no weights.
        """
        return _bags(self.weights(), self.offsets())

    def to_padded_dense(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor:
        """``[B, desired_length]`` (and ``D``): bags cut or padded to one length.

        Args:
            desired_length: None takes the longest bag.
            padding_value: what fills the rest.
        """
        return self._padded(self._values, desired_length, padding_value)

    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor:
        """Like `to_padded_dense`, of the weights.

        Raises:
            ValueError: the tensor has no weights.
        """
        return self._padded(self.weights(), desired_length, padding_value)

    def _padded(self, source: Tensor, desired_length: int | None, padding_value: float) -> Tensor:
        lengths = self.lengths()
        if desired_length is None:
            desired_length = int(lengths.max()) if lengths.numel() else 0
        shape = (lengths.numel(), desired_length, *source.shape[1:])
        padded = source.new_full(shape, padding_value)
        bag = torch.repeat_interleave(
            torch.arange(lengths.numel(), device=lengths.device), lengths.long()
        )
        place = torch.arange(source.size(0), device=lengths.device) - self.offsets()[bag]
        kept = place < desired_length
        padded[bag[kept], place[kept]] = source[kept]
        return padded

    def __str__(self) -> str:
        if is_traced(self._values, self._lengths, self._offsets):
            return "JaggedTensor(traced)"
        bags = ", ".join(str(bag.tolist()) for bag in self.to_dense())
        if self._weights is None:
            return f"JaggedTensor([{bags}])"
        weights = ", ".join(str(bag.tolist()) for bag in self.to_dense_weights())
        return f"JaggedTensor([{bags}], weights=[{weights}])"

    __repr__ = __str__


def _bags(source: Tensor, offsets: Tensor) -> list[Tensor]:
    bounds: list[int] = offsets.tolist()
    return [source[start:stop] for start, stop in pairwise(bounds)]
