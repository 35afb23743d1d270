"""A `Child` that trains in this process: trials without the start of a program."""

from __future__ import annotations

from pathlib import Path

from tessera.errors import UserError
from tessera.training.config import load_config
from tessera.training.trainer.run import train
from tessera.training.trainer.run_folder import RunFolder


class InProcessChild:
    """Trains to its end when it is made; or, with ``stop_after``, so many steps.

    Then it still runs when it is looked at for the first time (``on_wait`` is called), and goes on
    to its end at the second look, unless it was stopped in between.
    """

    stop_after: int | None = None
    started: list[str]

    def __init__(self, folder, log, *, config, overrides, directory, threads, gpu):
        self.folder = RunFolder(folder)
        self.seconds = 1.0
        self._log = log
        self._given = load_config(config, overrides, base=Path(directory))
        self._ended: int | None = None
        self._looks = 0
        self._line = ""
        type(self).started.append(folder.name)
        assert gpu is None
        assert threads is None or self._given.train.threads == threads
        self._train(self.stop_after)

    @staticmethod
    def on_wait():
        """What a test does while the trial runs."""

    def _train(self, steps):
        left = iter(range(steps or 0))
        try:
            result = train(
                self._given,
                self.folder.root,
                resume=self.folder.is_run,
                progress=False,
                should_stop=lambda: steps is not None and next(left, None) is None,
            )
        except UserError as error:
            self._ended, self._line = 2, str(error)
        else:
            self._ended = None if result.status == "interrupted" else 0

    @property
    def status(self):
        self._looks += self._ended is None
        if self._ended is None and self._looks > 1:
            self._train(None)
        elif self._ended is None:
            self.on_wait()
        return self._ended

    def stop(self):
        if self._ended is None:
            self._ended = 130

    def kill(self):
        self.stop()

    def wait(self):
        pass

    def last_line(self):
        return self._line


def use(monkeypatch):
    """Let searches train in this process; returns the class, which knows what was started."""
    fake = type("Fake", (InProcessChild,), {"started": []})
    monkeypatch.setattr("tessera.training.tuning.tuner.Child", fake)
    monkeypatch.setattr("tessera.training.tuning.tuner.LOOK_S", 0)
    return fake
