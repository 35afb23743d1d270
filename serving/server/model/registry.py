"""The models that a server has, by the name that requests use."""

from __future__ import annotations

from collections.abc import Iterator

from tessera.serving.server.errors import Code, ServeError
from tessera.serving.server.model.served_model import ServedModel


class Registry:
    """Names to models.  A name is known before its model is loaded.

    Args:
        names: every model's name, the default one first.
    """

    def __init__(self, names: list[str]) -> None:
        self._models: dict[str, ServedModel | None] = dict.fromkeys(names)
        self._default = names[0]

    def names(self) -> list[str]:
        """Every name, loaded or not."""
        return list(self._models)

    def add(self, model: ServedModel) -> None:
        """``model`` answers from now on."""
        self._models[model.name] = model

    def models(self) -> list[tuple[str, ServedModel | None]]:
        """Every name, with its model if that is loaded."""
        return list(self._models.items())

    def loaded(self) -> Iterator[ServedModel]:
        """The models that answer."""
        return (model for model in self._models.values() if model is not None)

    def is_ready(self) -> bool:
        """Whether every model answers."""
        return all(model is not None for model in self._models.values())

    def find(self, name: str, version: str) -> ServedModel:
        """The model that a request asks for.

        Args:
            name: empty for the default one.
            version: empty for whichever is loaded.

        Raises:
            ServeError: NOT_FOUND for an unknown name or version, UNAVAILABLE while it loads.
        """
        wanted = name or self._default
        try:
            model = self._models[wanted]
        except KeyError:
            known = ", ".join(repr(known) for known in self._models)
            raise ServeError(
                Code.NOT_FOUND, f"model_name '{name}' is unknown; this server has {known}"
            ) from None
        if model is None:
            raise ServeError(Code.UNAVAILABLE, f"model {wanted!r} is still loading")
        if version and version != model.version:
            raise ServeError(
                Code.NOT_FOUND,
                f"model_version '{version}' of model {wanted!r} is not loaded; "
                f"version {model.version!r} is",
            )
        return model
