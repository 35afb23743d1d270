"""The C++ server's own tests and programs, where they are built."""

import collections
import os
import queue
import subprocess
import threading
from pathlib import Path

import grpc
import pytest

from tessera.serving.client import Draw, RequestDrawer, encode_request, read_schema
from tests.package_factory import make_package
from tests.patience import PATIENCE_S

BUILD = Path(__file__).resolve().parents[2] / "build/cpp/release"

pytestmark = pytest.mark.skipif(
    not (BUILD / "tessera-server").exists(), reason="the C++ server is not built (make build)"
)


def run(*command, **options):
    options.setdefault("timeout", PATIENCE_S)
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, **options
    )


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    path, _ = make_package(tmp_path_factory.mktemp("cpp"))
    return path


@pytest.mark.parametrize("program", ["unit_tests", "front_tests"])
def test_unit_tests(program):
    done = run(BUILD / "tests" / program, "--gtest_brief=1")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.fixture
def bare_server(package):
    """The server with an empty environment: no PATH, no Python."""
    command = [BUILD / "tessera-server", "--model", package, "--host", "127.0.0.1"]
    command += ["--port", "0", "--http-port", "0", "--drain-propagation-ms", "0"]
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True, env={})
    yield process
    process.kill()
    process.wait()
    process.stderr.close()


def ready_port(process):
    for line in process.stderr:
        if '"event":"ready"' in line:
            return int(line.split('"port":')[1].split(",")[0])
    raise AssertionError("the server ended before it was ready")


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
    command = [BUILD / "tessera-server", "--model", package, "--host", "127.0.0.1"]
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


def test_load_generator_says_what_failed(package):
    command = [BUILD / "tessera-load", "--model-file", package, "--warm-up-s", "0"]
    command += ["--duration-s", "0.2", "--timeout-ms", "2000", "--in-flight", "1"]
    done = run(*command, "--address", "127.0.0.1:1")
    assert done.returncode == 1
    assert "UNAVAILABLE" in done.stdout
    assert run(*command).returncode == 2


def test_a_broken_operator_library_is_named(tmp_path):
    """The folder that the operator of the server gives comes before the installed ones."""
    package, _ = make_package(tmp_path, backend="fbgemm")
    flags = ["--model", package, "--port", "0", "--http-port", "0", "--host", "127.0.0.1"]
    broken = tmp_path / "fbgemm_gpu_tbe_inference.so"
    broken.write_bytes(b"no library")
    done = run(
        BUILD / "tessera-server",
        *flags,
        env={**os.environ, "TESSERA_OPS_DIR": str(tmp_path)},
    )
    assert done.returncode == 2
    (line,) = (line for line in done.stderr.splitlines() if not line.startswith("{"))
    assert "operator library 'fbgemm_gpu_tbe_inference'" in line
    assert str(broken) in line
    assert "--ops-dir" in line
