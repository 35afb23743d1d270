"""A pool of bags of ids: for each row the bags of some features, up to a length of each.

Legend: ``N`` rows that are read or written, ``F`` features, ``L`` the sum of the longest lengths.
Over ranks: `tessera.training.distributed.keyed_jagged_tensor_pool`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.training.modules import pool_rows
from tessera.training.modules.object_pool import ObjectPool
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


class KeyedJaggedTensorPool(ObjectPool[KeyedJaggedTensor]):
    """Holds the bags of ``pool_size`` samples that are written and read by number.

    Its state dict has TorchRec's entries: ``values`` ``[pool_size, L]`` with a row's bags behind one another,
    ``key_lengths`` int32 ``[pool_size, F]`` and, where it is weighted, ``weights`` like the values.

    Args:
        pool_size: rows.
        feature_max_lengths: the longest bag of each feature; their order is that of the results' keys.
        values_dtype: of the ids.
        is_weighted: whether ids carry weights.
        device: where the rows live; None: the CPU.
    """

    def __init__(
        self,
        pool_size: int,
        feature_max_lengths: dict[str, int],
        values_dtype: torch.dtype = torch.int64,
        is_weighted: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._feature_max_lengths = dict(feature_max_lengths)
        self._is_weighted = is_weighted
        shape = (pool_size, sum(feature_max_lengths.values()))
        self.values: Tensor
        self.key_lengths: Tensor
        self.weights: Tensor
        self.register_buffer("values", torch.zeros(shape, dtype=values_dtype, device=device))
        lengths = torch.zeros(pool_size, len(feature_max_lengths), dtype=torch.int32, device=device)
        self.register_buffer("key_lengths", lengths)
        if is_weighted:
            self.register_buffer("weights", torch.zeros(shape, device=device))

    @property
    def pool_size(self) -> int:
        """How many rows there are."""
        return self.values.size(0)

    @property
    def feature_max_lengths(self) -> dict[str, int]:
        """The longest bag of each feature."""
        return self._feature_max_lengths

    @property
    def values_dtype(self) -> torch.dtype:
        """The ids' dtype."""
        return self.values.dtype

    @property
    def is_weighted(self) -> bool:
        """Whether ids carry weights."""
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        """Where the rows live."""
        return self.values.device

    def lookup(self, ids: Tensor) -> KeyedJaggedTensor:
        """The bags of the rows of ``ids`` ``[N]``: ``N`` bags of each feature, int32 lengths.

        Raises:
            IndexError: an id is not a row.
            ValueError: ids are not integers ``[N]``.
        """
        ids = pool_rows.checked_ids(ids, self.pool_size)
        weights = self.weights if self._is_weighted else None
        keys = list(self._feature_max_lengths)
        return pool_rows.read_by_feature(keys, ids, self.key_lengths, self.values, weights)

    @torch.no_grad()
    def update(self, ids: Tensor, values: KeyedJaggedTensor) -> None:
        """Write bags to the rows of ``ids`` ``[N]``; the last one of an id counts.

        Args:
            ids: the rows.
            values: ``N`` bags of each feature of the pool, in any order; other features are ignored.

        Raises:
            IndexError: an id is not a row.
            KeyError: a feature is missing.
            ValueError: another number of bags, a bag that is too long, values of another dtype, or no weights.
        """
        ids = pool_rows.checked_ids(ids, self.pool_size)
        own = own_features(
            values, self._feature_max_lengths, self.values.dtype, weighted=self._is_weighted
        )
        if own.stride() != len(ids):
            raise ValueError(f"there are {len(ids)} ids and {own.stride()} bags; give one of each")
        weights = self.weights if self._is_weighted else None
        pool_rows.write_by_feature(ids, own, self.key_lengths, self.values, weights)

    def forward(self, ids: Tensor) -> KeyedJaggedTensor:
        """See `lookup`."""
        return self.lookup(ids)


def own_features(
    values: KeyedJaggedTensor,
    most: dict[str, int],
    dtype: torch.dtype,
    *,
    weighted: bool,
) -> KeyedJaggedTensor:
    """The features of a pool out of a batch, in the pool's order; without weights where it has none.

    Args:
        values: ``N`` bags of each feature.
        most: the longest bag of each feature.
        dtype: of the pool's values.
        weighted: whether the pool has weights.

    Raises:
        KeyError: a feature is missing.
        ValueError: a bag that is too long, values of another dtype, or no weights.
    """
    places = {key: place for place, key in enumerate(values.keys())}
    missing = [key for key in most if key not in places]
    if missing:
        raise KeyError(f"the values have no {missing[0]!r}; the pool holds it")
    order = [places[key] for key in most]
    own = values if order == [*range(len(values.keys()))] else values.permute(order)
    if own.values().dtype != dtype:
        raise ValueError(f"values are {own.values().dtype}; the pool has {dtype}")
    if weighted:
        own.weights()
    elif own.weights_or_none() is not None:
        own = own.with_fields(own.values(), None, own.lengths_or_none(), own.offsets_or_none())
    if own.lengths().numel():
        longest = own.lengths().view(len(most), -1).amax(1).tolist()
        for (key, room), length in zip(most.items(), longest, strict=True):
            if length > room:
                raise ValueError(f"a bag of {key!r} has {length} ids; the pool has room for {room}")
    return own
