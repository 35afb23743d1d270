"""The C++ server's own tests and programs, where they are built."""

import collections
import contextlib
import itertools
import json
import os
import queue
import re
import socket
import struct
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest

from tessera.serving.capacity.calibration import read_calibration
from tessera.serving.client import Draw, RequestDrawer, encode_request, read_schema
from tessera.serving.protocol import predictor_pb2 as pb
from tests.conformance.conformance_harness import CPP_PROGRAM
from tests.package_factory import package_file
from tests.patience import PATIENCE_S

BUILD = CPP_PROGRAM.parent

pytestmark = pytest.mark.skipif(
    not CPP_PROGRAM.exists(), reason="the C++ server is not built (make build)"
)


def run(*command, **options):
    options.setdefault("timeout", PATIENCE_S)
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, **options
    )


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return package_file(tmp_path_factory.mktemp("cpp"))


@pytest.mark.parametrize("program", ["unit_tests", "http2_tests", "front_tests", "torch_tests"])
def test_unit_tests(program):
    done = run(BUILD / "tests" / program, "--gtest_brief=1")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.fixture
def bare_server(package):
    """The server with an empty environment (but for a sanitizer's options): no PATH, no Python."""
    options = {name: os.environ[name] for name in os.environ if name.endswith("SAN_OPTIONS")}
    command = [CPP_PROGRAM, "--model", package, "--host", "127.0.0.1"]
    command += ["--port", "0", "--http-port", "0", "--drain-propagation-ms", "0"]
    process = subprocess.Popen(
        list(map(str, command)), stderr=subprocess.PIPE, text=True, env=options
    )
    yield process
    process.kill()
    process.wait()
    process.stderr.close()


def ready_line(process):
    for line in process.stderr:
        if '"event":"ready"' in line:
            return json.loads(line)
    raise AssertionError("the server ended before it was ready")


def ready_port(process):
    return ready_line(process)["port"]


def test_it_starts_without_a_path_or_python(bare_server):
    assert ready_port(bare_server) > 0
    maps = Path(f"/proc/{bare_server.pid}/maps").read_text()
    assert "libpython" not in maps
    bare_server.terminate()
    assert bare_server.wait(PATIENCE_S) == 0


def outcome(call, content):
    try:
        call(content, timeout=PATIENCE_S)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


def test_clients_that_send_on_through_the_end_hear_unavailable(package):
    """Nobody is told CANCELLED, which gRPC says of calls that reach it while it shuts down."""
    drawer = RequestDrawer(read_schema(package), Draw(ids="uniform"), seed=0)
    content = encode_request(drawer.samples(1))
    command = [CPP_PROGRAM, "--model", package, "--host", "127.0.0.1"]
    command += ["--port", "0", "--http-port", "0", "--drain-propagation-ms", "0"]
    seen = collections.Counter()
    for _ in range(3):
        process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
        port = ready_port(process)
        ended = threading.Event()
        statuses = queue.SimpleQueue()

        def send(port=port, ended=ended, statuses=statuses):
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                call = channel.unary_unary("/predictor.Predictor/Predict")
                while not ended.is_set():
                    statuses.put(outcome(call, content))

        senders = [threading.Thread(target=send) for _ in range(6)]
        for sender in senders:
            sender.start()
        while statuses.qsize() < 100:
            assert process.poll() is None
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        ended.set()
        for sender in senders:
            sender.join()
        process.stderr.close()
        while not statuses.empty():
            seen[statuses.get()] += 1
    assert seen.keys() == {"OK", "UNAVAILABLE"}, seen


@pytest.mark.parametrize("loop", [["--in-flight", "8"], ["--rate", "200"]], ids=["closed", "open"])
def test_load_generator(bare_server, package, tmp_path, loop):
    port = ready_port(bare_server)
    csv = tmp_path / "load.csv"
    command = [BUILD / "tessera-load", "--address", f"127.0.0.1:{port}", "--model-file", package]
    command += ["--samples", "3", "--ids-per-bag", "2", "--shared-features", "2", "--csv", csv]
    command += ["--warm-up-s", "0", "--duration-s", "0.5", *loop]
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "latency ms p50" in done.stdout
    header, line = csv.read_text().splitlines()
    row = dict(zip(header.split(","), line.split(","), strict=True))
    assert int(row["answered"]) > 10
    assert int(row["failed"]) == 0
    assert float(row["batch_samples"]) >= 3


def calibrate(server_log, package, file, *flags):
    command = [BUILD / "tessera-load", "--address", f"127.0.0.1:{server_log['port']}"]
    command += ["--http-address", f"127.0.0.1:{server_log['http_port']}", "--calibrate", file]
    command += ["--model-file", package, "--warm-up-s", "0", "--duration-s", "0.2"]
    return run(*command, *flags)


def test_calibration_writes_costs_that_can_be_simulated(bare_server, package, tmp_path):
    """tessera-load writes the file, tessera.serving.capacity reads it."""
    ready = ready_line(bare_server)
    file = tmp_path / "costs.json"
    done = calibrate(ready, package, file, "--samples", "2", "--ids-per-bag", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".partial"] == []
    found = read_calibration(file)
    assert found.server == "cpp"
    assert found.samples == 2
    assert found.ids_per_sample % 3 == 0
    assert [run.samples for run in found.alone] == [1, 2, 4, 16, 64, 256]
    assert [run.batch_samples for run in found.alone] == [1, 2, 4, 16, 64, 256]
    assert sorted(run.in_flight for run in found.runs if run.in_flight > 1) == [
        4 * found.cpus,
        32 * found.cpus,
    ]
    assert found.busiest.batch_samples >= 2
    assert len(found.busiest.latency_us) > 50
    rates = [run.rate for run in found.rated]
    few = next(run for run in found.runs if run.in_flight == 4 * found.cpus)
    assert [rate / rates[-1] for rate in rates] == pytest.approx(
        [0.25 / 0.9, 0.5 / 0.9, 0.75 / 0.9, 1]
    )
    assert (
        0.5 < rates[-1] / (0.9 * few.calls / few.seconds) < 2
    )  # the same, but for what turns differ
    # Windows of one duration together, of calls at random times of two.
    assert found.busiest.seconds > 0.19
    assert found.calm.seconds > 0.39
    done = calibrate(ready, package, file, "--calibrate-loads", "0.1,0.3")
    assert done.returncode == 0, done.stdout + done.stderr
    low, high = read_calibration(file).rated
    assert high.rate / low.rate == pytest.approx(3)


def test_calibration_says_what_is_wrong(bare_server, package, tmp_path):
    ready = ready_line(bare_server)
    file = tmp_path / "costs.json"
    done = calibrate({**ready, "http_port": 1}, package, file)
    assert done.returncode == 1
    assert "--http-address is 127.0.0.1:1; its /metrics cannot be asked for" in done.stderr
    done = calibrate({**ready, "http_port": ready["port"]}, package, file)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "--http-address" in done.stderr
    for wrong in (["--rate", "5"], ["--csv", tmp_path / "x.csv"]):
        done = calibrate(ready, package, file, *wrong)
        assert done.returncode == 2
        assert done.stderr.startswith("tessera-load: error: --calibrate draws")
    for loads in ("0.5,0.25", "0.5,0.5", "0", "1", "", "half"):
        done = calibrate(ready, package, file, "--calibrate-loads", loads)
        assert done.returncode == 2, loads
        assert "--calibrate-loads" in done.stderr
    address = f"127.0.0.1:{ready['port']}"
    alone = ["--address", address, "--model-file", package, "--calibrate-loads", "0.5"]
    done = run(BUILD / "tessera-load", *alone)
    assert done.returncode == 2
    assert "--calibrate-loads is for --calibrate" in done.stderr
    done = calibrate(ready, package, tmp_path / "nowhere" / "costs.json")
    assert done.returncode == 2
    assert "it cannot be written" in done.stderr
    assert list(tmp_path.glob("costs.json*")) == []


@contextlib.contextmanager
def predictor_that(answer):
    """The port of a server of another implementation, whose Predict is ``answer(request, context)``."""
    handler = grpc.method_handlers_generic_handler(
        "predictor.Predictor", {"Predict": grpc.unary_unary_rpc_method_handler(answer)}
    )
    server = grpc.server(ThreadPoolExecutor(8), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(None)


def load_on(port, package, *flags):
    command = [BUILD / "tessera-load", "--address", f"127.0.0.1:{port}", "--model-file", package]
    return run(*command, "--warm-up-s", "0", "--duration-s", "0.5", *flags)


def test_load_generator_reads_statuses_and_sizes(package):
    content = pb.PredictionResponse(predictions={"default": pb.FloatVec(data=[1.0] * 7)})
    codes = itertools.cycle(
        (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.FAILED_PRECONDITION, None)
    )

    def answer(_request, context):
        code = next(codes)
        if code:
            context.abort(code, "no")
        return content.SerializeToString()

    with predictor_that(answer) as port:
        done = load_on(port, package, "--in-flight", "4", "--samples", "2")
    assert done.returncode == 1, done.stderr
    assert re.search(r"[1-9]\d* RESOURCE_EXHAUSTED", done.stdout)
    assert re.search(r"[1-9]\d* FAILED_PRECONDITION", done.stdout)
    assert re.search(r"[1-9]\d* answers of the wrong size", done.stdout)


def test_load_generator_keeps_its_deadlines(package):
    ended = threading.Event()
    with predictor_that(lambda _request, _context: ended.wait(PATIENCE_S) and b"") as port:
        done = load_on(port, package, "--in-flight", "2", "--timeout-ms", "50")
        ended.set()
    assert done.returncode == 1, done.stderr
    assert re.search(r"[1-9]\d* DEADLINE_EXCEEDED", done.stdout)
    assert "UNAVAILABLE" not in done.stdout


CALL = np.dtype(
    [("due", "<i8"), ("took", "<i8"), ("request", "<u4"), ("code", "<u4"), ("bytes", "<u4")]
)
"""A call in the file of --record, without its answer."""


def calls_of(record):
    """Each call and its answer."""
    content, at = record.read_bytes(), 0
    while at < len(content):
        head = np.frombuffer(content, CALL, 1, at)[0]
        at += CALL.itemsize + int(head["bytes"])
        yield head, content[at - int(head["bytes"]) : at]


def test_load_generator_sends_a_file_and_writes_down_each_call(tmp_path):
    requests = [b"first", b"", b"third" * 50_000]
    file, record = tmp_path / "requests", tmp_path / "calls"
    file.write_bytes(b"".join(struct.pack("<I", len(one)) + one for one in requests))

    def answer(request, context):
        if not request:
            context.abort(grpc.StatusCode.NOT_FOUND, "empty")
        return request[::-1]

    handler = grpc.method_handlers_generic_handler(
        "some.Service", {"Method": grpc.unary_unary_rpc_method_handler(answer)}
    )
    server = grpc.server(ThreadPoolExecutor(2), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    command = [BUILD / "tessera-load", "--address", f"127.0.0.1:{port}", "--requests", file]
    command += ["--method", "/some.Service/Method", "--record", record, "--rate", "100"]
    began = time.monotonic_ns()
    done = run(*command, "--warm-up-s", "0", "--duration-s", "0.5")
    ended = time.monotonic_ns()
    server.stop(None)
    assert done.returncode == 1, done.stderr  # some were not answered
    calls = list(calls_of(record))
    assert {int(head["request"]) for head, _ in calls} == {0, 1, 2}
    for head, told in calls:
        sent = requests[head["request"]]
        assert told == sent[::-1]
        assert head["code"] == (0 if sent else grpc.StatusCode.NOT_FOUND.value[0])
        assert began < head["due"] < head["due"] + head["took"] < ended
    assert f"answered   {sum(head['code'] == 0 for head, _ in calls)} requests" in done.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "it has no request"), (b"\x05", "size is cut"), (b"\x05\0\0\0abc", "request is cut")],
)
def test_load_generator_says_what_is_wrong_with_a_file(tmp_path, package, content, message):
    file = tmp_path / "requests"
    file.write_bytes(content)
    command = [BUILD / "tessera-load", "--address", "127.0.0.1:1", "--requests", file]
    done = run(*command)
    assert done.returncode == 2
    assert done.stderr.startswith("tessera-load: error: --requests is")
    assert message in done.stderr
    assert run(*command, "--model-file", package).returncode == 2
    assert "--record is" in run(*command[:3], "--model-file", package, "--record", tmp_path).stderr


def test_load_generator_takes_large_messages_both_ways(package):
    """More than the windows that HTTP/2 begins with, in many frames."""
    rows = 1_000
    large = pb.PredictionResponse(predictions={"default": pb.FloatVec(data=[0.5] * 200 * rows)})

    def answer(request, _context):
        assert len(request) > 1 << 16
        return large.SerializeToString()

    with predictor_that(answer) as port:
        done = load_on(port, package, "--in-flight", "3", "--samples", str(rows))
    assert done.returncode == 0, done.stdout + done.stderr


def test_load_generator_comes_back_after_a_restart(package):
    """A connection that ends costs the calls that were on it; the next one serves the rest."""
    one = pb.PredictionResponse(predictions={"default": pb.FloatVec(data=[1.0])})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = [BUILD / "tessera-load", "--address", f"127.0.0.1:{port}", "--in-flight", "3"]
        command += ["--model-file", package, "--warm-up-s", "0", "--duration-s", "2"]
        process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
        listener.accept()[0].close()
    handler = grpc.method_handlers_generic_handler(
        "predictor.Predictor",
        {"Predict": grpc.unary_unary_rpc_method_handler(lambda *_: one.SerializeToString())},
    )
    server = grpc.server(ThreadPoolExecutor(2), handlers=[handler])
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    out, _ = process.communicate(timeout=PATIENCE_S)
    server.stop(None)
    assert process.returncode == 1
    assert re.search(r"[1-9]\d* UNAVAILABLE", out)
    assert re.search(r"answered +[1-9]", out)


def test_load_generator_says_what_failed(package):
    command = [BUILD / "tessera-load", "--model-file", package, "--warm-up-s", "0"]
    command += ["--duration-s", "0.2", "--timeout-ms", "2000", "--in-flight", "1"]
    done = run(*command, "--address", "127.0.0.1:1")
    assert done.returncode == 1
    assert "UNAVAILABLE" in done.stdout
    for address in ("127.0.0.1", ":5", "::1:5", "127.0.0.1:x", "nobody.invalid:5"):
        done = run(*command, "--address", address)
        assert done.returncode == 2
        assert done.stderr.startswith("tessera-load: error: --address is")
    assert run(*command).returncode == 2


def test_a_broken_operator_library_is_named(tmp_path):
    """The folder that the operator of the server gives comes before the installed ones."""
    package = package_file(tmp_path, backend="fbgemm")
    flags = ["--model", package, "--port", "0", "--http-port", "0", "--host", "127.0.0.1"]
    broken = tmp_path / "fbgemm_gpu_tbe_inference.so"
    broken.write_bytes(b"no library")
    done = run(
        CPP_PROGRAM,
        *flags,
        env={**os.environ, "TESSERA_OPS_DIR": str(tmp_path)},
    )
    assert done.returncode == 2
    (line,) = (line for line in done.stderr.splitlines() if not line.startswith("{"))
    assert "operator library 'fbgemm_gpu_tbe_inference'" in line
    assert str(broken) in line
    assert "--ops-dir" in line


def frames_of(connection):
    """The frames that come, without the client's preface: type, stream, length."""
    received = connection.makefile("rb")
    assert received.read(24).startswith(b"PRI * HTTP/2.0")
    while head := received.read(9):
        length = int.from_bytes(head[:3], "big")
        received.read(length)
        yield head[3], int.from_bytes(head[5:], "big"), length


def test_load_sends_waiting_messages_one_after_the_other(tmp_path):
    data, window_update, room = 0, 8, 1 << 20
    message = bytes(100_000)
    requests = tmp_path / "requests"
    requests.write_bytes(struct.pack("<I", len(message)) + message)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = subprocess.Popen(
            [
                *(BUILD / "tessera-load", "--address", f"127.0.0.1:{listener.getsockname()[1]}"),
                *("--requests", requests, "--in-flight", "4", "--warm-up-s", "0"),
                *("--duration-s", "1", "--timeout-ms", "60000"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(PATIENCE_S)
                # SETTINGS with a window (4) for each message as a whole, and one for all of them.
                connection.sendall(struct.pack(">HBBBIHI", 0, 6, 4, 0, 0, 4, room))
                connection.sendall(struct.pack(">HBBBII", 0, 4, window_update, 0, 0, room))
                sent = (
                    stream
                    for kind, stream, length in frames_of(connection)
                    if kind == data and length > 0
                )
                frames_each = -(-(len(message) + 5) // 16_384)
                order = list(itertools.islice(sent, 4 * frames_each))
        finally:
            client.kill()
            client.wait()
    assert order == sorted(order)
    assert set(collections.Counter(order).values()) == {frames_each}
