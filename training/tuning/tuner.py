"""`Tuner`: runs the trials of a search, several at a time, until there are enough of them.

Only this process asks Optuna and writes its database; what a trial does is read from its run folder.
After `kill -9` of this process the trials end with a checkpoint each.  The next call takes them up
there, under the same number.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from tessera.cpus import usable_cpus
from tessera.errors import UserError
from tessera.training.config import ExperimentConfig
from tessera.training.trainer.logs import read_metrics
from tessera.training.tuning.child import Child, wait_until_free
from tessera.training.tuning.settings import Search, SearchFolder
from tessera.training.tuning.study import MOST_STARTS, Study, TrialRecord, best_of
from tessera.training.typed_config import leaves

LOOK_S = 0.2
"""Seconds between looks at the trials."""
OF_TRIALS = ("run.report=false", "run.tensorboard=false")
"""What a trial has no need of."""
ALIKE = 3
"""So many trials that fail with the same words, before any other end, end the search."""


@dataclass(kw_only=True)
class _Running:
    """A trial with its process."""

    record: TrialRecord
    child: Child
    slot: int
    pruned: bool = False
    evaluations: int = 0


@dataclass(kw_only=True)
class Tuner:
    """One call of `tessera tune`.

    Attributes:
        folder: the search's folder, which this process holds.
        search: what is searched; it was checked.
        study: its trials.
        trials: how many there shall be in all, failed and pruned ones included.
        processes: how many run at a time.
        keep_all: whether every trial keeps its checkpoints, or the best one alone.
        progress: whether to say on stderr how far it is.
        should_stop: asked several times a second; once True it must stay so.
        on_trial: called after each trial that has ended.
    """

    folder: SearchFolder
    search: Search
    study: Study
    trials: int
    processes: int
    keep_all: bool
    progress: bool
    should_stop: Callable[[], bool]
    on_trial: Callable[[], None]
    _running: list[_Running] = field(default_factory=list)
    _taken_up: list[int] = field(default_factory=list)
    _threads: int | None = None
    _gpus: list[str] = field(default_factory=list)
    _ends: list[str] = field(default_factory=list)
    _bar: tqdm[Any] | None = None

    def run(self) -> bool:
        """Run trials; True if there are enough now, False if it was told to stop before."""
        base = self.search.config(self.folder.base)
        self._try_first(base)
        self._threads, self._gpus = _share_of_threads(base, self.processes), _gpus(base)
        self._taken_up = [r.number for r in self.study.records() if r.state == "running"]
        if self.progress and sys.stderr.isatty():
            self._bar = tqdm(total=self.trials, initial=self._ended(), unit="trial")
        try:
            while True:
                stopping = self.should_stop()
                if not stopping:
                    self._fill()
                if not self._running:
                    return not stopping or self._ended() >= self.trials
                for running in list(self._running):
                    if stopping:
                        running.child.stop()
                    self._look_at(running, stopping=stopping)
                time.sleep(LOOK_S)
        finally:
            for running in self._running:
                running.child.kill()
                running.child.wait()
            if self._bar is not None:
                self._bar.close()

    def _try_first(self, base: ExperimentConfig) -> None:
        """Let the config as it is come first, so that what the search gains can be seen."""
        config = leaves(base.to_plain())
        own = {dimension.key: dimension.value_in(config) for dimension in self.search.space}
        found = {key: value for key, value in own.items() if value is not None}
        if len(found) == len(own):
            self.study.try_first(found)

    def _fill(self) -> None:
        """Start trials, those first that were begun already, until as many run as may."""
        while len(self._running) < self.processes:
            if self._taken_up:
                self._start(self.study.record(self._taken_up.pop(0)))
            elif self._ended() + len(self._running) < self.trials:
                self._start(self.study.begin())
            else:
                return

    def _ended(self) -> int:
        return sum(r.state in {"complete", "pruned", "failed"} for r in self.study.records())

    def _start(self, record: TrialRecord) -> None:
        threads, gpus = self._threads, self._gpus
        number, path = record.number, self.folder.trial(record.number)
        if not wait_until_free(path):
            raise UserError(f"another process trains into {path}; end it and resume the search")
        if self.study.count_start(number) > MOST_STARTS:
            self._end(record, "failed", f"it was started {MOST_STARTS} times and never ended")
            return
        overrides = [*OF_TRIALS, *self.search.overrides(record.values)]
        if threads is not None and not any(own.key == "train.threads" for own in self.search.space):
            overrides.append(f"train.threads={threads}")
        slot = min(set(range(self.processes)) - {running.slot for running in self._running})
        child = Child(
            path,
            self.folder.log(number),
            config=self.folder.base,
            overrides=overrides,
            directory=self.search.folder,
            threads=threads,
            gpu=gpus[slot % len(gpus)] if gpus else None,
        )
        self._running.append(_Running(record=record, child=child, slot=slot))

    def _look_at(self, running: _Running, *, stopping: bool) -> None:
        """Take note of what a trial has done since the last look."""
        number, child = running.record.number, running.child
        status = child.status
        if self.search.prune != "none" and not stopping:
            self._look_at_evaluations(running, ended=status is not None)
        if status is None:
            return
        self._running.remove(running)
        self.study.add_seconds(number, child.seconds)
        if running.pruned and not child.folder.is_finished:
            self._end(running.record, "pruned", "")
        elif status == 0:
            value = self.search.metric.of_final(child.folder.read_final())
            undefined = f"{self.search.metric.text} is not defined for the validation rows"
            state, reason = ("failed", undefined) if value is None else ("complete", "")
            self._end(running.record, state, reason, value)
        elif not stopping:  # else it is taken up next time
            reason = f"killed by signal {-status}" if status < 0 else child.last_line()
            self._end(running.record, "failed", reason)

    def _look_at_evaluations(self, running: _Running, *, ended: bool) -> None:
        path = running.child.folder.metrics
        values = self.search.metric.of_rows(read_metrics(path)) if path.exists() else []
        while running.evaluations < len(values):
            running.evaluations += 1
            value = values[running.evaluations - 1]
            if self.study.report(running.record.number, running.evaluations, value) and not ended:
                running.pruned = True
                running.child.stop()
                return

    def _end(
        self, record: TrialRecord, state: str, reason: str, value: float | None = None
    ) -> None:
        """Write down what became of a trial, say it, and remove what nobody needs."""
        number, best = record.number, self.study.best()
        if state == "complete":
            assert value is not None
            self.study.complete(number, value)
        elif state == "pruned":
            self.study.prune(number)
        else:
            self.study.fail(number, reason)
        self._ends.append(reason if state == "failed" else "")
        now = self.study.best()
        if not self.keep_all:
            losers = {number} | ({best.number} if best else set())
            for loser in losers - ({now.number} if now else set()):
                shutil.rmtree(self.folder.trial(loser) / "checkpoints", ignore_errors=True)
        self.on_trial()
        self._say(self.study.record(number))
        # What no values can mend, such as a path that is not there, need not be tried further.
        if len(self._ends) == ALIKE and reason and set(self._ends) == {reason}:
            raise UserError(
                f"the first {ALIKE} trials failed alike: {reason}; mend that, and begin anew or"
                f" resume ({self.folder.log(number)} has what the last one said)"
            )

    def _say(self, record: TrialRecord) -> None:
        if not self.progress:
            return
        best = best_of(self.study.records(), self.search)
        values = ", ".join(f"{key}={value}" for key, value in record.values.items())
        metric = self.search.metric.text
        what = f"{metric} {record.value:.5f}" if record.state == "complete" else record.state
        reason = f" ({record.reason})" if record.reason else ""
        line = f"trial {record.number}: {what}{reason} in {record.seconds:.0f} s: {values}"
        if best is not None:
            line += f"; best: {best.value:.5f} of trial {best.number}"
        if self._bar is not None:
            self._bar.update(1)
            self._bar.write(line, file=sys.stderr)
        else:
            print(f"{self._ended()}/{self.trials}  {line}", file=sys.stderr, flush=True)


def _share_of_threads(config: ExperimentConfig, processes: int) -> int | None:
    """CPU threads of a trial; None: as the config says."""
    if config.train.threads is not None:
        return None
    return max(1, usable_cpus() // processes)


def _gpus(config: ExperimentConfig) -> list[str]:
    """The GPUs among which trials are dealt out, one each; empty on the CPU."""
    if config.train.device != "cuda":
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    import torch  # noqa: PLC0415 - takes seconds

    return [str(number) for number in range(torch.cuda.device_count())]
