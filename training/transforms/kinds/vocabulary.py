"""``vocabulary``: a row of its own for each id of the training rows, row 0 for all others.

Features that share a table share its vocabulary.  All vocabularies of a model lie in one sorted
array, so that the ids of a batch are looked up by one search: an id of vocabulary ``v`` stands there
as ``fmix64(id ^ seed_v)``, which is one-to-one within the vocabulary.

Shapes: ``F`` sparse features, ``V`` vocabularies, ``U`` ids of all vocabularies, ``N`` ids of a batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from tessera.training import field_checks as check
from tessera.training.modules.hashing import fmix64
from tessera.training.modules.id_search import find
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.training.transforms.ids import seeds
from tessera.training.transforms.transform import IdTransform, transform

MAX_COUNTED = 1 << 24
"""Different ids of a vocabulary that are counted at a time; of more, the rarest so far are forgotten."""


@transform
@dataclass(frozen=True, kw_only=True)
class Vocabulary(IdTransform):
    """Ids of the training rows get rows of their own, every other id gets row 0.

    Attributes:
        min_count (training rows): ids that fewer rows' bags hold get row 0.
        max_size (ids): only so many, the most frequent ones (of equally frequent ones the smaller
            ids), get rows of their own; None: all.
    """

    name: ClassVar[str] = "vocabulary"
    main: ClassVar[str] = "min_count"

    min_count: int = 1
    max_size: int | None = None

    def __post_init__(self) -> None:
        check.at_least_one(self, "min_count max_size")


class VocabularyLookup(nn.Module):
    """Ids of features with a vocabulary to rows; those of the others stay as they are.

    Args:
        vocabulary_of: by feature, in the order of the batch's keys, its vocabulary; None: none.
        sizes: by vocabulary, its number of ids.
    """

    def __init__(self, vocabulary_of: Sequence[str | None], sizes: Mapping[str, int]) -> None:
        super().__init__()
        names = list(sizes)
        starts = dict(zip(names, itertools.accumulate(sizes.values(), initial=0), strict=False))
        self.names = tuple(names)
        self.sizes = dict(sizes)
        own = [0 if name is None else names.index(name) for name in vocabulary_of]
        self._everywhere = None not in vocabulary_of
        self.register_buffer("vocabulary_F", torch.tensor(own), persistent=False)
        has = torch.tensor([name is not None for name in vocabulary_of])
        self.register_buffer("has_F", has, persistent=False)
        places = [(0, 0) if name is None else (starts[name], sizes[name]) for name in vocabulary_of]
        self.register_buffer(
            "start_F", torch.tensor([start for start, _ in places]), persistent=False
        )
        self.register_buffer("size_F", torch.tensor([size for _, size in places]), persistent=False)
        bounds = torch.arange(len(vocabulary_of) + 1)
        self.register_buffer("bounds_F1", bounds, persistent=False)
        # One entry at least: a search in nothing has no place to give.
        total = max(sum(sizes.values()), 1)
        self.register_buffer("keys_U", torch.zeros(total, dtype=torch.int64))
        self.register_buffer("places_U", torch.full((total,), -1))
        self.register_buffer("seeds_V", torch.zeros(len(names), dtype=torch.int64))
        self.vocabulary_F: Tensor
        self.has_F: Tensor
        self.start_F: Tensor
        self.size_F: Tensor
        self.bounds_F1: Tensor
        self.keys_U: Tensor
        self.places_U: Tensor
        self.seeds_V: Tensor

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """``[N]`` int64 ids; those of a vocabulary as rows from 1, or 0."""
        ids = features.values().long()
        bounds = features.offsets().index_select(0, self.bounds_F1 * features.stride())
        feature_N = torch.repeat_interleave(bounds[1:] - bounds[:-1])
        seed_N = self.seeds_V[self.vocabulary_F][feature_N]
        found, hit = find(self.keys_U, fmix64(ids ^ seed_N))
        place = self.places_U[found] - self.start_F[feature_N]
        own = hit & (place >= 0) & (place < self.size_F[feature_N])
        rows = torch.where(own, place + 1, 0)
        return rows if self._everywhere else torch.where(self.has_F[feature_N], rows, ids)

    @staticmethod
    def state(vocabularies: Sequence[Tensor]) -> dict[str, Tensor]:
        """The buffers for these sorted ids of each vocabulary."""
        flat = torch.cat(list(vocabularies))
        if not len(flat):
            one = torch.zeros(1, dtype=torch.int64)
            count = len(vocabularies)
            return {"keys_U": one, "places_U": one - 1, "seeds_V": seeds(count)}
        for attempt in itertools.count():
            own = seeds(len(vocabularies), attempt)
            sizes = torch.tensor([len(ids) for ids in vocabularies])
            keys, order = torch.sort(fmix64(flat ^ torch.repeat_interleave(own, sizes)))
            if not bool((keys[1:] == keys[:-1]).any()):  # ids of two vocabularies would meet
                return {"keys_U": keys, "places_U": order, "seeds_V": own}
        raise AssertionError("unreachable: the attempts do not end")


class IdCounts:
    """How often each id of a vocabulary occurs in the training rows."""

    def __init__(self) -> None:
        self._ids = torch.empty(0, dtype=torch.int64)
        self._counts = torch.empty(0, dtype=torch.int64)
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._waiting = 0

    def update(self, ids: Tensor) -> None:
        """Count these ids, ``[n]`` int64."""
        self._add(ids, torch.ones_like(ids))

    def merge(self, later: IdCounts) -> None:
        """Take the counts of other rows."""
        later.settle()
        self._add(later._ids, later._counts)

    def _add(self, ids: Tensor, counts: Tensor) -> None:
        self._pending.append((ids, counts))
        self._waiting += len(ids)
        if self._waiting > max(1 << 20, len(self._ids)):
            self.settle()

    def settle(self) -> None:
        """Count what waits to be counted; afterwards each id is held once."""
        if not self._pending:
            return
        fresh, more = (torch.cat(part) for part in zip(*self._pending, strict=True))
        self._pending, self._waiting = [], 0
        ids, place = torch.unique(torch.cat([self._ids, fresh]), return_inverse=True)
        counts = torch.zeros_like(ids).index_add_(0, place, torch.cat([self._counts, more]))
        while len(ids) > MAX_COUNTED:
            kept = counts > counts.min()
            ids, counts = ids[kept], counts[kept]
        self._ids, self._counts = ids, counts

    def kept(self, settings: Vocabulary) -> Tensor:
        """The ids of the vocabulary, sorted."""
        self.settle()
        enough = self._counts >= settings.min_count
        ids, counts = self._ids[enough], self._counts[enough]
        if settings.max_size is not None and len(ids) > settings.max_size:
            order = torch.sort(counts, descending=True, stable=True).indices
            ids = ids[order[: settings.max_size]].sort().values
        return ids
