"""Write a changed copy of a package, record by record."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tessera.serving.manifest import MANIFEST_RECORD


def read_records(path: Path) -> dict[str, bytes]:
    """Every record by its full name."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_records(path: Path, records: dict[str, bytes]) -> Path:
    """A plain archive of ``records``."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return path


def top_folder(records: dict[str, bytes]) -> str:
    return next(iter(records)).split("/")[0]


def with_manifest(source: Path, path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy whose manifest is changed and otherwise whole."""
    records = read_records(source)
    name = f"{top_folder(records)}/{MANIFEST_RECORD}"
    data = json.loads(records[name])
    change(data)
    records[name] = json.dumps(data).encode()
    return write_records(path, records)
