"""A package's scores in this process: libtessera-engine, the C++ server without its transport.

    with Engine("model.pt") as engine:
        scores = engine.predict(assemble(dense, sparse, schema=read_schema("model.pt")))["default"]

`Engine` takes `RequestArrays` and gives futures; `EngineHandle` is the C API itself, for who submits
so many requests that a future for each costs too much.  docs/engine.md tells more.
"""

from tessera.serving.engine.engine import Engine
from tessera.serving.engine.handle import (
    Completions,
    EngineHandle,
    PreparedRequest,
    RequestSet,
)
from tessera.serving.engine.installed import engine_library
from tessera.serving.engine.options import EngineOptions

__all__ = [
    "Completions",
    "Engine",
    "EngineHandle",
    "EngineOptions",
    "PreparedRequest",
    "RequestSet",
    "engine_library",
]
