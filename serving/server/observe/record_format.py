"""Files of recorded requests, byte by byte: docs/replay.md has the table of them.

    for call in read_records(Path("records/requests-1795479005007999-7.rec")):
        print(call.arrival_ns, call.method, len(call.message))

A file is a header and records, one after another, little-endian.  Each record has the sum of its own bytes, so that a
file that was cut anywhere is read up to its last whole record.  ``cpp_server/src/recording`` reads and writes the same.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

METHODS = {"Predict": 1, "ModelInfer": 2}
"""The number of each method in a record."""
PROTOCOLS = {"grpc": 1, "rest": 2}
"""The number of each protocol in a record."""
MOST_NAME_BYTES = 65_535
"""What a model, a version or a request id may have."""

_MAGIC = b"TESSREC\n"
_VERSION = 1
_HEADER = struct.Struct("<8sIIqd")
_SUM = struct.Struct("<I")
_PREFIX = struct.Struct("<II")
_FIXED = struct.Struct("<QBBHHH")
_MOST_BODY_BYTES = (1 << 32) - 1

HEADER_BYTES = _HEADER.size + _SUM.size


@dataclass(frozen=True, slots=True)
class RecordingHeader:
    """What a file says of itself.

    Attributes:
        process: number of the process that has written it.
        start_unix_ns: when its recording began, nanoseconds since 1970.
        share: of the calls that were to be recorded, 0 to 1.
    """

    process: int
    start_unix_ns: int
    share: float


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One recorded call.

    Attributes:
        arrival_ns: when its message was there, nanoseconds after the recording's start.
        method: ``Predict`` or ``ModelInfer``.
        protocol: ``grpc`` or ``rest``.
        model: that the call went to.
        version: of that model.
        request_id: the client's, or one that the server made.
        message: of protobuf, as it was received; of REST as the server made it.
    """

    arrival_ns: int
    method: str
    protocol: str
    model: str
    version: str
    request_id: str
    message: bytes


def is_recording_name(name: str) -> bool:
    """Whether a file of this name, without its folder, is one of recorded requests."""
    return name.startswith("requests-") and name.endswith(".rec")


def recording_header(header: RecordingHeader) -> bytes:
    """The first bytes of a file."""
    content = _HEADER.pack(_MAGIC, _VERSION, header.process, header.start_unix_ns, header.share)
    return content + _SUM.pack(zlib.crc32(content))


def read_header(content: bytes) -> RecordingHeader:
    """The header at the beginning of a file's content.

    Raises:
        ValueError: there is none, or one of another version.
    """
    if len(content) >= HEADER_BYTES:
        magic, version, process, start, share = _HEADER.unpack_from(content)
        (told,) = _SUM.unpack_from(content, _HEADER.size)
        if (magic, version, told) == (_MAGIC, _VERSION, zlib.crc32(content[: _HEADER.size])):
            return RecordingHeader(process, start, share)
    raise ValueError("it does not begin as a file of recorded requests of version 1")


def record_head(call: RecordedCall) -> bytes:
    """What stands in a record's body before the message; empty: the call fits into no record."""
    names = [text.encode() for text in (call.model, call.version, call.request_id)]
    sizes = [len(name) for name in names]
    size = _FIXED.size + sum(sizes) + len(call.message)
    if max(sizes) > MOST_NAME_BYTES or size > _MOST_BODY_BYTES:
        return b""
    method, protocol = METHODS[call.method], PROTOCOLS[call.protocol]
    return b"".join([_FIXED.pack(call.arrival_ns, method, protocol, *sizes), *names])


def sealed_record(head: bytes, message: bytes) -> bytes:
    """The record of a body in two parts, with its size and its sum."""
    total = zlib.crc32(message, zlib.crc32(head))
    return b"".join([_PREFIX.pack(len(head) + len(message), total), head, message])


def records_of(content: bytes) -> Iterator[RecordedCall]:
    """The records of a file's content, up to its last whole one.

    Raises:
        ValueError: it does not begin with a header.
    """
    read_header(content)
    at = HEADER_BYTES
    while at + _PREFIX.size <= len(content):
        size, told = _PREFIX.unpack_from(content, at)
        body = content[at + _PREFIX.size : at + _PREFIX.size + size]
        if size < _FIXED.size or len(body) < size or zlib.crc32(body) != told:
            return
        call = _call_of(body)
        if call is None:
            return
        yield call
        at += _PREFIX.size + size


def read_records(path: Path) -> Iterator[RecordedCall]:
    """The calls of a file, up to its last whole record.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a file of recorded requests.
    """
    return records_of(path.read_bytes())


def _call_of(body: bytes) -> RecordedCall | None:
    arrival, method, protocol, *sizes = _FIXED.unpack_from(body)
    methods = {number: name for name, number in METHODS.items()}
    protocols = {number: name for name, number in PROTOCOLS.items()}
    if method not in methods or _FIXED.size + sum(sizes) > len(body):
        return None
    at, names = _FIXED.size, []
    for size in sizes:
        names.append(body[at : at + size].decode(errors="replace"))
        at += size
    model, version, request_id = names
    return RecordedCall(
        arrival,
        methods[method],
        protocols.get(protocol, ""),
        model,
        version,
        request_id,
        body[at:],
    )
