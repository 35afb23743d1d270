"""Lets a file of tests that imports a name which is not here fail in the tests that use it, and not as a whole.

`guarded` rewrites the import statements of a moved file; what stands for a missing name raises
`MissingName` when it is called, compared, counted or looked into.  The file is also copied beside the
tests, which import `taken` from it.
"""

import ast
import importlib
from collections.abc import Iterator
from typing import Any, NoReturn

_PACKAGE = "tessera.training"


class MissingName(Exception):  # noqa: N818 - its text says what it is
    """A name that a test uses is not here."""


class Missing:
    """Stands for a name that is not here: may be a base class, part of an annotation or a constant's owner."""

    def __init__(self, path: str) -> None:
        self._path = path

    def _raise(self, *_: Any, **__: Any) -> NoReturn:
        raise MissingName(f"{self._path} is not here")

    __call__ = __iter__ = __len__ = __bool__ = __contains__ = __getitem__ = _raise
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        """Raises, but for what `typing` compares an annotation with."""
        if self is not other and not isinstance(other, type) and type(other).__module__ != "typing":
            self._raise()
        return self is other

    def __getattr__(self, name: str) -> "Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(self._path)

    def __or__(self, _: Any) -> "Missing":
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """A class of it inherits from nothing, and is not made."""
        del bases
        return (_class_of(self._path),)


def _class_of(path: str) -> type:
    """A class whose objects cannot be made."""

    def init(self: Any, *_: Any, **__: Any) -> NoReturn:
        del self
        raise MissingName(f"{path} is not here")

    return type("MissingBase", (), {"__new__": init})


def taken(module: str, name: str) -> Any:
    """The name of a module, its sub-module of that name, or what stands for it."""
    try:
        found = importlib.import_module(module)
        if hasattr(found, name):
            return getattr(found, name)
        return importlib.import_module(f"{module}.{name}")
    except (ImportError, AttributeError):
        return Missing(f"{module}.{name}")


def guarded(source: str, home: str) -> str:
    """The source with `from tessera.training.M import A` at its top level as `A = taken("...M", "A")`.

    Args:
        source: a moved file.
        home: the module that has `taken`.
    """
    lines = source.splitlines()
    for node in reversed(list(_imports(ast.parse(source)))):
        assert node.end_lineno is not None
        made = [
            f'{alias.asname or alias.name} = taken("{node.module}", "{alias.name}")'
            for alias in node.names
        ]
        lines[node.lineno - 1 : node.end_lineno] = [f"from {home} import taken", *made]
    return "\n".join(lines) + "\n"


def _imports(tree: ast.Module) -> Iterator[ast.ImportFrom]:
    """Yields the statements that import names of the library."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PACKAGE):
            yield node
