"""NVIDIA's own client against both servers, and its messages against ours."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tessera.serving.protocol import inference_pb2 as ipb
from tests.conformance.conformance_harness import TIMEOUT_S, scores_of
from tests.conformance.triton_client import fields_of
from tests.kserve_messages import tensors_of

pytestmark = pytest.mark.skipif(
    find_spec("tritonclient") is None, reason="tritonclient is not installed (make install-dev)"
)

SERVER_FLAGS = ("--shared-memory",)
PAGE = Path(__file__).parents[2] / "docs" / "kserve.md"
PROGRAM = Path(__file__).with_name("triton_client.py")


def triton_client(*arguments, **options):
    """What `triton_client.py` prints."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
        **options,
    )
    return json.loads(done.stdout)


def test_every_field_has_triton_s_number_and_type():
    ours = fields_of([ipb.DESCRIPTOR])
    theirs = triton_client("--fields")
    # The comparison reaches fields, nested ones, values of enums and methods.
    assert ours.keys() >= {
        "inference.ModelInferRequest.raw_input_contents",
        "inference.ModelInferRequest.InferInputTensor.ParametersEntry.value",
        "inference.DataType.TYPE_FP32",
        "GRPCInferenceService/ModelInfer",
    }
    # Numbers from 100 on are Tessera's own; Triton's messages have none of them.
    fields = {name: of for name, of in ours.items() if isinstance(of, list)}
    own = {name for name, of in fields.items() if isinstance(of[0], int) and of[0] >= 100}
    assert own.isdisjoint(theirs)
    assert {name: theirs.get(name) for name in ours.keys() - own} == {
        name: field for name, field in ours.items() if name not in own
    }


@pytest.mark.parametrize("ours_first", [True, False])
def test_its_messages_and_ours_share_a_process(ours_first):
    ours = "from tessera.serving.protocol import inference_pb2, predictor_pb2"
    theirs = "from tritonclient.grpc import service_pb2"
    lines = [ours, theirs] if ours_first else [theirs, ours]
    lines += [
        "asked = inference_pb2.ModelReadyRequest(name='ranker', version='3')",
        "theirs = service_pb2.ModelReadyRequest.FromString(asked.SerializeToString())",
        "print(theirs.name, theirs.version)",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    assert done.stdout == "ranker 3\n"


def test_every_call_of_the_client(server, drawn):
    message = drawn.samples(5)
    tensors = [
        (name, datatype, shape, content.hex())
        for name, datatype, shape, content in tensors_of(message)
    ]
    told = triton_client(server.address, input=json.dumps(tensors))
    wanted = np.asarray(scores_of(server.predict(message)), "<f4").tobytes().hex()
    assert told["live"]
    assert told["ready"]
    assert told["model_ready"]
    assert told["version_ready"]
    assert told["server"]["name"] == "tessera"
    assert [one["name"] for one in told["metadata"]["inputs"]] == [name for name, *_ in tensors]
    assert told["config"]["config"]["backend"] == "tessera"
    assert [one["state"] for one in told["index"]["models"]] == ["READY", "READY"]
    assert (told["scores"], told["all_outputs"], told["async"]) == (wanted, wanted, wanted)
    assert told["response"] == {
        "model_name": "ranker",
        "model_version": "3",
        "id": "an id",
        "outputs": [{"name": "default", "datatype": "FP32", "shape": ["5"]}],
    }
    assert int(told["statistics"]["model_stats"][0]["inference_count"]) >= 15
    assert told["all_statistics"] == 2
    assert told["refusal"] == [
        "StatusCode.NOT_FOUND",
        "model_name 'nobody' is unknown; this server has 'ranker', 'second'",
    ]
    assert told["unknown_call"] == "StatusCode.UNIMPLEMENTED"


def test_every_call_of_the_client_over_http(server, drawn):
    message = drawn.samples(5)
    tensors = [
        (name, datatype, shape, content.hex())
        for name, datatype, shape, content in tensors_of(message)
    ]
    told = triton_client("--http", server.http_address, input=json.dumps(tensors))
    wanted = np.asarray(scores_of(server.predict(message)), "<f4").tobytes().hex()
    assert told["live"]
    assert told["ready"]
    assert told["model_ready"]
    assert told["version_ready"]
    assert not told["nobody_ready"]
    assert told["server"]["name"] == "tessera"
    assert "binary_tensor_data" in told["server"]["extensions"]
    assert [one["name"] for one in told["metadata"]["inputs"]] == [name for name, *_ in tensors]
    assert told["config"]["backend"] == "tessera"
    assert [one["state"] for one in told["index"]] == ["READY", "READY"]
    assert told["scores"] == [wanted] * 16
    assert told["response"] == {
        "model_name": "ranker",
        "model_version": "3",
        "id": "an id",
        "outputs": [{"name": "default", "datatype": "FP32", "shape": [5]}],
    }
    assert told["statistics"]["model_stats"][0]["inference_count"] >= 16 * 5
    assert told["all_statistics"] == 2
    assert told["refusal"] == [
        "404",
        "model_name 'nobody' is unknown; this server has 'ranker', 'second'",
    ]
    assert told["unknown_call"] == "404"


@pytest.mark.usefixtures("shares_memory")
def test_its_shared_memory(server, drawn):
    message = drawn.samples(5)
    tensors = [
        (name, datatype, shape, content.hex())
        for name, datatype, shape, content in tensors_of(message)
    ]
    addresses = server.address, server.http_address
    told = triton_client("--shared-memory", *addresses, input=json.dumps(tensors))
    wanted = np.asarray(scores_of(server.predict(message)), "<f4").tobytes().hex()
    assert told == {
        "tritonclient.grpc": [True, wanted, 2],
        "tritonclient.http": [True, wanted, 2],
    }


def test_the_example_of_the_page_over_http(server, package, tmp_path):
    """docs/rest.md: a request."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.with_name("rest.md").read_text(), re.DOTALL)
    code = code.replace("127.0.0.1:8002", server.http_address).replace("model.pt", str(package))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    assert re.fullmatch(r"\[\S+ +\S+\]\n", done.stdout)


@pytest.mark.usefixtures("shares_memory")
def test_the_examples_of_the_page(server, package, drawn, tmp_path):
    """docs/kserve.md: a request, the same in shared memory, and requests for perf_analyzer."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    request, sharing, file = (block for block in blocks if "import" in block)

    def run(code):
        code = code.replace("127.0.0.1:50051", server.address).replace("model.pt", str(package))
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=TIMEOUT_S,
        ).stdout

    sharing = sharing.replace('"/mine"', f'"/tessera-test-{tmp_path.name}-{os.getpid()}"')
    assert re.fullmatch(r"(\[\S+ +\S+\]\n)\1", run(request + sharing))
    run(file)
    made = json.loads((tmp_path / "requests.json").read_text())["data"]
    assert len(made) == 50
    wanted = {name: shape for name, _, shape, _ in tensors_of(drawn.samples(2))}
    for one in made:
        assert one.keys() == wanted.keys()
        for name in ("float_features", "id_list_features_lengths"):
            assert one[name]["shape"] == wanted[name]
        for part in one.values():
            assert len(part["content"]) == np.prod(part["shape"])
