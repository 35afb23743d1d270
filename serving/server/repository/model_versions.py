"""One model of a repository as the server has it: what was read, what is loaded, what failed and why.

Plain state of the event loop's thread; `tessera.serving.repository` decides what it means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from tessera.serving.repository.changes import Situation
from tessera.serving.repository.choice import Routes
from tessera.serving.repository.control import ControlRecord
from tessera.serving.repository.folder import Fingerprint, ModelFolder
from tessera.serving.repository.plan import Plan, VersionState, VersionStatus, plan_model
from tessera.serving.repository.settings import ServingSettings
from tessera.serving.repository.wanted import GONE, Wanted, wanted_versions
from tessera.serving.server.follow.version_log import Shown, VersionLog
from tessera.serving.server.model.loader import LoadedModel
from tessera.serving.server.model.served_model import ServedModel
from tessera.serving.server.repository.reading import ModelReading

STILL_LOADING = "is still loading"
FAILED = "could not be loaded; the repository's index says why"
ABSENT = "is not in its folder"


@dataclass(eq=False)
class LiveVersion:
    """A loaded version: what answers, the model, the file that it came from, and the log that it follows, if it does."""

    served: ServedModel
    loaded: LoadedModel
    file: Fingerprint
    log: VersionLog | None = None


@dataclass(frozen=True, kw_only=True)
class IndexRow:
    """One version of one model, as RepositoryIndex and the status page tell it.

    Attributes:
        model: its name.
        version: its number, or what the manifest of a package of ``--model`` says; empty: the model has none.
        state: see `VersionState`.
        reason: why it does not answer, or why its changed file does not; what is wrong with the model's own files.
        progress: how much of its load is done, from 0 to 1.
        labels: that name it.
        percent: of the requests without a version that ``traffic`` gives it.
        shadow: whether it computes a share of the calls and does not answer them.
        commit: the number of its last commit, 0 where it has none; None: it follows no log.
        newest_example_s: when its newest training example was made, seconds since 1970; None: not known.
    """

    model: str
    version: str
    state: VersionState
    reason: str = ""
    progress: float = 0.0
    labels: tuple[str, ...] = ()
    percent: float = 0.0
    shadow: bool = False
    commit: int | None = None
    newest_example_s: float | None = None

    @property
    def full_version(self) -> str:
        """The version with its commit, such as ``3.42``, where it follows a log."""
        return self.version if self.commit is None else f"{self.version}.{self.commit}"


@dataclass(eq=False)
class ModelVersions:
    """The versions of one model.

    Attributes:
        folder: as it was read last; None: it is not there any more.
        settings: of its serving.yaml, as it was read without an error last; None: never.
        record: of its control.json, likewise.
        errors: of these files as they are now.
        wanted: what follows from the three.
        statuses: of versions that are loaded or were to be.
        reasons: why a version's last load failed.
        live: the versions that answer.
        retiring: versions that do not answer any more and have not given back their memory, with their files.
        loading: the version that is being loaded.
        progress: of that load, from 0 to 1.
        asked: versions that a call waits for; while one does, none retires.
    """

    name: str
    folder: ModelFolder | None = None
    settings: ServingSettings | None = None
    record: ControlRecord | None = None
    errors: tuple[str, ...] = ()
    wanted: Wanted = GONE
    statuses: dict[int, VersionStatus] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    live: dict[int, LiveVersion] = field(default_factory=dict)
    retiring: list[tuple[int, Fingerprint]] = field(default_factory=list)
    loading: int | None = None
    progress: float = 0.0
    asked: frozenset[int] | None = None

    def take(self, reading: ModelReading | None) -> None:
        """Know what was read; None: the folder is not there any more."""
        if reading is None:
            self.folder, self.settings, self.record, self.errors = None, None, None, ()
        else:
            self.folder, self.errors = reading.folder, reading.errors
            self.settings = reading.settings or self.settings
            self.record = reading.record or self.record
        self.decide()

    def decide(self) -> None:
        """Find what is wanted, of what was read."""
        if self.folder is None:
            self.wanted = GONE
        elif self.settings is None or self.record is None:
            self.wanted = Wanted()
        else:
            self.wanted = wanted_versions(self.present, self.settings, self.record)
        for version in set(self.statuses) - self.wanted.versions - set(self.live):
            del self.statuses[version]
            self.reasons.pop(version, None)

    @property
    def present(self) -> frozenset[int]:
        """The versions in the folder."""
        return frozenset() if self.folder is None else frozenset(self.folder.versions)

    def was_unloaded(self, version: int) -> bool:
        """Whether a call has unloaded ``version`` and nothing wants it since.

        One that another has superseded is not: it answers until that is ready.
        """
        if self.record is None or version in self.wanted.versions | (self.asked or frozenset()):
            return False
        return self.record.unloaded or version in self.record.remove

    def plan(self, *, retry: bool, now: float) -> Plan:
        """What to do next; see `plan_model`."""
        versions = {} if self.folder is None else self.folder.versions
        if self.asked is None:
            return plan_model(self.wanted, versions, self.statuses, retry=retry, now=now)
        wanted = replace(self.wanted, versions=self.wanted.versions | self.asked)
        plan = plan_model(wanted, versions, self.statuses, retry=retry, now=now)
        return replace(plan, retire=frozenset())

    def succeeded(self, version: int, live: LiveVersion) -> LiveVersion | None:
        """``version`` answers from now on; returns what answered as this version before."""
        before = self.live.get(version)
        self.live[version] = live
        self.statuses[version] = VersionStatus(file=live.file)
        self.reasons.pop(version, None)
        return before

    def failed(self, version: int, file: Fingerprint, reason: str, now: float) -> None:
        """A load has failed; what answered still does."""
        past = self.statuses.get(version, VersionStatus())
        again = past.failed_file == file
        self.statuses[version] = replace(
            past,
            failed_file=file,
            failures=past.failures + 1 if again else 1,
            failed_at=now,
        )
        self.reasons[version] = reason

    def load_again(self, version: int) -> None:
        """Let ``version``, which answers, be loaded once more beside it."""
        self.statuses[version] = VersionStatus()

    def forgive(self, versions: frozenset[int]) -> None:
        """Let failed loads of ``versions`` be tried again at once."""
        for version in versions & set(self.statuses):
            self.statuses[version] = replace(self.statuses[version], failed_file=None, failures=0)
            self.reasons.pop(version, None)

    def retire(self, version: int) -> LiveVersion:
        """``version`` answers no more."""
        live = self.live.pop(version)
        self.statuses.pop(version, None)
        self.reasons.pop(version, None)
        self.retiring.append((version, live.file))
        return live

    def routes(self) -> Routes:
        """Which version answers which request, as things are."""
        ready = frozenset(self.live)
        not_ready = {}
        for version in self.wanted.versions - ready:
            if version in self.reasons:
                not_ready[version] = FAILED
            else:
                not_ready[version] = STILL_LOADING if version in self.present else ABSENT
        return Routes(self.name, ready, not_ready, self.wanted)

    def situation(self) -> Situation:
        """The model as a call finds it; its files must have been read without an error."""
        assert self.settings is not None
        assert self.record is not None
        return Situation(
            model=self.name,
            present=self.present,
            settings=self.settings,
            record=self.record,
            ready=frozenset(self.live),
            known=frozenset(self.statuses),
        )

    def index(self) -> Iterator[IndexRow]:
        """A row for each version that is in the folder, wanted or loaded; one without any if none is."""
        retiring = {version for version, _ in self.retiring}
        versions = self.present | self.wanted.versions | set(self.live) | retiring
        problem = "; ".join(self.errors)
        if not versions:
            yield IndexRow(
                model=self.name,
                version="",
                state=VersionState.UNAVAILABLE,
                reason=problem or "its folder has no version",
            )
        for version in sorted(versions):
            state, reason = self._state(version, retiring=version in retiring)
            labels = tuple(sorted(one for one, of in self.wanted.labels.items() if of == version))
            shares = self.wanted.traffic
            shown = self._shown(version)
            yield IndexRow(
                model=self.name,
                version=str(version),
                state=state,
                reason="; ".join(filter(None, (reason, problem))),
                progress=self.progress if version == self.loading else 0.0,
                labels=labels,
                percent=sum(shares.get(label, 0.0) for label in labels),
                shadow=self.wanted.shadow is not None and self.wanted.shadow.version == version,
                commit=None if shown is None else shown.commit,
                newest_example_s=None if shown is None else shown.newest_example_s,
            )

    def _shown(self, version: int) -> Shown | None:
        """What is shown of the version's log; None: it follows none."""
        live = self.live.get(version)
        return None if live is None or live.log is None else live.log.shown

    def _state(self, version: int, *, retiring: bool) -> tuple[VersionState, str]:
        # One that is tried again has its reason until it is ready.
        reason = self.reasons.get(version, "")
        if version in self.live:
            shown = self._shown(version)
            if shown is not None and shown.refused is not None:
                stopped = f"commit {shown.refused.commit}: {shown.refused.message}"
                reason = "; ".join(filter(None, (reason, stopped)))
            return VersionState.READY, reason
        if retiring:
            return VersionState.UNLOADING, ""
        if version == self.loading and not reason:
            return VersionState.LOADING, ""
        if version not in self.wanted.versions:
            reason = "it is not wanted"
        elif version not in self.present:
            reason = "it is not in its folder"
        return (VersionState.UNAVAILABLE if reason else VersionState.LOADING), reason


def fixed_rows(models: Iterable[tuple[str, ServedModel | None]]) -> list[IndexRow]:
    """The rows of ``--model``'s models; None: it is being loaded."""
    return [
        IndexRow(model=name, version="", state=VersionState.LOADING)
        if served is None
        else IndexRow(model=name, version=served.version, state=VersionState.READY)
        for name, served in models
    ]
