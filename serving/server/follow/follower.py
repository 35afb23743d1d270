"""The thread that looks at the logs of all followed versions and puts in what is new."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from tessera.serving.server.follow.version_log import Did, Step, VersionLog
from tessera.serving.server.named_thread import NamedThread

_RELOAD_AGAIN_S = 10.0

Tell = Callable[[VersionLog, Step], None]
"""Told of each step that did something, on the follower's thread."""


class Follower:
    """Follows the logs that it is given until it is closed.

    Its thread has the priority of those that answer, as it needs the interpreter's lock for some milliseconds a commit: one
    that stands back and has to wait for a CPU while it holds that lock lets all of them wait.  What takes long pauses, and is
    done by operators and in another process, which run while CPUs have nothing else to do.

    Args:
        poll_s: seconds between two looks at the folders.
        tell: told what was done.
        log: where bugs go.
    """

    def __init__(self, *, poll_s: float, tell: Tell, log: Any) -> None:
        self._poll_s = poll_s
        self._tell = tell
        self._log = log
        self._lock = threading.Lock()
        self._logs: list[VersionLog] = []
        self._reloads: dict[VersionLog, float] = {}
        self._wake = threading.Event()
        self._closed = False
        self._thread = NamedThread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    def add(self, log: VersionLog) -> None:
        """Follow ``log`` from now on."""
        with self._lock:
            self._logs.append(log)
        self.look()

    def remove(self, log: VersionLog) -> None:
        """Follow it no longer; a commit that is being put in is put in whole."""
        with self._lock:
            with contextlib.suppress(ValueError):
                self._logs.remove(log)
            self._reloads.pop(log, None)
        log.close()

    def look(self) -> None:
        """Look at the folders at once."""
        self._wake.set()

    def close(self) -> None:
        """Put in nothing any more."""
        self._closed = True
        self._wake.set()

    def _run(self) -> None:
        torch.set_num_threads(1)  # of this thread; OpenMP's would spin
        while not self._closed:
            self._wake.clear()
            for log in self._followed():
                self._look_at(log)
            self._wake.wait(self._poll_s)

    def _look_at(self, log: VersionLog) -> None:
        try:
            self._follow(log)
        except Exception as error:  # noqa: BLE001 - whatever it was, the others are followed
            self._log.error(
                "follow_raised",
                model=log.model,
                version=str(log.version),
                exc_info=(type(error), error, error.__traceback__),
                limited=True,
            )

    def _followed(self) -> list[VersionLog]:
        with self._lock:
            return list(self._logs)

    def _follow(self, log: VersionLog) -> None:
        if self._reloads.get(log, 0.0) > time.monotonic():
            return
        for step in steps(log, lambda: self._closed or log not in self._logs):
            if step.did is Did.MUST_RELOAD:
                self._reloads[log] = time.monotonic() + _RELOAD_AGAIN_S
            self._tell(log, step)
        if log not in self._logs:
            log.close()  # it was removed meanwhile


def steps(log: VersionLog, ended: Callable[[], bool] = lambda: False) -> Any:
    """Take steps until there is nothing to do; gives each that did something."""
    while not ended():
        step = log.step()
        if step.did is Did.NOTHING:
            return
        yield step
        if step.did in {Did.REFUSED, Did.MUST_RELOAD}:
            return
