"""A model's inputs, read from its package file without torch."""

from __future__ import annotations

from pathlib import Path

from tessera.serving.package.records import Records
from tessera.serving.package.schema import InputSchema


def read_schema(path: str | Path) -> InputSchema:
    """The input schema of the package at ``path`` (a MODEL.pt that ``package-model`` wrote).

    Reads the manifest only; nothing of the archive runs, and its hashes are not checked
    (``tessera verify`` does that).  A missing or damaged file is a `PackageError`, and so is one
    that is not a package.
    """
    return Records(Path(path)).manifest().schema
