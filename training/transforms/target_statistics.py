"""Target statistics: the label's smoothed mean, and the number of rows, by key.

A key is the first id of a feature, or several features' joined (`tessera.training.transforms.ids`).  Each
statistic gives the model two dense values:

* ``NAME_mean``: ``(sum + smoothing * prior) / (count + smoothing)`` over the training rows of the same
  key; ``prior`` is the label's mean over all training rows.  A key without rows gets the prior.
* ``NAME_count``: ``log(1 + count)``.

**No row sees its own label.**  While the model is trained, sum and count leave out the fold of the row
itself (the row's number in the data set, mixed, modulo ``folds``); its count is scaled by
``folds / (folds - 1)`` to what the serving table would say.  Validation, test and serving, whose rows
were not fitted, take the sums over all folds.  A key that a single training row has is therefore a
key without rows for that row.

Shapes: ``T`` statistics, ``B`` samples, ``U`` keys of all statistics, ``K`` folds at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.training import field_checks as check
from tessera.training.modules.hashing import murmur3_rows
from tessera.training.modules.id_search import find
from tessera.training.transforms.ids import seeds

MAX_KEYS = 1 << 22
"""Keys of all statistics together; of more, those of the fewest rows so far are forgotten."""

SUFFIXES = ("mean", "count")


@dataclass(frozen=True, kw_only=True)
class TargetStatistic:
    """The mean of a label, and the number of rows, by the ids of some features.

    Attributes:
        key: one or more sparse features of the data.
        label: which label; None: the first one.
        smoothing (rows): rows of the overall mean that are added to each key's own.
        folds (parts): parts of the training rows; a row is shown the other parts' statistics.
    """

    key: tuple[str, ...]
    label: str | None = None
    smoothing: float = 20.0
    folds: int = 5

    def __post_init__(self) -> None:
        if not self.key or len(set(self.key)) != len(self.key):
            raise UserError(f"key={list(self.key)}: give one or more different columns of ids")
        check.not_negative(self, "smoothing")
        check.allowed(self, "folds", lambda n: 2 <= n <= 64, "give 2 to 64")


class StatisticsTable(nn.Module):
    """The fitted statistics, looked up by key.

    Args:
        settings: of each statistic.
        keys: how many keys were kept, ``U``; at least one place is held.
    """

    def __init__(self, settings: Sequence[TargetStatistic], keys: int) -> None:
        super().__init__()
        count, folds, size = len(settings), most_folds(settings), max(keys, 1)
        self.folds_T1: Tensor
        self.smoothing_T1: Tensor
        self.seeds_T1: Tensor
        self.keys_U: Tensor
        self.means_U: Tensor
        self.counts_U: Tensor
        self.fold_sums_UK: Tensor
        self.fold_counts_UK: Tensor
        self.priors_T1: Tensor
        own = torch.tensor([[one.folds] for one in settings])
        self.register_buffer("folds_T1", own, persistent=False)
        smoothing = torch.tensor([[one.smoothing] for one in settings], dtype=torch.float64)
        self.register_buffer("smoothing_T1", smoothing, persistent=False)
        self.register_buffer("seeds_T1", seeds(count).unsqueeze(1), persistent=False)
        self.register_buffer("keys_U", torch.zeros(size, dtype=torch.int64))
        # What serving reads: the finished values.
        self.register_buffer("means_U", torch.zeros(size))
        self.register_buffer("counts_U", torch.zeros(size))
        # What training reads: every fold's own.
        self.register_buffer("fold_sums_UK", torch.zeros(size, folds, dtype=torch.float64))
        self.register_buffer("fold_counts_UK", torch.zeros(size, folds, dtype=torch.float64))
        self.register_buffer("priors_T1", torch.zeros(count, 1, dtype=torch.float64))

    def forward(self, key_TB: Tensor, has_TB: Tensor, row_numbers: Tensor | None = None) -> Tensor:
        """``[B, 2 * T]`` float32: means and counts, statistic by statistic.

        Args:
            key_TB: int64.
            has_TB: whether the sample has the key.
            row_numbers: ``[B]`` int64 of training rows, whose own folds are left out.
        """
        places, found = find(self.keys_U, key_TB ^ self.seeds_T1)
        found = found & has_TB
        if row_numbers is None:
            means = torch.where(found, self.means_U[places], self.priors_T1.float())
            counts = torch.where(found, self.counts_U[places], 0.0)
        else:
            means, counts = self._out_of_fold(places, found, row_numbers)
        return torch.stack([means, counts], dim=1).flatten(0, 1).t()

    def _out_of_fold(self, places: Tensor, found: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        fold_TB = murmur3_rows(rows.unsqueeze(0), self.folds_T1)
        sums, counts = (
            (table[places].sum(dim=2) - table[places, fold_TB]) * found
            for table in (self.fold_sums_UK, self.fold_counts_UK)
        )
        means = smoothed(sums, counts, self.smoothing_T1, self.priors_T1)
        whole = counts * (self.folds_T1 / (self.folds_T1 - 1.0))
        return means.float(), torch.log1p(whole).float()


def most_folds(settings: Sequence[TargetStatistic]) -> int:
    """The columns of the fold tables."""
    return max(one.folds for one in settings)


def smoothed(sums: Tensor, counts: Tensor, smoothing: Tensor, priors: Tensor) -> Tensor:
    """The means of keys; the prior where nothing counts.  All float64."""
    weight = counts + smoothing
    return torch.where(weight > 0, (sums + smoothing * priors) / weight.clamp(min=1e-300), priors)


class TargetSums:
    """Sums and counts of the labels by key and fold, over the training rows.

    Args:
        settings: of each statistic.
        labels: by statistic, which column of the labels it is of.
    """

    def __init__(self, settings: Sequence[TargetStatistic], labels: Sequence[int]) -> None:
        self._settings = tuple(settings)
        self._labels = torch.tensor(labels)
        self._folds = most_folds(settings)
        self._folds_T1 = torch.tensor([[one.folds] for one in settings])
        self._seeds_T1 = seeds(len(settings)).unsqueeze(1)
        self._keys = torch.empty(0, dtype=torch.int64)
        self._statistic = torch.empty(0, dtype=torch.int64)
        self._sums = torch.empty(0, self._folds, dtype=torch.float64)
        self._counts = torch.empty(0, self._folds, dtype=torch.float64)
        self._all_sums = torch.zeros(len(settings), dtype=torch.float64)
        self._all_counts = torch.zeros(len(settings), dtype=torch.float64)
        self._pending: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._parts: list[TargetSums] = []
        self._waiting = 0

    def update(self, key_TB: Tensor, has_TB: Tensor, labels: Tensor, rows: Tensor) -> None:
        """Count a batch; ``labels`` ``[B]`` or ``[B, L]`` float32, ``rows`` ``[B]`` int64.

        Rows without a key or with a missing label (NaN) count for nothing.
        """
        label_TB = labels.view(len(rows), -1).t().index_select(0, self._labels).double()
        known = ~torch.isnan(label_TB)
        self._all_sums += torch.where(known, label_TB, 0.0).sum(dim=1)
        self._all_counts += known.sum(dim=1)
        known &= has_TB
        fold_TB = murmur3_rows(rows.unsqueeze(0), self._folds_T1)
        statistic_TB = torch.arange(len(key_TB)).unsqueeze(1).expand_as(key_TB)
        tables = ((key_TB ^ self._seeds_T1), statistic_TB, fold_TB, label_TB)
        self._pending.append(tuple(table[known] for table in tables))  # type: ignore[arg-type] # four of them
        self._waiting += int(known.sum())
        if self._waiting > max(1 << 20, len(self._keys)):
            self.settle()

    def merge(self, later: TargetSums) -> None:
        """Take the sums of other rows, which stand behind these."""
        later.settle()
        self._all_sums += later._all_sums
        self._all_counts += later._all_counts
        self._parts.append(later)
        self._waiting += len(later._keys)
        if self._waiting > max(1 << 20, len(self._keys)):
            self.settle()

    def settle(self) -> None:
        """Sum what waits to be summed; afterwards each key is held once."""
        self._settle_rows()
        self._settle_parts()

    def _settle_parts(self) -> None:
        """Join the sums of `merge`, part by part in their order."""
        if not self._parts:
            return
        parts, self._parts, self._waiting = [self, *self._parts], [], 0
        keys = [part.keys for part in parts]
        every, place = torch.unique(torch.cat(keys), return_inverse=True)
        sums = torch.zeros(len(every), self._folds, dtype=torch.float64)
        counts, of = torch.zeros_like(sums), torch.zeros_like(every)
        for part, own in zip(parts, place.split(list(map(len, keys))), strict=True):
            part.add_to(own, sums, counts, of)
        self._keep(every, of, sums, counts)

    @property
    def keys(self) -> Tensor:
        """``[U]``: the settled keys, each once."""
        return self._keys

    def add_to(self, places: Tensor, sums: Tensor, counts: Tensor, statistic: Tensor) -> None:
        """Add what is settled of each of the `keys` to its place ``[U]`` in larger tables."""
        sums[places] += self._sums
        counts[places] += self._counts
        statistic[places] = self._statistic

    def _settle_rows(self) -> None:
        if not self._pending:
            return
        parts = zip(*self._pending, strict=True)
        keys, statistic, folds, labels = (torch.cat(part) for part in parts)
        self._pending, self._waiting = [], 0
        every, place = torch.unique(torch.cat([self._keys, keys]), return_inverse=True)
        old, new = place[: len(self._keys)], place[len(self._keys) :]
        sums = torch.zeros(len(every), self._folds, dtype=torch.float64)
        counts = torch.zeros_like(sums)
        of = torch.zeros_like(every)
        for table, mine in ((sums, self._sums), (counts, self._counts), (of, self._statistic)):
            table[old] = mine
        of[new] = statistic
        flat = new * self._folds + folds
        sums.view(-1).index_add_(0, flat, labels)
        counts.view(-1).index_add_(0, flat, torch.ones_like(labels))
        self._keep(every, of, sums, counts)

    def _keep(self, every: Tensor, of: Tensor, sums: Tensor, counts: Tensor) -> None:
        while len(every) > MAX_KEYS:
            totals = counts.sum(dim=1)
            kept = totals > totals.min()
            every, of, sums, counts = every[kept], of[kept], sums[kept], counts[kept]
        self._keys, self._statistic, self._sums, self._counts = every, of, sums, counts

    def state(self) -> dict[str, Tensor]:
        """The buffers of a `StatisticsTable` of as many keys."""
        self.settle()
        priors = self._all_sums / self._all_counts.clamp(min=1)
        if not len(self._keys):
            return {"priors_T1": priors.unsqueeze(1)}
        smoothing = torch.tensor([one.smoothing for one in self._settings], dtype=torch.float64)
        sums, counts = self._sums.sum(dim=1), self._counts.sum(dim=1)
        of = self._statistic
        return {
            "keys_U": self._keys,
            "means_U": smoothed(sums, counts, smoothing[of], priors[of]).float(),
            "counts_U": torch.log1p(counts).float(),
            "fold_sums_UK": self._sums,
            "fold_counts_UK": self._counts,
            "priors_T1": priors.unsqueeze(1),
        }
