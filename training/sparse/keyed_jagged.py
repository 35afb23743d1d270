"""KeyedJaggedTensor: the bags of several features for a batch, in one set of tensors."""

# ruff: noqa: FBT001, FBT002, PLR0917 - the signatures that TorchRec users know

from __future__ import annotations

import torch
from torch import Tensor

from tessera.training.sparse import checks, layout
from tessera.training.sparse.exchange import Exchangeable
from tessera.training.sparse.jagged import JaggedTensor, cut_evenly
from tessera.training.sparse.script_types import Device, DType, is_scripting


class KeyedJaggedTensor(Exchangeable):
    """``F`` features of ``B`` bags each, stored feature-major.

    Bag ``f * B + b`` is feature ``f`` of sample ``b``.  Where the batch varies per key, key ``f``
    has ``S_f`` bags instead of ``B``, and ``inverse_indices`` say which bag each sample uses.

    Compiles under ``torch.jit.script``.  Inside a model that ``torch.fx`` traces it may be built
    from proxies: nothing is checked then, and the batch size stays a traced value.

    Args:
        keys: ``F`` feature names.  Of a name that is there twice, lookups take the last.
        values: ``[N]`` ids, the bags' entries in order.
        weights: ``[N]`` or None, one weight per value.
        lengths: ``[sum of S_f]`` int32 or int64.
        offsets: ``[sum of S_f + 1]`` int32 or int64; one of lengths and offsets is enough.
            Offsets worked out from lengths are int64.
        stride: ``B``, worked out when None.  Only a tensor without keys needs it.
        stride_per_key_per_rank: ``[F][ranks]`` bags of each key from each rank; makes a batch
            that varies per key.  Also a tensor ``[F, ranks]``.
        stride_per_key: ``S_f``; where they differ this alone makes a batch that varies per key.
        length_per_key, lengths_offset_per_key, offset_per_key, index_per_key, jt_dict: what the
            methods of these names give, if the caller has it (it may save a wait for the device).
        inverse_indices: keys and ``[F, B]`` int64: each sample's bags; the batch then varies per key.
        validate: False where the caller answers for the fields; scripted code never checks.

    Raises:
        ValueError: the fields do not fit together.  Where lengths and offsets are both missing, or the
            weights are not one per value, the methods that need them raise it.
    """

    def _of(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None,
        strides: list[list[int]] | None,
        offset_per_key: list[int] | None,
        inverse: tuple[list[str], Tensor] | None,
    ) -> KeyedJaggedTensor:
        # All arguments by place: compiling the class, TorchScript knows none of its defaults.
        B = self.stride()
        rest = (None, None, None, offset_per_key, None, None, inverse, False)
        return KeyedJaggedTensor(keys, values, weights, lengths, offsets, B, strides, *rest)

    def with_fields(
        self, values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None
    ) -> KeyedJaggedTensor:
        """The same keys and bounds over other tensors; the caller answers for their sizes."""
        strides, bounds = self._stride_per_key_per_rank, self._offset_per_key
        inverse = self._inverse_indices
        return self._of(self._keys, values, weights, lengths, offsets, strides, bounds, inverse)

    @staticmethod
    def from_lengths_sync(
        keys: list[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: list[list[int]] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> KeyedJaggedTensor:
        """Build from lengths and work out the per-key bounds at once."""
        strides, inverse = stride_per_key_per_rank, inverse_indices
        return KeyedJaggedTensor(
            keys, values, weights, lengths, None, stride, strides, inverse_indices=inverse
        ).sync()

    @staticmethod
    def from_offsets_sync(
        keys: list[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: list[list[int]] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> KeyedJaggedTensor:
        """Build from offsets and work out the per-key bounds at once."""
        strides, inverse = stride_per_key_per_rank, inverse_indices
        return KeyedJaggedTensor(
            keys, values, weights, None, offsets, stride, strides, inverse_indices=inverse
        ).sync()

    @staticmethod
    def from_jt_dict(jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """One feature per entry; different numbers of bags make a batch that varies per key.

        Raises:
            ValueError: no entries, or weights in some only.
        """
        return _from_jt_dict(jt_dict)

    @staticmethod
    def concat(kjt_list: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """Put the keys of several tensors one after the other.

        Raises:
            ValueError: the list is empty, batch sizes differ where no batch varies per key,
                weights or inverse indices in some only.
        """
        return _concat(kjt_list)

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: Device | None = None,
        values_dtype: DType | None = None,
        weights_dtype: DType | None = None,
        lengths_dtype: DType = torch.int32,
    ) -> KeyedJaggedTensor:
        """Return a tensor without keys and samples."""
        keys: list[str] = []
        none = JaggedTensor.empty(is_weighted, device, values_dtype, weights_dtype, lengths_dtype)
        return KeyedJaggedTensor(
            keys, none.values(), weights=none.weights_or_none(), lengths=none.lengths(), stride=0
        )

    @staticmethod
    def empty_like(kjt: KeyedJaggedTensor, device: Device | None = None) -> KeyedJaggedTensor:
        """No keys and no ids, with the batch size and dtypes of ``kjt``."""
        return _empty_like(kjt, device)

    def sync(self) -> KeyedJaggedTensor:
        """Work out the per-key bounds now (waits for the device); returns itself."""
        self.length_per_key()
        self.offset_per_key()
        return self

    def _check_use(self) -> None:
        if not is_scripting():
            self.check_fields()

    def _feature(self, index: int, compute_offsets: bool) -> JaggedTensor:
        ids, bags = self.offset_per_key(), self.lengths_offset_per_key()
        ids, bags = ids[index : index + 2], bags[index : index + 2]
        if compute_offsets:
            self.offsets()
        part = JaggedTensor.part(
            self._values, self._weights, self._lengths, self._offsets, ids, bags
        )
        if not is_scripting():
            checks.tell_compiler_of_weights(part.values(), part.weights_or_none())
        return part

    def __getitem__(self, key: str) -> JaggedTensor:
        """Return the bags of one feature.

        Raises:
            KeyError: there is no such key.
        """
        self._check_use()
        return self._feature(layout.place_of(self._keys, key), True)

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Every feature's bags by its name; without their offsets if those are not wanted."""
        bags = self._jt_dict
        if bags is None:
            self._check_use()
            traced = False
            if not is_scripting():
                # Sizes that are not known yet: one slice per feature leaves them open.
                traced = checks.values_are_unknown(self._values, self._lengths, self._offsets)
            if traced or self.variable_stride_per_key() or self.stride() == 0:
                parts = [self._feature(place, compute_offsets) for place in range(len(self._keys))]
            else:
                offsets = self.offsets() if compute_offsets else None
                lengths, counts = self.lengths(), self.length_per_key()
                parts = cut_evenly(self._values, self._weights, lengths, offsets, counts)
            bags = {key: parts[place] for place, key in enumerate(self._keys)}
            self._jt_dict = bags
        return bags

    def with_values(self, values: Tensor) -> KeyedJaggedTensor:
        """The same bags with other ids: ``values`` ``[N]``, in the same order.

        Raises:
            ValueError: another number of ids.
        """
        if not is_scripting():
            checks.check_as_many(values, self._values)
        return self.with_fields(values, self._weights, self._lengths, self._offsets)

    def split(self, segments: list[int]) -> list[KeyedJaggedTensor]:
        """Cut into tensors of ``segments[i]`` keys each, sharing storage.

        The parts have no inverse indices: those are the whole batch's, which one part may be.

        Raises:
            ValueError: the segments do not add up to the number of keys.
        """
        if len(segments) > 0 and min(segments) < 0:
            raise ValueError(f"segments {segments} holds a negative number")
        if sum(segments) != len(self._keys):
            raise ValueError(
                f"segments {segments} do not add up to the {len(self._keys)} keys of this tensor"
            )
        self._check_use()
        bounds, bags, lengths = self.offset_per_key(), self.lengths_offset_per_key(), self.lengths()
        weights, strides = self._weights, self._stride_per_key_per_rank
        parts: list[KeyedJaggedTensor] = []
        first = 0
        for segment in segments:
            last = first + segment
            start, stop = bounds[first], bounds[last]
            part = self._of(
                self._keys[first:last],
                self._values[start:stop],
                None if weights is None else weights[start:stop],
                lengths[bags[first] : bags[last]],
                None,
                None if strides is None else strides[first:last],
                [bound - start for bound in bounds[first : last + 1]],
                self._inverse_indices if segment == len(self._keys) else None,
            )
            parts.append(part)
            first = last
        return parts

    def permute(
        self, indices: list[int], indices_tensor: Tensor | None = None
    ) -> KeyedJaggedTensor:
        """Keys ``indices``, in that order; a subset is allowed, and so is a key twice.

        The result has no inverse indices: those are in the order of the whole batch's keys.

        Args:
            indices: places of the wanted keys.
            indices_tensor: the same on the tensor's device, if the caller has it at hand: the
                lengths are then gathered in one step.

        Raises:
            ValueError: an index is out of range.
        """
        for index in indices:
            if index < 0 or index >= len(self._keys):
                raise ValueError(f"indices holds {index}; give places among {len(self._keys)} keys")
        self._check_use()
        bounds, bags, lengths = self.offset_per_key(), self.lengths_offset_per_key(), self.lengths()
        weights, strides = self._weights, self._stride_per_key_per_rank
        if strides is not None:
            lengths = layout.segments(lengths, bags, indices)
        else:
            lengths = layout.permuted_lengths(lengths, bags, indices, indices_tensor)
        return self._of(
            [self._keys[index] for index in indices],
            layout.segments(self._values, bounds, indices),
            None if weights is None else layout.segments(weights, bounds, indices),
            lengths,
            None,
            None if strides is None else [strides[index] for index in indices],
            layout.running_sum([bounds[index + 1] - bounds[index] for index in indices]),
            None,
        )

    def flatten_lengths(self) -> KeyedJaggedTensor:
        """Return the same bags with one-dimensional lengths."""
        return self.with_fields(self._values, self._weights, self.lengths().flatten(), None)

    def to(
        self, device: Device, non_blocking: bool = False, dtype: DType | None = None
    ) -> KeyedJaggedTensor:
        """The same bags on ``device``, weights as ``dtype`` if one is given."""
        weights, lengths, offsets = self._weights, self._lengths, self._offsets
        if weights is not None:
            kind = weights.dtype if dtype is None else dtype
            weights = weights.to(device, kind, non_blocking=non_blocking)
        return self.with_fields(
            self._values.to(device, non_blocking=non_blocking),
            weights,
            None if lengths is None else lengths.to(device, non_blocking=non_blocking),
            None if offsets is None else offsets.to(device, non_blocking=non_blocking),
        )


def _empty_like(kjt: KeyedJaggedTensor, device: Device | None) -> KeyedJaggedTensor:
    where = kjt.device() if device is None else device
    weights = kjt.weights_or_none()
    return KeyedJaggedTensor(
        kjt.keys()[:0],
        kjt.values()[:0].to(where),
        weights=None if weights is None else weights[:0].to(where),
        lengths=kjt.lengths()[:0].to(where),
        stride=kjt.stride(),
    )


def _from_jt_dict(jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
    if len(jt_dict) == 0:
        raise ValueError("jt_dict is empty; use KeyedJaggedTensor.empty()")
    parts = list(jt_dict.values())
    weights: list[Tensor | None] = []
    for part in parts:
        weights.append(part.weights_or_none())  # noqa: PERF401 - see layout.all_or_none
    return KeyedJaggedTensor(
        keys=list(jt_dict.keys()),
        values=torch.cat([part.values() for part in parts]),
        weights=layout.all_or_none(weights),
        lengths=torch.cat([part.lengths() for part in parts]),
        stride_per_key=[part.lengths().numel() for part in parts],
    ).sync()


def _concat(kjt_list: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    if len(kjt_list) == 0:
        raise ValueError("kjt_list is empty; there is nothing to concatenate")
    keys: list[str] = []
    strides: list[list[int]] = []
    varies = False
    weights: list[Tensor | None] = []
    inverse: list[tuple[list[str], Tensor] | None] = []
    for kjt in kjt_list:
        keys.extend(kjt.keys())
        weights.append(kjt.weights_or_none())
        inverse.append(kjt.inverse_indices_or_none())
        varies = varies or kjt.variable_stride_per_key()
        if varies:
            strides.extend(kjt.stride_per_key_per_rank())
    stride = None if varies else layout.common_stride([kjt.stride() for kjt in kjt_list])
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([kjt.values() for kjt in kjt_list]),
        weights=layout.all_or_none(weights),
        lengths=torch.cat([kjt.lengths() for kjt in kjt_list]),
        stride=stride,
        stride_per_key_per_rank=strides if varies else None,
        inverse_indices=layout.joined_inverse(inverse),
    )


# Of tensors that are proxies themselves (not ours holding some) these are one step of a graph.
torch.fx.wrap("_empty_like")
torch.fx.wrap("_from_jt_dict")
torch.fx.wrap("_concat")
