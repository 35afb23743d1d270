"""A run folder: where its files are, what state it is in, who writes to it.

::

    config.yaml      the resolved config
    checkpoints/     step-*.pt: the newest and the best
    metrics.csv      one row per logged loss and per evaluation
    tensorboard/     the same as TensorBoard events
    trackers/        by tracker, what it needs to go on with the same tracked run
    .lock            when the run was begun; held while it is trained
    stream.jsonl     of a growing folder: the files that were taken, in their order
    continues.json   of a run that goes on from another one: which, and from which checkpoint of it
    final.json       metrics of the best checkpoint; its presence says that the run is finished
    report.html      curves, calibration, histograms
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tessera.durable import replacing
from tessera.errors import UserError
from tessera.training.trainer.files import latest_checkpoint

LOCK = ".lock"


class RunFolder:
    """The files of the run in folder ``root``, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        self.checkpoints = root / "checkpoints"
        self.metrics = root / "metrics.csv"
        self.tensorboard = root / "tensorboard"
        self.trackers = root / "trackers"
        self.stream = root / "stream.jsonl"
        self.continues = root / "continues.json"
        self.final = root / "final.json"
        self.report = root / "report.html"

    @property
    def is_run(self) -> bool:
        """Whether a run was begun here."""
        return self.config.exists()

    @property
    def is_finished(self) -> bool:
        """Whether the run here ended by itself and was evaluated."""
        return self.final.exists()

    def require_fit(self, *, resume: bool) -> None:
        """Check that a run may begin here, or with ``resume`` go on.

        Raises:
            UserError: it may not; the message says what to do instead.
        """
        if resume and not self.is_run:
            raise UserError(f"--resume: there is no run in {self.root}; leave --resume out")
        if resume or not self.root.exists():
            return
        if self.is_finished:
            raise UserError(
                f"{self.root} holds a finished run ({self.summary()}); give another --out"
            )
        if self.is_run:
            latest = latest_checkpoint(self.checkpoints)
            where = f"after {latest.name}" if latest else "before its first checkpoint"
            raise UserError(
                f"{self.root} holds a run that stopped {where}; add --resume to go on with it, or"
                " give another --out"
            )
        if any(path.name != LOCK for path in self.root.iterdir()):
            raise UserError(f"{self.root} is not empty and holds no run; give another --out")

    def summary(self) -> str:
        """One line on a finished run."""
        final = self.read_final()
        parts = [f"best step {final['best_step']}"]
        for split in ("valid", "test"):
            auc = None if final[split] is None else final[split].get("auc")
            if auc is not None:
                parts.append(f"{split} AUC {auc:.5f}")
        return ", ".join(parts)

    def write_text(self, path: Path, text: str) -> None:
        """Write one of this folder's files atomically."""
        with replacing(path) as stream:
            stream.write(text.encode())

    def write_final(self, content: dict[str, Any]) -> None:
        """Write ``final.json``, which marks the run as finished."""
        self.write_text(self.final, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def read_final(self) -> dict[str, Any]:
        """What `write_final` wrote.

        Raises:
            UserError: the file is damaged.
        """
        try:
            return dict(json.loads(self.final.read_text()))
        except ValueError as error:
            raise UserError(f"{self.final} is damaged ({error}); delete it and resume") from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process; the system lets go of it when the process dies.

        Raises:
            UserError: another process trains into it.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / LOCK).open("a") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"another process is training into {self.root}; wait for it or give another"
                    " --out"
                ) from error
            if not stream.tell():
                stream.write(f"{datetime.now(timezone.utc).isoformat(timespec='seconds')}\n")
                stream.flush()
            yield

    def started(self) -> datetime:
        """When the run was begun, which its lock file holds; of a run that is older than this, when it last went on."""
        lock = self.root / LOCK
        text = lock.read_text().strip()
        if text:
            return datetime.fromisoformat(text)
        return datetime.fromtimestamp(lock.stat().st_mtime, timezone.utc)


def default_run_folder(name: str, now: datetime) -> Path:
    """``runs/<name>-<timestamp>`` under the working directory."""
    return Path("runs") / f"{name}-{now:%Y%m%d-%H%M%S}"
