"""``tessera serve --processes N``: one server to its clients, however many processes answer."""

import json
import os
import re
import signal
import socket
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tessera.cli import run_command
from tessera.serving.client import RequestDrawer, read_schema
from tessera.serving.client.encode import encode_request
from tessera.serving.package.loading import load_package
from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.serving.server import supervisor
from tessera.serving.server.background import ServerProcess
from tessera.serving.server.observe.record_format import read_records
from tessera.serving.server.shared_slots import SharedSlots
from tessera.training.models.config import TableConfig
from tests.conformance.guarded import TOKEN, Asker, Places
from tests.conformance.rest_calls import RestClient, rest_request
from tests.conformance.test_answers import run_in_process
from tests.kserve_messages import infer_request
from tests.package_factory import make_package, package_file
from tests.patience import PATIENCE_S
from tests.server.server_harness import ForkedServer, parse_metrics, value
from tests.span_collector import SpanCollector

ALONE = [("grpc.use_local_subchannel_pool", 1)]
"""A channel with this has a connection of its own."""

CONNECTIONS = 12
"""So many that both of two processes have some, but once in two thousand times."""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return package_file(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def messages(package):
    drawer = RequestDrawer(read_schema(package), seed=0)
    return [encode_request(drawer.samples(count)) for count in (1, 2, 7, 40)]


@pytest.fixture(scope="module")
def access_log(tmp_path_factory):
    return tmp_path_factory.mktemp("logs") / "access"


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def collector():
    with SpanCollector() as running:
        yield running


@pytest.fixture(scope="module")
def server(package, access_log, collector, records):
    flags = ["--model", str(package), "--processes", "2", "--drain-propagation-ms", "0"]
    tracing = ["--otlp-endpoint", collector.url, "--trace-share", "0"]
    telling = ["--access-log", str(access_log), "--record", str(records), "--record-share", "1"]
    with ForkedServer([*flags, *tracing, *telling]) as running:
        yield running
        assert running.terminate() == 0


class Clients:
    """Connections of their own, and calls on each."""

    def __init__(self, server, count=CONNECTIONS):
        self.channels = [grpc.insecure_channel(server.address, ALONE) for _ in range(count)]

    def __enter__(self):
        return [channel.unary_unary("/predictor.Predictor/Predict") for channel in self.channels]

    def __exit__(self, *_):
        for channel in self.channels:
            channel.close()


def wait_until(holds):
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.01)


def page(server, path="/metrics"):
    url = f"http://127.0.0.1:{server.http_port}{path}"
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as reply:
        return reply.read().decode()


def figure(server, name, **labels):
    return value(parse_metrics(page(server)), name, **labels)


def started(server):
    """The last process id of each process, by its name."""
    return {e["process"]: e["pid"] for e in server.log if e["event"] == "process_started"}


def test_every_connection_gives_the_bits_of_one_process_and_all_are_counted(
    server, package, messages, records
):
    in_process = load_package(package)
    before = figure(server, "tessera_requests_total", code="OK")
    with Clients(server) as calls:
        for content in messages:
            expected = run_in_process(in_process, pb.PredictionRequest.FromString(content))
            for call in calls:
                answer = pb.PredictionResponse.FromString(call(content, timeout=PATIENCE_S))
                scores = np.array(answer.predictions["default"].data, "<f4")
                assert scores.tobytes() == np.asarray(expected, "<f4").tobytes()
    count = CONNECTIONS * len(messages)
    wait_until(lambda: figure(server, "tessera_requests_total", code="OK") == before + count)
    metrics = parse_metrics(page(server))
    calls_counted = value(metrics, "tessera_request_duration_seconds_count")
    assert calls_counted == value(metrics, "tessera_requests_total")
    assert value(metrics, "tessera_model_ready") == 1
    tables = value(metrics, "tessera_device_memory_bytes", kind="tables")
    assert tables == sum(table.bytes for table in in_process.manifest.tables)
    assert value(metrics, "tessera_queue_requests") == 0
    # Each process has recorded its own calls in a file of its own.
    recorded = lambda: [list(read_records(path)) for path in records.iterdir()]  # noqa: E731 - it is one line
    wait_until(lambda: figure(server, "tessera_records_total", result="written") == before + count)
    assert sum(map(len, recorded())) == before + count
    assert len(recorded()) == 2
    assert {call.message for calls in recorded() for call in calls} >= set(messages)
    # Whichever process answers, Triton's statistics are those of the whole server.
    for _ in range(4):
        with grpc.insecure_channel(server.address, ALONE) as channel:
            ask = channel.unary_unary("/inference.GRPCInferenceService/ModelStatistics")
            told = ipb.ModelStatisticsResponse.FromString(ask(b"", timeout=PATIENCE_S))
        (statistics,) = told.model_stats
        assert statistics.inference_stats.success.count == before + count


def test_the_page_has_the_families_of_one_process_and_counts_restarts(server, package):
    def families(of):
        return set(re.findall(r"^# TYPE (\S+) (\S+)", page(of), re.MULTILINE))

    with ForkedServer(["--model", str(package), "--drain-propagation-ms", "0"]) as alone:
        more = families(server) - families(alone)
        assert families(alone) <= families(server)
    assert more == {("tessera_worker_restarts_total", "counter")}
    assert page(server, "/readyz") == "ready\n"
    assert page(server, "/healthz") == "ok\n"
    assert "tessera serve" in page(server, "/")


def test_health_metadata_and_refusals_are_those_of_any_server(server, messages):
    for _ in range(4):
        with grpc.insecure_channel(server.address, ALONE) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            state = stub.Check(health_pb2.HealthCheckRequest(service="model"), timeout=PATIENCE_S)
            assert state.status == health_pb2.HealthCheckResponse.SERVING
            ready = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")(
                b"", timeout=PATIENCE_S
            )
            assert ipb.ServerReadyResponse.FromString(ready).ready
            call = channel.unary_unary("/predictor.Predictor/Predict")
            assert call.future(b"\xff", timeout=PATIENCE_S).code().name == "INVALID_ARGUMENT"
            message = pb.PredictionRequest.FromString(messages[0])
            message.model_name = "nobody"
            refused = call.future(message.SerializeToString(), timeout=PATIENCE_S)
            assert refused.code().name == "NOT_FOUND"


@pytest.mark.parametrize("more", [[], ["--processes", "2"]])
def test_a_second_server_does_not_share_the_port(capsys, server, package, more):
    flags = ["--model", str(package), "--host", "127.0.0.1", "--http-port", "0", *more]
    assert run_command("serve", [*flags, "--port", str(server.port)]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"127.0.0.1:{server.port} cannot be listened on" in line


@pytest.fixture(scope="module")
def large_package(tmp_path_factory):
    """80 MB of tables."""
    features = {f"f{number}": TableConfig(rows=300_000) for number in range(4)}
    path, _ = make_package(tmp_path_factory.mktemp("large"), dim=64, features=features)
    return path


def test_tables_are_in_memory_once(large_package):
    manifest = load_package(large_package).manifest
    table_bytes = sum(table.bytes for table in manifest.tables)
    content = encode_request(RequestDrawer(read_schema(large_package), seed=0).samples(500))
    flags = ["--model", str(large_package), "--processes", "3", "--drain-propagation-ms", "0"]
    with ForkedServer(flags) as running, Clients(running) as calls:
        for call in calls:
            call(content, timeout=PATIENCE_S)
        private = [
            memory_kib(pid, "Private_Clean") + memory_kib(pid, "Private_Dirty")
            for name, pid in started(running).items()
            if name != "pages"
        ]
        assert len(private) == 3
        assert all(1024 * kib < table_bytes / 2 for kib in private), (private, table_bytes)


def memory_kib(pid, name):
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)[1])


def keep_calling(call, content, outcomes, ended):
    while not ended.is_set():
        outcome = call.future(content, timeout=PATIENCE_S).code().name
        outcomes[outcome] += 1
        if outcome != "OK":
            ended.wait(0.002)


def under_load(server, calls, content, action):
    """Run ``action`` while every call is made again and again; returns how the calls ended."""
    outcomes, ended = Counter(), threading.Event()
    threads = [
        threading.Thread(target=keep_calling, args=(call, content, outcomes, ended))
        for call in calls
    ]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: outcomes["OK"] > 100)
        action(outcomes)
    finally:
        ended.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    return outcomes


def test_a_worker_that_is_killed_is_replaced_and_its_counts_stay(package, messages):
    flags = ["--model", str(package), "--processes", "2", "--drain-propagation-ms", "0"]
    with ForkedServer(flags) as running, Clients(running) as calls:

        def kill_one(outcomes):
            first = started(running)
            time.sleep(0.3)  # both have told what they have counted
            counted = figure(running, "tessera_requests_total", code="OK")
            os.kill(first["worker-0"], signal.SIGKILL)
            wait_until(lambda: started(running)["worker-0"] != first["worker-0"])
            wait_until(lambda: figure(running, "tessera_worker_restarts_total") == 1)
            assert figure(running, "tessera_requests_total", code="OK") >= counted
            answered = outcomes["OK"]
            wait_until(lambda: outcomes["OK"] > answered + 100)
            assert page(running, "/readyz") == "ready\n"

        outcomes = under_load(running, calls, messages[0], kill_one)
        assert outcomes.keys() <= {"OK", "UNAVAILABLE"}
        # Each connection to the killed process loses the call that it had, and tries until it is back.
        ended = [e for e in running.log if e["event"] == "process_ended"]
        assert [(e["process"], e["status"], e["level"]) for e in ended] == [
            ("worker-0", -signal.SIGKILL, "warning")
        ]
        os.kill(started(running)["pages"], signal.SIGKILL)
        wait_until(lambda: page_or_nothing(running) == "ready\n")
        assert running.terminate() == 0


def page_or_nothing(server):
    try:
        return page(server, "/readyz")
    except OSError:
        return ""


def test_sigterm_under_load_loses_no_accepted_request(package, messages):
    with ServerProcess(["--model", str(package), "--processes", "2"]) as running:
        with Clients(running) as calls:
            statuses = []
            outcomes = under_load(
                running, calls, messages[0], lambda _: statuses.append(running.terminate())
            )
        assert statuses == [0]
        assert outcomes.keys() == {"OK", "UNAVAILABLE"}
    events = [line["event"] for line in running.log]
    assert events[-3:] == ["signal", "drain", "stop"]
    assert "process_ended" not in events


def test_sigterm_while_loading_ends_with_0(large_package):
    running = ForkedServer(["--model", str(large_package), "--processes", "2"])
    running._reader.start()
    wait_until(lambda: any(line["event"] == "load" for line in running.log))
    assert running.terminate() == 0
    running._reader.join(PATIENCE_S)
    running.process.stderr.close()


def test_without_its_supervisor_nothing_stays(package):
    running = ForkedServer(["--model", str(package), "--processes", "2"])
    with running:
        pids = started(running).values()
        running.process.kill()
        running.process.wait()
        wait_until(lambda: not any(is_alive(pid) for pid in pids))
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", running.port)) != 0


def is_alive(pid):
    """Whether it runs; one that nobody has waited for is only a name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--processes", "0"], "--processes is 0; give a whole number of at least 1"),
        (["--processes", "257"], "--processes is 257; give a number of at most 256"),
        (
            ["--processes", "32"],
            "--max-message-bytes 67108864 could never come into one of 32 processes",
        ),
    ],
)
def test_numbers_of_processes_that_cannot_work(capsys, package, arguments, text):
    assert run_command("serve", ["--model", str(package), *arguments]) == 2
    assert text in capsys.readouterr().err


def test_a_package_for_gpus_is_refused(capsys, monkeypatch, package):
    class OnGpu:
        device = "cuda"

    monkeypatch.setattr(supervisor.Records, "manifest", lambda _: OnGpu)
    flags = ["--model", str(package), "--processes", "2", "--port", "0", "--http-port", "0"]
    assert run_command("serve", flags) == 2
    assert "is a package for GPUs" in capsys.readouterr().err


def test_slots_hold_the_last_whole_content():
    slots = SharedSlots(2, 100)
    assert (slots.read(0), slots.read(1), slots.state, slots.restarts) == (b"", b"", 0, 0)
    slots.write(1, b"x" * 100)
    slots.write(1, b"")
    slots.write(1, b"last")
    slots.state, slots.restarts = 2, 3
    assert (slots.read(0), slots.read(1), slots.state, slots.restarts) == (b"", b"last", 2, 3)
    with pytest.raises(ValueError, match="101 bytes do not fit a slot of 100"):
        slots.write(0, bytes(101))
    pid = os.fork()
    if pid == 0:
        slots.write(0, b"from another process")
        os._exit(0)
    os.waitpid(pid, 0)
    assert slots.read(0) == b"from another process"


def test_a_slot_that_is_written_is_never_read_torn():
    slots = SharedSlots(1, 10_000)
    ended = threading.Event()

    def write():
        turn = 0
        while not ended.is_set():
            turn += 1
            slots.write(0, bytes([turn % 251]) * (1 + 37 * turn % 10_000))

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(5_000):
        assert len(set(slots.read(0))) <= 1
    ended.set()
    writer.join()


def lines_of(path):
    return [json.loads(line) for line in path.open()] if path.exists() else []


def test_every_process_writes_the_access_log_and_no_client_can_say_where_it_is(
    server, messages, access_log
):
    forged = (("x-request-id", "forged"), ("tessera-origin", " 10.1.1.1 other"))
    body, headers = rest_request(infer_request(pb.PredictionRequest.FromString(messages[1])))
    rest = RestClient(f"127.0.0.1:{server.http_port}")
    path = "/v2/models/model/infer"
    with Clients(server) as calls, rest:
        for call in calls:
            call(messages[0], metadata=forged, timeout=PATIENCE_S)
        reply = rest.infer(body, {"X-Request-Id": "by REST", **headers}, path=path)
        assert (reply.status, reply.headers["x-request-id"]) == (200, "by REST")
        assert rest.infer(b"{", {"X-Request-Id": "not JSON"}, path=path).status == 400

        def of(request_id):
            return [each for each in lines_of(access_log) if each["request_id"] == request_id]

        wait_until(lambda: len(of("forged")) == CONNECTIONS and of("by REST") and of("not JSON"))
        assert {(each["protocol"], each["peer"]) for each in of("forged")} == {
            ("grpc", "127.0.0.1")
        }
        told = [(each["protocol"], each["method"], each["peer"]) for each in of("by REST")]
        assert told == [("rest", "ModelInfer", "127.0.0.1")]
        assert [each["samples"] for each in of("by REST") + of("not JSON")] == [2, 0]
        assert [each["http_status"] for each in of("by REST") + of("not JSON")] == [200, 400]
        access_log.rename(access_log.with_suffix(".1"))
        server.process.send_signal(signal.SIGHUP)

        def all_write_to_the_new_one():
            before = len(lines_of(access_log))
            for call in calls:
                call(messages[0], timeout=PATIENCE_S)
            time.sleep(0.05)
            return len(lines_of(access_log)) == before + CONNECTIONS

        wait_until(all_write_to_the_new_one)
    assert figure(server, "tessera_log_lines_dropped_total", log="access") == 0


def test_calls_that_are_forwarded_are_traced_where_they_are_computed(server, messages, collector):
    trace = "0af7651916cd43dd8448eb211c80319c"
    body, headers = rest_request(infer_request(pb.PredictionRequest.FromString(messages[1])))
    given = {"traceparent": f"00-{trace}-b7ad6b7169203331-01", **headers}
    with RestClient(f"127.0.0.1:{server.http_port}") as rest:
        for content, status in ((body, 200), (b"{", 400)):
            reply = rest.infer(content, given, path="/v2/models/model/infer")
            assert reply.status == status
    wait_until(lambda: figure(server, "tessera_spans_total", result="sent") == 6 + 1)
    assert {span["traceId"] for span in collector.spans} == {trace}
    whole, refused = sorted(
        (span["attributes"] for span in collector.spans if span["kind"] == 2),
        key=lambda told: told["http.response.status_code"],
    )
    assert (whole["network.peer.address"], whole["tessera.samples"]) == ("127.0.0.1", 2)
    assert (refused["http.response.status_code"], refused["tessera.samples"]) == (400, 0)
    assert whole["http.route"] == refused["http.route"] == "/v2/models/{name}/infer"


def test_tokens_and_certificates_guard_every_process(package, messages, tmp_path):
    places = Places(tmp_path)
    flags = ["--model", str(package), "--processes", "2", "--drain-propagation-ms", "0"]
    flags += ["--tls-cert", str(places.cert), "--tls-key", str(places.key)]
    flags += ["--tls-client-ca", str(places.ca), "--auth-token-file", str(places.tokens)]
    with ForkedServer(flags) as running:
        asked = SimpleNamespace(
            address=running.address, http_address=f"127.0.0.1:{running.http_port}"
        )
        predict = "/predictor.Predictor/Predict"
        for _ in range(4):
            with Asker(asked, places.mine) as asker:
                assert asker.call(predict, content=messages[0]) == "UNAUTHENTICATED"
                assert asker.call(predict, TOKEN, messages[0]) == "OK"
        with Asker(asked, places.mine) as asker:
            # What the process of the pages asks the others.
            for _ in range(4):
                assert asker.page("GET", "/v2/models/model", TOKEN)[0] == 200
            assert asker.page("GET", "/v2/models/model")[0] == 401
            assert asker.page("GET", "/readyz")[0] == 200
            refused = 'tessera_calls_refused_total{reason="no_token"} 5.0'
            wait_until(lambda: refused in asker.page("GET", "/metrics", TOKEN)[1])
            serial = places.renew()
            wait_until(
                lambda: (
                    {asker.served(address, "h2") for address in [asked.address] * 4} == {serial}
                    and asker.served(asked.http_address, "http/1.1") == serial
                )
            )
        with Asker(asked) as asker:
            assert asker.call(predict, TOKEN, messages[0]) == "UNAVAILABLE"
        assert running.terminate() == 0
