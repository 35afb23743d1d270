"""What a server does while the system has no more of something for it."""

import itertools
import os
import resource
import socket
import time
from pathlib import Path

import pytest

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

LOOK_S = 1.0


def cpu_seconds(pid):
    """What a process has used of CPUs."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_without_descriptors_the_pages_wait(kind, package):
    """A client that cannot be let in is not asked for again and again, and is let in later."""
    with RunningServer(kind, "--model", package, "--drain-propagation-ms", 0) as server:
        pid = server.process.pid
        host, _, port = server.http_address.rpartition(":")
        _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        held = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
        lowest_free = next(number for number in itertools.count() if number not in held)
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free, most))
        with socket.create_connection((host, int(port)), TIMEOUT_S) as client:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            began = cpu_seconds(pid)
            time.sleep(LOOK_S)
            used_s = cpu_seconds(pid) - began
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
            with client.makefile("rb") as answer:
                assert b" 200 " in answer.readline()
        assert used_s < LOOK_S / 4


SAMPLES = 1_000


def request_of(bag):
    """A request whose only ids are ``bag`` for each sample, of the first of seven features."""
    message = pb.PredictionRequest(batch_size=SAMPLES)
    message.float_features.num_features = 4
    message.float_features.values = f32([0.5] * 4 * SAMPLES)
    message.id_list_features.num_features = 7
    message.id_list_features.lengths = i32([bag] * SAMPLES + [0] * 6 * SAMPLES)
    message.id_list_features.values_int64 = i64(range(bag * SAMPLES))
    return message


def scores(content):
    """The bytes of an answer's scores: its timings differ from call to call."""
    return scores_of(pb.PredictionResponse.FromString(content)).tobytes()


def limit_memory(server, room):
    """Let the server's process have so many bytes more than now; None: as many as it wants."""
    pid = server.process.pid
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    most = resource.RLIM_INFINITY if room is None else resource.getpagesize() * pages + room
    resource.prlimit(pid, resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def test_without_memory_a_large_request_alone_is_refused(kind, package, drawn):
    """An allocation that fails is RESOURCE_EXHAUSTED for its request, and the server lives on."""
    if kind == "cpp" and any(
        sign in cpp_program().read_bytes() for sign in (b"__tsan_", b"__asan_")
    ):
        pytest.skip("a sanitizer's own memory is address space")
    flags = ["--max-request-ids", 10**7, "--max-batch-ids", 10**7, "--drain-propagation-ms", 0]
    small = drawn.samples(1).SerializeToString()
    ends = {"OK", "RESOURCE_EXHAUSTED"}
    shares = (0.5, 1.25, 1.75)
    if kind == "python":
        # Python's protobuf says of a message for which it has no memory that it is not a valid one,
        # and gRPC ends the process where it has none to read a message into.
        ends.add("INVALID_ARGUMENT")
        shares = (1.25, 1.5, 1.75)
    with RunningServer(kind, "--model", package, *flags) as server:
        expected = scores(server.raw(small))
        for bag in (1_000, 4_000):
            large = request_of(bag).SerializeToString()
            # Room for the message or not even that, and less than for what is made of it.
            for share in shares:
                limit_memory(server, int(share * len(large)))
                assert server.outcome(large)[0] in ends
                assert scores(server.raw(small)) == expected
            limit_memory(server, None)
            assert server.outcome(large)[0] == "OK"
        assert sum(server.value("tessera_requests_total", code=code) for code in ends - {"OK"}) > 0
        assert server.value("tessera_requests_total", code="INTERNAL") == 0
        server.signal()
        assert server.exit_status() == 0
