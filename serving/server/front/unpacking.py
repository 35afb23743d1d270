"""Unpacks compressed messages, with a bound.

gRPC is told to hand messages over as they came: its own unpacking ends only with the message, at a thousand
times what came.  It does not say which messages are compressed, so this looks at how they begin: no protobuf
message begins as gzip does, and those of our protocols do not begin as zlib's format ("deflate") does, for they
have no field 15.
"""

from __future__ import annotations

import asyncio
import zlib

from tessera.serving.server.errors import InvalidRequestError, QueueFullError, TooLargeError

_FORMATS = {b"\x1f": ("gzip", 16 + zlib.MAX_WBITS), b"\x78": ("deflate", zlib.MAX_WBITS)}
"""By a message's first byte."""

_GZIP_MAGIC = b"\x1f\x8b"
_ZLIB_DIVISOR = 31  # RFC 1950, section 2.2: of the first two bytes as one number


def _is_packed(content: bytes) -> bool:
    begin = content[:2]
    return begin == _GZIP_MAGIC or (
        begin[:1] == b"\x78"
        and len(begin) == len(_GZIP_MAGIC)
        and int.from_bytes(begin, "big") % _ZLIB_DIVISOR == 0
    )


def unpack(content: bytes, limit: int) -> bytes:
    """The message of ``content``, which is ``content`` itself where it is not compressed.

    Args:
        content: a message as it came.
        limit: the most bytes that it may unpack to.

    Raises:
        QueueFullError: it unpacks to more; no more than that has been unpacked.
        InvalidRequestError: it is damaged.
    """
    if not _is_packed(content):
        return content
    name, window_bits = _FORMATS[content[:1]]
    made, whole = _unpack(window_bits, content, limit)
    if len(made) > limit:
        raise QueueFullError(f"the message unpacks to more than {limit} bytes, which is the limit")
    if not whole:
        raise InvalidRequestError(f"the message ({len(content)} bytes) is not valid {name}")
    return made


def unpack_body(encoding: str, content: bytes, limit: int) -> bytes:
    """The body that ``content`` is in ``encoding``, ``gzip`` or ``deflate``.

    Args:
        encoding: the name of the format.
        content: a body as it came over HTTP.
        limit: the most bytes that it may unpack to.

    Raises:
        TooLargeError: it unpacks to more; no more than that has been unpacked.
        InvalidRequestError: it is not of the format.
    """
    made, whole = _unpack(dict(_FORMATS.values())[encoding], content, limit)
    if len(made) > limit:
        raise TooLargeError(f"the body unpacks to more than {limit} bytes, the limit")
    if not whole:
        raise InvalidRequestError(f"the body ({len(content)} bytes) is not valid {encoding}")
    return made


def _unpack(window_bits: int, content: bytes, limit: int) -> tuple[bytes, bool]:
    """What ``content`` unpacks to, a byte more than ``limit`` at most; whether that is all of it."""
    unpacker = zlib.decompressobj(window_bits)
    try:
        made = unpacker.decompress(content, limit + 1)
    except zlib.error:
        return b"", False
    return made, unpacker.eof and not unpacker.unused_data


async def unpacked(content: bytes, limit: int) -> bytes:
    """What `unpack` returns and raises; on a thread of its own, for few bytes may unpack to many."""
    return await asyncio.to_thread(unpack, content, limit) if _is_packed(content) else content
