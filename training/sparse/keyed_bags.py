"""What a keyed jagged tensor holds and what follows from it, in TorchScript as well."""

# ruff: noqa: FBT001, FBT002, PLR0917 - the signatures that TorchRec users know

from __future__ import annotations

from torch import Tensor

from tessera.training.sparse import checks, layout
from tessera.training.sparse.bags import Bags
from tessera.training.sparse.jagged import JaggedTensor
from tessera.training.sparse.script_types import is_scripting
from tessera.training.sparse.strictness import is_strict


class KeyedBags(Bags, shared=True):
    """The fields of `KeyedJaggedTensor`, which says what they mean, and the bounds of its keys."""

    # What follows from the other fields.
    _worked_out = frozenset(
        {
            "stride_per_key",
            "length_per_key",
            "lengths_offset_per_key",
            "offset_per_key",
            "index_per_key",
            "jt_dict",
        }
    )

    def __init__(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: list[list[int]] | None = None,
        stride_per_key: list[int] | None = None,
        length_per_key: list[int] | None = None,
        lengths_offset_per_key: list[int] | None = None,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
        jt_dict: dict[str, JaggedTensor] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
        validate: bool = True,
    ) -> None:
        if is_scripting():
            pass
        elif validate and is_strict():
            keys, stride_per_key_per_rank = list(keys), checks.as_lists(stride_per_key_per_rank)
            strides = stride_per_key_per_rank, stride_per_key
            checks.check_keyed_jagged(keys, values, lengths, offsets, stride, strides)
            checks.check_key_bounds(keys, length_per_key, offset_per_key, inverse_indices)
        if stride_per_key_per_rank is None and inverse_indices is not None:
            bags = layout.bags_of_keys(len(keys), lengths, offsets, stride, stride_per_key)
            stride, stride_per_key_per_rank = None, bags
        elif stride_per_key_per_rank is None and stride_per_key is not None:
            stride_per_key_per_rank = layout.uneven(stride_per_key)
        self._keys: list[str] = keys
        self._values: Tensor = values
        self._weights: Tensor | None = weights
        self._lengths: Tensor | None = lengths
        self._offsets: Tensor | None = offsets
        self._stride: int | None = stride
        self._stride_per_key_per_rank: list[list[int]] | None = stride_per_key_per_rank
        self._stride_per_key: list[int] | None = stride_per_key
        self._length_per_key: list[int] | None = length_per_key
        self._lengths_offset_per_key: list[int] | None = lengths_offset_per_key
        self._offset_per_key: list[int] | None = offset_per_key
        self._index_per_key: dict[str, int] | None = index_per_key
        self._jt_dict: dict[str, JaggedTensor] | None = jt_dict
        self._inverse_indices: tuple[list[str], Tensor] | None = inverse_indices

    def keys(self) -> list[str]:
        """Return the ``F`` feature names in order."""
        return self._keys

    def stride(self) -> int:
        """The batch size ``B`` (a traced value while the model is traced).

        Of a batch that varies per key: the inverse indices' number of samples, without them the
        largest ``S_f``.
        """
        stride = self._stride
        if stride is None:
            lengths, offsets = self._lengths, self._offsets
            strides, inverse = self._stride_per_key_per_rank, self._inverse_indices
            stride = layout.batch_size(len(self._keys), lengths, offsets, strides, inverse)
            self._stride = stride
        return stride

    def variable_stride_per_key(self) -> bool:
        """Return whether the batch size varies per key."""
        return self._stride_per_key_per_rank is not None

    def stride_per_key(self) -> list[int]:
        """Return the number of bags of each key, ``[S_f]``."""
        strides = self._stride_per_key
        if strides is None:
            per_rank = self._stride_per_key_per_rank
            if per_rank is not None:
                strides = [sum(own) for own in per_rank]
            else:
                strides = [self.stride() for _ in self._keys]
            self._stride_per_key = strides
        return strides

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """``[F][ranks]`` bags; empty unless the batch varies per key."""
        strides = self._stride_per_key_per_rank
        none: list[list[int]] = []
        return none if strides is None else strides

    def inverse_indices_or_none(self) -> tuple[list[str], Tensor] | None:
        """Return the inverse indices, or None."""
        return self._inverse_indices

    def lengths_offset_per_key(self) -> list[int]:
        """``F + 1`` bounds: key ``f`` owns the bags from bound ``f`` to bound ``f + 1``."""
        bounds = self._lengths_offset_per_key
        if bounds is None:
            bounds = layout.running_sum(self.stride_per_key())
            self._lengths_offset_per_key = bounds
        return bounds

    def offset_per_key(self) -> list[int]:
        """``F + 1`` bounds: key ``f`` owns the ids from bound ``f`` to bound ``f + 1``."""
        bounds = self._offset_per_key
        if bounds is None:
            counts = self._length_per_key
            if counts is not None:
                bounds = layout.running_sum(counts)
            else:
                traced = False
                if not is_scripting():
                    traced = checks.is_traced(self._lengths)
                    if not traced and self._values.is_meta:
                        # There are no numbers to add up: as many ids of each key as there can be.
                        bounds = layout.spread(self._values.size(0), len(self._keys))
                        self._offset_per_key = bounds
                        return bounds
                if traced:
                    self.offsets()  # so that the graph has one running sum, not one per use
                bags, varies = self.lengths_offset_per_key(), self.variable_stride_per_key()
                bounds = layout.ids_per_key(
                    self._lengths, self._offsets, bags, self.stride(), varies
                )
            self._offset_per_key = bounds
        return bounds

    def length_per_key(self) -> list[int]:
        """Return the number of ids per key."""
        counts = self._length_per_key
        if counts is None:
            bounds = self.offset_per_key()
            counts = [bounds[key + 1] - bounds[key] for key in range(len(self._keys))]
            self._length_per_key = counts
        return counts

    def index_per_key(self) -> dict[str, int]:
        """Return the place of each key."""
        places = self._index_per_key
        if places is None:
            places = {key: index for index, key in enumerate(self._keys)}
            self._index_per_key = places
        return places
