"""--otlp-endpoint https://...: which collectors get spans, and what they are shown; calls are answered in any case."""

import ssl

import pytest

from tests.conformance.certificates import certify, replace
from tests.conformance.conformance_harness import RunningServer, start_that_ends
from tests.conformance.conftest import Drawn
from tests.conformance.rest_calls import RestClient, rest_request
from tests.kserve_messages import infer_request
from tests.span_collector import SpanCollector


class Collectors:
    """What a collector may show: contexts by what is wrong with them, and the files of who asks it."""

    def __init__(self, folder):
        authority, other = certify("authority"), certify("another authority")
        pairs = {
            "right": certify("collector", authority),
            "another authority": certify("collector", other),
            "another host": certify(
                "collector", authority, address="127.0.0.2", host="elsewhere.example"
            ),
        }
        self.ca, self.headers = folder / "ca.pem", folder / "headers"
        replace(self.ca, authority.pem)
        replace(self.headers, b"# of the team\nAuthorization: Bearer first\nx-team: ads\n")
        self.contexts = {}
        for name, pair in pairs.items():
            path = folder / f"{name}.pem"
            replace(path, pair.pem + pair.key_pem)
            self.contexts[name] = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.contexts[name].load_cert_chain(path)


@pytest.fixture
def collectors(tmp_path):
    return Collectors(tmp_path)


@pytest.fixture(scope="module")
def body(in_process):
    message = Drawn(in_process.manifest.schema).samples(3)
    return rest_request(infer_request(message), binary=True)


def traced(kind, package, url, *flags):
    tracing = ["--otlp-endpoint", url, "--trace-share", 1]
    return RunningServer(kind, "--model", package, "--drain-propagation-ms", 0, *tracing, *flags)


def sent(server):
    return server.value("tessera_spans_total", result="sent")


def refusals(server):
    return [line["error"] for line in server.log if line["event"] == "spans_not_sent"]


def call(server, body, path="/v2/models/ranker/infer"):
    content, headers = body
    with RestClient(server.http_address) as rest:
        reply = rest.infer(content, headers, path=path)
    assert reply.status == 200, reply


def test_a_collector_without_a_good_certificate_gets_nothing(kind, package, collectors, body):
    shown = collectors.contexts
    files = ["--otlp-ca", collectors.ca, "--otlp-headers-file", collectors.headers]
    with (
        SpanCollector(tls=shown["another authority"]) as collector,
        traced(kind, package, collector.url, *files) as server,
    ):
        call(server, body)
        server.wait_for(lambda: len(refusals(server)) == 1)
        assert "its certificate is not accepted: " in refusals(server)[0]
        assert (collector.requests, sent(server)) == (0, 0)
        collector.tls = shown["right"]
        server.wait_for(lambda: sent(server) == 6)
        assert collector.headers[0]["Authorization"] == "Bearer first"
        assert collector.headers[0]["x-team"] == "ads"

        collector.tls = shown["another host"]
        call(server, body, "/v2/models/ranker/versions/3/infer")
        server.wait_for(lambda: len(refusals(server)) == 2)
        assert "IP address mismatch" in refusals(server)[1]
        # A token that has been exchanged is taken, and a file that is wrong ends nothing.
        replace(collectors.headers, b"Authorization: Bearer second\n")
        collector.tls = shown["right"]
        server.wait_for(lambda: sent(server) == 12)
        assert collector.headers[-1]["Authorization"] == "Bearer second"
        assert "x-team" not in collector.headers[-1]
        replace(collectors.headers, b"no header\n")
        call(server, body)
        server.wait_for(lambda: len(refusals(server)) == 3)
        assert refusals(server)[2].endswith("line 1 is not a header; write NAME: VALUE")
        assert server.value("tessera_spans_total", result="dropped") == 0
        assert server.http("/readyz")[0] == 200
    routes = [span["attributes"]["http.route"] for span in collector.spans if span["kind"] == 2]
    plain, versioned = "/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer"
    assert routes[:2] == [plain, versioned]
    names = [span["name"] for span in collector.spans if span["kind"] == 2]
    assert names[:2] == [f"POST {plain}", f"POST {versioned}"]


def test_authorities_are_the_systems_where_none_are_named(
    kind, package, collectors, body, monkeypatch
):
    monkeypatch.setenv("SSL_CERT_FILE", str(collectors.ca))
    with (
        SpanCollector(tls=collectors.contexts["right"]) as collector,
        traced(kind, package, collector.url) as server,
    ):
        call(server, body)
        server.wait_for(lambda: sent(server) == 6)
        assert refusals(server) == []


def test_one_that_does_not_speak_tls_is_told_apart(kind, package, collectors, body):
    with SpanCollector() as collector:
        url = collector.url.replace("http:", "https:")
        with traced(kind, package, url, "--otlp-ca", collectors.ca) as server:
            call(server, body)
            server.wait_for(lambda: refusals(server) == ["TLS could not be agreed upon"])


def test_a_file_that_cannot_be_used_ends_the_start(kind, package, collectors):
    if kind == "given":
        pytest.skip("needs a server with flags of its own")
    asked = ["--model", package, "--port", "0", "--http-port", "0"]
    asked += ["--otlp-endpoint", "https://127.0.0.1", "--otlp-ca", collectors.headers]
    several = [["--processes", "2"]] if kind == "python" else []
    for more in ([], *several):
        ended = start_that_ends(kind, *asked, *more)
        assert ended.returncode == 2
        last = ended.stderr.splitlines()[-1]
        assert f"{collectors.headers}: is not a file of certificates in PEM" in last
        assert "Bearer" not in ended.stderr
