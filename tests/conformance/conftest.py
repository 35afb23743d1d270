"""The packages and the servers of the conformance suite."""

from pathlib import Path

import pytest

from tessera.serving.client import Draw, RequestDrawer, encode_request
from tessera.serving.package.loading import load_package
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.training.models.config import TableConfig
from tests.conformance.conformance_harness import (
    LIMITS,
    MODELS,
    GivenServer,
    RunningServer,
    commands,
    cpp_program,
)
from tests.conformance.live_models import Answers
from tests.package_factory import make_package, package_file
from tests.packaging.archives import as_version_3


def pytest_addoption(parser):
    group = parser.getgroup("conformance")
    group.addoption(
        "--address",
        metavar="HOST:PORT",
        help="hold the suite against the server that is there, instead of starting servers; "
        "`python -m tests.conformance.packages --help` tells more",
    )
    group.addoption("--http-address", metavar="HOST:PORT", help="its HTTP port; for --address")
    group.addoption(
        "--packages", metavar="FOLDER", type=Path, help="the packages it serves; for --address"
    )


def pytest_generate_tests(metafunc):
    if "kind" not in metafunc.fixturenames:
        return
    no_cpp = pytest.mark.skipif(
        cpp_program() is None, reason="the C++ server is not built (make build)"
    )
    given = metafunc.config.getoption("--address", None)
    kinds = ["given"] if given else ["python", pytest.param("cpp", marks=no_cpp)]
    metafunc.parametrize("kind", kinds, scope="module", indirect=True)


def suite_package(request, tmp_path_factory, name):
    folder = request.config.getoption("--packages", None)
    if folder:
        return folder / f"{name}-{MODELS[name].get('version', '1')}.pt"
    return package_file(tmp_path_factory.mktemp("conformance"), name=name, **MODELS[name])


@pytest.fixture(scope="session")
def package(request, tmp_path_factory):
    return suite_package(request, tmp_path_factory, "ranker")


@pytest.fixture(scope="session")
def other_package(request, tmp_path_factory):
    """As version 3 of the format has it, where the suite writes it."""
    path = suite_package(request, tmp_path_factory, "other")
    if request.config.getoption("--packages", None):
        return path
    return as_version_3(path, path.with_name("old.pt"))


@pytest.fixture(scope="session")
def in_process(package):
    """The package as this process runs it: what every server's bits are held against."""
    return load_package(package)


@pytest.fixture(scope="module")
def kind(request):
    """Which server."""
    return request.param


@pytest.fixture(scope="module")
def server(request, kind, package, other_package):
    """A server with two models and limits that tests can reach, and the ``SERVER_FLAGS`` of the test's module."""
    if kind == "given":
        option = request.config.getoption
        with GivenServer(option("--address"), option("--http-address")) as given:
            yield given
        return
    models = ["--model", package, "--model", f"second={other_package}"]
    flags = (*LIMITS, "--drain-propagation-ms", 0, *getattr(request.module, "SERVER_FLAGS", ()))
    with RunningServer(kind, *models, *flags) as running:
        yield running


@pytest.fixture
def shares_memory(server):
    """A server that clients may register shared memory with."""
    if isinstance(server, GivenServer) and "system_shared_memory" not in server.http("/v2")[1]:
        pytest.skip("the given server was started without --shared-memory")


@pytest.fixture(scope="session")
def both_kinds(request):
    """Both servers' names, where both are there."""
    if request.config.getoption("--address", None):
        pytest.skip("compares two servers that it starts")
    if "cpp" not in commands():
        pytest.skip("the C++ server is not built (make build)")
    return ("python", "cpp")


class Drawn:
    """Random valid requests of a package's schema."""

    def __init__(self, schema, *, seed=0, max_bag=5):
        self.schema = schema
        self._drawer = RequestDrawer(
            schema, Draw(ids="uniform", bags="uniform", max_bag=max_bag), seed=seed
        )

    def samples(self, count, **fields):
        arrays = self._drawer.samples(count)
        return pb.PredictionRequest.FromString(encode_request(arrays, **fields))

    def ranking(self, candidates):
        return pb.PredictionRequest.FromString(encode_request(self._drawer.ranking(candidates)))


@pytest.fixture
def drawn(in_process):
    return Drawn(in_process.manifest.schema)


@pytest.fixture
def draw_with(in_process):
    """Draws with another seed or longer bags."""
    return lambda **options: Drawn(in_process.manifest.schema, **options)


VARIANTS = {
    "a": {"seed": 1},
    "b": {"seed": 2},
    "c": {"seed": 3},
    "wide": {
        "seed": 4,
        "num_dense": 3,
        "features": {"user": TableConfig(rows=1000), "shop": TableConfig(rows=20)},
    },
}
"""Packages for repositories of models: three of the same schema, and one with other features."""


@pytest.fixture(scope="session")
def variants(tmp_path_factory):
    """The packages by name; no test may write to them."""
    folder = tmp_path_factory.mktemp("variants")
    small = {"num_dense": 2, "features": {"user": TableConfig(rows=1000)}}
    return {
        name: make_package(folder, name=name, **{**small, **options})[0]
        for name, options in VARIANTS.items()
    }


@pytest.fixture(scope="session")
def answers(variants):
    """What a package answers to a message."""
    return Answers(variants)


@pytest.fixture(scope="session")
def drawn_live(variants):
    """Requests for the packages of the same schema."""
    return Drawn(load_package(variants["a"]).manifest.schema)


@pytest.fixture(scope="session")
def message(drawn_live):
    """One of them."""
    return drawn_live.samples(3)
