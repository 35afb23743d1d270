"""Which versions of a model should be loaded: a function of its folder, serving.yaml and control.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tessera.serving.repository.control import ControlRecord
from tessera.serving.repository.settings import ServingSettings, Shadow


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What serving.yaml and control.json make of a folder together.

    Attributes:
        versions: that should be loaded; they need not all be in the folder.
        labels: names for versions; control.json's win.
        traffic: percent by label; empty: calls are not shared.
        shadow: see `Shadow`.
        may_be_none: whether the model is to have no version where ``versions`` is empty: a call has unloaded
            it, or its versions.  False: nothing of it is there that could be chosen, and what is loaded stays.
    """

    versions: frozenset[int] = frozenset()
    labels: Mapping[str, int] = field(default_factory=dict)
    traffic: Mapping[str, float] = field(default_factory=dict)
    shadow: Shadow | None = None
    may_be_none: bool = False

    def unanswering(self) -> frozenset[int]:
        """The shadow's version, unless a label names it: only requests that name it get it."""
        if self.shadow is None:
            return frozenset()
        return frozenset({self.shadow.version}) - frozenset(self.labels.values())


def wanted_versions(
    present: Collection[int], settings: ServingSettings, control: ControlRecord
) -> Wanted:
    """What is wanted of a model with the versions ``present`` in its folder."""
    labels = {**settings.labels, **control.labels}
    if control.unloaded:
        return Wanted(labels=labels, traffic=settings.traffic, may_be_none=True)
    named = frozenset(labels.values())
    shadow = frozenset() if settings.shadow is None else frozenset({settings.shadow.version})
    # The shadow does not answer: it must not take the place of a version that does.
    choosable = frozenset(present) - control.remove - (shadow - named)
    versions = settings.versions.choose(choosable) | control.add | named | shadow
    return Wanted(
        versions=versions,
        labels=labels,
        traffic=settings.traffic,
        shadow=settings.shadow,
        may_be_none=bool(control.remove),
    )


GONE = Wanted(may_be_none=True)
"""What is wanted of a model whose folder is not there any more: nothing."""


def first_to_load(wanted: Wanted) -> list[int]:
    """The wanted versions in the order in which they are loaded.

    First the one that requests without a version go to (label ``stable``), then the highest first.
    """
    stable = wanted.labels.get("stable")
    return sorted(wanted.versions, key=lambda version: (version != stable, -version))
