"""`evaluate`: from models and data to everything that is known of how good they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.serving.offline.evaluation.data import Opened, Wanted, open_rows
from tessera.serving.offline.evaluation.importance import Importance, importance_of
from tessera.serving.offline.evaluation.models import Model, open_models
from tessera.serving.offline.evaluation.results import Results, results_of
from tessera.serving.offline.evaluation.scoring import Looks, Scored, score
from tessera.serving.package.time_limit import TimeLimit

OWN_ROWS = "rows"
"""What ``--cluster`` calls every row its own cluster."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is looked at; see `tessera.serving.offline.evaluation.scoring.Looks`.

    Attributes:
        ks: of recall@k and NDCG@k.
        batch_size: rows of a forward pass.
        max_rows: rows that are scored at most; 0: all.
        importance: how often each column is shuffled; None: importance is not computed.
        importance_rows: rows that are used for it at most.
        seed: of the shuffles.
    """

    by: tuple[str, ...] = ()
    group: str | None = None
    cluster: str | None = None
    weight: str | None = None
    buckets: int = 5
    top: int = 10
    ks: tuple[int, ...] = (10,)
    batch_size: int = 2048
    max_rows: int = 10_000_000
    importance: int | None = None
    importance_rows: int = 20_000
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Everything that was found.

    Attributes:
        models: in the order in which they were named.
        opened: the data.
        looks: the columns that were looked at, defaults filled in.
        options: as asked for.
        scored: labels and scores by row.
        results: the metrics.
        importance: empty where it was not asked for.
    """

    models: tuple[Model, ...]
    opened: Opened
    looks: Looks
    options: Options
    scored: Scored
    results: Results
    importance: tuple[Importance, ...]


def evaluate(
    paths: Sequence[Path],
    wanted: Wanted,
    options: Options,
    *,
    allow_ops: Collection[str] = (),
    time_limit: TimeLimit | None = None,
    progress: bool = True,
) -> Evaluated:
    """Let models answer rows, and compute all metrics.

    Args:
        paths: packages, run folders or checkpoints.
        wanted: which data.
        options: what is looked at.
        allow_ops: operators that a package's graph may call beside those that every package may.
        time_limit: what a package's own code may take while it is loaded; None: as long as it likes.
        progress: show bars on a terminal.

    Raises:
        UserError: a model or the data cannot be read, or they do not fit.
    """
    models = open_models(paths, allow_ops=allow_ops, time_limit=time_limit)
    named = (*options.by, options.group, options.weight)
    named = (*named, None if options.cluster == OWN_ROWS else options.cluster)
    columns = tuple(dict.fromkeys(name for name in named if name is not None))
    opened = open_rows(models, dataclasses.replace(wanted, columns=columns), progress=progress)
    looks = _looks(options, opened.user)
    scored = score(
        opened,
        looks,
        batch_size=options.batch_size,
        max_rows=options.max_rows,
        progress=progress,
    )
    importance: list[Importance] = []
    if options.importance is not None:
        importance = importance_of(
            opened,
            scored,
            repeats=options.importance,
            max_rows=options.importance_rows,
            seed=options.seed,
            progress=progress,
        )
    return Evaluated(
        models=tuple(models),
        opened=opened,
        looks=looks,
        options=options,
        scored=scored,
        results=results_of(scored, options.ks),
        importance=tuple(importance),
    )


def _looks(options: Options, user: str | None) -> Looks:
    """The columns to look at: groups and clusters are the users' where nothing else is said."""
    group = options.group or user
    cluster: Any = options.cluster or user or group
    return Looks(
        by=options.by,
        group=group,
        cluster=None if cluster == OWN_ROWS else cluster,
        weight=options.weight,
        buckets=options.buckets,
        top=options.top,
    )
