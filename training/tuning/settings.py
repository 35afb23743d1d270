"""What a search is made of, as its folder keeps it; and where its files are.

::

    base.yaml     the config that every trial begins with, as it was written
    search.json   space, metric, seed, pruning
    study.db      Optuna's database: the trials with their values
    trials/0007   the run folder of a trial; trials/0007.log what it said
    best.yaml, trials.csv, report.html   the result, also written while the search goes on
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tessera.durable import replacing
from tessera.errors import UserError
from tessera.training.config import ExperimentConfig, load_config
from tessera.training.tuning.metric import Metric, parse_metric
from tessera.training.tuning.space import Dimension, Value, read_space

Pruning = Literal["none", "median", "halving"]
PRUNINGS = get_args(Pruning)


class SearchFolder:
    """The files of the search in folder ``root``, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = root / "base.yaml"
        self.search = root / "search.json"
        self.database = root / "study.db"
        self.trials = root / "trials"
        self.best = root / "best.yaml"
        self.table = root / "trials.csv"
        self.report = root / "report.html"

    def trial(self, number: int) -> Path:
        """The run folder of a trial."""
        return self.trials / f"{number:04d}"

    def log(self, number: int) -> Path:
        """The file with what a trial said."""
        return self.trials / f"{number:04d}.log"

    def write(self, path: Path, text: str) -> None:
        """Write one of the files whole or not at all."""
        with replacing(path) as stream:
            stream.write(text.encode())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process.

        Raises:
            UserError: another process searches in it.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("w") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"another process searches in {self.root}; wait for it or give another --out"
                ) from error
            yield


@dataclass(frozen=True, kw_only=True)
class Search:
    """Everything that decides which trials there are.

    Attributes:
        space: the keys.
        metric: what counts.
        seed: of Optuna's sampler.
        prune: how trials that do badly are ended before their time.
        folder: the working directory, which relative paths of the config are taken from.
    """

    space: tuple[Dimension, ...]
    metric: Metric
    seed: int
    prune: Pruning
    folder: str

    def __post_init__(self) -> None:
        if self.prune != "none" and not self.metric.is_logged:
            raise UserError(
                f"--prune {self.prune}: metrics.csv has no {self.metric.text} after each evaluation;"
                " give --prune none, or the metric loss, auc or normalised_entropy"
            )

    def config(self, base: Path, values: dict[str, Value] | None = None) -> ExperimentConfig:
        """The config of a trial with these values by key; without, the one that it begins with."""
        return load_config(base, self.overrides(values or {}), base=Path(self.folder))

    def overrides(self, values: dict[str, Value]) -> list[str]:
        """The ``KEY=VALUE`` of a trial."""
        metric = self.metric.of_training
        chosen = [] if metric is None else [f"train.metric={metric}"]
        return chosen + [own.override(values[own.key]) for own in self.space if own.key in values]

    def check(self, base: Path) -> None:
        """Check that the config takes each key, and the ends of its values.

        Raises:
            UserError: it does not.
        """
        self.config(base)
        for own in self.space:
            for value in own.ends:
                self.config(base, {own.key: value})

    def to_json(self) -> str:
        """The text of search.json; `from_json` is the inverse."""
        plain = {
            **dataclasses.asdict(self),
            "space": {own.key: own.text for own in self.space},
            "metric": self.metric.text,
        }
        return json.dumps(plain, indent=2) + "\n"

    @classmethod
    def from_json(cls, path: Path) -> Search:
        """What the file holds.

        Raises:
            UserError: it is damaged.
        """
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
            over = [f"{key}={text}" for key, text in plain["space"].items()]
            return cls(
                space=tuple(read_space(None, over)),
                metric=parse_metric(plain["metric"]),
                seed=int(plain["seed"]),
                prune=plain["prune"],
                folder=str(plain["folder"]),
            )
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error}); begin another search") from error
