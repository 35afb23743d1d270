"""Which version of a model answers a request: a pure function of what is ready and what the request names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import xxhash

from tessera.serving.repository.names import parse_version
from tessera.serving.repository.settings import Shadow
from tessera.serving.repository.wanted import Wanted

MAX_TRAFFIC_KEY_BYTES = 1_024

_SHADOW_SUFFIX = b"\0shadow"
STABLE = "stable"
"""The label of the version that answers requests without one."""


class Refusal(Enum):
    """Why no version answers; the names are those of gRPC's codes."""

    NOT_FOUND = "NOT_FOUND"
    UNAVAILABLE = "UNAVAILABLE"


class NoVersionError(Exception):
    """No version of the model answers the request.

    Attributes:
        refusal: whether asking again later may help.
        message: the sentence for the client.
    """

    def __init__(self, refusal: Refusal, message: str) -> None:
        super().__init__(message)
        self.refusal = refusal
        self.message = message


def draw(model: str, key: bytes, suffix: bytes = b"") -> float:
    """Where ``key`` of ``model`` lies between 0 and 1.

    XXH64 (seed 0) of the model's name, a zero byte, the key and ``suffix``, divided by 2^64.
    """
    return xxhash.xxh64_intdigest(model.encode() + b"\0" + key + suffix) / 2.0**64


@dataclass(frozen=True, kw_only=True)
class _Share:
    upto: float  # the shares up to and with this one, in sum, of 1
    version: int


def answering_version(wanted: Wanted, ready: frozenset[int]) -> int | None:
    """The version of requests without one where calls are not shared; None: none is ready."""
    stable = wanted.labels.get(STABLE)
    return stable if stable in ready else max(ready - wanted.unanswering(), default=None)


class Routes:
    """Which of a model's versions answers; immutable.

    Args:
        model: its name.
        ready: the versions that answer.
        not_ready: those that should and do not, each with the end of the sentence "version '4' of model
            'm' ...", such as "is still loading".
        wanted: labels, shares and the shadow.

    Attributes:
        usual: the version of requests without one where calls are not shared; None: none is ready.
    """

    def __init__(
        self, model: str, ready: frozenset[int], not_ready: Mapping[int, str], wanted: Wanted
    ) -> None:
        self._model = model
        self._ready = ready
        self._not_ready = dict(sorted(not_ready.items()))
        self._labels = dict(sorted(wanted.labels.items()))
        self._shares = _shares(wanted)
        self._shadow: Shadow | None = wanted.shadow
        self.usual = answering_version(wanted, ready)

    def choose(self, asked: str, key: Callable[[], bytes]) -> int:
        """The version that answers.

        Args:
            asked: the request's ``model_version``: a number, a label, or empty.
            key: gives what decides between shares; called only where there are some.

        Raises:
            NoVersionError: no version answers.
        """
        if asked:
            return self._named(asked)
        if self._shares:
            point = draw(self._model, key())
            share = next((one for one in self._shares if point < one.upto), self._shares[-1])
            if share.version in self._ready:
                return share.version
        if self.usual is None:
            raise NoVersionError(Refusal.UNAVAILABLE, self._why_none())
        return self.usual

    def shadow(self, key: Callable[[], bytes]) -> int | None:
        """The version that computes the request, too, where its key is in the share and it is ready."""
        shadow = self._shadow
        if shadow is None or shadow.version not in self._ready:
            return None
        point = draw(self._model, key(), _SHADOW_SUFFIX)
        return shadow.version if point < shadow.percent / 100 else None

    def _named(self, asked: str) -> int:
        version = self._labels.get(asked) or parse_version(asked)
        if version is not None and version in self._ready:
            return version
        if version is not None and version in self._not_ready:
            raise NoVersionError(
                Refusal.UNAVAILABLE,
                f"version '{version}' of model '{self._model}' {self._not_ready[version]}",
            )
        raise NoVersionError(
            Refusal.NOT_FOUND,
            f"model_version '{asked}' of model '{self._model}' is unknown; {self._there_is()}",
        )

    def _why_none(self) -> str:
        for version, why in reversed(self._not_ready.items()):
            return f"version '{version}' of model '{self._model}' {why}"
        return f"no version of model '{self._model}' is loaded"

    def _there_is(self) -> str:
        versions = ", ".join(f"'{version}'" for version in sorted(self._ready))
        found = f"there is version {versions}" if versions else "none is loaded"
        ready = [label for label, version in self._labels.items() if version in self._ready]
        labels = ", ".join(f"'{label}'" for label in ready)
        return f"{found} and label {labels}" if labels else found


def _shares(wanted: Wanted) -> list[_Share]:
    """The shares in the order of their labels' bytes; a label without a version keeps its place."""
    shares, total = [], 0.0
    for label, percent in sorted(wanted.traffic.items()):
        total += percent
        shares.append(_Share(upto=total / 100, version=wanted.labels.get(label, 0)))
    return shares
