"""The examples in Go and Java, built with the commands of docs/client.md, against both servers."""

import re
import subprocess
import time

import numpy as np
import pytest

from tessera.serving.client import PredictorClient, read_schema
from tests import REPOSITORY
from tests.conformance.conformance_harness import MODELS, RunningServer, commands
from tests.package_factory import package_file
from tests.patience import PATIENCE_S
from tests.toolchains import go_lacks, java_lacks

PAGE = (REPOSITORY / "docs/client.md").read_text()
LANGUAGES = {
    "go": (go_lacks("protoc", "protoc-gen-go"), ["build/clients/predict-go"]),
    "java": (
        java_lacks("protoc", "grpc_java_plugin"),
        ["java", "@examples/java/debian.args", "Predict"],
    ),
}
# Dense values, then the features user, item, history, genre, region, tag and bucket.
SAMPLES = [
    ([0.5, float("nan"), 1, -2e3], [[7], [8, 9], [], [1], [2, 2], [3], [4, 5]]),
    ([1, 1, 1, 1], [[2**63 - 1], [-5], list(range(300)), [], [], [], [-(2**63)]]),
]
TEXTS = [["Zürich"], ["8", "-9"], ["東京", "a"], ["1"], ["2"], ["3"], ["DE"]]


def line_of(dense, bags):
    return " ".join(",".join(map(str, values)) or "-" for values in (dense, *bags)) + "\n"


@pytest.fixture(scope="module", params=list(LANGUAGES))
def program(request, tmp_path_factory):
    """The example as a function of flags and standard input."""
    lacking, command = LANGUAGES[request.param]
    if lacking:
        pytest.skip(lacking)
    folder = tmp_path_factory.mktemp(request.param)
    for name in ("protos", "examples"):
        (folder / name).symlink_to(REPOSITORY / name)
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (block,) = [
        text for text in blocks if "protoc" in text and f"examples/{request.param}/" in text
    ]
    subprocess.run(["bash", "-ec", block], cwd=folder, check=True)
    (asked,) = [text for text in blocks if "predict-go 127" in text]
    assert f"| {' '.join(command)} 127.0.0.1:50051\n" in asked

    def run(*arguments, given):
        # A cold virtual machine on CPUs that other jobs share may not connect within the example's five seconds.
        end = time.monotonic() + PATIENCE_S
        while True:
            done = subprocess.run(
                [*command, *arguments],
                cwd=folder,
                input=given,
                capture_output=True,
                text=True,
                encoding="utf-8",
                check=False,
            )
            late = re.match("(?i)deadline_?exceeded", done.stderr)
            if not late or time.monotonic() > end:
                return done

    return run


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return package_file(tmp_path_factory.mktemp("package"), name="ranker", **MODELS["ranker"])


@pytest.fixture(scope="module", params=list(commands()))
def server(request, package):
    with RunningServer(request.param, "--model", package, "--drain-propagation-ms", 0) as running:
        yield running


def scores(printed):
    words = [line.split() for line in printed.splitlines()]
    assert [line[:2] for line in words] == [[str(i), "default"] for i in range(len(words))]
    return np.array([float(line[2]) for line in words], np.float32)


def test_the_scores_are_those_of_the_python_client(program, server, package):
    done = program(server.address, given="".join(line_of(*sample) for sample in SAMPLES))
    assert done.returncode == 0, done.stderr
    schema = read_schema(package)
    names = [feature.name for feature in schema.features]
    bags = {name: [sample[1][i] for sample in SAMPLES] for i, name in enumerate(names)}
    with PredictorClient(server.address, schema=schema) as client:
        expected = client.predict([dense for dense, _ in SAMPLES], bags).outputs["default"]
        row = dict(zip(names, TEXTS, strict=True)) | {"dense_1": 2.0}
        row |= {
            name: [int(text) for text in row[name]] for name in ("item", "genre", "region", "tag")
        }
        by_text = client.predict_rows([row]).outputs["default"]
    assert np.array_equal(scores(done.stdout), expected)
    texts = program(
        "--strings", server.address, given=line_of([float("nan"), 2, *2 * [float("nan")]], TEXTS)
    )
    assert texts.returncode == 0, texts.stderr
    assert np.array_equal(scores(texts.stdout), by_text)


def test_what_is_told_of_mistakes(program, server):
    refused = program(server.address, given="1,1,1,1 7\n")
    assert refused.returncode == 1
    assert re.match(r"(?i)invalid_?argument: id_list_features\.num_features is 1", refused.stderr)
    for given, told in (
        ("", "standard input has no samples"),
        ("1,x 7\n", r"line 1: .x. is not a dense value"),
        ("1 7 a\n", r"sample 0, feature 1: .a. is not a whole number; give --strings"),
        ("1 7\n\n1 7 8\n", "line 3 has 1 dense values and 2 features; the first line has 1 and 1"),
    ):
        done = program(server.address, given=given)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.match(told, done.stderr), done.stderr
    assert program(given="").returncode == 2
