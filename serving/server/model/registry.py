"""The models that a server has, by the name that requests use, and which version of each answers.

What requests look at is one immutable snapshot behind one pointer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from tessera.serving.repository.choice import NoVersionError, Routes
from tessera.serving.server.errors import Code, ServeError
from tessera.serving.server.model.served_model import ServedModel

Key = Callable[[], bytes]
"""Gives the key of a request that decides between shares of the traffic."""


def no_key() -> bytes:
    """The key of what is not a request for scores."""
    return b""


class ModelEntry(Protocol):
    """A name in the registry."""

    @property
    def loaded(self) -> tuple[ServedModel, ...]:
        """The versions that answer."""
        ...

    def find(self, version: str, key: Key) -> ServedModel:
        """The version that answers.

        Raises:
            ServeError: NOT_FOUND, or UNAVAILABLE while it loads.
        """
        ...

    def shadow(self, key: Key) -> ServedModel | None:
        """The version that computes the request, too, if one does."""
        ...


@dataclass(frozen=True)
class SingleModel:
    """A model of ``--model``: one version for as long as the server runs; None until it is loaded."""

    name: str
    model: ServedModel | None = None

    @property
    def loaded(self) -> tuple[ServedModel, ...]:
        """The version that answers."""
        return () if self.model is None else (self.model,)

    def find(self, version: str, _key: Key) -> ServedModel:
        """See `ModelEntry.find`."""
        if self.model is None:
            raise ServeError(Code.UNAVAILABLE, f"model {self.name!r} is still loading")
        if version and version != self.model.version:
            raise ServeError(
                Code.NOT_FOUND,
                f"model_version '{version}' of model {self.name!r} is not loaded; "
                f"version {self.model.version!r} is",
            )
        return self.model

    def shadow(self, _key: Key) -> ServedModel | None:
        """None: these have none."""
        return None


@dataclass(frozen=True)
class VersionedModel:
    """A model of a repository: which of its versions answers, and those that do."""

    routes: Routes
    versions: Mapping[int, ServedModel]

    @property
    def loaded(self) -> tuple[ServedModel, ...]:
        """The versions that answer, in their order."""
        return tuple(model for _, model in sorted(self.versions.items()))

    def find(self, version: str, key: Key) -> ServedModel:
        """See `ModelEntry.find`."""
        try:
            return self.versions[self.routes.choose(version, key)]
        except NoVersionError as error:
            raise ServeError(Code(error.refusal.value), error.message) from None

    def shadow(self, key: Key) -> ServedModel | None:
        """See `ModelEntry.shadow`."""
        version = self.routes.shadow(key)
        return None if version is None else self.versions[version]


class Registry:
    """Names to models.  A name is known before its model is loaded.

    Args:
        names: those of ``--model``, the default one first.
    """

    def __init__(self, names: list[str]) -> None:
        self._fixed = tuple(names)
        self._snapshot: Mapping[str, ModelEntry] = {name: SingleModel(name) for name in names}

    def add(self, model: ServedModel) -> None:
        """``model``, of ``--model``, answers from now on."""
        self.publish(model.name, SingleModel(model.name, model))

    def publish(self, name: str, entry: ModelEntry) -> None:
        """Requests for ``name`` go to ``entry`` from now on."""
        self._snapshot = {**self._snapshot, name: entry}

    def withdraw(self, name: str) -> None:
        """``name`` is unknown from now on."""
        self._snapshot = {known: entry for known, entry in self._snapshot.items() if known != name}

    def names(self) -> list[str]:
        """Every name, loaded or not; those of ``--model`` first."""
        return list(self._snapshot)

    def fixed(self) -> list[tuple[str, ServedModel | None]]:
        """The names of ``--model``, with their models where these are loaded."""
        snapshot = self._snapshot
        return [(name, next(iter(snapshot[name].loaded), None)) for name in self._fixed]

    def loaded(self) -> Iterator[ServedModel]:
        """Every version of every model that answers."""
        return (model for entry in self._snapshot.values() for model in entry.loaded)

    def loaded_of(self, name: str) -> tuple[ServedModel, ...]:
        """The versions of ``name`` that answer.

        Raises:
            ServeError: NOT_FOUND for an unknown name.
        """
        return self._entry(name).loaded

    def is_ready(self) -> bool:
        """Whether every model of ``--model`` answers."""
        return all(model is not None for _, model in self.fixed())

    def find(self, name: str, version: str, key: Key = no_key) -> ServedModel:
        """The model that a request asks for.

        Args:
            name: empty for the default one: the first of ``--model``, else the only one.
            version: a version or a label; empty: whichever answers.
            key: decides between shares of the traffic; called only where there are some.

        Raises:
            ServeError: NOT_FOUND for an unknown name or version, UNAVAILABLE while it loads.
        """
        return self._entry(name).find(version, key)

    def shadow(self, model: ServedModel, key: Key) -> ServedModel | None:
        """The other version that computes a request with ``key``, which ``model`` answers, too."""
        entry = self._snapshot.get(model.name)
        shadow = None if entry is None else entry.shadow(key)
        return None if shadow is model else shadow

    def _entry(self, name: str) -> ModelEntry:
        snapshot = self._snapshot
        wanted = name or (self._fixed[0] if self._fixed else "")
        if not wanted and len(snapshot) == 1:
            wanted = next(iter(snapshot))
        try:
            return snapshot[wanted]
        except KeyError:
            known = ", ".join(repr(known) for known in snapshot) or "none"
            raise ServeError(
                Code.NOT_FOUND, f"model_name '{name}' is unknown; this server has {known}"
            ) from None
