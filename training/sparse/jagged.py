"""JaggedTensor: the bags of one feature for a batch."""

# ruff: noqa: FBT001, FBT002, PLR0917 - signatures that TorchRec users know, flags by position among them

from __future__ import annotations

import torch
from torch import Tensor

from tessera.training.sparse.bags import Bags
from tessera.training.sparse.checks import (
    check_jagged,
    check_use_of_bags,
    check_weights,
    values_are_unknown,
)
from tessera.training.sparse.layout import running_sum
from tessera.training.sparse.script_types import Device, DType, is_scripting
from tessera.training.sparse.strictness import is_strict


class JaggedTensor(Bags):
    """``B`` bags of different lengths, stored one after the other.

    Compiles under ``torch.jit.script``; may hold ``torch.fx`` proxies.

    Args:
        values: ``[N]`` (ids) or ``[N, D]`` (vectors), the bags' entries in order.
        weights: ``[N]`` or None, one weight per value.
        lengths: ``[B]`` int32 or int64, the bags' sizes.
        offsets: ``[B + 1]`` int32 or int64, where each bag starts, then ``N``.
        validate: False where the caller answers for the fields; scripted code never checks.

    One of ``lengths`` and ``offsets`` is enough; the other is worked out when asked for.
    Offsets worked out here are int64.  Where both are missing, or the weights are not one per value,
    the methods that need them raise.

    Raises:
        ValueError: the fields do not fit together.
    """

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        validate: bool = True,
    ) -> None:
        if is_scripting():
            pass
        elif validate and is_strict():
            check_jagged(values, lengths, offsets)
        self._values: Tensor = values
        self._weights: Tensor | None = weights
        self._lengths: Tensor | None = lengths
        self._offsets: Tensor | None = offsets

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: Device | None = None,
        values_dtype: DType | None = None,
        weights_dtype: DType | None = None,
        lengths_dtype: DType = torch.int32,
    ) -> JaggedTensor:
        """Return a tensor without bags."""
        weights = torch.empty([0], dtype=weights_dtype, device=device)
        return JaggedTensor(
            values=torch.empty([0], dtype=values_dtype, device=device),
            weights=weights if is_weighted else None,
            lengths=torch.empty([0], dtype=lengths_dtype, device=device),
        )

    @staticmethod
    def empty_like(jt: JaggedTensor, device: Device | None = None) -> JaggedTensor:
        """No bags, with the dtypes of ``jt``, on its device or another."""
        return _empty_like(jt, device)

    @staticmethod
    def from_dense(values: list[Tensor], weights: list[Tensor] | None = None) -> JaggedTensor:
        """One bag per tensor of ``values`` (each ``[n_i]`` or ``[n_i, D]``).

        Lengths and offsets are int32, or int64 where the values are too many for it.

        Raises:
            ValueError: ``values`` is empty, or weights of other lengths than the values.
        """
        if len(values) == 0:
            raise ValueError("values is an empty list; use JaggedTensor.empty() for no bags")
        sizes = [value.size(0) for value in values]
        if weights is not None and [weight.size(0) for weight in weights] != sizes:
            raise ValueError("weights and values differ in the lengths of their tensors")
        bounds = running_sum(sizes)
        kind = torch.int32 if bounds[-1] < 2**31 else torch.int64
        device = values[0].device
        return JaggedTensor(
            values=torch.cat(values),
            weights=None if weights is None else torch.cat(weights),
            lengths=torch.tensor(sizes, dtype=kind, device=device),
            offsets=torch.tensor(bounds, dtype=kind, device=device),
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
        if not is_scripting() and not values_are_unknown(values, lengths):
            _check_width(lengths, width)
        mask = torch.arange(width, device=values.device).unsqueeze(0) < lengths.unsqueeze(1)
        return JaggedTensor(
            values=values[mask],
            weights=None if weights is None else weights[mask],
            lengths=lengths,
        )

    @staticmethod
    def part(
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None,
        ids: list[int],
        bags: list[int],
    ) -> JaggedTensor:
        """Some neighbouring bags of many, sharing storage.

        ``ids`` are the first entry of the part and the first after it, ``bags`` the same of bags;
        all else is of all bags.
        """
        start, stop = ids[0], ids[1]
        first, last = bags[0], bags[1]
        return JaggedTensor(
            values[start:stop],
            None if weights is None else weights[start:stop],
            None if lengths is None else lengths[first:last],
            None if offsets is None else offsets[first : last + 1] - start,
            False,
        )

    def to(self, device: Device, non_blocking: bool = False) -> JaggedTensor:
        """Return the same bags on ``device``."""
        weights, lengths, offsets = self._weights, self._lengths, self._offsets
        return JaggedTensor(
            self._values.to(device, non_blocking=non_blocking),
            None if weights is None else weights.to(device, non_blocking=non_blocking),
            None if lengths is None else lengths.to(device, non_blocking=non_blocking),
            None if offsets is None else offsets.to(device, non_blocking=non_blocking),
            False,
        )

    def to_dense(self) -> list[Tensor]:
        """Return one tensor per bag."""
        if not is_scripting():
            check_use_of_bags(self._values, self.offsets())
        return _bags(self._values, self.offsets())

    def to_dense_weights(self) -> list[Tensor] | None:
        """One weight tensor per bag; None where there are no weights."""
        weights = self._weights
        if weights is None:
            return None
        if not is_scripting():
            check_weights(self._values, weights)
            check_use_of_bags(weights, self.offsets())
        return _bags(weights, self.offsets())

    def to_padded_dense(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor:
        """``[B, desired_length]`` (and ``D``): bags cut or padded to one length.

        Args:
            desired_length: None takes the longest bag.
            padding_value: what fills the rest.
        """
        if not is_scripting():
            check_use_of_bags(self._values, self.offsets())
        return _padded(self._values, self.lengths(), self.offsets(), desired_length, padding_value)

    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor | None:
        """Like `to_padded_dense`, of the weights; None where there are no weights."""
        weights = self._weights
        if weights is None:
            return None
        if not is_scripting():
            check_weights(self._values, weights)
            check_use_of_bags(weights, self.offsets())
        return _padded(weights, self.lengths(), self.offsets(), desired_length, padding_value)


def cut_evenly(
    values: Tensor,
    weights: Tensor | None,
    lengths: Tensor,
    offsets: Tensor | None,
    counts: list[int],
) -> list[JaggedTensor]:
    """Features of as many bags each, one after the other, taken apart in a few operations.

    ``counts`` are the values of each feature; ``lengths`` are ``[F * B]``, with ``B`` at least 1.
    The parts have offsets where ``offsets`` are given.
    """
    features = len(counts)
    if features == 0:
        return []
    lengths_FB = lengths.view(features, -1)
    stride = lengths_FB.size(1)
    values_of = torch.split_with_sizes(values, counts)
    weights_of = values_of if weights is None else torch.split_with_sizes(weights, counts)
    lengths_of = lengths_FB.unbind(0)
    offsets_of = lengths_of
    if offsets is not None:
        starts = offsets[:-1:stride].unsqueeze(1)
        offsets_of = (offsets.unfold(0, stride + 1, stride) - starts).unbind(0)
    return [
        JaggedTensor(
            values_of[feature],
            None if weights is None else weights_of[feature],
            lengths_of[feature],
            None if offsets is None else offsets_of[feature],
            False,
        )
        for feature in range(features)
    ]


def _check_width(lengths: Tensor, width: int) -> None:
    if lengths.numel() and int(lengths.max()) > width:
        raise ValueError(f"lengths holds {int(lengths.max())}, but rows have {width} entries")


def _empty_like(jt: JaggedTensor, device: Device | None) -> JaggedTensor:
    where = jt.device() if device is None else device
    weights = jt.weights_or_none()
    return JaggedTensor(
        values=jt.values()[:0].to(where),
        weights=None if weights is None else weights[:0].to(where),
        lengths=jt.lengths()[:0].to(where),
    )


def _bags(source: Tensor, offsets: Tensor) -> list[Tensor]:
    bounds: list[int] = offsets.tolist()
    return [source[bounds[index] : bounds[index + 1]] for index in range(len(bounds) - 1)]


def _padded(
    source: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    desired_length: int | None,
    padding_value: float,
) -> Tensor:
    width = 0
    if desired_length is not None:
        width = desired_length
    elif lengths.numel() > 0:
        width = int(lengths.max())
    shape = [lengths.numel(), width]
    shape.extend(source.shape[1:])
    padded = source.new_full(shape, padding_value)
    bag = torch.repeat_interleave(
        torch.arange(lengths.numel(), device=lengths.device), lengths.long()
    )
    source = source[: bag.numel()]  # values behind the last bag are left alone
    place = torch.arange(source.size(0), device=lengths.device) - offsets[bag]
    kept = place < width
    padded[bag[kept], place[kept]] = source[kept]
    return padded


# Their branches and shapes depend on values: torch.fx leaves them whole, TorchScript compiles them.
torch.fx.wrap("_empty_like")
torch.fx.wrap("_bags")
torch.fx.wrap("_padded")
