"""A pool of bags of ids: for each row the bags of some features, up to a length of each.

Legend: ``N`` rows that are read or written, ``F`` features, ``L`` the sum of the longest lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.training.modules.feature_processor_ import places_in_bags
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
        ids = self._check_ids(ids)
        lengths_NF = self.key_lengths[ids]
        rows, columns = _cells(ids, lengths_NF)
        return KeyedJaggedTensor.from_lengths_sync(
            keys=list(self._feature_max_lengths),
            values=self.values[rows, columns],
            lengths=lengths_NF.t().flatten(),
            weights=self.weights[rows, columns] if self._is_weighted else None,
        )

    @torch.no_grad()
    def update(self, ids: Tensor, values: KeyedJaggedTensor) -> None:
        """Write bags to the rows of ``ids`` ``[N]``; the last one of an id counts.

        Args:
            ids: the rows.
            values: ``N`` bags of each feature of the pool, in any order; other features are ignored.

        Raises:
            IndexError: an id is not a row.
            KeyError: a feature is missing.
            ValueError: another number of bags, a bag that is too long, or values of another dtype.
        """
        ids = self._check_ids(ids)
        places = {key: place for place, key in enumerate(values.keys())}
        missing = [key for key in self._feature_max_lengths if key not in places]
        if missing:
            raise KeyError(f"the values have no {missing[0]!r}; the pool holds it")
        own = values.permute([places[key] for key in self._feature_max_lengths])
        if own.stride() != len(ids):
            raise ValueError(f"there are {len(ids)} ids and {own.stride()} bags; give one of each")
        if own.values().dtype != self.values.dtype:
            raise ValueError(f"values are {own.values().dtype}; the pool has {self.values.dtype}")
        lengths_NF = own.lengths().view(len(self._feature_max_lengths), -1).t()
        for (key, most), column in zip(
            self._feature_max_lengths.items(), lengths_NF.t(), strict=True
        ):
            if len(ids) and int(column.max()) > most:
                raise ValueError(
                    f"a bag of {key!r} has {int(column.max())} ids; the pool has room for {most}"
                )
        kept = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        kept[self._last_places(ids)] = True
        rows, columns = _cells(ids, lengths_NF)
        # Which ids of the values belong to a bag that is kept.
        chosen = kept.repeat(lengths_NF.size(1)).repeat_interleave(lengths_NF.t().flatten())
        self.values[ids] = 0
        self.values[rows[chosen], columns[chosen]] = own.values()[chosen]
        if self._is_weighted:
            self.weights[ids] = 0.0
            self.weights[rows[chosen], columns[chosen]] = own.weights()[chosen].float()
        self.key_lengths[ids[kept]] = lengths_NF[kept].int()

    def forward(self, ids: Tensor) -> KeyedJaggedTensor:
        """See `lookup`."""
        return self.lookup(ids)


def _cells(ids: Tensor, lengths_NF: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of each id, feature by feature; a row has its bags behind one another."""
    lengths_NF = lengths_NF.long()
    starts_NF = lengths_NF.cumsum(1) - lengths_NF
    lengths, starts = lengths_NF.t().flatten(), starts_NF.t().flatten()
    rows = ids.repeat(lengths_NF.size(1)).repeat_interleave(lengths)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    places = places_in_bags(offsets, lengths, rows)
    return rows, starts.repeat_interleave(lengths) + places
