"""Where the files are that cpp_server/ builds: in the package tessera-rec-server, or in the checkout."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import tessera
from tessera.errors import UserError

_CHECKOUT = Path(tessera.__file__).resolve().parent.parent
_VARIABLE = "TESSERA_ENGINE"


def built_file(folder: str, name: str) -> Path | None:
    """The file ``name`` of tessera-rec-server's ``folder``, else of the checkout's build; None: neither is there."""
    places = [_CHECKOUT / "build" / "cpp" / "release" / name]
    spec = importlib.util.find_spec("tessera_rec_server")
    if spec is not None and spec.origin is not None:
        places.insert(0, Path(spec.origin).parent / folder / name)
    return next((place for place in places if place.is_file()), None)


def engine_library() -> Path:
    """The file libtessera-engine.so: the one that the variable TESSERA_ENGINE names, else as `built_file`.

    Raises:
        UserError: there is none.
    """
    if given := os.environ.get(_VARIABLE):
        if not Path(given).is_file():
            raise UserError(f"{_VARIABLE}={given} is not a file; name a libtessera-engine.so")
        return Path(given)
    found = built_file("lib", "libtessera-engine.so")
    if found is None:
        raise UserError(
            "libtessera-engine.so is not installed; pip install tessera-rec-server, or make build-server"
        )
    return found
