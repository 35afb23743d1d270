"""`Study`: Optuna's study in the folder of a search, and what became of each trial.

Optuna's samplers forget their random numbers when a process ends.  Each trial's sampler is therefore
made anew, seeded by the search's seed and the trial's number: a search with one process that was killed
and went on has the trials of one that was not.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tessera.errors import UserError
from tessera.training.tuning.settings import Search
from tessera.training.tuning.space import Value

if TYPE_CHECKING:
    import optuna

State = Literal["waiting", "running", "complete", "pruned", "failed"]

MOST_STARTS = 3
"""So often a trial is begun that never ends, such as one that takes all memory."""
RANDOM_TRIALS = 10
"""Trials that are drawn at random before the model of the space is made."""


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """What is known of a trial.

    Attributes:
        number: from 0.
        state: what became of it.
        values: by key.
        value: the metric; None unless it is complete, or pruned after an evaluation.
        seconds: of all its processes together.
        reason: why it failed or was pruned.
        evaluations: the metric after each evaluation that was looked at.
    """

    number: int
    state: State
    values: dict[str, Value]
    value: float | None
    seconds: float
    reason: str = ""
    evaluations: dict[int, float] = field(default_factory=dict)


def require_optuna() -> None:
    """Check that Optuna is installed.

    Raises:
        UserError: it is not.
    """
    try:
        import optuna  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UserError("tessera tune needs optuna; pip install 'tessera-rec[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)


class Study:
    """The trials of a search; `require_optuna` was called.

    Args:
        database: the SQLite file; it is made if it is not there.
        search: what is searched.
    """

    def __init__(self, database: Path, search: Search) -> None:
        import optuna  # noqa: PLC0415 - an extra

        self._optuna = optuna
        self._search = search
        self._distributions = {own.key: own.distribution() for own in search.space}
        self._study = optuna.create_study(
            storage=f"sqlite:///{database.absolute()}",
            study_name="tessera",
            direction=search.metric.direction,
            pruner=_pruner(optuna, search.prune),
            load_if_exists=True,
        )

    def try_first(self, values: dict[str, Value]) -> None:
        """Make these values the first trial's, if there is none yet."""
        if not self._study.trials:
            self._study.enqueue_trial(values)

    def begin(self) -> TrialRecord:
        """The next trial."""
        number = len(self._study.get_trials(deepcopy=False))
        seeds = np.random.SeedSequence([self._search.seed, number]).generate_state(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of experimental names
            self._study.sampler = self._optuna.samplers.TPESampler(
                seed=int(seeds[0]), n_startup_trials=RANDOM_TRIALS
            )
            trial = self._study.ask(self._distributions)
        return self.record(trial.number)

    def count_start(self, number: int) -> int:
        """How often the trial was started, this time included."""
        trial = self._trial(number)
        starts = int(trial.user_attrs.get("starts", 0)) + 1
        trial.set_user_attr("starts", starts)
        return starts

    def add_seconds(self, number: int, seconds: float) -> None:
        """Count the time of a process of the trial."""
        trial = self._trial(number)
        before = float(trial.user_attrs.get("seconds", 0.0))
        trial.set_user_attr("seconds", round(before + seconds, 2))

    def report(self, number: int, evaluation: int, value: float) -> bool:
        """Take the value of an evaluation, counted from 1; whether the trial should be ended."""
        trial = self._trial(number)
        if evaluation not in self._frozen(number).intermediate_values:
            trial.report(value, evaluation)
        return bool(trial.should_prune())

    def complete(self, number: int, value: float) -> None:
        """The trial has ended with this value."""
        self._study.tell(number, value)

    def prune(self, number: int) -> None:
        """The trial was ended before its time."""
        self._trial(number).set_user_attr("reason", f"{self._search.prune} pruning")
        self._study.tell(number, state=self._optuna.trial.TrialState.PRUNED)

    def fail(self, number: int, reason: str) -> None:
        """The trial cannot be run, or diverged."""
        self._trial(number).set_user_attr("reason", reason)
        self._study.tell(number, state=self._optuna.trial.TrialState.FAIL)

    def records(self) -> list[TrialRecord]:
        """Every trial, in order."""
        return [_record(trial) for trial in self._study.get_trials(deepcopy=False)]

    def record(self, number: int) -> TrialRecord:
        """The trial of that number."""
        return _record(self._frozen(number))

    def best(self) -> TrialRecord | None:
        """The complete trial with the best value, the first one of equals; None without one."""
        return best_of(self.records(), self._search)

    def importances(self) -> dict[str, float]:
        """By key, its share of what makes a trial good (PED-ANOVA, Watanabe et al. 2023).

        Empty where there are too few trials to say.
        """
        evaluator = self._optuna.importance.PedAnovaImportanceEvaluator
        varied = [
            own.key
            for own in self._search.space
            if len({record.values.get(own.key) for record in self.records()}) > 1
        ]
        if not varied or sum(record.state == "complete" for record in self.records()) < 4:
            return {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = self._optuna.importance.get_param_importances(
                    self._study, evaluator=evaluator(), params=varied
                )
            except (ValueError, RuntimeError):  # all trials are equally good
                return {}
        return {key: float(share) for key, share in found.items()}

    def _frozen(self, number: int) -> optuna.trial.FrozenTrial:
        return self._study.get_trials(deepcopy=False)[number]

    def _trial(self, number: int) -> optuna.Trial:
        return self._optuna.trial.Trial(self._study, self._frozen(number)._trial_id)  # noqa: SLF001 - Optuna has no other way back to a trial


def best_of(records: Sequence[TrialRecord], search: Search) -> TrialRecord | None:
    """The complete trial with the best value; None without one."""
    sign = -1.0 if search.metric.direction == "maximize" else 1.0
    complete = [record for record in records if record.state == "complete"]
    return min(complete, key=lambda own: sign * (own.value or 0.0), default=None)


def _record(trial: optuna.trial.FrozenTrial) -> TrialRecord:
    states: dict[str, State] = {
        "WAITING": "waiting",
        "RUNNING": "running",
        "COMPLETE": "complete",
        "PRUNED": "pruned",
        "FAIL": "failed",
    }
    return TrialRecord(
        number=trial.number,
        state=states[trial.state.name],
        values=dict(trial.params),
        value=trial.value,
        seconds=float(trial.user_attrs.get("seconds", 0.0)),
        reason=str(trial.user_attrs.get("reason", "")),
        evaluations=dict(trial.intermediate_values),
    )


def _pruner(library: Any, prune: str) -> Any:
    if prune == "median":
        return library.pruners.MedianPruner()
    if prune == "halving":
        return library.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
    return library.pruners.NopPruner()
