"""The clients that this machine has, against both servers: see `tests.peers`."""

import os
from pathlib import Path

import pytest

from tessera.serving.client import Draw, RequestDrawer, encode_request
from tessera.serving.package.loading import load_package
from tests.conformance.conformance_harness import MODELS, RunningServer, commands
from tests.package_factory import make_package
from tests.peers import clients

LARGE_SAMPLES = 2_000


def requests_of(folder):
    """A package, and files with a request of one sample and of many."""
    package, _ = make_package(folder, name="ranker", **MODELS["ranker"])
    schema = load_package(package).manifest.schema
    drawer = RequestDrawer(schema, Draw(ids="uniform", bags="uniform", max_bag=20), seed=0)
    files = []
    for name, samples in (("small", 1), ("large", LARGE_SAMPLES)):
        files.append(folder / name)
        files[-1].write_bytes(encode_request(drawer.samples(samples)))
    return package, *files


@pytest.fixture(scope="module", params=list(commands()))
def served(request, tmp_path_factory):
    package, small, large = requests_of(tmp_path_factory.mktemp("peers"))
    with RunningServer(request.param, "--model", package, "--drain-propagation-ms", 0) as server:
        yield server.address, small, large


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


@pytest.mark.parametrize("name", list(clients.LIBRARIES))
def test_libraries(served, name):
    client, lacks = clients.LIBRARIES[name]
    if reason := lacks():
        pytest.skip(reason)
    assert f"{name} " in client(*served)
