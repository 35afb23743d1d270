"""The gRPC port serves as many connections as it may, and ends those that ask for nothing."""

import contextlib

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tessera.serving.protocol import predictor_pb2 as pb
from tests.conformance.conformance_harness import TIMEOUT_S, RunningServer, same_bits, scores_of
from tests.conformance.raw_http2 import Http2Client

MOST = 4
REFUSED = {"python": grpc.StatusCode.UNAVAILABLE, "cpp": grpc.StatusCode.DEADLINE_EXCEEDED}
"""Python's closes what is above the limit, the C++ server lets it wait in the system's queue."""


@pytest.fixture(scope="module")
def limited(kind, package):
    flags = ("--max-connections", MOST, "--idle-timeout-s", 1, "--drain-propagation-ms", 0)
    with RunningServer(kind, "--model", package, *flags) as server:
        yield server


class Connection:
    """A connection of its own."""

    def __init__(self, server, stack):
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200)]
        self._channel = grpc.insecure_channel(server.address, options=options)
        stack.callback(self._channel.close)

    def watch(self):
        """Hold it with a call that does not end; returns when the server has answered."""
        call = self._channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        return next(call(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S, wait_for_ready=True))

    def predict(self, message, **options):
        call = self._channel.unary_unary("/predictor.Predictor/Predict")
        return pb.PredictionResponse.FromString(call(message.SerializeToString(), **options))

    def close(self):
        self._channel.close()


def test_further_connections_get_in_when_others_end(limited, kind, drawn):
    message = drawn.samples(3)
    with contextlib.ExitStack() as stack:
        held = [Connection(limited, stack) for _ in range(MOST)]
        for connection in held:
            assert connection.watch().status == health_pb2.HealthCheckResponse.SERVING
        further = Connection(limited, stack)
        with pytest.raises(grpc.RpcError) as refused:
            further.predict(message, timeout=1)
        assert refused.value.code() == REFUSED[kind]
        # Those that are in are served as before.
        expected = scores_of(held[0].predict(message, timeout=TIMEOUT_S))
        held.pop().close()
        found = further.predict(message, timeout=TIMEOUT_S, wait_for_ready=True)
        assert same_bits(scores_of(found), expected)


def test_a_connection_without_a_call_ends(limited, drawn):
    with contextlib.ExitStack() as stack, Http2Client(limited.address) as idle:
        busy = Connection(limited, stack)
        busy.watch()
        limited.wait_for(lambda: idle.turn() or idle.closed)
        assert scores_of(busy.predict(drawn.samples(1), timeout=TIMEOUT_S))
    # A client whose connection was ended for that makes another one.
    assert scores_of(limited.predict(drawn.samples(1)))
