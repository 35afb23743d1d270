"""tessera-server --grpc-socket: a Unix socket that answers as the port does."""

import os
import socket
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tessera.cli import run_command
from tessera.serving.client import Draw, RequestDrawer, encode_request, read_schema
from tessera.serving.protocol import predictor_pb2 as pb
from tests.conformance.certificates import certify, replace
from tests.conformance.conformance_harness import (
    CPP_PROGRAM,
    RunningServer,
    same_bits,
    scores_of,
    start_that_ends,
)
from tests.package_factory import package_file
from tests.patience import PATIENCE_S

METHOD = "/predictor.Predictor/Predict"
DRAINS_AT_ONCE = ("--drain-propagation-ms", 0)

pytestmark = pytest.mark.skipif(
    not CPP_PROGRAM.exists(), reason="the C++ server is not built (make build)"
)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return package_file(tmp_path_factory.mktemp("grpc_socket"))


@pytest.fixture(scope="module")
def contents(package):
    """Requests of one sample and of many, the largest of some 2 MB."""
    schema = read_schema(package)
    short = RequestDrawer(schema, Draw(ids="uniform"), seed=0)
    long = RequestDrawer(schema, Draw(ids="uniform", bags="uniform", max_bag=50), seed=1)
    return [
        *(encode_request(short.samples(count)) for count in (1, 2, 300)),
        encode_request(long.samples(1_500)),
    ]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "grpc.sock"


def asked(channel, content, **options):
    """The scores, with the time limit of every test."""
    call = channel.unary_unary(METHOD)
    answer = call(content, timeout=PATIENCE_S, **options)
    return scores_of(pb.PredictionResponse.FromString(answer))


def status(channel, content, **options):
    try:
        asked(channel, content, **options)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


def test_it_answers_as_the_port_does(package, contents, path):
    with RunningServer("cpp", "--model", package, "--grpc-socket", path) as server:
        (ready,) = [entry for entry in server.log if entry["event"] == "ready"]
        assert ready["grpc_socket"] == str(path)
        with ThreadPoolExecutor(8) as threads, grpc.insecure_channel(f"unix:{path}") as channel:
            of_port = [asked(server.channel, content) for content in contents]
            of_file = threads.map(lambda content: asked(channel, content), contents * 20)
            for scores, expected in zip(of_file, of_port * 20, strict=True):
                assert same_bits(scores, expected)
            assert status(channel, b"no message") == "INVALID_ARGUMENT"
        assert server.value("tessera_requests_total", code="OK") == 21 * len(contents)


def test_a_connection_that_breaks_off_harms_nobody(package, contents, path):
    with RunningServer("cpp", "--model", package, "--grpc-socket", path) as server:
        for sent in (
            b"",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
            bytes(100),
        ):
            with socket.socket(socket.AF_UNIX) as broken:
                broken.connect(str(path))
                broken.sendall(sent)
        with grpc.insecure_channel(f"unix:{path}") as channel:
            assert status(channel, contents[0]) == "OK"
        server.wait_for(lambda: server.value("tessera_connections") == 0)


def test_the_umask_says_who_may_connect(package, path):
    previous = os.umask(0o077)
    try:
        server = RunningServer("cpp", "--model", package, "--grpc-socket", path)
    finally:
        os.umask(previous)
    with server:
        found = path.stat()
        assert stat.S_ISSOCK(found.st_mode)
        assert stat.S_IMODE(found.st_mode) == 0o700


def test_the_file_goes_with_the_server(package, contents, path):
    flags = ["--model", package, "--grpc-socket", path, *DRAINS_AT_ONCE]
    with RunningServer("cpp", *flags) as server:
        server.signal()
        assert server.exit_status() == 0
        assert not path.exists()
    # A file that a killed server has left is replaced.
    killed = RunningServer("cpp", *flags)
    with killed:
        killed.process.kill()
        killed.exit_status()
        assert path.exists()
    with RunningServer("cpp", *flags), grpc.insecure_channel(f"unix:{path}") as channel:
        assert status(channel, contents[0]) == "OK"
        # Somebody else's file in its place is left.
        path.unlink()
        path.write_text("kept")
    assert path.read_text() == "kept"


def test_what_cannot_be_had_is_refused_in_a_line(package, path, tmp_path):
    def refusal(value):
        done = start_that_ends(
            "cpp", "--model", package, "--port", 0, "--http-port", 0, "--grpc-socket", value
        )
        assert done.returncode == 2
        *_, line = done.stderr.splitlines()  # behind "start" where its address is looked at
        assert "grpc-socket" in line
        return line

    with RunningServer("cpp", "--model", package, "--grpc-socket", path) as server:
        assert f"{path} cannot be listened on (another program listens there)" in refusal(path)
        with grpc.insecure_channel(f"unix:{path}") as channel:
            grpc.channel_ready_future(channel).result(PATIENCE_S)
        assert server.process.poll() is None
    file = tmp_path / "file"
    file.write_text("kept")
    assert "a file is there that is not a socket" in refusal(file)
    assert file.read_text() == "kept"
    assert "No such file or directory" in refusal(tmp_path / "none" / "socket")
    assert "a path has 1 to 107 bytes" in refusal("/tmp/" + "x" * 103)
    assert "give a path, or leave it out" in refusal("")


def test_certificates_and_tokens_are_asked_for_there_too(package, contents, path, tmp_path):
    authority = certify("authority")
    ours = certify("server", authority)
    files = {
        "ca": authority.pem,
        "cert": ours.pem,
        "key": ours.key_pem,
        "tokens": b"abcdefghij shop\n",
    }
    for name, content in files.items():
        replace(tmp_path / name, content)
    flags = ["--tls-cert", tmp_path / "cert", "--tls-key", tmp_path / "key"]
    flags += ["--auth-token-file", tmp_path / "tokens", "--grpc-socket", path]
    token = [("authorization", "Bearer abcdefghij")]
    with RunningServer("cpp", "--model", package, *flags):
        with grpc.insecure_channel(f"unix:{path}") as channel:
            assert status(channel, contents[0], metadata=token) == "UNAVAILABLE"
        credentials = grpc.ssl_channel_credentials(authority.pem)
        # A certificate is for a name, and a path has none.
        named = [("grpc.ssl_target_name_override", "localhost")]
        with grpc.secure_channel(f"unix:{path}", credentials, named) as channel:
            assert status(channel, contents[0]) == "UNAUTHENTICATED"
            assert status(channel, contents[-1], metadata=token) == "OK"


def test_our_own_clients(package, path, capsys):
    """tessera predict and tessera-load."""
    model = ["--model-file", str(package)]
    with RunningServer("cpp", "--model", package, "--grpc-socket", path):
        assert run_command("predict", ["--address", f"unix:{path}", "--random", "3", *model]) == 0
        assert len(capsys.readouterr().out.splitlines()) >= 3
        for address in (f"unix:{path}", f"unix://{path}"):
            done = load(address, *model)
            assert done.returncode == 0, done.stderr
            assert "latency ms p50" in done.stdout


def test_an_address_that_is_none(package):
    done = load("unix:", "--model-file", package)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "give a path of 1 to 107 bytes" in done.stderr


def load(address, *flags):
    command = [CPP_PROGRAM.with_name("tessera-load"), "--address", address, *flags]
    command += ["--warm-up-s", 0, "--duration-s", 0.5, "--in-flight", 4]
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
