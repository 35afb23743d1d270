"""MovieLens as a `Dataset`: the real multi-hot case, with nothing taken from the future.

A row is one rating; its label says whether it is at least ``positive_rating``.  Rows are in the
order of time (equal times: of the file).  Every feature that depends on other ratings uses only
those with a strictly earlier timestamp, in the held-out rows as well: it is what a server that
sees ratings as they come would know.

Sparse features: ``user``, ``item``, ``gender``, ``age`` and ``occupation`` (one id each), ``year`` of the
item's release (one or none), ``genres`` (0 to 19 ids) and ``history``: the items that the user has rated
positively before, oldest first, the last ``max_history`` of them.

Dense features, of the ratings before this one: how many the user has given and the item has
received, and how many of these were positive.  Their logarithms and log-odds are transforms of the
model (see `COLUMNS`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.training.data.batch import Batch, make_batch
from tessera.training.data.columns import (
    DenseColumn,
    FeatureColumns,
    LabelColumn,
    Side,
    SparseColumn,
    SparseKind,
)
from tessera.training.data.dataset import Rows
from tessera.training.data.malformed import Progress
from tessera.training.data.movielens_read import MovieLens, find_layout, read_movielens

SPARSE_NAMES = ("user", "item", "gender", "age", "occupation", "year", "genres", "history")
DENSE_NAMES = ("user_ratings", "user_positive", "item_ratings", "item_positive")
_TRANSFORMS: Mapping[str, Any] = {
    "user_ratings": "log1p",
    "user_positive": {"log_odds": {"of": "user_ratings", "added": 2.5}},
    "item_ratings": "log1p",
    "item_positive": {"log_odds": {"of": "item_ratings", "added": 2.5}},
}

_SIDES: Mapping[str, Side] = {"item": "item", "year": "item", "genres": "item"}
_KINDS: Mapping[str, SparseKind] = {"genres": "categorical_list", "history": "sequence"}

COLUMNS = FeatureColumns(
    dense=tuple(
        DenseColumn(
            name=name,
            side="user" if name.startswith("user") else "item",
            transform=(_TRANSFORMS[name],),
        )
        for name in DENSE_NAMES
    ),
    sparse=tuple(
        SparseColumn(name=name, kind=_KINDS.get(name, "categorical"), side=_SIDES.get(name, "user"))
        for name in SPARSE_NAMES
    ),
    labels=(LabelColumn(name="positive"),),
    user_id="user",
    item_id="item",
)

LAYOUT = 3
"""Goes up with every change of what is written, so that older prepared folders are stale."""

Integers = npt.NDArray[np.int64]


def write_movielens(
    source: Path, positive_rating: int, folder: Path, progress: Progress
) -> Mapping[str, Any]:
    """Write the features' arrays, of MovieLens' folder ``source``, into the empty ``folder``.

    Returns:
        ``rows``, their number, and ``malformed``, a report's JSON.

    Raises:
        UserError: ``source`` has no known layout.
    """
    tables = read_movielens(source)
    progress(
        sum(file.stat().st_size for file in find_layout(source).files(source)), tables.malformed
    )
    for name, array in build_arrays(tables, positive_rating=positive_rating).items():
        np.save(folder / f"{name}.npy", array)
    return {"rows": len(tables.ratings), "malformed": tables.malformed.to_json()}


def build_arrays(tables: MovieLens, *, positive_rating: int) -> dict[str, npt.NDArray[Any]]:
    """The features of every rating, ``n`` in the order of time.

    Returns:
        ``labels [n]``; ``dense [n, 4]``; ``single [n, 5]``, the ids of the first five sparse
        features; ``years``/``genres`` with ``*_starts [n]`` and ``*_lengths [n]``: bags as parts of one
        array; ``history`` with ``history_ends [n]`` and ``history_lengths [n]``: a row's history is the
        ``history_lengths`` ids before ``history_ends``.
    """
    order = np.argsort(tables.ratings[:, 3], kind="stable")
    user, item, rating, time = tables.ratings[order].T
    labels = (rating >= positive_rating).astype(np.float32)
    user_count, user_positive = past_sums(user, time, labels)
    item_count, item_positive = past_sums(item, time, labels)
    dense = np.stack(
        [user_count, user_positive, item_count, item_positive], axis=1, dtype=np.float32
    )
    # Positive items, user by user, each user's in the order of time.
    by_user = np.argsort(user, kind="stable")
    positive = by_user[labels[by_user] == 1]
    first_of_user = np.searchsorted(user[positive], user)
    user_rows = [tables.users[number] for number in user.tolist()]
    item_rows = [tables.items[number] for number in item.tolist()]
    attributes = np.array([(u.gender, u.age, u.occupation) for u in user_rows], np.int64)
    years: list[tuple[int, ...]] = [() if row.year is None else (row.year,) for row in item_rows]
    return {
        "labels": labels,
        "dense": dense,
        "single": np.concatenate([user[:, None], item[:, None], attributes.reshape(-1, 3)], axis=1),
        **_bags("year", years),
        **_bags("genres", [row.genres for row in item_rows]),
        "history": item[positive],
        "history_ends": first_of_user + user_positive.astype(np.int64),
        "history_lengths": user_positive.astype(np.int32),
    }


def _bags(name: str, bags: list[tuple[int, ...]]) -> dict[str, npt.NDArray[Any]]:
    lengths = np.array([len(bag) for bag in bags], np.int32)
    return {
        name: np.array([number for bag in bags for number in bag], np.int64),
        f"{name}_starts": np.cumsum(lengths, dtype=np.int64) - lengths,
        f"{name}_lengths": lengths,
    }


def past_sums(
    keys: Integers, times: Integers, values: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """For every row: number of, and sum of ``values`` over, the earlier rows with the same key.

    All are ``[n]``.  ``times`` ascend; an earlier row has a strictly smaller one.
    """
    order = np.argsort(keys, kind="stable")  # within a key the times still ascend
    key, time = keys[order], times[order]
    sums = np.concatenate([[0.0], np.cumsum(values[order], dtype=np.float64)])
    new_key = np.diff(key, prepend=key[:1] - 1) != 0
    new_time = new_key | (np.diff(time, prepend=time[:1] - 1) != 0)
    places = np.arange(len(keys))
    first_of_key = np.maximum.accumulate(np.where(new_key, places, 0))
    first_of_time = np.maximum.accumulate(np.where(new_time, places, 0))
    counts = np.empty(len(keys))
    totals = np.empty(len(keys))
    counts[order] = first_of_time - first_of_key
    totals[order] = sums[first_of_time] - sums[first_of_key]
    return counts, totals


def _gather_bags(
    values: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int32],
) -> npt.NDArray[np.int64]:
    """``values[starts[i] : starts[i] + lengths[i]]`` for every ``i``, one after the other."""
    ends = np.cumsum(lengths, dtype=np.int64)
    shifts = starts - (ends - lengths)  # from a place in the result to a place in `values`
    places = np.arange(ends[-1] if len(ends) else 0, dtype=np.int64)
    gathered: npt.NDArray[np.int64] = values[places + np.repeat(shifts, lengths)]
    return gathered


class MovieLensDataset:
    """The rows of a prepared folder; see `Dataset` for the methods.  Held in memory."""

    columns = COLUMNS

    def __init__(self, folder: Path, *, max_history: int) -> None:
        arrays = {file.stem: np.load(file) for file in folder.glob("*.npy")}
        self._labels: npt.NDArray[np.float32] = arrays["labels"]
        self._dense: npt.NDArray[np.float32] = arrays["dense"]
        self._single: Integers = arrays["single"]
        lengths = np.minimum(arrays["history_lengths"], np.int32(max_history))
        self._bags: tuple[tuple[Integers, Integers, npt.NDArray[np.int32]], ...] = (
            (arrays["year"], arrays["year_starts"], arrays["year_lengths"]),
            (arrays["genres"], arrays["genres_starts"], arrays["genres_lengths"]),
            (arrays["history"], arrays["history_ends"] - lengths, lengths),
        )

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, rows: Rows) -> Batch:
        """The rows with these numbers, in this order."""
        single = self._single[rows]
        lengths = [np.ones(single.size, np.int32)]
        values = [single.T.ravel()]
        for array, starts, bag_lengths in self._bags:
            lengths.append(bag_lengths[rows])
            values.append(_gather_bags(array, starts[rows], lengths[-1]))
        return make_batch(
            dense=self._dense[rows],
            keys=SPARSE_NAMES,
            lengths=np.concatenate(lengths),
            values=np.concatenate(values),
            labels=self._labels[rows],
        )

    def take(self, start: int, stop: int) -> Batch:
        """Rows ``start`` to ``stop - 1``."""
        return self.batch(np.arange(start, stop, dtype=np.int64))

    def labels(self, rows: Rows) -> npt.NDArray[np.float32]:
        """The labels of these rows."""
        return self._labels[rows]
