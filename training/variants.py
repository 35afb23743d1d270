"""`Variants`: dataclasses among which one key of a config's section, the tag, chooses."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, TypeVar

from tessera.errors import UserError, unknown_name

C = TypeVar("C", bound=type)


class Variants:
    """A registry of dataclasses, by the value of their section's tag.

    The dataclass that an annotation names holds the registry as its class attribute
    ``variants``; `tessera.training.typed_config.build` then makes the variant that the section's
    tag names.  The modules of ``package`` are imported when a variant is first asked for, and
    each adds its own.

    Args:
        tag: the key that chooses; a field of every variant, whose default is the variant's name.
        default: the variant of a section without the tag; None: it must be given.
        implied: further keys that choose when the tag is not given, with the variants' names.
        package: the dotted name of the package whose modules add variants.
    """

    def __init__(
        self, tag: str, *, default: str | None, implied: Mapping[str, str], package: str
    ) -> None:
        self.tag = tag
        self._default = default
        self._implied = dict(implied)
        self._package = package
        self._classes: dict[str, type] = {}
        self._imported = False

    def add(self, cls: C) -> C:
        """Register a dataclass under the default of its tag; usable as a decorator.

        Raises:
            ValueError: another class has that name.
        """
        name = getattr(cls, self.tag)
        if name in self._classes:
            raise ValueError(f"{self.tag} {name!r} is registered twice; give {cls} another name")
        self._classes[name] = cls
        return cls

    def classes(self) -> dict[str, type]:
        """Every variant by its name."""
        if not self._imported:
            self._imported = True
            package = importlib.import_module(self._package)
            for found in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self._package}.{found.name}")
        return self._classes

    def chosen(self, section: Mapping[str, Any]) -> str:
        """The name of the variant that a section asks for.

        Raises:
            UserError: it asks for none and there is no default.
        """
        if self.tag in section:
            return str(section[self.tag])
        implied = (name for key, name in self._implied.items() if key in section)
        found = next(implied, self._default)
        if found is None:
            raise UserError(
                f"{self.tag} is missing; give one of {', '.join(sorted(self.classes()))}"
            )
        return found

    def find(self, name: str) -> type:
        """The variant of that name.

        Raises:
            UserError: there is none; the message begins with the tag and says the nearest name.
        """
        classes = self.classes()
        if name in classes:
            return classes[name]
        raise unknown_name(self.tag, name, sorted(classes))
