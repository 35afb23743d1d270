"""Calls that gRPC has read and the event loop has not taken yet: those of one connection end none of another."""

import contextlib
import socket
import struct
import threading

import grpc
import pytest

from tests.attack.wire import GREETING, call_headers, data, frame, message, open_call
from tests.conformance.raw_http2 import ACK, GOAWAY, PING
from tests.patience import PATIENCE_S
from tests.server.server_harness import request, serving

POLITE_CALLS = 10


@contextlib.contextmanager
def standing_still(server):
    """The server's event loop takes no call meanwhile; gRPC's own threads go on reading."""
    standing, released = threading.Event(), threading.Event()

    def stand():
        standing.set()
        released.wait(PATIENCE_S)

    server.thread.loop.call_soon_threadsafe(stand)
    assert standing.wait(PATIENCE_S)
    try:
        yield
    finally:
        released.set()


def calls_of_one_connection(content, count):
    body = message(content)
    return b"".join(
        open_call(stream, call_headers()) + data(stream, body, ends=True)
        for stream in range(1, 2 * count, 2)
    )


def frames(connection):
    """The kind and flags of each frame that the server sends, until it closes."""
    reader = connection.makefile("rb")
    while len(head := reader.read(9)) == 9:
        kind, flags = head[3:5]
        reader.read(int.from_bytes(head[:3], "big"))
        yield kind, flags


def pour(connection, content):
    """Send ``content`` and return once the server has read it or has ended the connection."""
    with contextlib.suppress(ConnectionError):
        connection.sendall(GREETING + content + frame(PING, 0, 0, struct.pack(">Q", 7)))
        for kind, flags in frames(connection):
            if kind == GOAWAY or (kind == PING and flags & ACK):
                return


@pytest.mark.parametrize(("connections", "calls"), [(8, 1_000), (35, 100)])
def test_calls_that_wait_for_the_event_loop_end_no_others(connections, calls):
    with serving() as server, contextlib.ExitStack() as stack:
        expected = server.predict(request()).predictions
        host, port = server.thread.address.split(":")
        content = calls_of_one_connection(request().SerializeToString(), calls)
        with standing_still(server):
            for _ in range(connections):
                connection = socket.create_connection((host, int(port)), PATIENCE_S)
                pour(stack.enter_context(connection), content)
            polite = [server.start(request(), timeout=PATIENCE_S) for _ in range(POLITE_CALLS)]
            with contextlib.suppress(grpc.FutureTimeoutError):
                # Where gRPC ends it, it does so at once.
                polite[-1].exception(timeout=0.5)
        assert {call.code().name for call in polite} == {"OK"}
        assert server.predict(request()).predictions == expected


def test_a_client_with_more_calls_than_a_connection_may_have_waits_with_them():
    with serving() as server:
        server.predict(request())
        calls = [server.start(request(), timeout=PATIENCE_S) for _ in range(600)]
        assert {call.code().name for call in calls} == {"OK"}
