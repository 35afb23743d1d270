"""`Child`: one trial as a `tessera train` of its own.

It runs in a session of its own, so that Ctrl-C reaches it through us, and ends by itself, with a
checkpoint, when this process dies (`tessera.training.trainer.ranks.when_parent_dies`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tessera.training.trainer.ranks import PARENT_VARIABLE
from tessera.training.trainer.run_folder import LOCK, RunFolder

END_WITHIN_S = 60.0
"""Seconds in which a trial that is told to stop writes its checkpoint."""
FREE_WITHIN_S = 120.0
"""Seconds in which the trial of a killed search lets go of its folder."""


class Child:
    """A training process.

    Args:
        folder: its run folder; a run that is there goes on.
        log: takes what it says.
        config: the config file.
        overrides: ``KEY=VALUE``.
        directory: its working directory.
        threads: CPU threads; None: as the config says.
        gpu: the GPU that it sees; None: as this process.
    """

    def __init__(
        self,
        folder: Path,
        log: Path,
        *,
        config: Path,
        overrides: Sequence[str],
        directory: str,
        threads: int | None,
        gpu: str | None,
    ) -> None:
        self.folder = RunFolder(folder)
        self.began = time.monotonic()
        self._log = log
        self._told_to_stop_at: float | None = None
        resume = self.folder.is_run and not self.folder.is_finished
        command = [sys.executable, "-m", "tessera", "train", "--out", str(folder.absolute())]
        command += ["--config", str(config.absolute()), "--quiet", *overrides]
        env = dict(os.environ, **{PARENT_VARIABLE: str(os.getpid())})
        if threads is not None:
            env["OMP_NUM_THREADS"] = str(threads)
        if gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = gpu
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                command + ["--resume"] * resume,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                cwd=directory,
                env=env,
                start_new_session=True,
            )

    @property
    def status(self) -> int | None:
        """The exit status; negative for a signal; None while it runs."""
        status = self._process.poll()
        late = self._told_to_stop_at
        if status is None and late is not None and time.monotonic() > late + END_WITHIN_S:
            self.kill()
        return status

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self.began

    def stop(self) -> None:
        """Tell it to write a checkpoint and end; one that does not within a minute is killed."""
        if self._told_to_stop_at is None:
            self._told_to_stop_at = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """End it at once, with all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Wait until it has ended."""
        self._process.wait()

    def last_line(self) -> str:
        """The last line that it said, without the program's name."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1].removeprefix("tessera train: error: ") if lines else "it said nothing"


def wait_until_free(folder: Path, *, within_s: float = FREE_WITHIN_S) -> bool:
    """Wait until no process trains into ``folder``; False if one still does after that time.

    A trial of a search that was killed sees that a moment later, and writes a checkpoint first.
    """
    path = folder / LOCK
    end = time.monotonic() + within_s
    while path.exists():
        with path.open("r+") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    return False
                time.sleep(0.1)
            else:
                return True
    return True
