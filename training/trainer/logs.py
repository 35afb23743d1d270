"""The metrics log of a run: ``metrics.csv`` and, beside it, the trackers that a config names.

The CSV keeps full precision (``repr`` of every float), so that two runs can be compared bit for
bit.  Columns that do not apply to a row are empty.  A resumed run first cuts the log back to its
checkpoint's step, so a step is never logged twice.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from tessera.durable import replacing
from tessera.errors import UserError
from tessera.training.trackers.attached import AttachedTracker, Row, RowKey, open_trackers, row_key
from tessera.training.trackers.tracker import Status, TrackedRun, TrackerConfig

COLUMNS = (
    "step",
    "epoch",
    "samples",
    "split",
    "loss",
    "auc",
    "normalised_entropy",
    "calibration",
    "dense_learning_rate",
    "embedding_learning_rate",
    "samples_per_second",
    "label",
    "recall",
    "ndcg",
)
"""``split`` is ``train`` (``loss``: mean since the row before) or ``valid``.

``loss`` of a label is its log loss, or its mean squared error.  Of several labels there is one row
for all, whose ``loss`` is the weighted sum and whose ``auc`` is the mean, and one row for each, which
has its name under ``label``.  ``recall`` and ``ndcg`` are those of models for retrieval.
"""


class MetricsLog:
    """Appends to the log of one run.

    Args:
        path: ``metrics.csv``.
        from_step: rows after this step are cut off; 0 begins anew.
    """

    def __init__(self, path: Path, *, from_step: int) -> None:
        self._status: Status = "failed"
        self._kept, self._told = _cut_back(path, from_step)
        self._stream: TextIO = path.open("a", encoding="utf-8", newline="")
        self._csv = csv.DictWriter(self._stream, COLUMNS)
        self._trackers: list[AttachedTracker] = []

    def track(self, configs: Mapping[str, TrackerConfig], run: TrackedRun, states: Path) -> None:
        """Give the rows to trackers, too; one that does not know the run is given the kept ones.

        Args:
            configs: the trackers by name.
            run: what they are told of the run.
            states: the folder of the files that say how a tracker knows the run.

        Raises:
            UserError: one of them cannot be opened.
        """
        self._trackers = open_trackers(
            configs, run, states=states, history=self._kept, told=self._told
        )

    def finish(self, final: Mapping[str, Any] | None) -> None:
        """Say how the run ended, before `close`: with ``final.json``'s content, or stopped (None)."""
        self._status = "interrupted" if final is None else "finished"
        if final is not None:
            numbers = {
                f"best/{split}/{metric.replace('.', '/')}": float(value)
                for split in ("valid", "test")
                for metric, value in (final[split] or {}).items()
                if value is not None
            }
            for tracker in self._trackers:
                tracker.summarize({"best/step": float(final["best_step"]), **numbers})

    def close(self) -> None:
        """Write what is pending and close the files; without `finish` the run has failed."""
        self._stream.close()
        for tracker in self._trackers:
            tracker.close(self._status)

    def write(self, **row: float | str) -> None:
        """Log a row: a value for each of the `COLUMNS` that apply to it."""
        self._csv.writerow(row)
        self._stream.flush()
        if self._trackers:
            step, metrics = _tracked({name: str(value) for name, value in row.items()})
            for tracker in self._trackers:
                tracker.log(step, metrics)

    def sync(self) -> None:
        """Put every row on the disk; called before a checkpoint that is to agree with it."""
        self._stream.flush()
        os.fsync(self._stream.fileno())


def _tracked(row: Mapping[str, str]) -> Row:
    """A row of the CSV as trackers are given it."""
    label = row.get("label")
    of = f"{row['split']}/{label}/" if label else f"{row['split']}/"
    return int(row["step"]), {
        f"{of}{name}": float(row[name]) for name in COLUMNS[4:] if name != "label" and row.get(name)
    }


def read_metrics(path: Path) -> list[dict[str, str]]:
    """The rows of a ``metrics.csv`` as text by column; a torn last line is left out."""
    with path.open(encoding="utf-8", newline="") as stream:
        return [row for row in csv.DictReader(stream) if None not in row.values()]


def _is_whole(row: dict[str, str]) -> bool:
    """Whether it has all columns; earlier versions did not have those of retrieval."""
    return set(COLUMNS[:-2]) <= row.keys() <= set(COLUMNS)


def _cut_back(path: Path, step: int) -> tuple[list[Row], frozenset[RowKey]]:
    """Cut off the rows after ``step``; returns the others, and which there were from it on."""
    try:
        rows = read_metrics(path) if path.exists() else []
    except (csv.Error, UnicodeDecodeError):
        rows = [{}]
    if not all(_is_whole(row) and row["step"].isdigit() for row in rows):
        raise UserError(
            f"{path} is damaged; delete it and resume again (its curves then begin there)"
        )
    kept = [row for row in rows if int(row["step"]) <= step]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerows(kept)
    with replacing(path) as stream:
        stream.write(text.getvalue().encode())
    told = [_tracked(row) for row in rows if int(row["step"]) >= step]
    return [_tracked(row) for row in kept], frozenset(row_key(row) for row in told)


def training_time(rows: Sequence[Mapping[str, str]]) -> tuple[float, int]:
    """Seconds of the steps of all rows that say a speed, and their samples."""
    seconds, samples, before = 0.0, 0, 0
    for row in rows:
        if row["split"] == "train":
            here, speed = int(row["samples"]), float(row["samples_per_second"] or 0)
            if speed:
                seconds += (here - before) / speed
                samples += here - before
            before = here
    return seconds, samples
