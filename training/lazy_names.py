"""Packages that import a name when it is first asked for, so that importing them costs nothing.

Their sub-modules are names, too: ``import tessera.training as t; t.distributed.planner`` works.

Such an ``__init__.py`` lists its names once, as imports under ``if TYPE_CHECKING:``; type checkers
and editors read them there, and so does `lazy_names`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__all__``, ``__getattr__`` and ``__dir__`` of ``package``, called in its ``__init__.py``."""
    module = sys.modules[package]
    home_of = {
        alias.name: str(statement.module)
        for block in ast.parse(inspect.getsource(module)).body
        if isinstance(block, ast.If)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }

    def getattr_of_package(name: str) -> Any:
        if name not in home_of:
            full = f"{package}.{name}"
            if name.startswith("__") or importlib.util.find_spec(full) is None:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            return importlib.import_module(full)
        value = getattr(importlib.import_module(home_of[name]), name)
        setattr(module, name, value)
        return value

    def dir_of_package() -> list[str]:
        return sorted({*vars(module), *home_of})

    return sorted(home_of), getattr_of_package, dir_of_package
