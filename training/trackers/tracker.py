"""What a tracker is, the registry of ours, and how the items of ``run.trackers`` are read.

An item is a name (``mlflow``), or a mapping of one name to its settings (``{mlflow: {experiment: ads}}``).
A name ``pkg.module:Class`` is a tracker of the user's: the class is called with a `TrackedRun` and the
settings as keyword arguments.

Rank 0 alone opens trackers, before the first step; an error there is the user's to mend and ends the
command.  Later ones end the tracker, never the run (`tessera.training.trackers.attached`).
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar, cast

from tessera.errors import UserError, unknown_name
from tessera.training.config_source import ConfigSource
from tessera.training.trackers import kinds
from tessera.training.typed_config import build
from tessera.users_code import call_named, check_named

Status = Literal["finished", "interrupted", "failed"]


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker is told of the run when it is opened.

    Attributes:
        folder: the run folder.
        name: what the run is called.
        config: the resolved config by dotted key, values as text.
        from_step: finished steps; above 0 the run goes on.
        state: what `Tracker.state` gave when the run was begun or last gone on with; None: this
            tracker does not know the run yet.
    """

    folder: Path
    name: str
    config: Mapping[str, str]
    from_step: int
    state: Mapping[str, str] | None


class Tracker(Protocol):
    """Takes a run's numbers; its methods are called from one thread, one at a time.

    A class may have the attribute ``rewinds = True``: it then drops, when it is opened, what it was
    told of steps after ``from_step``, and is told of them again.  Others are not told twice.
    """

    def state(self) -> Mapping[str, str]:
        """What it needs to go on with the same tracked run later, such as the run's id."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the numbers of a step: ``train/loss``, ``valid/auc``, ``valid/LABEL/auc``."""

    def summarize(self, metrics: Mapping[str, float]) -> None:
        """Take the final numbers, of the best checkpoint: ``best/step``, ``best/valid/auc``."""

    def close(self, status: Status) -> None:
        """The run has ended, or stops here for now."""


class TrackerConfig:
    """The settings of one of our trackers; subclasses are frozen dataclasses.

    Attributes:
        name: what ``run.trackers`` calls it.
        module: what must be installed for it.
        extra: the extra of this project that brings it.
    """

    name: ClassVar[str]
    module: ClassVar[str]
    extra: ClassVar[str] = ""

    def require(self) -> None:
        """Check that what it needs is installed.

        Raises:
            UserError: it is not.
        """
        if importlib.util.find_spec(self.module) is None:
            remedy = f"pip install 'tessera-rec[{self.extra}]'"
            raise UserError(f"run.trackers: {self.name} needs {self.module}; {remedy}")

    def open(self, run: TrackedRun) -> Tracker:
        """The tracker, ready for numbers; a `UserError` names what does not fit."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class UsersTracker(TrackerConfig):
    """A class ``pkg.module:Class`` with its settings."""

    path: str
    settings: Mapping[str, Any]

    def require(self) -> None:
        """The module is imported when the tracker is opened."""

    def open(self, run: TrackedRun) -> Tracker:
        """An instance; its methods are looked for at once."""
        made = call_named("run.trackers", self.path, run, **self.settings)
        lacks = [
            name
            for name in ("state", "log", "summarize", "close")
            if not callable(getattr(made, name, None))
        ]
        if lacks:
            raise UserError(
                f"run.trackers: {self.path} has no {' and no '.join(lacks)}; see"
                " tessera.training.trackers.tracker.Tracker"
            )
        return cast("Tracker", made)


T = TypeVar("T", bound=type[TrackerConfig])
_KINDS: dict[str, type[TrackerConfig]] = {}


def tracker(cls: T) -> T:
    """Register a tracker under its name; a decorator.

    Raises:
        ValueError: another one has that name.
    """
    if _KINDS.get(cls.name, cls).__qualname__ != cls.__qualname__:
        raise ValueError(f"tracker {cls.name!r} is registered twice; give {cls} another name")
    _KINDS[cls.name] = cls
    return cls


def trackers_by_name() -> dict[str, type[TrackerConfig]]:
    """Our trackers."""
    for found in pkgutil.iter_modules(kinds.__path__):
        importlib.import_module(f"{kinds.__name__}.{found.name}")
    return dict(sorted(_KINDS.items()))


def parse_trackers(field: str, items: Sequence[Any]) -> dict[str, TrackerConfig]:
    """The trackers that a config asks for, by name.

    Args:
        field: the key for messages.
        items: its value.

    Raises:
        UserError: an unknown name or setting, or one twice.
    """
    found: dict[str, TrackerConfig] = {}
    for place, item in enumerate(items):
        where = f"{field}[{place}]"
        name: Any = item
        settings: Any = {}
        if isinstance(item, Mapping) and len(item) == 1:
            ((name, settings),) = item.items()
        if not isinstance(name, str) or not isinstance(settings or {}, Mapping):
            raise UserError(f"{where}={item!r}: give a tracker's name, or {{name: {{KEY: VALUE}}}}")
        if name in found:
            raise UserError(f"{where}={name!r}: it is named twice; keep one of the two")
        found[name] = _parse(where, name, dict(settings or {}))
    return found


def _parse(where: str, name: str, settings: dict[str, Any]) -> TrackerConfig:
    if ":" in name:
        check_named(where, name)
        return UsersTracker(path=name, settings=settings)
    known = trackers_by_name()
    if name not in known:
        raise unknown_name(where, name, [*known, "pkg.module:Class"])
    assert dataclasses.is_dataclass(known[name])
    return build(known[name], ConfigSource(values=settings, origins={(): f"{where}.{name}"}))
