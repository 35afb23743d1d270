"""The packages and the servers of the conformance suite."""

import pytest
from conformance_harness import RunningServer, commands, cpp_program
from package_factory import make_package

from tessera.serving.client import Draw, RequestDrawer, encode_request
from tessera.serving.loading import load_package
from tessera.serving.protocol import predictor_pb2 as pb

KINDS = [
    "python",
    pytest.param(
        "cpp",
        marks=pytest.mark.skipif(
            cpp_program() is None, reason="the C++ server is not built (make build)"
        ),
    ),
]


@pytest.fixture(scope="session")
def package(tmp_path_factory):
    path, _ = make_package(tmp_path_factory.mktemp("conformance"), name="ranker", version="3")
    return path


@pytest.fixture(scope="session")
def other_package(tmp_path_factory):
    path, _ = make_package(tmp_path_factory.mktemp("conformance"), name="other", seed=1)
    return path


@pytest.fixture(scope="session")
def in_process(package):
    """The package as this process runs it: what every server's bits are held against."""
    return load_package(package)


@pytest.fixture(params=KINDS, scope="module")
def kind(request):
    """Which server."""
    return request.param


@pytest.fixture(scope="module")
def server(kind, package, other_package):
    """A server with two models and limits that tests can reach."""
    limits = ["--max-request-samples", 1000, "--max-request-ids", 100_000]
    models = ["--model", package, "--model", f"second={other_package}"]
    with RunningServer(kind, *models, *limits, "--drain-propagation-ms", 0) as running:
        yield running


@pytest.fixture(scope="session")
def both_kinds():
    """Both servers' names, where both are there."""
    if "cpp" not in commands():
        pytest.skip("the C++ server is not built (make build)")
    return ("python", "cpp")


class Drawn:
    """Random valid requests of a package's schema."""

    def __init__(self, schema, *, seed=0, max_bag=5):
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
