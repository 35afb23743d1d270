"""The command line: what a user can get wrong ends with status 2 and one line that says what."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.cli import run_command
from tessera.errors import UserError
from tessera.serving.commands.serve import parse_model
from tessera.serving.server.background import ServerProcess
from tessera.serving.server.config import ModelLimits, ModelSource, ServerConfig
from tests.package_factory import package_file


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    path = package_file(tmp_path_factory.mktemp("package"))
    return str(path)


def refused(capsys, *arguments):
    """The one line on stderr, log lines aside, of a command that must end with status 2."""
    assert run_command("serve", [*arguments, "--host", "127.0.0.1"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("{")]
    assert len(lines) == 1
    return lines[0]


def test_missing_package(capsys, tmp_path):
    line = refused(capsys, "--model", str(tmp_path / "none.pt"))
    assert "none.pt" in line
    assert line.startswith("tessera serve: error: ")


def test_damaged_package(capsys, tmp_path, package):
    content = bytearray(Path(package).read_bytes())
    content[len(content) // 3] ^= 1
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes(content)
    line = refused(capsys, "--model", str(damaged), "--port", "0", "--http-port", "0")
    assert "damaged.pt" in line


@pytest.mark.parametrize(("flag", "other"), [("--port", "--http-port"), ("--http-port", "--port")])
def test_port_in_use(capsys, package, flag, other):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused(capsys, "--model", package, flag, str(port), other, "0")
    assert f"127.0.0.1:{port} cannot be listened on" in line
    assert flag in line


def test_a_second_server_does_not_share_the_port(capsys, package):
    with ServerProcess(["--model", package]) as first:
        line = refused(capsys, "--model", package, "--port", str(first.port), "--http-port", "0")
    assert "cannot be listened on" in line


def test_two_models_of_one_name(capsys, package):
    line = refused(capsys, "--model", package, "--model", package)
    assert "are both named 'model'" in line
    assert f"--model NAME={package}" in line


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--workers", "0"], "--workers is 0; give a whole number of at least 1"),
        (
            ["--max-queue-samples", "5"],
            "--max-queue-samples is 5; a request of --max-request-samples",
        ),
        (
            ["--max-inflight-bytes", "5000000"],
            "--max-inflight-bytes is 5000000; a message of --max-message-bytes 67108864 could never come",
        ),
        (["--port", "70000"], "--port is 70000; give a number of at most 65535"),
        (
            ["--port", "7000", "--http-port", "7000"],
            "--http-port is 7000; the gRPC port is the same",
        ),
        (["--drain-limit-s", "0.5"], "--drain-limit-s is 0.5; it must be longer than"),
        (["--drain-limit-s", "nan"], "--drain-limit-s is nan; it must be longer"),
        (["--drain-limit-s", "inf"], "--drain-limit-s is inf; it must be longer"),
        (
            ["--max-message-bytes", "3000000000", "--max-inflight-bytes", "4000000000"],
            "--max-message-bytes is 3000000000; give a number of at most 2147483647",
        ),
        (
            ["--max-http-connections", "0"],
            "--max-http-connections is 0; give a whole number of at le",
        ),
        (["--max-delay-us", "-1"], "--max-delay-us is -1"),
        (
            ["--max-delay-us", "60000001"],
            "--max-delay-us is 60000001; give a number of at most 60000000",
        ),
        (["--workers", "4097"], "--workers is 4097; give a number of at most 4096"),
        (
            ["--threads-per-worker", "4097"],
            "--threads-per-worker is 4097; give a number of at most 4096",
        ),
        (["--worker-niceness", "20"], "--worker-niceness is 20; give a number of at most 19"),
    ],
)
def test_values_that_cannot_work(capsys, package, arguments, text):
    assert text in refused(capsys, "--model", package, *arguments)


def test_no_models():
    with pytest.raises(UserError, match=r"give at least one MODEL\.pt"):
        ServerConfig(models=())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "--model is missing; give at least one MODEL.pt, or --model-repository DIR"),
        (
            ["--model-repository", "d", "--processes", "2"],
            "--processes is 2; a repository's versions",
        ),
        (["--model-repository", "d", "--poll-s", "0"], "--poll-s is 0; give seconds above 0"),
        (["--model-repository", "d", "--model-repository", "d"], "give each folder once"),
        (["--model-repository", "d", "--max-model-bytes", "-1"], "--max-model-bytes is -1; give a"),
        (
            ["--model", "m", "--model-control", "poll"],
            "--model-control is poll; there is nothing to control; add --model-repo",
        ),
    ],
)
def test_repositories_that_cannot_be_served(capsys, arguments, text):
    assert text in refused(capsys, *arguments)


@pytest.mark.parametrize("model", ["=x", "a="])
def test_a_model_without_name_or_path(capsys, model):
    assert f"--model is '{model}'; give MODEL.pt" in refused(capsys, "--model", model)


def test_an_unknown_flag_ends_with_2():
    with pytest.raises(SystemExit) as caught:
        run_command("serve", ["--nonsense"])
    assert caught.value.code == 2


def test_model_argument():
    assert parse_model("a/b.pt") == ModelSource(path="a/b.pt")
    assert parse_model("n=a=b.pt") == ModelSource(path="a=b.pt", name="n")
    assert parse_model("n=a/b=1.pt") == ModelSource(path="a/b=1.pt", name="n")
    assert parse_model("models/date=1/m.pt") == ModelSource(path="models/date=1/m.pt")
    assert parse_model("./date=1.pt") == ModelSource(path="./date=1.pt")
    assert parse_model("date=1.pt") == ModelSource(path="1.pt", name="date")


def test_flags_reach_the_server(package):
    arguments = ["--model", f"first={package}", "--model", f"second={package}", "--log-format"]
    with ServerProcess([*arguments, "json", "--log-level", "debug", "--skip-golden"]) as server:
        loaded = [line["model"] for line in server.log if line["event"] == "loaded"]
    assert loaded == ["first", "second"]


def test_help_needs_no_torch():
    code = (
        "import sys, tessera.serving.commands.serve as s, argparse;"
        "p = argparse.ArgumentParser(); s.add_arguments(p); p.format_help();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_defaults_are_possible():
    assert ModelLimits().workers >= 1
