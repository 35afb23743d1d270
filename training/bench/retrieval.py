"""Retrieval on MovieLens-100K: ``two_tower`` beside popularity, item-kNN and EASE, out of all items.

    python -m tessera.training.bench.retrieval --data FOLDER/ml-100k --out FOLDER [--minutes N]

Two ways to hold rows out (`WAYS`).  ``random``: every rating counts as a positive, and of each user's a tenth
is for validation and a tenth for the test, drawn at random; this is how RecBole evaluates on this data
unless it is told otherwise.  ``time``: ratings of 4 and 5 are the positives, the latest tenth of all is the
test, and a held-out user is described by everything that was liked before; most have no training row.

A query is a user of the held-out rows.  Asked for are the best of all items of the training rows,
without those that the user is known to have: under ``random`` the ones of the earlier splits, under ``time``
those of the training rows and the user's history.  A held-out item without a training row counts as missed.

Item-kNN has the cosine with shrinkage (Sarwar et al. 2001; Deshpande and Karypis 2004), EASE is the linear
model of Steck ("Embarrassingly Shallow Autoencoders for Sparse Data", 2019).  Every model's settings are those
with the best recall@10 on the validation rows; of ``two_tower`` also the epoch.  Test rows choose nothing.

± is the standard error over the users; of a difference, over pairs.  Several seeds are averaged for each user
before.  Runs are kept in ``--out``: the script goes on where it was stopped.  It writes ``retrieval.md`` there
and prints it.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tessera.training.bench.harness import arguments, machine
from tessera.training.bench.retrieval_baselines import Matrix, ease, item_knn, popularity
from tessera.training.bench.retrieval_settings import SETTINGS, config_of
from tessera.training.bench.trials import Scored, Trials, Values, trained_on
from tessera.training.config import ExperimentConfig
from tessera.training.data.catalogue import Catalogue, collect, single_ids
from tessera.training.data.dataset import View
from tessera.training.data.item_rows import items_alone
from tessera.training.data.loader import BatchLoader
from tessera.training.data.movielens_read import MovieLens, read_movielens
from tessera.training.data.opening import open_data
from tessera.training.models.retrieval import RetrievalArch
from tessera.training.trained import TrainedModel
from tessera.training.trainer.retrieval_metrics import best_items, gains

Way = Literal["random", "time"]
WAYS: tuple[Way, ...] = ("random", "time")
SPLIT_SEED = 0
POSITIVE_RATING = 4
HISTORY = 50
"""A row has at most so many ids of its user's other items, the latest ones."""
KS = (10, 20)
CHOSEN_BY = "valid recall@10"

NEIGHBOURS = (20, 50, 100, 200)
SHRINKAGE = (0.0, 10.0, 100.0)
RIDGES = (30.0, 100.0, 300.0, 1000.0)

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Asked:
    """The queries of a split; ``Q`` users, ``I`` items.

    Attributes:
        users: ``[Q]`` their ids.
        profiles: ``[Q, I]``: 1 for the items that are known of the user, which describe it.
        excluded: by query, places of the items that it is not given.
        relevant: by query, places of the items that are wanted.
        missing: ``[Q]``: how many more are wanted that no training row has.
    """

    users: Ids
    profiles: Matrix
    excluded: list[Ids]
    relevant: list[Ids]
    missing: Ids


class Interactions:
    """The positives of MovieLens, split in one way.

    Args:
        tables: what was read of MovieLens.
        way: see the module.

    Attributes:
        items: ``[I]``, ascending: the items of the training rows.
        matrix: ``[U, I]``: 1 where a user has an item in the training rows.
    """

    def __init__(self, tables: MovieLens, way: Way) -> None:
        ratings = tables.ratings[np.argsort(tables.ratings[:, 3], kind="stable")]
        if way == "time":
            ratings = ratings[ratings[:, 2] >= POSITIVE_RATING]
        self.users, self._items, _, times = ratings.T
        self._way, self._tables = way, tables
        self.split = _random_split(self.users) if way == "random" else _time_split(len(ratings))
        self.histories = _histories(self.users, self._items, times, self.split, way)
        train = self.split == 0
        self.items = np.unique(self._items[train])
        users, place = np.unique(self.users[train], return_inverse=True)
        self.matrix = np.zeros((len(users), len(self.items)), np.float32)
        self.matrix[place, np.searchsorted(self.items, self._items[train])] = 1.0

    def write(self, folder: Path) -> dict[str, Path]:
        """A Parquet file of each split, by its name."""
        files = {}
        for number, name in enumerate(("train", "valid", "test")):
            rows = np.flatnonzero(self.split == number)
            about = [self._tables.items[item] for item in self._items[rows].tolist()]
            table = pa.table(
                {
                    "user": self.users[rows],
                    "item": self._items[rows],
                    "history": pa.array([self.histories[row].tolist() for row in rows.tolist()]),
                    "genres": pa.array([list(one.genres) for one in about], pa.list_(pa.int64())),
                    "year": pa.array([one.year for one in about], pa.int64()),
                }
            )
            files[name] = folder / f"{self._way}-{name}.parquet"
            pq.write_table(table, files[name])
        return files

    def asked(self, name: Literal["valid", "test"]) -> Asked:
        """The queries of a split."""
        number = 1 if name == "valid" else 2
        users, profiles, excluded, relevant, missing = [], [], [], [], []
        for user in np.unique(self.users[self.split == number]).tolist():
            own = self.users == user
            rows = np.flatnonzero(own & (self.split == number))
            wanted = np.unique(self._items[rows])
            earlier = self._items[own & (self.split < (number if self._way == "random" else 1))]
            history = self.histories[rows[0]]
            profile = np.zeros(len(self.items), np.float32)
            profile[self._places(history)] = 1.0
            known = np.unique(self._places(np.concatenate([earlier, history])))
            wanted_places = np.setdiff1d(self._places(wanted), known)
            lost = len(wanted) - len(self._places(wanted))
            if not len(wanted_places) + lost:
                continue
            users.append(user)
            profiles.append(profile)
            excluded.append(known)
            relevant.append(wanted_places)
            missing.append(lost)
        return Asked(np.array(users), np.stack(profiles), excluded, relevant, np.array(missing))

    def _places(self, items: Ids) -> Ids:
        """Where these items stand in ``items``, without those that do not."""
        places = np.minimum(np.searchsorted(self.items, items), len(self.items) - 1)
        found: Ids = places[self.items[places] == items]
        return found


def _random_split(users: Ids) -> npt.NDArray[np.int8]:
    """``[n]``: of each user's rows a tenth 1, a tenth 2, and the others 0."""
    split = np.zeros(len(users), np.int8)
    draw = np.random.default_rng(SPLIT_SEED)
    for user in np.unique(users).tolist():
        rows = draw.permutation(np.flatnonzero(users == user))
        tenth = max(1, len(rows) // 10)
        split[rows[:tenth]], split[rows[tenth : 2 * tenth]] = 1, 2
    return split


def _time_split(rows: int) -> npt.NDArray[np.int8]:
    """``[n]`` of rows in the order of time."""
    split = np.zeros(rows, np.int8)
    split[rows * 8 // 10 :], split[rows * 9 // 10 :] = 1, 2
    return split


def _histories(
    users: Ids, items: Ids, times: Ids, split: npt.NDArray[np.int8], way: Way
) -> list[Ids]:
    """By row, the other items that its user is known to have, the latest ones last.

    ``random``: those of the training rows.  ``time``: those with an earlier time.
    """
    found = []
    by_user = {user: np.flatnonzero(users == user) for user in np.unique(users).tolist()}
    for row, user in enumerate(users.tolist()):
        own = by_user[user]
        known = split[own] == 0 if way == "random" else times[own] < times[row]
        found.append(items[own[known & (own != row)]][-HISTORY:])
    return found


def measured(asked: Asked, users: Matrix, items: Matrix, name: str) -> dict[str, Values]:
    """Recall and NDCG of every query, by ``name`` and metric; scores are ``users @ items.T``."""
    found = {}
    for k in KS:
        best = best_items(users, items, k, asked.excluded)
        both = gains(best, asked.relevant, asked.missing, k)
        found[f"{name} recall@{k}"], found[f"{name} ndcg@{k}"] = both[:, 0], both[:, 1]
    return found


def tower_vectors(
    trained: TrainedModel, view: View, catalogue: Catalogue
) -> tuple[dict[int, Matrix], Matrix]:
    """The vector of each user of a view, from its first row, and those of all items ``[I, D]``."""
    model = trained.model
    arch = model.arch
    assert isinstance(arch, RetrievalArch)

    def vectors(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        dense, ids = model.preprocessor(batch.dense_features, batch.sparse_features)
        dense = model.encoder(dense, ids.stride())
        return arch.vectors(dense, model.hasher(ids), users=batch.size)

    of_user: dict[int, Matrix] = {}
    with torch.no_grad():
        for batch in BatchLoader(view, batch_size=4096, shuffle=False, seed=0).epoch(0):
            users, _ = vectors(batch)
            for user, vector in zip(single_ids(batch, "user").tolist(), users.numpy(), strict=True):
                of_user.setdefault(user, vector)
        places = np.arange(len(catalogue), dtype=np.int64)
        _, items = vectors(items_alone(trained.columns, catalogue, places))
    return of_user, items.numpy()


class Bench:
    """The runs in one way.

    Args:
        rows: the interactions.
        way: their name.
        trials: the runs.
        work: a folder for what is not kept.
    """

    def __init__(self, rows: Interactions, way: Way, trials: Trials, work: Path) -> None:
        self._rows, self._way, self._trials, self._work = rows, way, trials, work
        self._asked = {"valid": rows.asked("valid"), "test": rows.asked("test")}

    def peer(self, name: str, weights: Callable[[Matrix], Matrix]) -> Scored | None:
        """A model whose scores are a user's profile times ``weights(matrix)``."""

        def run() -> Scored:
            of_items = weights(self._rows.matrix)
            found: dict[str, Values] = {}
            for part, asked in self._asked.items():
                # A user without a known item is given the most popular ones.
                counts = self._rows.matrix.sum(axis=0)
                unknown = asked.profiles.sum(axis=1) == 0
                scores = asked.profiles @ of_items
                scores[unknown] = counts
                found |= measured(asked, scores, np.eye(len(counts), dtype=np.float32), part)
            return Scored(found, {})

        return self._trials.scored({"way": self._way, "peer": name}, run)

    def model(self, setting: str, seed: int) -> Scored | None:
        """Train once with a setting, and measure; None if the time is up."""
        plain = config_of(SETTINGS[setting], seed)

        def run() -> Scored:
            files = self._rows.write(self._work)
            paths = {
                "path": str(files["train"]),
                "valid_path": str(files["valid"]),
                "test_path": str(files["test"]),
            }
            sections = {**plain, "data": {**plain["data"], **paths}}
            config = ExperimentConfig.from_plain(sections, name="two_tower")
            trained = trained_on(config, self._work / "run")
            splits = open_data(config.data, progress=False)
            found: dict[str, Values] = {}
            for part, asked in self._asked.items():
                if trained is None:  # it diverged, and finds nothing
                    names = [f"{part} {m}@{k}" for k in KS for m in ("recall", "ndcg")]
                    found |= dict.fromkeys(names, np.zeros(len(asked.users)))
                    continue
                catalogue = collect(trained.columns, splits.train, progress=False)
                assert np.array_equal(catalogue.ids, self._rows.items)
                of_user, items = tower_vectors(trained, getattr(splits, part), catalogue)
                users = np.stack([of_user[user] for user in asked.users.tolist()])
                found |= measured(asked, users, items, part)
            return Scored(found, {})

        what = {"way": self._way, "setting": setting, "seed": seed, "config": plain}
        return self._trials.scored(what, run)

    def contenders(self, seeds: int) -> dict[str, list[Scored]]:
        """By model, its name with the chosen setting, the runs."""
        peers: dict[str, dict[str, Callable[[Matrix], Matrix]]] = {
            "popularity": {"": popularity},
            "item-kNN": {
                f", {n} neighbours, shrinkage {s:g}": partial(item_knn, neighbours=n, shrinkage=s)
                for n, s in itertools.product(NEIGHBOURS, SHRINKAGE)
            },
            "EASE": {f", ridge {ridge:g}": partial(ease, ridge=ridge) for ridge in RIDGES},
        }
        found: dict[str, list[Scored]] = {}
        for name, forms in peers.items():
            runs = {form: self.peer(f"{name}{form}", weights) for form, weights in forms.items()}
            chosen = best({form: run for form, run in runs.items() if run is not None})
            tried = "" if len(forms) == 1 else f" (of {len(forms)})"
            found[f"{name}{chosen}{tried}"] = [_there(runs[chosen])]
        runs = {setting: self.model(setting, 0) for setting in SETTINGS}
        known = {setting: run for setting, run in runs.items() if run is not None}
        if known:
            chosen = best(known)
            own = [known[chosen], *(self.model(chosen, seed) for seed in range(1, seeds))]
            name = f"`two_tower`, {chosen} (of {len(known)})"
            found[name] = [run for run in own if run is not None]
        return found


def _there(run: Scored | None) -> Scored:
    assert run is not None
    return run


def best(found: Mapping[str, Scored]) -> str:
    """The setting that is best on the validation rows."""
    return max(found, key=lambda name: float(np.mean(found[name].scores[CHOSEN_BY])))


def with_error(values: Values, sign: str = "") -> str:
    """The mean over queries and its standard error."""
    return f"{np.mean(values):{sign}.4f} ± {np.std(values, ddof=1) / np.sqrt(len(values)):.4f}"


def table(way: Way, found: Mapping[str, Sequence[Scored]]) -> list[str]:
    """The rows of the results of one way; differences are to item-kNN."""
    metrics = [f"test {metric}@{k}" for k in KS for metric in ("recall", "ndcg")]
    of_users = {
        name: {m: np.mean([run.scores[m] for run in runs], axis=0) for m in (*metrics, CHOSEN_BY)}
        for name, runs in found.items()
    }
    peer = next(own for name, own in of_users.items() if name.startswith("item-kNN"))
    lines = []
    for name, own in of_users.items():
        cells = [with_error(own[metric]) for metric in metrics]
        less = "" if own is peer else with_error(own[metrics[0]] - peer[metrics[0]], sign="+")
        valid = f"{np.mean(own[CHOSEN_BY]):.4f}"
        lines.append(
            f"| `{way}` | {name} | {valid} | {' | '.join(cells)} | {less} | {len(found[name])} |"
        )
    return lines


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="MovieLens' folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and results")
    parser.add_argument(
        "--seeds", type=int, default=3, help="runs of the chosen setting; default 3"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="default: both")
    parser.add_argument(
        "--minutes", type=float, help="begin no run after so many; default: no limit"
    )
    args = parser.parse_args()
    trials = Trials(args.out, minutes=args.minutes)
    tables = read_movielens(args.data)
    heads = [f"recall@{k} | NDCG@{k}" for k in KS]
    lines = [
        f"{machine()}.",
        "",
        f"| held out | model | validation recall@10 | {' | '.join(heads)} | less item-kNN's recall@10 | runs |",
        "| --- " * (5 + 2 * len(KS)) + "|",
    ]
    with tempfile.TemporaryDirectory() as work:
        for way in args.ways:
            bench = Bench(Interactions(tables, way), way, trials, Path(work))
            lines += table(way, bench.contenders(args.seeds))
    text = "\n".join(lines) + "\n"
    (args.out / "retrieval.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
