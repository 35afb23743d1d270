"""The names that functions and classes have inside packages, whatever file they live in.

TorchScript writes the module of every function that it compiles into the archive.  A function that
moves to another file would change the bytes of every package that calls it; the name given here stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Named = TypeVar("Named", bound=Callable[..., Any])

_FOLDER = "tessera.serving.packaging"


def named_in_packages(home: str) -> Callable[[Named], Named]:
    """A decorator that fixes the name of a function or class in TorchScript archives.

    ``home`` is the file below ``serving/packaging``, without ``.py``, that it lived in when format
    version 3 was settled.
    """

    def name(thing: Named) -> Named:
        thing.__module__ = f"{_FOLDER}.{home}"  # where both torch.fx and TorchScript look
        return thing

    return name
