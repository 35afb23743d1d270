"""The metrics log of a run: ``metrics.csv`` and, beside it, TensorBoard events.

The CSV keeps full precision (``repr`` of every float), so that two runs can be compared bit for
bit.  Columns that do not apply to a row are empty.  A resumed run first cuts the log back to its
checkpoint's step, so a step is never logged twice.
"""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tessera.errors import UserError
from tessera.training.trainer.files import write_atomically
from tessera.training.trainer.metrics import Evaluation

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

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
)
"""``split`` is ``train`` (``loss``: mean since the row before) or ``valid`` (``loss``: log loss)."""

Row = dict[str, int | float | str]


class MetricsLog:
    """Appends to the log of one run.

    Args:
        path: ``metrics.csv``.
        tensorboard: the folder for event files; None: none are written.
        from_step: rows after this step are cut off; 0 begins anew.
    """

    def __init__(self, path: Path, *, tensorboard: Path | None, from_step: int) -> None:
        _cut_back(path, from_step)
        self._stream: TextIO = path.open("a", encoding="utf-8", newline="")
        self._csv = csv.DictWriter(self._stream, COLUMNS)
        self._events: SummaryWriter | None = None
        if tensorboard is not None:
            # Its import takes a second that a run without it need not wait.
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

            self._events = SummaryWriter(str(tensorboard), purge_step=from_step + 1)

    def close(self) -> None:
        """Write what is pending and close the files."""
        self._stream.close()
        if self._events is not None:
            self._events.close()

    def train(
        self,
        *,
        step: int,
        epoch: int,
        samples: int,
        loss: float,
        dense_learning_rate: float,
        embedding_learning_rate: float,
        samples_per_second: float,
    ) -> None:
        """Log the mean training loss since the last call."""
        self._write(
            {
                "step": step,
                "epoch": epoch,
                "samples": samples,
                "split": "train",
                "loss": loss,
                "dense_learning_rate": dense_learning_rate,
                "embedding_learning_rate": embedding_learning_rate,
                "samples_per_second": round(samples_per_second, 1),
            }
        )

    def valid(self, *, step: int, epoch: int, samples: int, evaluation: Evaluation) -> None:
        """Log an evaluation on the validation rows."""
        self._write(
            {
                "step": step,
                "epoch": epoch,
                "samples": samples,
                "split": "valid",
                "loss": evaluation.log_loss,
                "auc": evaluation.auc,
                "normalised_entropy": evaluation.normalised_entropy,
                "calibration": evaluation.calibration,
            }
        )

    def sync(self) -> None:
        """Put every row on the disk; called before a checkpoint that is to agree with it."""
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def _write(self, row: Row) -> None:
        self._csv.writerow(row)
        self._stream.flush()
        if self._events is not None:
            for name in COLUMNS[4:]:
                if name in row:
                    self._events.add_scalar(f"{row['split']}/{name}", row[name], row["step"])


class NoLog:
    """The log of a rank that writes none: takes what `MetricsLog` takes and does nothing."""

    def close(self) -> None:
        """Nothing is open."""

    def train(self, **row: float) -> None:
        """Rank 0 logs it."""

    def valid(self, **row: int | Evaluation) -> None:
        """Rank 0 logs it."""

    def sync(self) -> None:
        """Nothing is written."""


def read_metrics(path: Path) -> list[dict[str, str]]:
    """The rows of a ``metrics.csv`` as text by column; a torn last line is left out."""
    with path.open(encoding="utf-8", newline="") as stream:
        return [row for row in csv.DictReader(stream) if None not in row.values()]


def _cut_back(path: Path, step: int) -> None:
    try:
        rows = read_metrics(path) if path.exists() else []
    except (csv.Error, UnicodeDecodeError):
        rows = [{}]
    if not all(row.keys() == set(COLUMNS) and row["step"].isdigit() for row in rows):
        raise UserError(
            f"{path} is damaged; delete it and resume again (its curves then begin there)"
        )
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerows(row for row in rows if int(row["step"]) <= step)
    write_atomically(path, lambda stream: stream.write(text.getvalue().encode()))
