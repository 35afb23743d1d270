"""Pages for browsers under the server's own names alone (DNS rebinding), alike on both servers."""

import http.client
import json

import pytest

from tests.conformance.conformance_harness import TIMEOUT_S, RunningServer

BROWSER = {"Accept-Language": "en-GB,en;q=0.5"}
STRANGE = "evil.example"
PAGES = ("/", "/metrics", "/v2", "/v2/models/ranker", "/v2/models/ranker/config", "/nowhere")
PROBES = ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready")


def ask(server, path, host, headers=(), method="GET"):
    """The status, and what the answer says."""
    connection = http.client.HTTPConnection(server.http_address, timeout=TIMEOUT_S)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        if host is not None:
            connection.putheader("Host", host)
        for name, value in dict(headers).items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def status(*arguments, **options):
    return ask(*arguments, **options)[0]


@pytest.fixture(scope="module")
def named(kind, package):
    """A server that has a name, too."""
    flags = ["--allowed-host", "Ranker.Example.", "--allowed-host", "b.example"]
    with RunningServer(kind, "--model", package, *flags, "--drain-propagation-ms", 0) as running:
        yield running


@pytest.fixture
def at_loopback(server, kind):
    if kind == "given":
        pytest.skip("the given server may have names")
    return server


@pytest.mark.parametrize("path", PAGES)
def test_no_page_is_read_under_a_strange_name(at_loopback, path):
    for host in (STRANGE, f"{STRANGE}:8002", "127.0.0.1.evil.example", "localhost.evil.example"):
        told = ask(at_loopback, path, host, BROWSER)
        assert told[0] == 403, host
        assert "--allowed-host" in json.loads(told[1])["error"]
        assert "tessera_" not in told[1]
    assert ask(at_loopback, path, STRANGE, BROWSER, method="HEAD") == (403, "")


@pytest.mark.parametrize(
    "headers",
    [
        {"accept-language": ""},
        {"Origin": "http://evil.example"},
        {"Referer": "http://evil.example/"},
        {"Cookie": "a=b"},
        {"Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Mode": "cors"},
        {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"},
    ],
    ids=lambda headers: next(iter(headers)),
)
def test_a_browser_is_known_by_what_it_sends(at_loopback, headers):
    assert status(at_loopback, "/metrics", STRANGE, headers) == 403
    assert status(at_loopback, "/metrics", "127.0.0.1", headers) == 200


def test_names_of_this_machine_are_its_own(at_loopback):
    for host in (
        *("127.0.0.1", "127.0.0.1:8002", "10.1.2.3", "[::1]", "[::1]:8002", "localhost"),
        *("LOCALHOST:1", "localhost.", "ranker.localhost:8002"),
    ):
        assert status(at_loopback, "/metrics", host, BROWSER) == 200, host


def test_programs_ask_by_any_name(at_loopback):
    program = {"User-Agent": "Prometheus/3.5.0", "Accept-Encoding": "gzip", "Accept": "text/plain"}
    for host in ("tessera.default.svc.cluster.local:8002", "tessera", STRANGE):
        assert status(at_loopback, "/metrics", host, program) == 200
        assert status(at_loopback, "/v2/models/ranker", host) == 200


def test_probes_stay_open(at_loopback):
    for path in PROBES:
        assert status(at_loopback, path, STRANGE, BROWSER) == 200, path
    assert status(at_loopback, "/healthz/", STRANGE, BROWSER) == 403


def test_given_names_are_its_own(named):
    for host in ("ranker.example", "RANKER.example.:8002", "b.example:1", "localhost", "10.0.0.1"):
        assert status(named, "/metrics", host, BROWSER) == 200, host
    for host in ("example", "x.ranker.example", "ranker.example.evil.example", STRANGE):
        assert status(named, "/metrics", host, BROWSER) == 403, host


def test_the_status_page_asks_for_scores_under_a_given_name(named):
    def post(host, origin):
        headers = {"Origin": origin, "Content-Length": "2"}
        return status(named, "/v2/models/ranker/infer", host, headers, method="POST")

    assert post("ranker.example:8002", "http://evil.example") == 403
    assert post("evil.example", "http://evil.example") == 403
    connection = http.client.HTTPConnection(named.http_address, timeout=TIMEOUT_S)
    own = {"Host": "ranker.example", "Origin": "http://ranker.example"}
    connection.request("POST", "/v2/models/ranker/infer", body=b"{}", headers=own)
    answer = connection.getresponse()
    assert answer.status == 400, "heard, and not understood"
    assert "inputs" in answer.read().decode()


@pytest.mark.parametrize(
    ("host", "flags", "expected"),
    [
        ("127.0.0.1", ["--allowed-host", "*"], 200),
        ("0.0.0.0", [], 200),
        ("0.0.0.0", ["--allowed-host", "ranker.example"], 403),
    ],
)
def test_where_other_machines_come_in_names_have_to_be_given(kind, package, host, flags, expected):
    flags = ["--model", package, *flags, "--drain-propagation-ms", 0]
    with RunningServer(kind, *flags, host=host) as running:
        running.http_address = running.http_address.replace("0.0.0.0", "127.0.0.1")
        assert status(running, "/metrics", STRANGE, BROWSER) == expected


def test_tokens_take_the_rule_s_place(kind, package, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("secret\n")
    tokens.chmod(0o600)
    flags = ["--model", package, "--auth-token-file", tokens, "--drain-propagation-ms", 0]
    with RunningServer(kind, *flags) as running:
        assert status(running, "/metrics", STRANGE, BROWSER) == 401
        known = BROWSER | {"Authorization": "Bearer secret"}
        assert status(running, "/metrics", STRANGE, known) == 200
