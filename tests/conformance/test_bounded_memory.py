"""Memory stays bounded, whoever sends how much and reads how little, and the server lives on."""

import contextlib
import gzip
import time
from collections import Counter
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tessera.serving.protocol import predictor_pb2 as pb
from tests.conformance.conformance_harness import (
    TIMEOUT_S,
    RunningServer,
    cpp_program,
    f32,
    i32,
    i64,
    scores_of,
)
from tests.conformance.raw_http2 import Http2Client
from tests.conformance.test_trouble import queued, waiting_server

MIB = 1 << 20
INFLIGHT_BYTES = 24 * MIB
FLAGS = (
    *("--max-inflight-bytes", INFLIGHT_BYTES, "--max-message-bytes", 8 * MIB),
    *("--max-request-ids", 10**6, "--drain-propagation-ms", 0),
)
BOUND_BYTES = 2 * INFLIGHT_BYTES + 240 * MIB
"""What requests may add to a server: those inside and those arriving, gRPC's own 64 MiB, the batches of
workers, and what the allocator keeps.  What the tests send is twice as much and more."""

SAMPLES = 1_000
FEATURES, DIM = 7, 8
"""The package has seven features of width eight: a sample makes seven pooled vectors and a score."""

SAMPLE_BYTES = 4 * (FEATURES * DIM + 1)
SHARED_ROW_BYTES = 2 * 4 + 4 * DIM
"""A row of a shared feature makes its length twice, as it came and in the batch, and its pooled vector."""


def large_message():
    """Six million bytes: a thousand samples of 750 ids of the first of seven features."""
    message = pb.PredictionRequest(batch_size=SAMPLES)
    message.float_features.num_features = 4
    message.float_features.values = f32([0.5] * 4 * SAMPLES)
    message.id_list_features.num_features = 7
    message.id_list_features.lengths = i32([750] * SAMPLES + [0] * 6 * SAMPLES)
    message.id_list_features.values_int64 = i64(range(750 * SAMPLES))
    return message


LARGE = large_message()


def memory(server, what="VmRSS"):
    """Bytes of the server's process, now (VmRSS) or at most so far (VmHWM)."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{what}:"))
    return 1024 * int(line.split()[1])


def grew_less(server, before, bound):
    """Whether it did; a sanitizer takes several times the memory for itself."""
    if server.kind == "cpp":
        program = cpp_program().read_bytes()
        if b"__tsan_" in program or b"__asan_" in program:
            return True
    return memory(server, "VmHWM") - before < bound


@contextlib.contextmanager
def bounded(kind, package, *flags):
    """A server that must not grow beyond the bound and answers at the end as in the beginning."""
    with RunningServer(kind, "--model", package, *FLAGS, *flags) as server:
        expected = scores_of(server.predict(LARGE)).tobytes()
        before = memory(server)
        yield server, expected
        assert grew_less(server, before, BOUND_BYTES)
        wait_until_answered(server, expected)
        assert server.process.poll() is None


def wait_until_answered(server, expected):
    server.wait_for(lambda: server.outcome(LARGE.SerializeToString())[0] == "OK")
    assert scores_of(server.predict(LARGE)).tobytes() == expected


@contextlib.contextmanager
def another_connection(server):
    """Predict, as bytes, by a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(server.address, options=options) as channel:
        yield channel.unary_unary("/predictor.Predictor/Predict")


def test_what_is_full_is_said(kind, package):
    """A connection may have half of the server's bytes, and all connections together may have all."""
    flags = ["--max-batch-samples", 10**6, "--max-batch-ids", 10**8]
    content = LARGE.SerializeToString()
    brings = 16_384 + LARGE.ByteSize() + SAMPLE_BYTES * SAMPLES

    def refusal(call):
        with pytest.raises(grpc.RpcError) as caught:
            call(content, timeout=TIMEOUT_S)
        return caught.value.code().name, caught.value.details()

    with waiting_server(kind, package, *FLAGS, *flags) as server, contextlib.ExitStack() as stack:
        second, third = (stack.enter_context(another_connection(server)) for _ in range(2))
        waiting = []
        for call in (server.raw, second):
            for _ in range(2):
                waiting.append(call.future(content, timeout=TIMEOUT_S))
                server.wait_for(queued(server, len(waiting)))
            if call is server.raw:
                assert refusal(call) == (
                    "RESOURCE_EXHAUSTED",
                    (
                        f"the connection has its share: requests and answers of it take {2 * brings} bytes "
                        f"(limit {INFLIGHT_BYTES // 2}), this request brings {brings}; try again later"
                    ),
                )
        assert refusal(third) == (
            "RESOURCE_EXHAUSTED",
            (
                f"the server is full: requests and answers in it take {4 * brings} bytes (limit "
                f"{INFLIGHT_BYTES}), this request brings {brings}; try again later"
            ),
        )
        assert server.value("tessera_rejected_total", model="ranker", reason="queue_full") == 2
        assert server.value("tessera_requests_total", code="RESOURCE_EXHAUSTED") == 2
        server.signal()
        assert all(call.result(TIMEOUT_S) for call in waiting)
        assert server.exit_status() == 0


def test_a_request_that_can_never_come_in_is_invalid(kind, package, drawn, draw_with):
    """However it grows: by its message, or by the copies that shared features become."""
    limit = 120_000
    flags = ["--max-inflight-bytes", limit, "--max-message-bytes", limit]
    with RunningServer(kind, "--model", package, *flags, "--drain-propagation-ms", 0) as server:
        message = drawn.samples(600)
        ranking = draw_with(max_bag=20).ranking(300)
        ranked = ranking.shared_features
        own, rows = ranking.id_list_features, ranked.num_rows
        lengths = 300 * own.num_features + rows * ranked.features.num_features
        ids = sum(
            len(part.values_int64) // 8 + len(part.values) // 4 for part in (own, ranked.features)
        )
        made = 4 * lengths + 8 * ids + rows * len(ranked.names) * SHARED_ROW_BYTES
        for sent, copied in ((message, 0), (ranking, made)):
            takes = 16_384 + sent.ByteSize() + SAMPLE_BYTES * sent.batch_size + copied
            assert sent.ByteSize() < limit < takes
            assert server.outcome(sent.SerializeToString()) == (
                "INVALID_ARGUMENT",
                f"the request takes {takes} bytes in the server, the limit is {limit}",
            )
        assert server.value("tessera_rejected_total", reason="invalid") == 2


def test_a_flood_of_large_requests(kind, package):
    content = LARGE.SerializeToString()
    with bounded(kind, package) as (server, expected):
        calls = [server.raw.future(content, timeout=TIMEOUT_S) for _ in range(80)]
        ends = Counter(call.code().name for call in calls)
        # gRPC itself may end the connection, which is UNAVAILABLE to the calls that had not come yet.
        assert (
            {"OK", "RESOURCE_EXHAUSTED"}
            <= ends.keys()
            <= {"OK", "RESOURCE_EXHAUSTED", "UNAVAILABLE"}
        )
        for call in calls:
            if call.code() is grpc.StatusCode.OK:
                answer = pb.PredictionResponse.FromString(call.result())
                assert scores_of(answer).tobytes() == expected
        # Those that gRPC itself refused are not among them.
        refused = server.value("tessera_rejected_total", reason="queue_full")
        assert 0 < refused <= ends["RESOURCE_EXHAUSTED"]


COMPRESSIONS = (grpc.Compression.Gzip, grpc.Compression.Deflate)


def test_compressed_messages_are_answered_as_others(kind, package):
    with bounded(kind, package) as (server, expected):
        for compression in COMPRESSIONS:
            answer = server.predict(LARGE, compression=compression)
            assert scores_of(answer).tobytes() == expected
        # Health checks are compressed where that makes them shorter.
        with grpc.insecure_channel(server.address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            for compression in COMPRESSIONS:
                with pytest.raises(grpc.RpcError) as caught:
                    check(
                        health_pb2.HealthCheckRequest(service="x" * 10_000),
                        compression=compression,
                        timeout=TIMEOUT_S,
                    )
                assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_messages_are_not_unpacked_beyond_the_limit(kind, package):
    with RunningServer(kind, "--model", package, *FLAGS) as server:
        server.predict(LARGE)
        before = memory(server)
        for compression in COMPRESSIONS:
            with pytest.raises(grpc.RpcError) as caught:
                server.raw(bytes(400 * MIB), compression=compression, timeout=TIMEOUT_S)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert caught.value.details() == (
                f"the message unpacks to more than {8 * MIB} bytes, which is the limit"
            )
        assert grew_less(server, before, 100 * MIB)
        server.predict(LARGE)


def test_damaged_compressed_messages_are_invalid(kind, package, drawn):
    packed = gzip.compress(drawn.samples(100).SerializeToString())
    changed = bytearray(packed)
    changed[len(packed) // 2] ^= 0x55
    contents = (packed[:-1], packed + b"x", bytes(changed), packed[:4] + bytes(100))
    with RunningServer(kind, "--model", package, *FLAGS) as server:

        def send(content, encoding):
            with Http2Client(server.address) as client:
                client.call(content, encoding=encoding)
                server.wait_for(lambda: pump([client], enough=lambda: client.ended) or client.ended)
                assert client.ended
                assert not client.closed

        for content in contents:
            send(content, "gzip")
        assert server.value("tessera_requests_total", code="INVALID_ARGUMENT") == len(contents)
        assert server.value("tessera_rejected_total", reason="invalid") == len(contents)
        send(packed, "gzip")
        assert server.value("tessera_requests_total", code="OK") == 1
        send(packed, "snappy")
        assert server.value("tessera_requests_total", code="OK") == 1


PUMP_S = 30.0


def pump(clients, enough=lambda: False):
    """Let the clients send until ``enough()``, or until nothing has moved for a second.

    A server whose memory is full may go on letting a few bytes in for as long as somebody sends, so that
    something always moves; after ``PUMP_S`` seconds the clients have done what they can, too.
    """
    began = moved = time.monotonic()
    while not enough() and (now := time.monotonic()) - moved < 1.0 and now - began < PUMP_S:
        if sum(client.turn() for client in clients):
            moved = time.monotonic()
        else:
            time.sleep(0.01)


def test_messages_that_never_come_whole(kind, package):
    half = bytes(4 * MIB)
    with bounded(kind, package) as (server, _), contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Http2Client(server.address)) for _ in range(40)]
        for client in clients:
            for _ in range(5):
                client.call(half, announced=8 * MIB)
        whole = sum(client.unsent() for client in clients)
        pump(clients)
        # The server was sent, or has refused, more than it may hold.
        assert whole - sum(client.unsent() for client in clients) > 2 * INFLIGHT_BYTES
        # Small requests of others are answered meanwhile.
        small = pb.PredictionRequest(batch_size=1)
        small.float_features.num_features = 4
        small.float_features.values = f32([0.5] * 4)
        small.id_list_features.num_features = 7
        small.id_list_features.lengths = i32([0] * 7)
        server.wait_for(lambda: server.outcome(small.SerializeToString())[0] == "OK")


def test_answers_that_nobody_reads(kind, package, drawn):
    content = drawn.samples(200).SerializeToString()
    with bounded(kind, package) as (server, _), contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(Http2Client(server.address, reply_window=0)) for _ in range(40)
        ]
        for client in clients:
            for _ in range(50):
                client.call(content)

        # Answers fill the server until it refuses.  A refusal is not a message, so it does not wait.
        # No connection has as many calls as it may, and all of them together more than the budget holds,
        # however fast they are computed: a waiting answer counts for at least 16 KiB.
        assert INFLIGHT_BYTES < 16_384 * 40 * 50

        def refused():
            pump(clients)
            return server.value("tessera_rejected_total", reason="queue_full")

        server.wait_for(lambda: refused() and server.value("tessera_queue_requests") == 0)
        waiting = server.value("tessera_requests_total", model="ranker", code="OK") - 1
        assert 0 < 16_384 * waiting < INFLIGHT_BYTES
        assert sum(len(client.ended) for client in clients) > 0


def test_shared_rows_that_nobody_uses_are_bounded(kind, package):
    """Four samples of three million users without ids: 12 MB that took 2.6 GB in the server."""
    message = pb.PredictionRequest(batch_size=4)
    message.float_features.num_features = 4
    message.float_features.values = f32([0.5] * 16)
    message.id_list_features.num_features = FEATURES - 1
    message.id_list_features.lengths = i32([0] * 4 * (FEATURES - 1))
    shared = message.shared_features
    shared.names.append("user")
    shared.features.num_features = 1
    shared.row_index = i32([0] * 4)

    def outcome(rows):
        shared.num_rows = rows
        shared.features.lengths = i32([0] * rows)
        return server.outcome(message.SerializeToString())

    limits = ["--max-message-bytes", 16 * MIB, "--max-inflight-bytes", 16 * MIB]
    most = 200_000
    limits += ["--max-request-samples", most, "--max-queue-samples", most]
    with RunningServer(kind, "--model", package, *limits, "--drain-propagation-ms", 0) as server:
        assert outcome(4)[0] == "OK"
        before = memory(server)
        rows = 3_000_000
        assert outcome(rows) == (
            "INVALID_ARGUMENT",
            f"shared_features.num_rows is {rows}, the limit is {most} rows",
        )
        # As many as may be take 48 bytes each: their lengths in the message and in the batch, and a vector.
        assert outcome(100_000)[0] == "OK"
        assert outcome(most)[0] == "OK"
        assert grew_less(server, before, 100 * MIB)
