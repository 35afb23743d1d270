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

from tessera.durable import replacing
from tessera.errors import UserError

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

    def write(self, **row: float | str) -> None:
        """Log a row: a value for each of the `COLUMNS` that apply to it."""
        self._csv.writerow(row)
        self._stream.flush()
        if self._events is not None:
            of_label = f"{row['label']}/" if "label" in row else ""
            for name in COLUMNS[4:]:
                if name in row and name != "label":
                    self._events.add_scalar(
                        f"{row['split']}/{of_label}{name}", row[name], row["step"]
                    )

    def sync(self) -> None:
        """Put every row on the disk; called before a checkpoint that is to agree with it."""
        self._stream.flush()
        os.fsync(self._stream.fileno())


def read_metrics(path: Path) -> list[dict[str, str]]:
    """The rows of a ``metrics.csv`` as text by column; a torn last line is left out."""
    with path.open(encoding="utf-8", newline="") as stream:
        return [row for row in csv.DictReader(stream) if None not in row.values()]


def _is_whole(row: dict[str, str]) -> bool:
    """Whether it has all columns; earlier versions did not have those of retrieval."""
    return set(COLUMNS[:-2]) <= row.keys() <= set(COLUMNS)


def _cut_back(path: Path, step: int) -> None:
    try:
        rows = read_metrics(path) if path.exists() else []
    except (csv.Error, UnicodeDecodeError):
        rows = [{}]
    if not all(_is_whole(row) and row["step"].isdigit() for row in rows):
        raise UserError(
            f"{path} is damaged; delete it and resume again (its curves then begin there)"
        )
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerows(row for row in rows if int(row["step"]) <= step)
    with replacing(path) as stream:
        stream.write(text.getvalue().encode())
