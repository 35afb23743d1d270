"""--auth-token-file: what needs a token, what does not, and a file that changes while calls are answered."""

import signal
import socket

import pytest
from grpc_health.v1 import health_pb2

from tessera.cli import run_command
from tessera.serving.client import Credentials, PredictorClient, RepositoryClient, Unauthenticated
from tessera.serving.protocol import inference_pb2, predictor_pb2
from tests.conformance.certificates import replace
from tests.conformance.conformance_harness import RunningServer
from tests.conformance.guarded import (
    GUARDED_METHODS,
    GUARDED_PAGES,
    OPEN_METHODS,
    OPEN_PAGES,
    TOKEN,
    Asker,
)
from tests.patience import PATIENCE_S

SLOW, WRONG = "slow-token-4567", "wrong-token-89ab"
CONTENT = f"# tokens\n{TOKEN} shop\n{SLOW} ads 2\n".encode()


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    replace(path, CONTENT)
    return path


@pytest.fixture(scope="module")
def guarded(kind, package, tokens):
    flags = ["--model", package, "--auth-token-file", tokens, "--drain-propagation-ms", 0]
    with RunningServer(kind, *flags) as running:
        yield running
    # Neither a line of the log nor of the page, for which see below, tells a token.
    written = repr(running.log) + "".join(running.noise)
    assert not [each for each in (TOKEN, SLOW, WRONG) if each in written]


@pytest.fixture
def asker(guarded):
    with Asker(guarded) as made:
        yield made


def count(asker, name):
    page = asker.page("GET", "/metrics", TOKEN)[1]
    assert not [each for each in (TOKEN, SLOW, WRONG) if each in page]
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


def test_every_method_of_the_protocols_is_in_the_table():
    services = [
        service
        for file in (predictor_pb2, inference_pb2, health_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
    ]
    methods = {f"/{one.full_name}/{m.name}" for one in services for m in one.methods}
    assert len(methods) > 15
    # Health's other method is one that newer releases of its protocol have and the servers do not.
    assert methods - {"/grpc.health.v1.Health/List"} <= {*GUARDED_METHODS, *OPEN_METHODS}


def test_what_needs_a_token_is_refused_without_and_what_does_not_is_not(asker):
    before = count(asker, "tessera_calls_refused_total")
    for method in GUARDED_METHODS:
        assert asker.call(method) == "UNAUTHENTICATED", method
        assert asker.call(method, WRONG) == "UNAUTHENTICATED", method
        assert asker.call(method, TOKEN) != "UNAUTHENTICATED", method
    for method in OPEN_METHODS:
        assert asker.call(method) == asker.call(method, WRONG) == "OK", method
    for method, path in GUARDED_PAGES:
        assert asker.page(method, path)[0] == 401, path
        assert asker.page(method, path, WRONG)[0] == 401, path
        assert asker.page(method, path, TOKEN)[0] != 401, path
    for method, path in OPEN_PAGES:
        assert asker.page(method, path)[0] == asker.page(method, path, WRONG)[0] == 200, path
    refused = 2 * (len(GUARDED_METHODS) + len(GUARDED_PAGES))
    assert count(asker, "tessera_calls_refused_total") == before + refused


def test_a_head_that_cannot_be_read_is_repeated_nowhere(guarded):
    host, port = guarded.http_address.rsplit(":", 1)
    for head in (
        f"GET /v2 HTTP/1.1\r\nHost: x\r\nAuthorization : Bearer {TOKEN}\r\n",
        f"GET /v2 HTTP/1.1\r\nHost: x\r\nX: y\r\n Authorization: Bearer {TOKEN}\r\n",
        f"Bearer {TOKEN}\r\n",
        f"GET {TOKEN}\r\n",
    ):
        with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
            connection.sendall(f"{head}Connection: close\r\n\r\n".encode())
            answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
        assert answer.split()[1] in {"400", "401", "405"}, answer
        assert TOKEN not in answer


def test_a_token_allows_so_many_calls_a_second(asker):
    before = count(asker, 'tessera_calls_refused_total{reason="rate"}')
    ended = [asker.call("/inference.GRPCInferenceService/ServerLive", SLOW) for _ in range(50)]
    assert ended[0] == "OK"
    assert set(ended) == {"OK", "RESOURCE_EXHAUSTED"}
    statuses = [asker.page("GET", "/v2", SLOW)[0] for _ in range(50)]
    assert 429 in statuses
    refused = ended.count("RESOURCE_EXHAUSTED") + statuses.count(429)
    assert count(asker, 'tessera_calls_refused_total{reason="rate"}') == before + refused
    assert asker.call("/inference.GRPCInferenceService/ServerLive", TOKEN) == "OK"


def test_clients_show_the_token_of_a_file(guarded, package, drawn, tmp_path, capsys):
    shown = tmp_path / "token"
    shown.write_text(f"{TOKEN}\n")
    mine = Credentials(token_file=shown)
    content = drawn.samples(3).SerializeToString()
    with (
        PredictorClient(guarded.address, credentials=mine) as client,
        PredictorClient(guarded.address) as other,
    ):
        assert client.send(content)
        with pytest.raises(Unauthenticated, match="the call has no token"):
            other.send(content)
    with RepositoryClient(guarded.address, credentials=mine) as repository:
        assert [row.name for row in repository.index()] == ["ranker"]
    ask = ["--address", guarded.address, "--model-file", str(package), "--random", "1"]
    assert run_command("predict", [*ask, "--token-file", str(shown)]) == 0
    assert run_command("predict", ask) == 2
    assert "see --token-file" in capsys.readouterr().err
    ask = ["list", "--address", guarded.address]
    assert run_command("repository", [*ask, "--token-file", str(shown)]) == 0
    assert run_command("repository", ask) == 2


def test_a_file_that_changes_is_read_again_and_a_bad_one_is_not_taken(guarded, asker, tokens):
    server, later = "/inference.GRPCInferenceService/ServerLive", "later-token-cdef"
    events = lambda: [line["event"] for line in guarded.log]  # noqa: E731 - it is one line
    try:
        replace(tokens, CONTENT + f"{later}\n".encode())
        guarded.wait_for(lambda: asker.call(server, later) == "OK")
        replace(tokens, b"not,a,token\n")
        guarded.wait_for(lambda: "tokens_not_reloaded" in events())
        assert asker.call(server, later) == asker.call(server, TOKEN) == "OK"
        line = next(line for line in guarded.log if line["event"] == "tokens_not_reloaded")
        assert "line 1 has no token" in line["error"]
        assert count(asker, 'tessera_secret_reloads_total{files="tokens",result="refused"}') == 1
        assert count(asker, 'tessera_secret_reloads_total{files="tokens",result="taken"}') == 1
    finally:
        replace(tokens, CONTENT)
    reloads = events().count("tokens_reloaded")
    guarded.signal(signal.SIGHUP)
    guarded.wait_for(lambda: events().count("tokens_reloaded") > reloads)
    assert "reload" in events()
    assert asker.call(server, later) == "UNAUTHENTICATED"
    assert asker.call(server, TOKEN) == "OK"
