"""The clients that this machine has, against both servers: see `tests.peers`."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tessera.serving.client import Draw, RequestDrawer, encode_request
from tessera.serving.package.loading import load_package
from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.protocol import predictor_pb2 as pb
from tests.conformance.conformance_harness import MODELS, RunningServer, commands
from tests.kserve_messages import DTYPES, infer_request, raw_infer, tensors_of
from tests.package_factory import package_file
from tests.peers import clients

LARGE_SAMPLES = 2_000


def requests_of(folder):
    """A package, and files with a request of one sample and of many."""
    package = package_file(folder, name="ranker", **MODELS["ranker"])
    schema = load_package(package).manifest.schema
    drawer = RequestDrawer(schema, Draw(ids="uniform", bags="uniform", max_bag=20), seed=0)
    files = []
    for name, samples in (("small", 1), ("large", LARGE_SAMPLES)):
        files.append(folder / name)
        files[-1].write_bytes(encode_request(drawer.samples(samples)))
    return package, *files


def kserve_case(server, small):
    """A file with a request of KServe's protocol, and with what the server answers to our own client."""
    message = pb.PredictionRequest.FromString(small.read_bytes())
    message.model_name = "ranker"
    sent = infer_request(message).SerializeToString()
    answer = ipb.ModelInferResponse.FromString(raw_infer(server)(sent))
    case = {
        "model": message.model_name,
        "inputs": [
            {
                "name": name,
                "datatype": datatype,
                "shape": shape,
                "numbers": np.frombuffer(content, DTYPES[datatype]).tolist(),
            }
            for name, datatype, shape, content in tensors_of(message)
        ],
        "outputs": {
            output.name: content.hex()
            for output, content in zip(answer.outputs, answer.raw_output_contents, strict=True)
        },
    }
    file = small.with_suffix(".json")
    file.write_text(json.dumps(case), encoding="utf-8")
    return file


@pytest.fixture(scope="module", params=list(commands()))
def running(request, tmp_path_factory):
    package, small, large = requests_of(tmp_path_factory.mktemp("peers"))
    with RunningServer(request.param, "--model", package, "--drain-propagation-ms", 0) as server:
        yield server, small, large


@pytest.fixture
def served(running):
    server, small, large = running
    return server.address, small, large


def test_grpcio(served):
    assert "cases" in clients.grpcio(*served)


@pytest.mark.parametrize("name", ["curl", "h2load"])
def test_programs(served, name):
    if name not in clients.PROGRAMS:
        pytest.skip(f"{name} is not installed")
    assert name in clients.PROGRAMS[name](*served)


def test_grpc_js(served):
    modules = os.environ.get("NODE_PATH", "")
    if not (Path(modules) / "@grpc/grpc-js").is_dir():
        pytest.skip("NODE_PATH has no @grpc/grpc-js (npm install @grpc/grpc-js)")
    assert "cases" in clients.grpc_js(*served, modules)


def test_kserve(running):
    python = os.environ.get("TESSERA_KSERVE_PYTHON", "")
    if not Path(python).is_file():
        pytest.skip("TESSERA_KSERVE_PYTHON names no Python that has the package kserve")
    server, small, _ = running
    case = kserve_case(server, small)
    assert "cases" in clients.kserve(server.address, server.http_address, case, python)


@pytest.mark.parametrize("name", list(clients.LIBRARIES))
def test_libraries(served, name):
    client, lacks = clients.LIBRARIES[name]
    if reason := lacks():
        pytest.skip(reason)
    assert f"{name} " in client(*served)
