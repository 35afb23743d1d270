"""``wandb``: an offline run of Weights & Biases, which ``wandb sync`` uploads later."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tessera.training.trackers.tracker import Status, TrackedRun, Tracker, TrackerConfig, tracker

_EXIT: Mapping[Status, int] = {"finished": 0, "interrupted": 130, "failed": 1}


class _Wandb:
    def __init__(self, run: Any) -> None:  # W&B's Run, whose package is an extra
        self._run = run

    def state(self) -> Mapping[str, str]:
        return {"id": str(self._run.id)}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def summarize(self, metrics: Mapping[str, float]) -> None:
        self._run.summary.update(dict(metrics))

    def close(self, status: Status) -> None:
        self._run.finish(exit_code=_EXIT[status])


@tracker
@dataclass(frozen=True, kw_only=True)
class WandbTracker(TrackerConfig):
    """An offline run in the folder ``wandb`` of the run folder; nothing is sent.

    A run that goes on adds a folder with the same id; ``wandb sync --append`` puts them together.

    Attributes:
        project: what W&B calls the group of runs.
    """

    name: ClassVar[str] = "wandb"
    module: ClassVar[str] = "wandb"
    extra: ClassVar[str] = "wandb"

    project: str = "tessera"

    def open(self, run: TrackedRun) -> Tracker:
        """See `TrackerConfig.open`."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # the user's own setting wins
        import wandb  # noqa: PLC0415 - an extra, and slow to import

        return _Wandb(
            wandb.init(
                project=self.project,
                name=run.name,
                id=(run.state or {}).get("id") or uuid.uuid4().hex[:8],
                dir=str(run.folder),
                config=dict(run.config),
                mode="offline",
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    disable_git=True,
                    save_code=False,
                    x_disable_stats=True,
                    x_disable_meta=True,
                ),
            )
        )
