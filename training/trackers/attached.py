"""`AttachedTracker`: a tracker that can do no harm to the training.

Its calls wait in a queue for a thread of its own, so that a slow server holds nobody up.  The first
error, or a queue that is full, ends the tracker with one line on stderr; the run goes on without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import re
import sys
import threading
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path

from tqdm import tqdm

from tessera.durable import replacing
from tessera.errors import UserError
from tessera.training.trackers.tracker import Status, TrackedRun, Tracker, TrackerConfig
from tessera.users_code import first_line, users_place

MOST_WAITING = 10_000
CLOSE_WITHIN_S = 30.0

Row = tuple[int, Mapping[str, float]]
"""A step and its numbers."""
RowKey = tuple[int, str]


def row_key(row: Row) -> RowKey:
    """What tells a row from the others of a run: its step and the name of its first number."""
    step, metrics = row
    return step, next(iter(metrics))


class AttachedTracker:
    """A tracker with its queue and its thread.

    Args:
        name: for the message.
        tracker: takes the numbers.
        told: rows that it knows already, as `row_key` names them; they are left out.
        warn: prints the message; None: on stderr, above a progress bar.
        most_waiting: calls that may wait.
    """

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        *,
        told: Container[RowKey] = frozenset(),
        warn: Callable[[str], None] | None = None,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._name = name
        self._tracker = tracker
        self._told = told
        self._warn = warn or _print
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(most_waiting)
        self._failed = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give the tracker the numbers of a step, unless it knows them."""
        if metrics and row_key((step, metrics)) not in self._told:
            self._put(lambda: self._tracker.log(step, metrics))

    def summarize(self, metrics: Mapping[str, float]) -> None:
        """Give the tracker the final numbers."""
        self._put(lambda: self._tracker.summarize(metrics))

    def close(self, status: Status, *, within_s: float = CLOSE_WITHIN_S) -> None:
        """Wait until the tracker has done its work, but no longer than ``within_s`` seconds."""
        self._put(lambda: self._tracker.close(status))
        with contextlib.suppress(queue.Full):
            self._calls.put_nowait(None)
        self._thread.join(within_s)
        if self._thread.is_alive():
            self._fail(f"it has not taken everything within {within_s:g} s")

    def _put(self, call: Callable[[], None]) -> None:
        if self._failed.is_set():
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._fail(f"{self._calls.maxsize} calls wait for it")

    def _work(self) -> None:
        while not self._failed.is_set():
            call = self._calls.get()
            if call is None:
                return
            try:
                call()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, the run goes on
                self._fail(f"{first_line(error)}{users_place(error)}")

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self._failed.is_set():
                return
            self._failed.set()
        self._warn(f"tracker {self._name} failed and is left out from here on: {reason}")
        with contextlib.suppress(queue.Full):
            self._calls.put_nowait(None)  # wakes the thread, which ends


def _print(text: str) -> None:
    tqdm.write(f"tessera train: {text}", file=sys.stderr)


def open_trackers(
    configs: Mapping[str, TrackerConfig],
    run: TrackedRun,
    *,
    states: Path,
    history: Iterable[Row],
    told: Container[RowKey],
) -> list[AttachedTracker]:
    """Open the trackers of a run.

    Args:
        configs: by name.
        run: what they are told of it; ``state`` is read from ``states``.
        states: the folder of the files with what trackers gave as their state.
        history: the rows that the run keeps of earlier; a tracker that does not know the run yet is
            given them.
        told: the rows that trackers which know the run have been told before it stopped.

    Raises:
        UserError: a tracker cannot be opened.
    """
    opened: list[AttachedTracker] = []
    kept = list(history)
    try:
        for name, config in configs.items():
            path = states / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.json"
            known = dataclasses.replace(run, state=_read_state(path))
            tracker = _opened(name, config, known, path)
            rewinds = bool(getattr(tracker, "rewinds", False))
            again = known.state is None or rewinds
            opened.append(AttachedTracker(name, tracker, told=frozenset() if again else told))
            for step, metrics in kept if known.state is None else ():
                opened[-1].log(step, metrics)
    except BaseException:
        for attached in opened:
            attached.close("failed")
        raise
    return opened


def _opened(name: str, config: TrackerConfig, run: TrackedRun, path: Path) -> Tracker:
    """The tracker, its state in the file ``path``."""
    config.require()
    try:
        tracker = config.open(run)
        state = {str(key): str(value) for key, value in tracker.state().items()}
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(
            f"run.trackers: {name} cannot be opened: {first_line(error)}; mend that or leave"
            f" {name} out"
        ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as stream:
        stream.write(json.dumps(state).encode())
    return tracker


def _read_state(path: Path) -> dict[str, str] | None:
    if not path.exists():
        return None
    try:
        return {str(key): str(value) for key, value in json.loads(path.read_text()).items()}
    except (ValueError, AttributeError) as error:
        raise UserError(
            f"{path} is damaged ({error}); delete it, and the tracker begins another run"
        ) from error
