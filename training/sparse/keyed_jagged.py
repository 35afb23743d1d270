"""KeyedJaggedTensor: the bags of several features for a batch, in one set of tensors."""

# ruff: noqa: SLF001 - a class method fills the fields of a new object of its own class

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import cast

import torch
from torch import Tensor

from tessera.training.sparse.checks import (
    check_jagged,
    check_keyed_jagged,
    is_traced,
    lengths_to_offsets,
    offsets_to_lengths,
)
from tessera.training.sparse.jagged import JaggedTensor


class KeyedJaggedTensor:
    """``F`` features of ``B`` bags each, stored feature-major.

    Bag ``f * B + b`` is feature ``f`` of sample ``b``.  The object may be built inside a model
    that ``torch.fx`` traces, from proxies: checks of values are then left out, and the batch
    size stays a traced value.

    Args:
        keys: ``F`` unique feature names.
        values: ``[N]`` ids, the bags' entries in order.
        weights: ``[N]`` or None, one weight per value.
        lengths: ``[F * B]`` int32 or int64.
        offsets: ``[F * B + 1]`` int32 or int64; one of lengths and offsets is enough.  Offsets
            worked out from lengths are int64.
        stride: ``B``, worked out when None.  Only a tensor without keys needs it.
        length_per_key: ids per key, if the caller knows them (saves a wait for the device).
        offset_per_key: where each key's ids start, then ``N``; likewise.

    Raises:
        ValueError: the fields do not fit together.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        length_per_key: list[int] | None = None,
        offset_per_key: list[int] | None = None,
    ) -> None:
        keys = list(keys)
        check_jagged(values, weights, lengths, offsets)
        check_keyed_jagged(keys, lengths, offsets, stride)
        if offset_per_key is None and length_per_key is not None:
            offset_per_key = [0, *accumulate(length_per_key)]
        if offset_per_key is not None and len(offset_per_key) != len(keys) + 1:
            raise ValueError(
                f"offset_per_key or length_per_key has {len(offset_per_key)} bounds; "
                f"{len(keys)} keys need {len(keys) + 1}"
            )
        self._keys: list[str] = keys
        self._values: Tensor = values
        self._weights: Tensor | None = weights
        self._lengths: Tensor | None = lengths
        self._offsets: Tensor | None = offsets
        self._stride: int | None = stride
        self._offset_per_key: list[int] | None = offset_per_key

    @classmethod
    def _trusted(  # noqa: PLR0917 - the fields, in the constructor's order
        cls,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None,
        stride: int,
        offset_per_key: list[int] | None,
    ) -> KeyedJaggedTensor:
        """Build from fields that are known to fit, without looking at them again."""
        keyed = cls.__new__(cls)
        keyed._keys, keyed._values, keyed._weights = keys, values, weights
        keyed._lengths, keyed._offsets, keyed._stride = lengths, offsets, stride
        keyed._offset_per_key = offset_per_key
        return keyed

    @staticmethod
    def from_lengths_sync(
        keys: list[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> KeyedJaggedTensor:
        """Build from lengths and work out the per-key bounds at once."""
        return KeyedJaggedTensor(keys, values, weights=weights, lengths=lengths).sync()

    @staticmethod
    def from_offsets_sync(
        keys: list[str], values: Tensor, offsets: Tensor, weights: Tensor | None = None
    ) -> KeyedJaggedTensor:
        """Build from offsets and work out the per-key bounds at once."""
        return KeyedJaggedTensor(keys, values, weights=weights, offsets=offsets).sync()

    @staticmethod
    def from_jt_dict(jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """One feature per entry; all have the same number of bags.

        Raises:
            ValueError: different numbers of bags, or weights in some entries only.
        """
        if not jt_dict:
            raise ValueError("jt_dict is empty; use KeyedJaggedTensor.empty()")
        parts = list(jt_dict.values())
        strides = {key: part.lengths().numel() for key, part in jt_dict.items()}
        if len(set(strides.values())) != 1:
            raise ValueError(f"the features have different numbers of bags: {strides}")
        weights = [part.weights_or_none() for part in parts]
        present = [weight for weight in weights if weight is not None]
        if present and len(present) != len(parts):
            raise ValueError("some features have weights and some have not; give all or none")
        return KeyedJaggedTensor(
            keys=list(jt_dict),
            values=torch.cat([part.values() for part in parts]),
            weights=torch.cat(present) if present else None,
            lengths=torch.cat([part.lengths() for part in parts]),
        ).sync()

    @staticmethod
    def empty(
        is_weighted: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> KeyedJaggedTensor:
        """No keys, no samples."""
        return KeyedJaggedTensor(
            keys=[],
            values=torch.empty(0, dtype=values_dtype, device=device),
            weights=torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            lengths=torch.empty(0, dtype=lengths_dtype, device=device),
            stride=0,
        )

    @staticmethod
    def empty_like(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """No keys and no ids, with the batch size, dtypes and device of ``kjt``."""
        weights = kjt.weights_or_none()
        return KeyedJaggedTensor(
            keys=[],
            values=kjt.values()[:0],
            weights=None if weights is None else weights[:0],
            lengths=kjt.lengths()[:0],
            stride=kjt.stride(),
        )

    @staticmethod
    def concat(kjt_list: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """The keys of all, one after the other.

        Raises:
            ValueError: the list is empty, batch sizes differ, weights in some only, or a key in
                two of them.
        """
        if not kjt_list:
            raise ValueError("kjt_list is empty; there is nothing to concatenate")
        strides = [kjt.stride() for kjt in kjt_list]
        values = [kjt.values() for kjt in kjt_list]
        if not is_traced(*values) and len(set(strides)) != 1:
            raise ValueError(f"the tensors have different batch sizes: {strides}")
        weights = [kjt.weights_or_none() for kjt in kjt_list]
        present = [weight for weight in weights if weight is not None]
        if present and len(present) != len(kjt_list):
            raise ValueError("some tensors have weights and some have not; give all or none")
        return KeyedJaggedTensor(
            keys=[key for kjt in kjt_list for key in kjt.index_per_key()],
            values=torch.cat(values),
            weights=torch.cat(present) if present else None,
            lengths=torch.cat([kjt.lengths() for kjt in kjt_list]),
            stride=strides[0],
        )

    def keys(self) -> list[str]:
        """The ``F`` feature names, in order."""
        return self._keys

    def values(self) -> Tensor:
        """``[N]`` ids."""
        return self._values

    def weights(self) -> Tensor:
        """``[N]``, one weight per id.

        Raises:
            ValueError: the tensor has no weights.
        """
        if self._weights is None:
            raise ValueError("this KeyedJaggedTensor has no weights; build it with weights=")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """The weights, or None."""
        return self._weights

    def lengths(self) -> Tensor:
        """``[F * B]``, the bags' sizes."""
        if self._lengths is None:
            assert self._offsets is not None
            self._lengths = offsets_to_lengths(self._offsets)
        return self._lengths

    def lengths_or_none(self) -> Tensor | None:
        """The lengths if they are known without work."""
        return self._lengths

    def offsets(self) -> Tensor:
        """``[F * B + 1]``, where each bag starts, then ``N``."""
        if self._offsets is None:
            assert self._lengths is not None
            self._offsets = lengths_to_offsets(self._lengths)
        return self._offsets

    def offsets_or_none(self) -> Tensor | None:
        """The offsets if they are known without work."""
        return self._offsets

    def stride(self) -> int:
        """The batch size ``B`` (a traced value while the model is traced)."""
        if self._stride is None:
            if not self._keys:
                self._stride = 0
            elif self._lengths is not None:
                self._stride = self._lengths.numel() // len(self._keys)
            else:
                self._stride = (self.offsets().numel() - 1) // len(self._keys)
        return self._stride

    def device(self) -> torch.device:
        """Where the values live."""
        return self._values.device

    def offset_per_key(self) -> list[int]:
        """``F + 1`` bounds: key ``f`` owns the ids from bound ``f`` to bound ``f + 1``."""
        if self._offset_per_key is None:
            stride, offsets, count = self.stride(), self.offsets(), len(self._keys)
            if is_traced(self._values, offsets):
                # 0-dimensional traced tensors stand in for ints: slices take them as bounds.
                traced = [offsets[key * stride] for key in range(count + 1)]
                self._offset_per_key = cast("list[int]", traced)
            elif stride == 0:
                self._offset_per_key = [0] * (count + 1)
            else:
                self._offset_per_key = offsets[::stride].tolist()
        return self._offset_per_key

    def offset_per_key_or_none(self) -> list[int] | None:
        """The bounds if they are known without work."""
        return self._offset_per_key

    def length_per_key(self) -> list[int]:
        """Ids per key."""
        bounds = self.offset_per_key()
        return [stop - start for start, stop in pairwise(bounds)]

    def length_per_key_or_none(self) -> list[int] | None:
        """Ids per key if they are known without work."""
        return None if self._offset_per_key is None else self.length_per_key()

    def index_per_key(self) -> dict[str, int]:
        """Each key's place."""
        return {key: index for index, key in enumerate(self._keys)}

    def sync(self) -> KeyedJaggedTensor:
        """Work out the per-key bounds now (waits for the device); returns itself."""
        self.offset_per_key()
        return self

    def unsync(self) -> KeyedJaggedTensor:
        """Forget the per-key bounds; returns itself."""
        self._offset_per_key = None
        return self

    def __getitem__(self, key: str) -> JaggedTensor:
        """The bags of one feature.

        Raises:
            KeyError: there is no such key.
        """
        if key not in self._keys:
            raise KeyError(f"no key {key!r}; there are {self._keys}")
        return self._feature(self._keys.index(key))

    def _feature(self, index: int) -> JaggedTensor:
        stride, bounds, offsets = self.stride(), self.offset_per_key(), self.offsets()
        start, stop = bounds[index], bounds[index + 1]
        own = offsets[index * stride : (index + 1) * stride + 1]
        lengths, weights = self._lengths, self._weights
        return JaggedTensor._trusted(
            self._values[start:stop],
            None if weights is None else weights[start:stop],
            None if lengths is None else lengths[index * stride : (index + 1) * stride],
            own - start,
        )

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Every feature's bags by its name."""
        return {key: self._feature(index) for index, key in enumerate(self._keys)}

    def with_values(self, values: Tensor) -> KeyedJaggedTensor:
        """The same bags with other ids: ``values`` ``[N]``, in the same order.

        Raises:
            ValueError: another number of ids.
        """
        if not is_traced(values, self._values) and values.size(0) != self._values.size(0):
            raise ValueError(f"values has {values.size(0)} ids, not {self._values.size(0)}")
        return KeyedJaggedTensor._trusted(
            self._keys,
            values,
            self._weights,
            self._lengths,
            self._offsets,
            self.stride(),
            self._offset_per_key,
        )

    def split(self, segments: list[int]) -> list[KeyedJaggedTensor]:
        """Cut into tensors of ``segments[i]`` keys each, sharing storage.

        Raises:
            ValueError: the segments do not add up to the number of keys.
        """
        if sum(segments) != len(self._keys) or any(segment < 0 for segment in segments):
            raise ValueError(
                f"segments {segments} do not add up to the {len(self._keys)} keys of this tensor"
            )
        stride, bounds, weights = self.stride(), self.offset_per_key(), self._weights
        lengths = self.lengths()
        parts = []
        first = 0
        for segment in segments:
            last = first + segment
            start, stop = bounds[first], bounds[last]
            parts.append(
                KeyedJaggedTensor._trusted(
                    self._keys[first:last],
                    self._values[start:stop],
                    None if weights is None else weights[start:stop],
                    lengths[first * stride : last * stride],
                    None,
                    stride,
                    [bound - start for bound in bounds[first : last + 1]],
                )
            )
            first = last
        return parts

    def permute(
        self, indices: list[int], indices_tensor: Tensor | None = None
    ) -> KeyedJaggedTensor:
        """Keys ``indices``, in that order; a subset is allowed.

        Args:
            indices: places of the wanted keys.
            indices_tensor: the same on the tensor's device, if the caller has it at hand; it
                saves a transfer where lengths are gathered on an accelerator.

        Raises:
            ValueError: an index is out of range or twice (keys stay unique).
        """
        count = len(self._keys)
        if any(not 0 <= index < count for index in indices) or len(set(indices)) != len(indices):
            raise ValueError(f"indices {indices} must be different places among {count} keys")
        stride, bounds = self.stride(), self.offset_per_key()
        lengths_FB = self.lengths()
        if is_traced(self._values, lengths_FB):
            chosen = [lengths_FB[i * stride : (i + 1) * stride] for i in indices]
            lengths = torch.cat(chosen) if chosen else lengths_FB[:0]
        else:
            if indices_tensor is None:
                indices_tensor = torch.tensor(indices, dtype=torch.int64, device=lengths_FB.device)
            lengths = lengths_FB.view(count, stride).index_select(0, indices_tensor).flatten()
        sizes = self.length_per_key()
        return KeyedJaggedTensor._trusted(
            [self._keys[index] for index in indices],
            _gather(self._values, bounds, indices),
            None if self._weights is None else _gather(self._weights, bounds, indices),
            lengths,
            None,
            stride,
            [0, *accumulate(sizes[index] for index in indices)],
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> KeyedJaggedTensor:
        """The same bags on ``device``; itself if it is there already."""
        if not is_traced(self._values) and self._values.device == torch.device(device):
            return self
        weights, lengths, offsets = self._weights, self._lengths, self._offsets
        return KeyedJaggedTensor._trusted(
            self._keys,
            self._values.to(device, non_blocking=non_blocking),
            None if weights is None else weights.to(device, non_blocking=non_blocking),
            None if lengths is None else lengths.to(device, non_blocking=non_blocking),
            None if offsets is None else offsets.to(device, non_blocking=non_blocking),
            self.stride(),
            self._offset_per_key,
        )

    def pin_memory(self) -> KeyedJaggedTensor:
        """The same bags in page-locked memory, for fast asynchronous copies to a GPU."""
        weights, lengths, offsets = self._weights, self._lengths, self._offsets
        return KeyedJaggedTensor._trusted(
            self._keys,
            self._values.pin_memory(),
            None if weights is None else weights.pin_memory(),
            None if lengths is None else lengths.pin_memory(),
            None if offsets is None else offsets.pin_memory(),
            self.stride(),
            self._offset_per_key,
        )

    def __str__(self) -> str:
        if is_traced(self._values, self._lengths, self._offsets):
            return f"KeyedJaggedTensor({self._keys}, traced)"
        lines = [f"  {key!r}: {bags}" for key, bags in self.to_dict().items()]
        return "\n".join(["KeyedJaggedTensor({", *lines, "})"])

    __repr__ = __str__


def _gather(source: Tensor, bounds: list[int], indices: list[int]) -> Tensor:
    parts = [source[bounds[index] : bounds[index + 1]] for index in indices]
    return torch.cat(parts) if parts else source[:0]
