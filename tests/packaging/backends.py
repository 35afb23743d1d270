"""The lookup backends that this machine can run."""

from __future__ import annotations

import pytest

from tessera.kernels.libraries import LibraryError, library_path
from tessera.serving.packaging.lookups.backends import BACKENDS


def _built(name: str) -> bool:
    try:
        return all(library_path(library) for library in BACKENDS[name].operator_libraries)
    except LibraryError:
        return False


EACH_BACKEND = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(not _built(name), reason="its library is not built (make build)"),
    )
    for name in BACKENDS
]
"""For ``pytest.mark.parametrize``."""

NEEDS_TESSERA = [
    mark
    for parameter in EACH_BACKEND
    if parameter.values == ("tessera",)
    for mark in parameter.marks
]
"""For ``pytestmark``: skips without Tessera's own operators."""
