"""What is sent to the HTTP port (metrics, probes, status page)."""

from __future__ import annotations

from tests.attack.pouring import Registry

FLOODS = Registry(port="http")
GET = b"GET /metrics HTTP/1.1\r\nHost: attack\r\n"


@FLOODS.add(connections=1_000, holds=True)
def idle_http(_):
    """1,000 connections without a byte."""
    yield b""


@FLOODS.add(connections=1_000, holds=True)
def half_requests(_):
    """1,000 requests without their end."""
    yield GET


@FLOODS.add(connections=100, holds=True, drips=True)
def slow_headers(_):
    """Requests whose header grows by a line at a time."""
    yield GET
    while True:
        yield b"X-Slow: 1\r\n"


@FLOODS.add()
def header_without_end(_):
    """A header line without an end."""
    yield GET + b"X-Long: "
    while True:
        yield b"x" * 65_536


@FLOODS.add()
def headers_for_ever(_):
    """Header lines without an end."""
    yield GET
    while True:
        yield b"X-Many: 1\r\n" * 1_000


@FLOODS.add()
def request_line_without_end(_):
    """A request line without an end."""
    yield b"GET /"
    while True:
        yield b"x" * 65_536


@FLOODS.add(reads=False)
def pages_unread(_):
    """Pipelined requests whose answers nobody reads."""
    while True:
        yield (GET + b"\r\n") * 100


@FLOODS.add()
def pages(_):
    """Pipelined requests whose answers are read."""
    while True:
        yield (GET + b"\r\n") * 10


@FLOODS.add()
def bodies(_):
    """A POST with a body of 10 GB."""
    yield b"POST / HTTP/1.1\r\nHost: attack\r\nContent-Length: 10000000000\r\n\r\n"
    while True:
        yield bytes(65_536)


@FLOODS.add()
def chunks(_):
    """A body in chunks of one byte."""
    yield b"POST / HTTP/1.1\r\nHost: attack\r\nTransfer-Encoding: chunked\r\n\r\n"
    while True:
        yield b"1\r\nx\r\n" * 1_000


@FLOODS.add(connections=50)
def opened_and_closed_http(_):
    """Connections that end at once."""
    yield b""


@FLOODS.add(connections=8)
def http_2_on_http(_):
    """The preface of HTTP/2 on the HTTP port."""
    yield b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100)
