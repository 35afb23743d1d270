"""The parts of a record's content that are hashed alone: what `Archive` compares, in as many threads as it likes."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.serving.package.hashes import chunk_sizes
from tessera.serving.package.layout import Entry
from tessera.serving.package.signed_record import RecordInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Bytes of a content that have a hash of their own.

    Attributes:
        name: the record's.
        where: which bytes of it, for people.
        begin: the content's byte at which they begin.
        offset: the file's byte at which they begin.
        bytes: how many.
        sha256: theirs, lower-case hex.
        place: memory for them, of their size; None: they are not kept.
    """

    name: str
    where: str
    begin: int
    offset: int
    bytes: int
    sha256: str
    place: memoryview | None


def parts_of(entry: Entry, listed: RecordInfo, place: memoryview | None) -> list[Part]:
    """The chunks of a content, or all of it."""
    sizes = chunk_sizes(entry.bytes) or [entry.bytes]
    parts, begin = [], 0
    for size, sha256 in zip(sizes, listed.chunks or (listed.sha256,), strict=True):
        end = begin + size
        where = f"bytes {begin} to {end} of {entry.bytes}" if listed.chunks else f"{size} bytes"
        parts.append(
            Part(
                name=entry.name,
                where=where,
                begin=begin,
                offset=entry.content_offset + begin,
                bytes=size,
                sha256=sha256,
                place=None if place is None else place[begin:end],
            )
        )
        begin = end
    return parts
