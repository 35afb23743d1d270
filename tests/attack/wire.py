"""HTTP/2 frames and HPACK header blocks as bytes, right or wrong as their writer wishes (RFC 9113, RFC 7541)."""

from __future__ import annotations

import struct

from tests.conformance.raw_http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    RESET,
    SETTINGS,
    frame,
)

PRIORITY, PUSH_PROMISE, CONTINUATION = 2, 5, 9
PADDED = 8
HEADER_TABLE_SIZE = 1
GREETING = PREFACE + frame(SETTINGS, 0, 0)

INDEXED, LITERAL_KEPT, LITERAL = (7, 0x80), (6, 0x40), (4, 0x00)
"""How HPACK says that a header is in a table, to be kept in it, or neither: bits of the prefix, first byte."""


def integer(value, prefix):
    """An integer in as many bits of the first byte as ``prefix`` says and as many bytes as it needs."""
    bits, first = prefix
    most = (1 << bits) - 1
    if value < most:
        return bytes([first | value])
    content, value = bytearray([first | most]), value - most
    while value >= 128:
        content.append(value % 128 + 128)
        value //= 128
    return bytes([*content, value])


def string(content, *, announced=None, huffman=False):
    """A string of HPACK; ``announced`` says another length than it has."""
    size = len(content) if announced is None else announced
    return integer(size, (7, 0x80 if huffman else 0)) + content


def header(name, value, kind=LITERAL):
    return integer(0, kind) + string(name.encode()) + string(value.encode())


def call_headers(path="/predictor.Predictor/Predict", *, kind=LITERAL, **replaced):
    """The header block of a gRPC call. ``replaced`` has other values, by names with "_"; None: left out."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "attack",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    for name, value in replaced.items():
        fields[name.replace("_", "-")] = value
    return b"".join(
        header(name, value, kind) for name, value in fields.items() if value is not None
    )


def open_call(stream, block=None, *, ends=False):
    flags = END_HEADERS | (END_STREAM if ends else 0)
    return frame(HEADERS, flags, stream, call_headers() if block is None else block)


def message(content, *, announced=None, compressed=False):
    """A length-prefixed message of gRPC."""
    size = len(content) if announced is None else announced
    return struct.pack(">BI", compressed, size) + content


def data(stream, content, *, ends=False):
    """DATA frames of at most 16 KiB each."""
    pieces = [content[at : at + 16_384] for at in range(0, len(content), 16_384)] or [b""]
    return b"".join(
        frame(DATA, END_STREAM if ends and at == len(pieces) - 1 else 0, stream, piece)
        for at, piece in enumerate(pieces)
    )


def reset(stream, code=8):
    return frame(RESET, 0, stream, struct.pack(">I", code))
