"""``tensorboard``: event files in the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tessera.training.trackers.tracker import Status, TrackedRun, Tracker, TrackerConfig, tracker

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class _TensorBoard:
    rewinds = True  # purge_step hides what was written of later steps

    def __init__(self, events: SummaryWriter) -> None:
        self._events = events

    def state(self) -> Mapping[str, str]:
        return {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)

    def summarize(self, metrics: Mapping[str, float]) -> None:
        """TensorBoard shows curves; the final numbers are points of them."""

    def close(self, status: Status) -> None:  # noqa: ARG002 - see `Tracker`
        self._events.close()


@tracker
@dataclass(frozen=True, kw_only=True)
class TensorBoardTracker(TrackerConfig):
    """Event files in the folder ``tensorboard`` of the run."""

    name: ClassVar[str] = "tensorboard"
    module: ClassVar[str] = "tensorboard"

    def open(self, run: TrackedRun) -> Tracker:
        """See `TrackerConfig.open`."""
        # Its import takes a second that a run without it need not wait.
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

        folder = str(run.folder / "tensorboard")
        return _TensorBoard(SummaryWriter(folder, purge_step=run.from_step + 1))
