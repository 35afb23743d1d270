"""MovieLens as a `Dataset`: the real multi-hot case, with nothing taken from the future.

A row is one rating; its label says whether it is at least ``positive_rating``.  Rows are in the
order of time (equal times: of the file).  Every feature that depends on other ratings uses only
those with a strictly earlier timestamp.  `Known` says whether ratings that are held out count among
them: then a row knows what a server knows that is told of every rating as it comes, otherwise what one
knows whose features stay as they were at the end of training.

Sparse features: ``user``, ``item``, ``gender``, ``age`` and ``occupation`` (one id each), ``year`` of the
item's release (one or none), ``genres`` (0 to 19 ids) and ``history``: the items that the user has rated
positively before, oldest first, the last ``max_history`` of them.  By choice also ``dislikes``, the same
of the items that the user has rated otherwise, ``zip_region``, the first character of the user's zip
code (a digit is its own id, a letter 10 and on), and ``zip_prefix``, its first three, where these are
digits.

Dense features, of the ratings before this one: how many the user has given and the item has
received, and how many of these were positive.  Their logarithms and log-odds are transforms of the
model (see `COLUMNS`).

Labels: ``positive``, ``top`` (the rating is 5) and ``rating`` itself, for a regression.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

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
from tessera.training.data.config import Split
from tessera.training.data.dataset import Rows
from tessera.training.data.malformed import Progress
from tessera.training.data.movielens_read import MovieLens, User, find_layout, read_movielens
from tessera.training.data.splits import split_rows

Feature = Literal[
    "user",
    "item",
    "gender",
    "age",
    "occupation",
    "year",
    "genres",
    "history",
    "dislikes",
    "zip_region",
    "zip_prefix",
]
Label = Literal["positive", "top", "rating"]

SPARSE_NAMES: tuple[Feature, ...] = (
    "user", "item", "gender", "age", "occupation", "year", "genres", "history",
)  # fmt: skip
"""The features of a config that names none."""
CHOSEN_NAMES: tuple[Feature, ...] = ("dislikes", "zip_region", "zip_prefix")
"""The features that a model has only if its config names them."""
DENSE_NAMES = ("user_ratings", "user_positive", "item_ratings", "item_positive")
_TRANSFORMS: Mapping[str, Any] = {
    "user_ratings": "log1p",
    "user_positive": {"log_odds": {"of": "user_ratings", "added": 2.5}},
    "item_ratings": "log1p",
    "item_positive": {"log_odds": {"of": "item_ratings", "added": 2.5}},
}

_SIDES: Mapping[str, Side] = {"item": "item", "year": "item", "genres": "item"}
_KINDS: Mapping[str, SparseKind] = {
    "genres": "categorical_list",
    "history": "sequence",
    "dislikes": "sequence",
}
_SINGLE: tuple[Feature, ...] = ("user", "item", "gender", "age", "occupation")
_HISTORIES = ("history", "dislikes")


def columns_of(
    features: Sequence[Feature] = SPARSE_NAMES, labels: Sequence[Label] = ("positive",)
) -> FeatureColumns:
    """The columns of a dataset with these sparse features and labels."""
    return FeatureColumns(
        dense=tuple(
            DenseColumn(
                name=name,
                side="user" if name.startswith("user") else "item",
                transform=(_TRANSFORMS[name],),
            )
            for name in DENSE_NAMES
        ),
        sparse=tuple(
            SparseColumn(
                name=name, kind=_KINDS.get(name, "categorical"), side=_SIDES.get(name, "user")
            )
            for name in features
        ),
        labels=tuple(
            LabelColumn(name=name, task="regression" if name == "rating" else "binary")
            for name in labels
        ),
        user_id="user" if "user" in features else None,
        item_id="item" if "item" in features else None,
    )


COLUMNS = columns_of()

LAYOUT = 4
"""Goes up with every change of what is written, so that older prepared folders are stale."""

Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class Known:
    """Which ratings the features of other rows may count.

    Args:
        split: how the rows are cut, if ratings that are held out do not count; None: all count.
        held_out: the shares of (validation, test).
        seed: that of a random split.
    """

    def __init__(
        self, split: Split | None = None, held_out: tuple[float, float] = (0.0, 0.0), seed: int = 0
    ) -> None:
        self._split, self._held_out, self._seed = split, held_out, seed

    def options(self) -> dict[str, Any]:
        """What a prepared folder depends on."""
        if self._split is None:
            return {}
        own = {"split": self._split, "held_out": list(self._held_out)}
        return {"known": own | ({"seed": self._seed} if self._split == "random" else {})}

    def mask(self, rows: int) -> Mask:
        """``[rows]``: whether the rating counts, of ratings in the order of time."""
        if self._split is None:
            return np.ones(rows, np.bool_)
        train, _, _ = split_rows(
            rows, split=self._split, held_out=self._held_out, seed=self._seed, prepared=None
        )
        known = np.zeros(rows, np.bool_)
        known[np.asarray(train, np.int64)] = True
        return known


EVERY_RATING = Known()


def write_movielens(
    source: Path, positive_rating: int, known: Known, folder: Path, progress: Progress
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
    arrays = build_arrays(tables, positive_rating=positive_rating, known=known)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return {"rows": len(tables.ratings), "malformed": tables.malformed.to_json()}


def build_arrays(
    tables: MovieLens, *, positive_rating: int, known: Known = EVERY_RATING
) -> dict[str, npt.NDArray[Any]]:
    """The features of every rating, ``n`` in the order of time.

    Returns:
        ``positive``, ``top`` and ``rating``, the labels, ``[n]`` float32; ``dense [n, 4]``; ``single
        [n, 5]``, the ids of the first five sparse features; of every other one, under its name, the
        ids of bags, of which a row's are the ``NAME_lengths [n]`` before ``NAME_ends [n]``.
    """
    order = np.argsort(tables.ratings[:, 3], kind="stable")
    user, item, rating, time = tables.ratings[order].T
    positive = rating >= positive_rating
    counts = known.mask(len(rating))
    both = np.stack([counts, counts & positive], axis=1)
    of_user, of_item = past_sums(user, time, both), past_sums(item, time, both)
    user_rows = [tables.users[number] for number in user.tolist()]
    item_rows = [tables.items[number] for number in item.tolist()]
    attributes = np.array([(u.gender, u.age, u.occupation) for u in user_rows], np.int64)
    years: list[tuple[int, ...]] = [() if row.year is None else (row.year,) for row in item_rows]
    liked = of_user[:, 1]
    return {
        "positive": positive.astype(np.float32),
        "top": (rating == MAX_RATING).astype(np.float32),
        "rating": rating.astype(np.float32),
        "dense": np.concatenate([of_user, of_item], axis=1).astype(np.float32),
        "single": np.concatenate([user[:, None], item[:, None], attributes.reshape(-1, 3)], axis=1),
        **_bags("year", years),
        **_bags("genres", [row.genres for row in item_rows]),
        **_bags("zip_region", [zip_region(row) for row in user_rows]),
        **_bags("zip_prefix", [zip_prefix(row) for row in user_rows]),
        **_histories("history", user, item, counts & positive, liked),
        **_histories("dislikes", user, item, counts & ~positive, of_user[:, 0] - liked),
    }


MAX_RATING = 5


def _bags(name: str, bags: list[tuple[int, ...]]) -> dict[str, npt.NDArray[Any]]:
    lengths = np.array([len(bag) for bag in bags], np.int32)
    return {
        name: np.array([number for bag in bags for number in bag], np.int64),
        f"{name}_ends": np.cumsum(lengths, dtype=np.int64),
        f"{name}_lengths": lengths,
    }


def _histories(
    name: str, user: Integers, item: Integers, enters: Mask, past: Integers
) -> dict[str, npt.NDArray[Any]]:
    """Bags of the items that ``enters`` names, user by user, each user's in the order of time.

    ``past`` says how many of them a row is given, the earliest ones.
    """
    by_user = np.argsort(user, kind="stable")
    entries = by_user[enters[by_user]]
    return {
        name: item[entries],
        f"{name}_ends": np.searchsorted(user[entries], user) + past,
        f"{name}_lengths": past.astype(np.int32),
    }


def zip_region(user: User) -> tuple[int, ...]:
    """A bag with the id of the zip code's first character; an empty one if it is something else."""
    first = user.zip_code[:1].upper()
    if not (first.isascii() and first.isalnum()):
        return ()
    return (int(first) if first.isdigit() else 10 + ord(first) - ord("A"),)


def zip_prefix(user: User) -> tuple[int, ...]:
    """A bag with the number that the first three digits make; an empty one where they are not digits."""
    prefix = user.zip_code[:3]
    return (int(prefix),) if len(prefix) == 3 and prefix.isascii() and prefix.isdigit() else ()


def past_sums(keys: Integers, times: Integers, values: npt.NDArray[Any]) -> Integers:
    """For every row the sums of ``values [n, k]`` over the earlier rows with the same key, ``[n, k]``.

    Keys and times are ``[n]``.  Times ascend; an earlier row has a strictly smaller one.
    """
    order = np.argsort(keys, kind="stable")  # within a key the times still ascend
    key, time = keys[order], times[order]
    sums = np.zeros((len(keys) + 1, values.shape[1]), np.int64)
    np.cumsum(values[order], axis=0, out=sums[1:])
    new_key = np.diff(key, prepend=key[:1] - 1) != 0
    new_time = new_key | (np.diff(time, prepend=time[:1] - 1) != 0)
    places = np.arange(len(keys))
    first_of_key = np.maximum.accumulate(np.where(new_key, places, 0))
    first_of_time = np.maximum.accumulate(np.where(new_time, places, 0))
    totals = np.empty((len(keys), values.shape[1]), np.int64)
    totals[order] = sums[first_of_time] - sums[first_of_key]
    return totals


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
    """The rows of a prepared folder; see `Dataset` for the methods.  Held in memory.

    Args:
        folder: what `write_movielens` has written.
        max_history: the ids that a history holds at most, the latest ones.
        features: the sparse features of a batch, in this order.
        labels: the labels of a batch, in this order.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_history: int,
        features: Sequence[Feature] = SPARSE_NAMES,
        labels: Sequence[Label] = ("positive",),
    ) -> None:
        self.columns = columns_of(features, labels)
        own = [np.load(folder / f"{name}.npy") for name in labels]
        self._labels: npt.NDArray[np.float32] = own[0] if len(own) == 1 else np.stack(own, axis=1)
        self._dense: npt.NDArray[np.float32] = np.load(folder / "dense.npy")
        single: Integers = np.load(folder / "single.npy")
        self._features: list[tuple[Integers, Integers, npt.NDArray[np.int32]]] = []
        for name in features:
            if name in _SINGLE:
                values = np.ascontiguousarray(single[:, _SINGLE.index(name)])
                lengths = np.ones(len(values), np.int32)
                starts = np.arange(len(values), dtype=np.int64)
            else:
                values = np.load(folder / f"{name}.npy")
                lengths = np.load(folder / f"{name}_lengths.npy")
                if name in _HISTORIES:
                    lengths = np.minimum(lengths, np.int32(max_history))
                starts = np.load(folder / f"{name}_ends.npy") - lengths
            self._features.append((values, starts, lengths))

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, rows: Rows) -> Batch:
        """The rows with these numbers, in this order."""
        lengths, values = [], []
        for array, starts, own in self._features:
            lengths.append(own[rows])
            values.append(_gather_bags(array, starts[rows], lengths[-1]))
        return make_batch(
            dense=self._dense[rows],
            keys=self.columns.sparse_names,
            lengths=np.concatenate(lengths),
            values=np.concatenate(values),
            labels=self._labels[rows],
        )

    def take(self, start: int, stop: int) -> Batch:
        """Rows ``start`` to ``stop - 1``."""
        return self.batch(np.arange(start, stop, dtype=np.int64))

    def labels(self, rows: Rows) -> npt.NDArray[np.float32]:
        """The labels of these rows, ``[len(rows)]``; of several ``[len(rows), L]``."""
        return self._labels[rows]
