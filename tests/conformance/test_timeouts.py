"""Timeouts as clients of any language may write them, byte by byte: gRPC's C library cuts them at three years."""

import socket
import struct

import pytest

from tessera.serving.protocol import predictor_pb2 as pb
from tests.conformance.conformance_harness import TIMEOUT_S

DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, END_HEADERS = 1, 4


def frame(kind, flags, stream, payload):
    """One frame of HTTP/2 (RFC 9113, section 4.1)."""
    size = struct.pack(">I", len(payload))[1:]
    return size + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name, value):
    """A header that is in no table (RFC 7541, section 6.2.2)."""
    return b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in (name, value))


def answer_to(address, message, timeout):
    """What a call with the header ``grpc-timeout: timeout`` gets; None: a status alone."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/predictor.Predictor/Predict",
        ":authority": "test",
        "te": "trailers",
        "content-type": "application/grpc",
        "grpc-timeout": timeout,
    }
    block = b"".join(literal(name, value) for name, value in headers.items())
    content = message.SerializeToString()
    data = b"\0" + struct.pack(">I", len(content)) + content
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), TIMEOUT_S) as connection:
        connection.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + frame(SETTINGS, 0, 0, b"")
            + frame(HEADERS, END_HEADERS, 1, block)
            + frame(DATA, END_STREAM, 1, data)
        )
        received = b""
        with connection.makefile("rb") as stream:
            while True:
                head = stream.read(9)
                assert head, "the server has closed the connection"
                payload = stream.read(int.from_bytes(head[:3], "big"))
                if head[3] == DATA:
                    received += payload
                if head[3] == HEADERS and head[4] & END_STREAM:
                    return pb.PredictionResponse.FromString(received[5:]) if received else None


@pytest.mark.parametrize("timeout", ["60S", "2562047H", "2562048H", "99999999H"])
def test_a_timeout_of_centuries_does_not_pass_at_once(server, drawn, timeout):
    message = drawn.samples(2)
    answer = answer_to(server.address, message, timeout)
    assert answer is not None
    assert answer.predictions == server.predict(message).predictions
