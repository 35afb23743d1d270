"""SHA-256 of everything in a checkpoint's folder, so that no flipped byte is loaded.

torch's data files have checksums that torch does not look at.  Each rank hashes the files that it has
written, record by record; the hashes, that of torch's index and that of the plain values stand
in ``tessera.json``.  A reader compares the records that it reads and no others, so that ranks which
read a part each do not read the whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from tessera.training.distributed.checkpoint.basics import CheckpointError

INDEX = ".metadata"
_CHUNK_BYTES = 1 << 20

Records = dict[str, dict[str, str]]
"""By file: SHA-256 in hexadecimal digits by ``OFFSET+LENGTH`` of the record in bytes."""


def record_key(offset: int, length: int) -> str:
    """The name of a record within its file."""
    return f"{offset}+{length}"


def digest(stream: IO[bytes]) -> str:
    """SHA-256 of what is left of ``stream``."""
    found = hashlib.sha256()
    while part := stream.read(_CHUNK_BYTES):
        found.update(part)
    return found.hexdigest()


def hash_records(folder: Path, places: Iterable[tuple[str, int, int]]) -> Records:
    """Read records and hash them.

    Args:
        folder: the checkpoint.
        places: file, offset and length of each, in bytes.
    """
    records: Records = {}
    for name, offset, length in sorted(places):
        with (folder / name).open("rb") as stream:
            stream.seek(offset)
            found = hashlib.sha256()
            left = length
            while left and (part := stream.read(min(left, _CHUNK_BYTES))):
                found.update(part)
                left -= len(part)
        records.setdefault(name, {})[record_key(offset, length)] = found.hexdigest()
    return records


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as stream:
        return digest(stream)


def plain_digest(plain: Mapping[str, Any]) -> str:
    """SHA-256 of plain values, whatever their order: of their JSON with sorted keys.

    The entry ``sha256`` itself does not count.
    """
    rest = {name: value for name, value in plain.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def require_equal(what: str, found: str, expected: object) -> None:
    """Raise the `CheckpointError` of damage unless two hashes are equal."""
    if found != expected:
        raise CheckpointError(
            f"{what} is damaged: its SHA-256 is {found}, and {expected} was written; use another"
            " checkpoint"
        )
