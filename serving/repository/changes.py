"""What a call about a repository would change: a function of a model's folder, settings, record and states."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import Enum

from tessera.serving.repository.choice import STABLE, answering_version
from tessera.serving.repository.control import ControlRecord
from tessera.serving.repository.settings import ServingSettings
from tessera.serving.repository.wanted import wanted_versions


class ChangeRefusal(Enum):
    """Why a call changes nothing; the names are those of gRPC's codes."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"


class RefusedChangeError(Exception):
    """A call asks for something that cannot be.

    Attributes:
        refusal: of which kind.
        message: the sentence for the client.
    """

    def __init__(self, refusal: ChangeRefusal, message: str) -> None:
        super().__init__(message)
        self.refusal = refusal
        self.message = message


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """RepositoryModelLoad's parameters; with none set the folder is read again.

    Attributes:
        version: to be loaded, too.
        label: to be this version's.
        rollback: go back to ``to``, or to the highest version below the one that answers.
        to: see ``rollback``.
        commit: of version ``to``, after which its commits are fenced off; None: it stays as it is.
    """

    version: int | None = None
    label: str = ""
    rollback: bool = False
    to: int | None = None
    commit: int | None = None


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A model as a call finds it.

    Attributes:
        model: its name.
        present: the versions in its folder.
        settings: its serving.yaml.
        record: its control.json.
        ready: the versions that answer.
        known: those that are loaded or were to be.
    """

    model: str
    present: frozenset[int]
    settings: ServingSettings = field(default_factory=ServingSettings)
    record: ControlRecord = field(default_factory=ControlRecord)
    ready: frozenset[int] = frozenset()
    known: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a call would change.

    Attributes:
        record: to be written once ``load`` are ready.
        load: versions that have to be ready before the call is done.
        drop: to be unloaded then, whatever else is wanted.
    """

    record: ControlRecord
    load: frozenset[int] = frozenset()
    drop: int | None = None


def change_by_load(situation: Situation, request: LoadRequest) -> Change:
    """What RepositoryModelLoad would change.

    Raises:
        RefusedChangeError: NOT_FOUND, a version that is not in the folder; INVALID_ARGUMENT, parameters
            that do not go together; FAILED_PRECONDITION, a rollback that leads nowhere.
    """
    if request.rollback:
        if request.version is not None or request.label:
            raise RefusedChangeError(
                ChangeRefusal.INVALID_ARGUMENT,
                "rollback goes with neither version nor label; give rollback alone",
            )
        return _roll_back(situation, request.to)
    if request.version is None:
        if request.label:
            raise RefusedChangeError(
                ChangeRefusal.INVALID_ARGUMENT,
                "label needs to know whose it is; give version, too",
            )
        record = replace(situation.record, unloaded=False)
        wanted = wanted_versions(situation.present, situation.settings, record)
        return Change(record=record, load=wanted.versions)
    version = request.version
    refuse_missing(situation, version, situation.present)
    record = _asking_for(situation.record, version)
    labels = {**record.labels, request.label: version} if request.label else record.labels
    return Change(
        record=replace(record, add=record.add | {version}, labels=labels), load=frozenset({version})
    )


def change_by_unload(situation: Situation, version: int | None) -> Change:
    """What RepositoryModelUnload of ``version``, or of the whole model, would change.

    Raises:
        RefusedChangeError: NOT_FOUND, a version that is neither in the folder nor loaded;
            FAILED_PRECONDITION, a label or the shadow names it.
    """
    if version is None:
        return Change(record=replace(situation.record, unloaded=True))
    refuse_missing(situation, version, situation.present | situation.known)
    _refuse_named(situation, version, situation.record, "unloaded")
    return Change(record=_without(situation.record, version), drop=version)


def _roll_back(situation: Situation, target: int | None) -> Change:
    wanted = wanted_versions(situation.present, situation.settings, situation.record)
    current = answering_version(wanted, situation.ready)
    if target is None:
        # What an earlier rollback left is not chosen again.
        choosable = situation.present - situation.record.remove
        target = max((one for one in choosable if current and one < current), default=None)
    if target is None:
        below = (
            " that answers, and so none before it"
            if current is None
            else f" below {current}, which answers,"
        )
        raise RefusedChangeError(
            ChangeRefusal.FAILED_PRECONDITION,
            f"model '{situation.model}' has no version{below} to go back to; name the version that "
            "you want",
        )
    refuse_missing(situation, target, situation.present)
    if target == current:
        raise RefusedChangeError(
            ChangeRefusal.FAILED_PRECONDITION, f"{_of(situation, target)} answers already"
        )
    record = _asking_for(situation.record, target)
    record = replace(record, labels={**record.labels, STABLE: target})
    if current is not None:
        _refuse_named(situation, current, record, "rolled back")
        record = _without(record, current)
    return Change(record=record, load=frozenset({target}), drop=current)


def _asking_for(record: ControlRecord, version: int) -> ControlRecord:
    return replace(record, unloaded=False, remove=record.remove - {version})


def _without(record: ControlRecord, version: int) -> ControlRecord:
    return replace(record, add=record.add - {version}, remove=record.remove | {version})


def _of(situation: Situation, version: int) -> str:
    return f"version '{version}' of model '{situation.model}'"


def refuse_missing(situation: Situation, version: int, there: Collection[int]) -> None:
    """Refuse a version that is not ``there``.

    Raises:
        RefusedChangeError: NOT_FOUND.
    """
    if version not in there:
        present = ", ".join(f"'{one}'" for one in sorted(situation.present)) or "none"
        raise RefusedChangeError(
            ChangeRefusal.NOT_FOUND,
            f"{_of(situation, version)} is not in its folder, which has {present}",
        )


def _refuse_named(
    situation: Situation, version: int, record: ControlRecord, what_cannot_be: str
) -> None:
    """Refuse where a label or the shadow would keep ``version`` wanted."""
    wanted = wanted_versions(situation.present, situation.settings, record)
    names = [
        f"the label '{label}'" for label, one in sorted(wanted.labels.items()) if one == version
    ]
    if wanted.shadow is not None and wanted.shadow.version == version:
        names.append("serving.yaml's shadow")
    if names:
        raise RefusedChangeError(
            ChangeRefusal.FAILED_PRECONDITION,
            f"{_of(situation, version)} cannot be {what_cannot_be}: {names[0]} names it; move that first",
        )
