"""What RFC 9113 (sections 3 to 8) asks of a server, frame by frame, of the C++ server's own front.

A case is what a client sends after its greeting, and what the RFC allows as the answer.  Where it asks for a
stream error, a server may end the connection with the same error (section 5.4.1).  The Python server's frames are
gRPC's own library's.
"""

import contextlib
import itertools
import socket
import struct
from dataclasses import dataclass

import pytest

from tests.attack.wire import (
    CONTINUATION,
    PADDED,
    PRIORITY,
    PUSH_PROMISE,
    call_headers,
    data,
    header,
    message,
    open_call,
    reset,
)
from tests.conformance.conformance_harness import TIMEOUT_S, RunningServer, cpp_program
from tests.conformance.raw_http2 import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    PREFACE,
    RESET,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)

pytestmark = pytest.mark.skipif(
    cpp_program() is None, reason="the C++ server is not built (make build)"
)

PROTOCOL, FLOW_CONTROL, CLOSED, FRAME_SIZE, REFUSED, COMPRESSION, CALM = 1, 3, 5, 6, 7, 9, 11
HAS_PRIORITY = 0x20
MAX_CONCURRENT, MAX_FRAME_SIZE, ENABLE_PUSH = 3, 5, 2
MOST = 2**31 - 1
STREAMS = 5
"""Calls of a connection at a time, as the server is started."""

PATH = "/grpc.health.v1.Health/Check"
BLOCK = call_headers(PATH)
CHECK = message(b"")
PREFIX_BYTES = len(CHECK)
"""A health check of the server as a whole."""


def number(value):
    return struct.pack(">I", value)


def setting(name, value):
    return struct.pack(">HI", name, value)


def headers(stream, block, flags=END_HEADERS | END_STREAM):
    return frame(HEADERS, flags, stream, block)


def call(stream, block=BLOCK):
    """A whole call that is answered."""
    return open_call(stream, block) + data(stream, CHECK, ends=True)


def edited(**fields):
    return call_headers(PATH, **fields)


@dataclass(frozen=True)
class Case:
    """``errors``: the codes that may end the connection or, if ``stream``, that stream; none: it lives on.

    ``answered`` is the stream of a call that must be answered.
    """

    name: str
    sent: bytes
    errors: tuple[int, ...] = ()
    stream: int = 0
    answered: int = 0


def fails(name, sent, *errors):
    return Case(name, sent, errors=errors)


def stream_fails(name, sent, *errors, stream=1):
    return Case(name, sent, errors=errors, stream=stream)


def answers(name, sent, stream=1):
    return Case(name, sent, answered=stream)


def malformed(name, block):
    """A request that is malformed is a stream error PROTOCOL_ERROR (section 8.1.1)."""
    return stream_fails(name, headers(1, block), PROTOCOL)


def out_of_order():
    """A pseudo-header behind another header."""
    return header("te", "trailers") + edited(te=None)


CASES = (
    # 4.1, 5.5: what is not known is ignored.
    answers("unknown frame", frame(0x16, 0xFF, 0, b"xxxx") + call(1)),
    answers("unknown flags", frame(PING, 0xFE, 0, bytes(8)) + call(1)),
    answers("reserved bit", frame(PING, 0, 1 << 31, bytes(8)) + call(1)),
    answers(
        "unknown frame of a stream",
        open_call(1, BLOCK) + frame(0x16, 0, 1) + data(1, CHECK, ends=True),
    ),
    fails("unknown frame in a block", headers(1, BLOCK, 0) + frame(0x16, 0, 0), PROTOCOL),
    # 4.2
    answers(
        "largest frame",
        open_call(1, BLOCK) + frame(DATA, END_STREAM, 1, message(b"\x12\xf8\x7f" + bytes(16_376))),
    ),
    # It is also more than --max-header-bytes.
    fails("HEADERS too large", headers(1, BLOCK + bytes(16_385), END_HEADERS), FRAME_SIZE, CALM),
    # 4.3
    fails("bad block", headers(1, b"\x40"), COMPRESSION),
    fails("index beyond the table", headers(1, BLOCK + b"\xff\xff\x7f"), COMPRESSION),
    fails("PRIORITY in a block", headers(1, BLOCK, 0) + frame(PRIORITY, 0, 1, bytes(5)), PROTOCOL),
    fails("HEADERS of another in a block", headers(1, BLOCK, 0) + open_call(3, BLOCK), PROTOCOL),
    # 5.1: idle
    fails("DATA of an idle stream", data(1, CHECK), PROTOCOL),
    fails("WINDOW_UPDATE of an idle stream", frame(WINDOW_UPDATE, 0, 1, number(1)), PROTOCOL),
    fails("CONTINUATION of an idle stream", frame(CONTINUATION, END_HEADERS, 1, BLOCK), PROTOCOL),
    # gRPC's own library (1.51) sends it; it is not heard.
    answers("RST_STREAM of an idle stream", reset(3) + call(5), stream=5),
    # 5.1: half closed, closed
    stream_fails("DATA after the end", call(1) + data(1, CHECK), CLOSED),
    stream_fails("HEADERS after the end", call(1) + headers(1, BLOCK), CLOSED, PROTOCOL),
    fails(
        "CONTINUATION after the end", call(1) + frame(CONTINUATION, 4, 1, BLOCK), CLOSED, PROTOCOL
    ),
    # What was sent before an error was heard of looks the same, and so is ignored (section 5.1).
    answers(
        "DATA after a reset",
        open_call(1, BLOCK) + reset(1) + data(1, CHECK) + call(3),
        stream=3,
    ),
    answers(
        "PRIORITY after a reset",
        call(1) + reset(1) + frame(PRIORITY, 0, 1, bytes(4) + b"\x10") + call(3),
        stream=3,
    ),
    answers(
        "HEADERS after a reset",
        open_call(1, BLOCK) + reset(1) + headers(1, BLOCK) + call(3),
        stream=3,
    ),
    # 5.1.1
    fails("an even stream", headers(2, BLOCK), PROTOCOL),
    answers("a smaller stream", call(5) + call(3) + call(7), stream=7),
    # 5.1.2
    stream_fails(
        "too many streams",
        b"".join(open_call(1 + 2 * i, BLOCK) for i in range(STREAMS + 1)),
        REFUSED,
        PROTOCOL,
        stream=1 + 2 * STREAMS,
    ),
    # 6.1
    fails("DATA of no stream", frame(DATA, 0, 0, b"x"), PROTOCOL),
    fails(
        "DATA with too much padding",
        open_call(1, BLOCK) + frame(DATA, PADDED, 1, b"\x05xxx"),
        PROTOCOL,
    ),
    answers(
        "DATA with padding",
        open_call(1, BLOCK) + frame(DATA, PADDED | 1, 1, b"\x03" + CHECK + bytes(3)),
    ),
    # 6.2
    fails("HEADERS of no stream", headers(0, BLOCK), PROTOCOL),
    fails(
        "HEADERS with too much padding", frame(HEADERS, PADDED | 5, 1, b"\xff" + BLOCK), PROTOCOL
    ),
    answers(
        "HEADERS with padding and priority",
        frame(
            HEADERS,
            PADDED | HAS_PRIORITY | END_HEADERS,
            1,
            b"\x02" + bytes(4) + b"\x10" + BLOCK + bytes(2),
        )
        + data(1, CHECK, ends=True),
    ),
    # 6.3
    fails("PRIORITY of no stream", frame(PRIORITY, 0, 0, bytes(5)), PROTOCOL),
    stream_fails(
        "PRIORITY of four bytes", open_call(1, BLOCK) + frame(PRIORITY, 0, 1, bytes(4)), FRAME_SIZE
    ),
    # 6.4
    fails("RST_STREAM of no stream", reset(0), PROTOCOL),
    fails(
        "RST_STREAM of three bytes", open_call(1, BLOCK) + frame(RESET, 0, 1, bytes(3)), FRAME_SIZE
    ),
    answers(
        "RST_STREAM with an unknown code",
        open_call(1, BLOCK) + reset(1, 0xFFFF) + call(3),
        stream=3,
    ),
    # 6.5
    fails("SETTINGS' acknowledgement with content", frame(SETTINGS, ACK, 0, bytes(6)), FRAME_SIZE),
    fails("SETTINGS of a stream", frame(SETTINGS, 0, 1, bytes(6)), PROTOCOL),
    fails("SETTINGS of five bytes", frame(SETTINGS, 0, 0, bytes(5)), FRAME_SIZE),
    fails("ENABLE_PUSH of 2", frame(SETTINGS, 0, 0, setting(ENABLE_PUSH, 2)), PROTOCOL),
    fails(
        "a window above the most",
        frame(SETTINGS, 0, 0, setting(INITIAL_WINDOW_SIZE, 2**31)),
        FLOW_CONTROL,
    ),
    fails("frames below 16,384", frame(SETTINGS, 0, 0, setting(MAX_FRAME_SIZE, 16_383)), PROTOCOL),
    fails("frames of 2^24", frame(SETTINGS, 0, 0, setting(MAX_FRAME_SIZE, 2**24)), PROTOCOL),
    answers("an unknown setting", frame(SETTINGS, 0, 0, setting(0xFF, 1)) + call(1)),
    answers(
        "no streams for the server", frame(SETTINGS, 0, 0, setting(MAX_CONCURRENT, 0)) + call(1)
    ),
    # 6.6
    fails(
        "PUSH_PROMISE", open_call(1, BLOCK) + frame(PUSH_PROMISE, 4, 1, number(2) + BLOCK), PROTOCOL
    ),
    # 6.7
    fails("PING of a stream", frame(PING, 0, 1, bytes(8)), PROTOCOL),
    fails("PING of seven bytes", frame(PING, 0, 0, bytes(7)), FRAME_SIZE),
    answers("PING's acknowledgement", frame(PING, ACK, 0, bytes(8)) + call(1)),
    # 6.8
    fails("GOAWAY of a stream", frame(GOAWAY, 0, 1, bytes(8)), PROTOCOL),
    answers(
        "GOAWAY with an unknown code", call(1) + frame(GOAWAY, 0, 0, number(0) + number(0xFFFF))
    ),
    # 6.9
    fails("no more window", frame(WINDOW_UPDATE, 0, 0, number(0)), PROTOCOL),
    stream_fails(
        "no more window of a stream",
        open_call(1, BLOCK) + frame(WINDOW_UPDATE, 0, 1, number(0)),
        PROTOCOL,
    ),
    fails("WINDOW_UPDATE of three bytes", frame(WINDOW_UPDATE, 0, 0, bytes(3)), FRAME_SIZE),
    fails("too much window", frame(WINDOW_UPDATE, 0, 0, number(MOST)), FLOW_CONTROL),
    stream_fails(
        "too much window of a stream",
        open_call(1, BLOCK) + frame(WINDOW_UPDATE, 0, 1, number(MOST)),
        FLOW_CONTROL,
    ),
    stream_fails(
        "settings that make too much window",
        open_call(1, BLOCK)
        + frame(WINDOW_UPDATE, 0, 1, number(MOST - 65_535))
        + frame(SETTINGS, 0, 0, setting(INITIAL_WINDOW_SIZE, 65_536)),
        FLOW_CONTROL,
    ),
    answers(
        "a window that becomes negative, and enough again",
        open_call(1, BLOCK)
        + frame(SETTINGS, 0, 0, setting(INITIAL_WINDOW_SIZE, 0))
        + data(1, CHECK, ends=True)
        + frame(WINDOW_UPDATE, 0, 1, number(3))
        + frame(WINDOW_UPDATE, 0, 1, number(97)),
    ),
    # 6.10
    answers(
        "a block in eight frames",
        headers(1, BLOCK[:1], 0)
        + b"".join(frame(CONTINUATION, 0, 1, BLOCK[i : i + 1]) for i in range(1, 7))
        + frame(CONTINUATION, END_HEADERS, 1, BLOCK[7:])
        + data(1, CHECK, ends=True),
    ),
    fails("CONTINUATION of no stream", headers(1, BLOCK, 0) + frame(CONTINUATION, 4, 0), PROTOCOL),
    fails(
        "CONTINUATION of another stream", headers(1, BLOCK, 0) + frame(CONTINUATION, 4, 3), PROTOCOL
    ),
    fails(
        "CONTINUATION after the block", open_call(1, BLOCK) + frame(CONTINUATION, 4, 1), PROTOCOL
    ),
    fails("DATA in a block", headers(1, BLOCK, 0) + data(1, CHECK), PROTOCOL),
    # 8.1
    answers(
        "trailers",
        open_call(1, BLOCK) + data(1, CHECK) + headers(1, header("x-after", "1")),
    ),
    stream_fails(
        "trailers that do not end",
        open_call(1, BLOCK) + headers(1, header("x-after", "1"), END_HEADERS),
        PROTOCOL,
    ),
    stream_fails(
        "a pseudo-header in trailers",
        open_call(1, BLOCK) + headers(1, header(":method", "POST")),
        PROTOCOL,
    ),
    # 8.1.1: content-length
    stream_fails(
        "less content than its length",
        open_call(1, edited(content_length="6")) + data(1, CHECK, ends=True),
        PROTOCOL,
    ),
    stream_fails(
        "more content than its length",
        open_call(1, edited(content_length="4")) + data(1, CHECK, ends=True),
        PROTOCOL,
    ),
    stream_fails(
        "more content than its length, in two frames",
        open_call(1, edited(content_length="6")) + data(1, CHECK) + data(1, b"xx", ends=True),
        PROTOCOL,
    ),
    answers("content of its length", call(1, edited(content_length="5"))),
    # 8.2
    malformed("an upper-case name", BLOCK + header("X-Case", "1")),
    malformed("a name with a space", BLOCK + header("x case", "1")),
    malformed("an empty name", BLOCK + header("", "1")),
    malformed("a value with a line's end", BLOCK + header("x-value", "a\r\nb")),
    malformed("connection", BLOCK + header("connection", "keep-alive")),
    malformed("keep-alive", BLOCK + header("keep-alive", "1")),
    malformed("proxy-connection", BLOCK + header("proxy-connection", "1")),
    malformed("transfer-encoding", BLOCK + header("transfer-encoding", "chunked")),
    malformed("upgrade", BLOCK + header("upgrade", "h2c")),
    malformed("te that is not trailers", edited(te="gzip")),
    # 8.3
    malformed("a pseudo-header behind others", out_of_order()),
    malformed("an unknown pseudo-header", header(":other", "1") + BLOCK),
    malformed("a pseudo-header of answers", header(":status", "200") + BLOCK),
    malformed("no :method", edited(**{":method": None})),
    malformed("no :scheme", edited(**{":scheme": None})),
    malformed("no :path", edited(**{":path": None})),
    malformed("an empty :path", edited(**{":path": ""})),
    *(
        malformed(f"two {name}", header(name, value) + BLOCK)
        for name, value in ((":method", "POST"), (":scheme", "http"), (":path", PATH))
    ),
)


@pytest.fixture(scope="module")
def server(package):
    flags = ("--max-connection-streams", STREAMS, "--drain-propagation-ms", 0)
    with RunningServer("cpp", "--model", package, *flags) as running:
        yield running


def connected(server):
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), TIMEOUT_S)


def frames_of(client):
    """The frames that come, until the connection ends."""
    received = b""
    while True:
        while len(received) >= 9 and len(received) >= 9 + int.from_bytes(received[:3], "big"):
            size = int.from_bytes(received[:3], "big")
            kind, flags, stream = struct.unpack(">BBI", received[3:9])
            yield kind, flags, stream, received[9 : 9 + size]
            received = received[9 + size :]
        try:
            content = client.recv(65_536)
        except ConnectionResetError:
            return
        if not content:
            return
        received += content


def outcome(frames, case):
    """What comes of a case: ("connection" or "stream", code), "answered" or "closed"."""
    for kind, flags, stream, body in frames:
        if kind == GOAWAY and (code := int.from_bytes(body[4:8], "big")):
            return "connection", code
        if kind == RESET and stream == case.stream:
            return "stream", int.from_bytes(body, "big")
        if kind == HEADERS and flags & END_STREAM and stream == case.answered:
            return "answered"
    return "closed"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_frames(server, case):
    greeting = PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0)
    with connected(server) as client:
        client.sendall(greeting + case.sent)
        got = outcome(frames_of(client), case)
    if case.answered:
        assert got == "answered"
        return
    allowed = {("connection", code) for code in case.errors}
    if case.stream:
        allowed |= {("stream", code) for code in case.errors}
    assert got in allowed


def unknown_field(size):
    """``size`` bytes of a message of protobuf: a field that health checks do not have."""
    for count in range(1, 5):
        length, digits = size - 1 - count, b""
        for place in range(count):
            more = place + 1 < count
            digits += bytes([(length >> 7 * place) & 0x7F | 0x80 * more])
        if length >> 7 * count == 0:
            break
    return b"\x12" + digits + bytes(length)


def test_data_is_as_long_as_the_server_has_said(server):
    """4.2: a frame of as many bytes as its SETTINGS allow is heard, and a longer one is an error."""
    for more, expected in (
        (0, ["answered"]),
        (1, [("connection", FRAME_SIZE), ("stream", FRAME_SIZE)]),
    ):
        case = Case("", b"", stream=1, answered=1)
        with connected(server) as client:
            client.sendall(PREFACE + frame(SETTINGS, 0, 0))
            frames = frames_of(client)
            said = next(body for kind, flags, _, body in frames if kind == SETTINGS and not flags)
            longest = dict(struct.iter_unpack(">HI", said)).get(MAX_FRAME_SIZE, 16_384)
            sent = frame(DATA, END_STREAM, 1, message(unknown_field(longest + more - PREFIX_BYTES)))
            client.sendall(frame(SETTINGS, ACK, 0) + open_call(1, BLOCK) + sent)
            assert outcome(frames, case) in expected


@pytest.mark.parametrize(
    "begin",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\r",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(24),
        PREFACE + frame(PING, 0, 0, bytes(8)),
        PREFACE + open_call(1, BLOCK),
        PREFACE + frame(SETTINGS, ACK, 0),
    ],
    ids=["another_text", "HTTP_1", "zeros", "PING_first", "HEADERS_first", "acknowledgement_first"],
)
def test_a_connection_begins_with_the_preface_and_settings(server, begin):
    """Section 3.4."""
    with connected(server) as client:
        client.sendall(begin)
        kinds = {
            (kind, int.from_bytes(body[4:8], "big") if kind == GOAWAY else 0)
            for kind, _, _, body in frames_of(client)
        }
    assert (GOAWAY, PROTOCOL) in kinds
    assert not {kind for kind, _ in kinds} - {SETTINGS, WINDOW_UPDATE, GOAWAY}


def test_pings_and_settings_are_acknowledged(server):
    """Sections 6.5.3 and 6.7."""
    with connected(server) as client:
        client.sendall(PREFACE + frame(SETTINGS, 0, 0) + frame(PING, 0, 0, b"12345678"))
        seen = list(itertools.islice(frames_of(client), 4))
    assert (SETTINGS, ACK, 0, b"") in seen
    assert (PING, ACK, 0, b"12345678") in seen


def test_what_ends_a_connection_that_floods_is_counted(server):
    count = lambda: server.value("tessera_connections_closed_total", reason="control_frames")  # noqa: E731 - it is one line
    before = count()
    nothing = frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1)) * 100_000
    with connected(server) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(PREFACE + frame(SETTINGS, 0, 0) + nothing)
        server.wait_for(lambda: count() == before + 1)


def test_answers_keep_to_the_windows_of_their_reader(server):
    """Section 6.9: no byte more, and the rest once there is room."""
    with connected(server) as client:
        window = setting(INITIAL_WINDOW_SIZE, 4)
        client.sendall(PREFACE + frame(SETTINGS, 0, 0, window) + call(1))
        frames = frames_of(client)
        first = next(body for kind, _, _, body in frames if kind == DATA)
        assert len(first) == 4
        client.settimeout(0.1)
        with pytest.raises(TimeoutError):
            next(frames)
        client.settimeout(TIMEOUT_S)
        client.sendall(frame(WINDOW_UPDATE, 0, 1, number(100)))
        kind, flags, stream, _ = list(
            itertools.takewhile(lambda one: one[0] != HEADERS, frames_of(client))
        )[-1]
        assert (kind, stream, flags & END_STREAM) == (DATA, 1, 0)
