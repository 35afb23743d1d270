"""``data.negatives``: rows of other items, for data that has positives only.

A `NegativeView` gives each row of another view, and behind it ``per_positive`` rows with label 0 that have
the features of another item.  Which items these are is a function of (seed, epoch, row), so that it is
the same for every number of ranks, threads and after a stop.

Shapes: ``n`` rows of the data, ``K`` negatives of each, ``I`` items.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from tessera.errors import UserError
from tessera.training import field_checks as check
from tessera.training.data.batch import Batch
from tessera.training.data.catalogue import Catalogue, Ids, collect, required_item_id, single_ids
from tessera.training.data.columns import FeatureColumns
from tessera.training.data.dataset import DataSplits, Described, EpochOrder, Part, View
from tessera.training.data.item_rows import with_other_items

NegativesBy = Literal["uniform", "popularity"]

_ATTEMPTS = 16
"""Draws of an item that is known to be a positive are repeated so often."""


@dataclass(frozen=True, kw_only=True)
class NegativesConfig:
    """Rows with label 0 that are made of positive ones, by replacing the features of side item.

    Attributes:
        per_positive: how many for each row.
        by: how their items are drawn from the items of the training rows: all alike (``uniform``), or
            by how many training rows have them (``popularity``), which is how often an item would be
            met in the batch beside a row.
        power: under ``popularity``, the exponent of these numbers; None: 1.
        exclude_known: whether no item is drawn that the row's user has in the training rows; it needs a
            ``data.user_id``.  The row's own item is never drawn.
    """

    per_positive: int
    by: NegativesBy = "uniform"
    power: float | None = None
    exclude_known: bool = False

    def __post_init__(self) -> None:
        check.at_least_one(self, "per_positive")
        check.one_of(self, "by", NegativesBy)
        check.positive(self, "power")
        if self.power is not None and self.by == "uniform":
            raise UserError(
                f"power={self.power}: uniform draws all items alike; leave it out, or set by to"
                " popularity"
            )


class Negatives:
    """Draws items for rows.

    Args:
        config: how.
        columns: of the data.
        catalogue: the items of the training rows.

    Raises:
        UserError: there is one item alone, or ``exclude_known`` without a ``user_id``.
    """

    def __init__(
        self, config: NegativesConfig, columns: FeatureColumns, catalogue: Catalogue
    ) -> None:
        self.config, self.columns, self.catalogue = config, columns, catalogue
        self._item_id = required_item_id(columns)
        if len(catalogue) < 2:
            raise UserError(
                "data.negatives: the training rows have one item alone; there is no other"
            )
        if config.exclude_known and catalogue.known is None:
            raise UserError(
                "data.negatives.exclude_known=true: no user_id says whose a row is; name it, or leave"
                " exclude_known out"
            )
        self._bounds: npt.NDArray[np.float64] | None = None
        if config.by == "popularity":
            weights = catalogue.counts.astype(np.float64) ** (config.power or 1.0)
            self._bounds = np.cumsum(weights) / weights.sum()
        self._known: npt.NDArray[np.uint64] | None = None
        if config.exclude_known and catalogue.known is not None:
            self._known = np.unique(_pairs(*catalogue.known))

    def added(self, batch: Batch, *, seed: int, epoch: int, start: int, stop: int) -> Batch:
        """Rows ``start`` to ``stop - 1`` of a batch of ``n`` rows, each followed by its negatives."""
        each = self.config.per_positive + 1
        numbers = batch.row_numbers
        assert numbers is not None, "views give their rows' numbers"
        places = self.drawn(
            numbers.numpy(),
            self.catalogue.places(single_ids(batch, self._item_id)),
            None if self._known is None else single_ids(batch, str(self.columns.user_id)),
            seed=seed,
            epoch=epoch,
        )
        chosen = np.arange(start, stop, dtype=np.int64)
        row, slot = chosen // each, chosen % each
        items = np.where(slot == 0, -1, places[row, np.maximum(slot - 1, 0)])
        made = with_other_items(batch, self.catalogue, row, items)
        labels = made.labels.clone()
        labels[slot > 0] = 0.0
        made_numbers = numbers[torch.from_numpy(row)] * each + torch.from_numpy(slot)
        return dataclasses.replace(made, labels=labels, row_numbers=made_numbers)

    def drawn(self, rows: Ids, own: Ids, users: Ids | None, *, seed: int, epoch: int) -> Ids:
        """``[n, K]``: places of items for these row numbers, whose own items' places are ``own``."""
        count = len(self.catalogue)
        places = np.empty((len(rows), self.config.per_positive), np.int64)
        key = _mixed(np.array([seed], np.uint64) ^ _mixed(np.array([epoch + 1], np.uint64)))
        of_row = _mixed(rows.astype(np.uint64) ^ key)
        for slot in range(self.config.per_positive):
            left = np.arange(len(rows))
            for attempt in range(_ATTEMPTS):
                draw = np.array([slot * _ATTEMPTS + attempt + 1], np.uint64)
                bits = _mixed(of_row[left] ^ _mixed(draw))
                share = (bits >> np.uint64(11)).astype(np.float64) / float(1 << 53)
                found = (
                    (share * count).astype(np.int64)
                    if self._bounds is None
                    else np.searchsorted(self._bounds, share, side="right")
                )
                places[left, slot] = np.minimum(found, count - 1)
                left = left[self._is_positive(places[left, slot], own[left], users, left)]
                if not len(left):
                    break
            # So many items are known that chance met no other: at least not the row's own.
            same = left[places[left, slot] == own[left]]
            places[same, slot] = (places[same, slot] + 1) % count
        return places

    def _is_positive(
        self, places: Ids, own: Ids, users: Ids | None, left: Ids
    ) -> npt.NDArray[np.bool_]:
        wrong: npt.NDArray[np.bool_] = places == own
        if self._known is not None and users is not None:
            pairs = _pairs(users[left], places)
            at = np.minimum(np.searchsorted(self._known, pairs), len(self._known) - 1)
            wrong |= self._known[at] == pairs
        return wrong


def _pairs(users: Ids, places: Ids) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of each pair; two pairs have the same by a chance of 1 in 2 ** 64."""
    return _mixed(_mixed(users.astype(np.uint64)) ^ places.astype(np.uint64))


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True)
class NegativeView:
    """A view's rows, each followed by its negatives; see `View`.

    Attributes:
        positives: the rows.
        negatives: what draws their items.
    """

    positives: View
    negatives: Negatives

    @property
    def dataset(self) -> Described:
        """See `View.dataset`."""
        return self.positives.dataset

    @property
    def _each(self) -> int:
        return self.negatives.config.per_positive + 1

    def __len__(self) -> int:
        return len(self.positives) * self._each

    def labels(self, limit: int | None = None) -> npt.NDArray[np.float32]:
        """See `View.labels`."""
        count = len(self) if limit is None else min(limit, len(self))
        labels: npt.NDArray[np.float32] = (np.arange(count) % self._each == 0).astype(np.float32)
        return labels

    def order(self, epoch: int, *, seed: int | None, threads: int) -> NegativeOrder:
        """See `View.order`; without a seed the negatives are those of no epoch, always the same."""
        return NegativeOrder(
            self.positives.order(epoch, seed=seed, threads=threads),
            self.negatives,
            seed=0 if seed is None else seed + 1,
            epoch=0 if seed is None else epoch,
        )


def with_negatives(splits: DataSplits, config: NegativesConfig, *, progress: bool) -> DataSplits:
    """The splits with negatives behind every row, whose items are those of the training rows.

    Raises:
        UserError: a row has another label than 1, or `Negatives` does not fit the data.
    """
    if not len(splits.train):
        return splits
    columns = splits.train.dataset.columns
    for name in ("train", "valid", "test"):
        labels = getattr(splits, name).labels()
        if labels.ndim > 1 or not bool(np.all(labels == 1)):
            raise UserError(
                f"data.negatives: the {name} rows have other labels than 1, or several; leave negatives"
                " out, or give the data with positives alone"
            )
    catalogue = collect(columns, splits.train, progress=progress)
    negatives = Negatives(config, columns, catalogue)
    return DataSplits(
        train=NegativeView(splits.train, negatives),
        valid=NegativeView(splits.valid, negatives),
        test=NegativeView(splits.test, negatives),
        malformed=splits.malformed,
    )


class NegativeOrder:
    """One epoch; see `EpochOrder`."""

    def __init__(
        self, positives: EpochOrder, negatives: Negatives, *, seed: int, epoch: int
    ) -> None:
        self._positives, self._negatives = positives, negatives
        self._seed, self._epoch = seed, epoch

    def place(self, start: int, stop: int, part: Part = (0, 1)) -> tuple[Any, int, int | None]:
        """See `EpochOrder.place`.

        Raises:
            UserError: of several parts, the rows begin or end between a row and its negatives.
        """
        each = self._negatives.config.per_positive + 1
        first, last = start // each, -(-stop // each)
        if part == (0, 1):
            return self._positives.place(first, last), start - first * each, stop - first * each
        if start % each or stop % each:
            raise UserError(
                f"data.negatives: {stop - start} rows of a batch are not a multiple of {each}, a row and"
                " its negatives, as several ranks need it; set train.batch_size to such a multiple"
            )
        return self._positives.place(first, last, part), 0, None

    def gather(self, place: tuple[Any, int, int | None]) -> Batch:
        """See `EpochOrder.gather`."""
        inner, start, stop = place
        batch = self._positives.gather(inner)
        if stop is None:
            stop = batch.size * (self._negatives.config.per_positive + 1)
        return self._negatives.added(
            batch, seed=self._seed, epoch=self._epoch, start=start, stop=stop
        )

    def close(self) -> None:
        """See `EpochOrder.close`."""
        self._positives.close()
