"""``tessera predict`` as a user runs it: output, progress, exit status and its one line."""

import gzip
import io
import json
import socket
import subprocess
import sys

import grpc
import pytest

from tessera.cli import run_command
from tessera.serving.commands import predict as command
from tests.client.client_schemas import schema

LINES = [
    '{"dense": {"I0": 1, "I1": 2}, "sparse": {"C1": [5]}}',
    '{"dense": {"I0": 3, "I1": 4}, "sparse": {"C2": [5, 6]}}',
    '{"dense": {"I0": 5, "I1": 6}, "sparse": {"W1": [8]}, "weights": {"W1": [0.25]}}',
]
SCORES = [3 + 5, 7 + 2 * 11, 11 + 2]


@pytest.fixture(autouse=True)
def model_file(monkeypatch):
    """Any package has the tests' schema; reading real ones is tested with the server's."""
    monkeypatch.setattr(command, "read_schema", lambda _: schema())


@pytest.fixture
def samples(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text("\n".join(LINES))
    return path


def predict(*arguments):
    return run_command("predict", [str(argument) for argument in arguments])


def scores(text):
    answers = [json.loads(line) for line in text.splitlines()]
    assert [answer["sample"] for answer in answers] == list(range(len(answers)))
    return [answer["scores"]["default"] for answer in answers]


@pytest.mark.parametrize(("batch", "calls"), [(1, 3), (2, 2), (64, 1)])
def test_one_answer_per_line(server, samples, capsys, batch, calls):
    status = predict(
        "--address", server.address, "--input", samples, "--model-file", "m.pt", "--batch", batch
    )
    assert status == 0
    assert scores(capsys.readouterr().out) == SCORES
    assert len(server.requests) == calls


def test_positions_without_a_model_file(server, tmp_path, capsys):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"dense": [1.5], "sparse": [[1], [2]]}\n')
    assert predict("--address", server.address, "--input", path) == 0
    assert scores(capsys.readouterr().out) == [1.5 + 1 + 4]


def test_standard_input(server):
    program = [sys.executable, "-m", "tessera", "predict", "--address", server.address]
    text = '{"sparse": [[1], [2]]}\n'
    result = subprocess.run(
        [*program, "--input", "-"], input=text, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert scores(result.stdout) == [5]


def test_a_reader_that_stops_early_is_no_error(server, tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"sparse": [[1], [2]]}\n' * 20_000)
    program = [sys.executable, "-m", "tessera", "predict", "--address", server.address]
    with subprocess.Popen(
        [*program, "--input", str(path), "--batch", "1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_random_samples_repeat_with_the_seed(server, capsys):
    server.requests.clear()
    texts = []
    for seed in (1, 1, 2):
        flags = ["--random", 5, "--batch", 2, "--seed", seed, "--model-file", "m.pt"]
        assert predict("--address", server.address, *flags) == 0
        texts.append(capsys.readouterr().out)
    assert [request.batch_size for request in server.requests] == [2, 2, 1] * 3
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0].splitlines()) == 5


def test_scores_are_the_shortest_decimals_of_their_float32(server, tmp_path, capsys):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"dense": [0.1], "sparse": []}\n{"dense": [null], "sparse": []}\n')
    assert predict("--address", server.address, "--input", path) == 0
    assert capsys.readouterr().out.splitlines() == [
        '{"sample": 0, "scores": {"default": 0.1}}',
        '{"sample": 1, "scores": {"default": null}}',
    ]


def test_wide_outputs_are_lists(server, tmp_path, capsys):
    server.width = 2
    path = tmp_path / "samples.jsonl"
    path.write_text('{"dense": [0.5]}\n{"dense": [1.5]}\n')
    assert predict("--address", server.address, "--input", path) == 0
    assert scores(capsys.readouterr().out) == [[0.5, 0.5], [1.5, 1.5]]


def test_latency_goes_to_stderr(server, capsys):
    flags = ["--random", 4, "--batch", 1, "--model-file", "m.pt", "--latency"]
    assert predict("--address", server.address, *flags) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("4 calls: mean ")
    assert len(captured.out.splitlines()) == 4


def test_model_and_version_travel(server, samples):
    flags = ["--model", "ctr", "--model-version", "7", "--model-file", "m.pt"]
    assert predict("--address", server.address, "--input", samples, *flags) == 0
    assert (server.requests[0].model_name, server.requests[0].model_version) == ("ctr", "7")
    assert server.requests[0].traffic_key == ""


def test_a_label_and_a_traffic_key_travel(server, samples):
    flags = ["--model-version", "canary", "--traffic-key", "user 7", "--model-file", "m.pt"]
    assert predict("--address", server.address, "--input", samples, *flags) == 0
    assert predict("--address", server.address, "--random", 1, *flags) == 0
    asked = [(request.model_version, request.traffic_key) for request in server.requests]
    assert set(asked) == {("canary", "user 7")}
    assert len(asked) >= 2


def test_progress_is_for_a_person_at_a_terminal(server, samples, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    flags = ["--address", server.address, "--input", samples, "--model-file", "m.pt"]
    assert predict(*flags) == 0
    assert "samples" in terminal.getvalue()


def fails(capsys, *arguments):
    """Run; returns the exit status and the one line on stderr."""
    status = predict(*arguments)
    (line,) = capsys.readouterr().err.splitlines()
    return status, line


def test_a_malformed_line_is_named_after_the_answers_before_it(server, tmp_path, capsys):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"sparse": [[1]]}\n{"sparse": [1]}\n')
    status = predict("--address", server.address, "--input", path, "--batch", 1)
    captured = capsys.readouterr()
    assert status == 2
    assert scores(captured.out) == [1]
    assert captured.err == (
        f"tessera predict: error: {path}, line 2: sparse: feature '0' is a JSON number;"
        " give a list of ids\n"
    )


def test_no_server(samples, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        status, line = fails(
            capsys, "--address", address, "--input", samples, "--model-file", "m.pt"
        )
    assert status == 2
    assert f"no answer from a server at {address}" in line
    assert "tessera serve" in line


STATUSES = [
    (grpc.StatusCode.NOT_FOUND, 2, "see --model"),
    (grpc.StatusCode.INVALID_ARGUMENT, 2, "lines 1 to 3: the server refused them: why"),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, 1, "RESOURCE_EXHAUSTED: why"),
    (grpc.StatusCode.INTERNAL, 1, "INTERNAL: why"),
]


@pytest.mark.parametrize("case", STATUSES, ids=lambda case: case[0].name)
def test_the_servers_refusals(server, samples, capsys, case):
    code, expected, text = case
    server.failures = [(code, "why")]
    flags = ["--address", server.address, "--input", samples, "--model-file", "m.pt"]
    status, line = fails(capsys, *flags)
    assert status == expected
    assert text in line


def test_an_answer_too_late(server, samples, capsys):
    server.hold = True
    flags = ["--model-file", "m.pt", "--timeout-ms", 50]
    status, line = fails(capsys, "--address", server.address, "--input", samples, *flags)
    assert status == 1
    assert "DEADLINE_EXCEEDED" in line


WRONG_FLAGS = {
    "address": (["--address", "nowhere", "--input", "x"], "is not HOST:PORT"),
    "no file": (["--address", "h:1", "--input", "absent.jsonl"], "absent.jsonl"),
    "no schema": (["--address", "h:1", "--random", "3"], "--random needs --model-file"),
}


@pytest.mark.parametrize(("flags", "message"), WRONG_FLAGS.values(), ids=WRONG_FLAGS.keys())
def test_wrong_flags(flags, message, capsys):
    status, line = fails(capsys, *flags)
    assert status == 2
    assert message in line


@pytest.mark.parametrize(
    "flags",
    [
        ["--address", "h:1"],
        ["--address", "h:1", "--input", "x", "--random", "3"],
        ["--address", "h:1", "--random", "0"],
        ["--address", "h:1", "--random", "many"],
        ["--address", "h:1", "--random", "3", "--model-file", "m", "--seed", "-1"],
        ["--input", "x"],
    ],
)
def test_flags_that_the_parser_refuses(flags, capsys):
    with pytest.raises(SystemExit) as caught:
        predict(*flags)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert said.endswith("; see tessera predict --help\n")


def test_compressed_json_lines(server, samples, tmp_path, capsys):
    small = tmp_path / "samples.jsonl.gz"
    small.write_bytes(gzip.compress(samples.read_bytes()))
    outputs = []
    for path in (samples, small):
        capsys.readouterr()
        assert predict("--address", server.address, "--input", path, "--model-file", "m.pt") == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != ""
    small.write_bytes(small.read_bytes()[:-6])
    flags = ["--input", small, "--model-file", "m.pt"]
    status, line = fails(capsys, "--address", server.address, *flags)
    assert status == 2
    assert "samples.jsonl.gz: not a whole file of gzip" in line


def test_input_that_is_no_text(server, tmp_path, capsys):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    status, line = fails(capsys, "--address", server.address, "--input", path)
    assert status == 2
    assert "not UTF-8" in line
