"""NVIDIA's own client against both servers, and its messages against ours."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from conformance_harness import TIMEOUT_S, scores_of
from kserve_messages import tensors_of

from tessera.serving.protocol import inference_pb2 as ipb

pytestmark = pytest.mark.skipif(
    find_spec("tritonclient") is None, reason="tritonclient is not installed (make install-dev)"
)

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
    sys.path.insert(0, str(PROGRAM.parent))
    from triton_client import fields_of

    ours = fields_of([ipb.DESCRIPTOR])
    theirs = triton_client("--fields")
    assert len(ours) > 150
    assert {name: theirs.get(name) for name in ours} == ours


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
