"""Write a changed copy of a package, record by record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tessera.serving.package.layout import ArchiveWriter
from tessera.serving.package.manifest import MANIFEST_RECORD, Manifest
from tessera.serving.package.records import Records
from tessera.serving.package.signed_record import RecordInfo


def read_records(path: Path) -> dict[str, bytes]:
    """Every record by its name below the top folder, in the order of the file."""
    records = Records(path)
    return {entry.name: records.read(entry.name, max_bytes=1 << 30) for entry in records.entries}


def write_records(path: Path, records: dict[str, bytes]) -> Path:
    """An archive of ``records`` as they come, laid out as a package is."""
    with path.open("w+b") as stream:
        writer = ArchiveWriter(stream)
        for name, content in records.items():
            writer.add(name, [content], len(content))
        writer.finish()
    return path


def with_manifest(source: Path, path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy whose manifest is changed and otherwise whole."""
    records = read_records(source)
    data = json.loads(records[MANIFEST_RECORD])
    change(data)
    records[MANIFEST_RECORD] = (json.dumps(data, indent=1) + "\n").encode()
    return write_records(path, records)


def in_version_4(data: dict[str, Any]) -> dict[str, Any]:
    """A manifest's fields as version 4 of the format has them."""
    since_5 = {"hex", "separator", "vocabulary"}
    schema = {
        key: value
        for key, value in data["schema"].items()
        if key not in {"dense_ranges", "other_columns"}
    }
    schema["features"] = [
        {key: value for key, value in feature.items() if key not in since_5}
        for feature in schema["features"]
    ]
    measured = data["evaluation"]
    if measured is not None:
        measured = {k: v for k, v in measured.items() if k not in {"labels", "members"}}
    return {**data, "format_version": 4, "schema": schema, "evaluation": measured}


def in_version_3(data: dict[str, Any]) -> dict[str, Any]:
    """A manifest's fields as version 3 of the format has them."""
    data = in_version_4(data)
    since_4 = {"strings", "column", "weights_column", "many", "max_length", "keep"}
    schema = data["schema"]
    features = [
        {key: value for key, value in feature.items() if key not in since_4}
        for feature in schema["features"]
    ]
    old = {
        "dense_features": schema["dense_features"],
        "dense_missing": schema["dense_missing"],
        "dense_transform": "log1p",
        "features": features,
        "outputs": schema["outputs"],
    }
    return {**data, "format_version": 3, "schema": old}


def as_version_3(source: Path, path: Path) -> Path:
    """A copy of a package as version 3 of the format has it: another manifest, the same model."""

    def change(data: dict[str, Any]) -> None:
        data.update(in_version_3(data))

    return with_manifest(source, path, change)


def with_record(source: Path, path: Path, name: str, content: bytes) -> Path:
    """A copy with another record, which the manifest lists as it is."""
    records = {**read_records(source), name: content}
    with path.open("w+b") as stream:
        writer = ArchiveWriter(stream)
        infos = {}
        for other in sorted(records.keys() - {MANIFEST_RECORD}):
            written = writer.add(other, [records[other]], len(records[other]))
            infos[other] = RecordInfo(
                sha256=written.sha256,
                bytes=written.bytes,
                crc32=written.crc32,
                chunks=written.chunks,
            )
        manifest = Manifest.from_bytes(records[MANIFEST_RECORD])
        data = manifest.to_json() | {
            "records": {n: vars(info) | {"chunks": list(info.chunks)} for n, info in infos.items()}
        }
        changed = Manifest.from_json(data).to_bytes()
        writer.add(MANIFEST_RECORD, [changed], len(changed))
        writer.finish()
    return path
