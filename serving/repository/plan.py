"""What to do next about a model: a pure function of (wanted, folder, states, now)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from tessera.serving.repository.folder import Fingerprint
from tessera.serving.repository.wanted import Wanted, first_to_load

_MOST_BACK_OFF_S = 60.0
_DOUBLINGS = 6  # until there


class VersionState(Enum):
    """KServe's states of a model in a repository."""

    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"


@dataclass(frozen=True, kw_only=True)
class VersionStatus:
    """Where a version stands that has been loaded, or was to be.

    Attributes:
        ready: whether it answers.
        file: the model.pt that answers; None where none does.
        failed_file: the model.pt that could not be loaded; None where the last load succeeded.
        failures: of ``failed_file``, one after the other.
        failed_at: the clock at the last of them (seconds).
        dropped: a call has asked for this version's unload.
    """

    file: Fingerprint | None = None
    failed_file: Fingerprint | None = None
    failures: int = 0
    failed_at: float = 0.0
    dropped: bool = False

    @property
    def ready(self) -> bool:
        """Whether it answers."""
        return self.file is not None


_NEVER_LOADED = VersionStatus()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do next about a model.

    Attributes:
        load: the next version to load, or to load again; None: none now.
        retire: versions to be unloaded once their last call has been answered.
        again: the clock when a failed load may be tried again (seconds); infinity: no load waits.
    """

    load: int | None = None
    retire: frozenset[int] = frozenset()
    again: float = math.inf


def back_off_s(failures: int) -> float:
    """Seconds after the ``failures``-th failure in a row until the next try: 1, 2, 4, ... 60."""
    return min(2.0 ** min(failures - 1, _DOUBLINGS), _MOST_BACK_OFF_S)


def plan_model(
    wanted: Wanted,
    present: Mapping[int, Fingerprint],
    states: Mapping[int, VersionStatus],
    *,
    retry: bool,
    now: float,
) -> Plan:
    """What to do next; the caller loads one version at a time.

    Args:
        wanted: see `wanted_versions`.
        present: the versions in the folder.
        states: of the versions that were loaded or tried.
        retry: whether failed loads are tried again after their back-off.  A changed file is loaded in any
            case, also in the place of one that answers.
        now: the clock (seconds).
    """
    load, again = None, math.inf
    for version in first_to_load(wanted):
        file, status = present.get(version), states.get(version, _NEVER_LOADED)
        if file is None or file == status.file:
            continue
        if file != status.failed_file:
            at = -math.inf
        else:
            at = status.failed_at + back_off_s(status.failures) if retry else math.inf
        if at > now:
            again = min(again, at)
        elif load is None:
            load = version
    ready = {version for version, status in states.items() if status.ready}
    retire = {version for version in ready if states[version].dropped}
    if wanted.versions <= ready and (wanted.versions or wanted.may_be_none):
        retire |= ready - wanted.versions
    return Plan(load=load, retire=frozenset(retire), again=again)
