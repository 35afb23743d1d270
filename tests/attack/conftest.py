"""A server of each kind to attack, and a polite client of it."""

import pytest

from tessera.serving.package.loading import load_package
from tests.attack.attacking import Server
from tests.attack.watching import PoliteClient
from tests.conformance.conformance_harness import RunningServer, cpp_program
from tests.conformance.conftest import Drawn
from tests.conformance.test_bounded_memory import FLAGS
from tests.package_factory import package_file

NO_CPP = pytest.mark.skipif(
    cpp_program() is None, reason="the C++ server is not built (make build)"
)


@pytest.fixture(scope="session")
def attacked_package(tmp_path_factory):
    return package_file(tmp_path_factory.mktemp("attack"))


@pytest.fixture(scope="session")
def request_file(attacked_package, tmp_path_factory):
    """One sample's request."""
    message = Drawn(load_package(attacked_package).manifest.schema).samples(1)
    path = tmp_path_factory.mktemp("attack") / "request"
    path.write_bytes(message.SerializeToString())
    return path


@pytest.fixture(scope="module", params=["python", pytest.param("cpp", marks=NO_CPP)])
def running(request, attacked_package):
    with RunningServer(request.param, "--model", attacked_package, *FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def attacked(running, request_file):
    return Server(running.address, running.http_address, running.process.pid, request_file)


@pytest.fixture(scope="module")
def polite(attacked):
    client = PoliteClient(attacked.address, attacked.request.read_bytes())
    yield client
    client.close()
