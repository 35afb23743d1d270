"""Fixtures of the client's tests."""

import pytest

from tessera.serving.server.background import ServerThread
from tessera.serving.server.config import ModelSource, ServerConfig
from tests.client.fake_predictor import FakeServer, running
from tests.package_factory import make_package


@pytest.fixture
def server():
    """A servicer that can be told to fail, see `FakeServer`."""
    with running(FakeServer()) as fake:
        yield fake


@pytest.fixture(scope="session")
def package(tmp_path_factory):
    """A small package with random weights."""
    path, _ = make_package(tmp_path_factory.mktemp("package"), name="small", version="3")
    return path


@pytest.fixture(scope="session")
def server_address(package):
    """The real server with `package`."""
    config = ServerConfig(
        models=(ModelSource(path=str(package)),), host="127.0.0.1", port=0, http_port=0
    )
    with ServerThread(config) as server:
        yield server.address
