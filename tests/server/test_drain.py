"""SIGTERM: nothing that was accepted is lost, and the process ends with 0."""

import asyncio
import io
import os
import signal
import threading
import time
from collections import Counter

import grpc
import pytest

from tessera.serving.client import RequestDrawer, read_schema
from tessera.serving.client.encode import encode_request
from tessera.serving.server.background import ServerProcess
from tessera.serving.server.config import ModelLimits
from tessera.serving.server.log import make_logger
from tessera.serving.server.server import Server
from tessera.serving.server.signals import SignalMeaning, SignalReader
from tests.package_factory import package_file
from tests.patience import PATIENCE_S
from tests.server.server_harness import FakeLoader, ForkedServer, config, request, serving, value


def test_accepted_requests_are_answered_and_new_ones_refused():
    limits = ModelLimits(workers=1, max_batch_samples=2, max_delay_us=60_000_000)
    with serving(config(limits=limits, drain_limit_s=60)) as server:
        server.runner.open.clear()
        accepted = [server.start(request()) for _ in range(9)]
        wait_until(lambda: queued(server) == 7)  # two are held by the worker
        stopping = threading.Thread(target=server.thread.__exit__, args=(None, None, None))
        stopping.start()
        wait_until(lambda: server.http_state() == 503)
        late = server.refused(request())
        assert late.code() is grpc.StatusCode.UNAVAILABLE
        assert "draining" in late.details()
        metrics = server.metrics()
        assert value(metrics, "tessera_rejected_total", reason="draining", model="m") == 1
        assert value(metrics, "tessera_requests_total", code="UNAVAILABLE", model="m") == 1
        assert value(metrics, "tessera_model_ready") == 0
        server.runner.open.set()
        assert [call.code().name for call in accepted] == ["OK"] * 9
        stopping.join(PATIENCE_S)
        assert not stopping.is_alive()
    assert '"event": "stop"' in server.log.getvalue()


def test_calls_are_still_taken_during_the_propagation_wait(monkeypatch):
    known = asyncio.Event()
    monkeypatch.setattr(Server, "_wait_for_propagation", lambda _: known.wait())
    with serving() as server:
        stopping = threading.Thread(target=server.thread.__exit__, args=(None, None, None))
        stopping.start()
        wait_until(lambda: server.http_state() == 503)
        server.predict(request())
        server.thread.loop.call_soon_threadsafe(known.set)
        stopping.join(PATIENCE_S)
        assert not stopping.is_alive()


def test_the_limit_ends_what_never_ends():
    with serving(config(drain_limit_s=0.2)) as server:
        server.runner.open.clear()
        stuck = server.start(request())
        server.runner.entered.acquire()
        server.thread.__exit__(None, None, None)
        assert stuck.code() is not grpc.StatusCode.OK
        assert "drain_limit_passed" in server.log.getvalue()
        server.runner.open.set()


def queued(server):
    return value(server.metrics(), "tessera_queue_requests")


def wait_until(holds):
    """Ask again until another process or thread got that far."""
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until, "it never happened"
        threading.Event().wait(0.005)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return package_file(tmp_path_factory.mktemp("package"))


def test_sigterm_under_load_loses_no_accepted_request(package):
    """Every call ends in an answer, or in UNAVAILABLE once the server refuses; exit status 0."""
    drawer = RequestDrawer(read_schema(package), seed=0)
    contents = [encode_request(drawer.samples(4)) for _ in range(8)]
    with ServerProcess(["--model", str(package), "--drain-propagation-ms", "100"]) as server:
        outcomes = []
        stopped = threading.Event()

        def client():
            with grpc.insecure_channel(server.address) as channel:
                call = channel.unary_unary("/predictor.Predictor/Predict")
                for count in range(100_000):
                    try:
                        call(contents[count % 8], timeout=30)
                        outcomes.append("OK")
                    except grpc.RpcError as error:
                        outcomes.append(error.code().name)
                        return
                    if count == 20:
                        stopped.set()

        clients = [threading.Thread(target=client) for _ in range(4)]
        for thread in clients:
            thread.start()
        assert stopped.wait(PATIENCE_S)
        assert server.terminate() == 0
        for thread in clients:
            thread.join(PATIENCE_S)
    assert outcomes.count("OK") > 20
    assert set(outcomes) == {"OK", "UNAVAILABLE"}
    # The file's hash is told when it is known.
    events = [line["event"] for line in server.log if line["event"] != "file_hash"]
    assert events == ["start", "load", "loaded", "ready", "signal", "drain", "stop"]


def test_second_signal_ends_at_once(package):
    arguments = [
        "--model",
        str(package),
        "--drain-propagation-ms",
        "60000",
        "--drain-limit-s",
        "99",
    ]
    with ForkedServer(arguments) as server:
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: any(line["event"] == "drain" for line in server.log))
        heard = time.monotonic()
        wait_until(lambda: time.monotonic() > heard + 1)  # sooner, it is the same signal
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 1
        server._reader.join(PATIENCE_S)
    assert server.log[-1]["event"] == "forced"


def test_a_repeat_within_a_second_is_the_same_signal():
    signals = SignalReader()
    numbers = [
        (signal.SIGHUP, 10.0, SignalMeaning.RELOAD),
        (signal.SIGTERM, 10.0, SignalMeaning.DRAIN),
        (signal.SIGTERM, 10.0, SignalMeaning.REPEAT),
        (signal.SIGINT, 10.999, SignalMeaning.REPEAT),
        (signal.SIGHUP, 11.0, SignalMeaning.RELOAD),
        (signal.SIGTERM, 11.0, SignalMeaning.END),
    ]
    assert [signals.read(number, now) for number, now, _ in numbers] == [m for *_, m in numbers]


def test_sigterm_while_loading_ends_with_0_and_what_nobody_awaits_is_logged():
    log = io.StringIO()
    loader = FakeLoader()
    loader.open.clear()

    async def body():
        server = Server(
            config(),
            log=make_logger("error", "json", log),
            dropped_log_lines=lambda: 0,
            loader=loader,
        )
        running = asyncio.ensure_future(server.run())
        while server.port == 0:  # noqa: ASYNC110 - the server has no event for "listening"
            await asyncio.sleep(0.001)
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        os.kill(os.getpid(), signal.SIGTERM)
        return await asyncio.wait_for(running, 60)

    assert asyncio.run(body()) == 0
    assert "unhandled" in log.getvalue()
    assert "ZeroDivisionError" in log.getvalue()
    loader.open.set()


def test_sixty_four_loops_hear_nothing_but_answers_and_unavailable(package):
    """Clients that go on sending, on one connection or on many, are never told CANCELLED."""
    content = encode_request(RequestDrawer(read_schema(package), seed=0).samples(1))
    loops, connections = 64, 16
    outcomes = Counter()
    ended = threading.Event()
    with ForkedServer(["--model", str(package), "--drain-propagation-ms", "100"]) as server:
        alone = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.insecure_channel(server.address, alone) for _ in range(connections)]

        def client(channel):
            """Asks again and again, also after it has heard UNAVAILABLE."""
            call = channel.unary_unary("/predictor.Predictor/Predict")
            while not ended.is_set():
                outcome = call.future(content, timeout=PATIENCE_S).code().name
                outcomes[outcome] += 1
                if outcome != "OK":
                    ended.wait(0.001)

        clients = [
            threading.Thread(target=client, args=(channels[number % connections],))
            for number in range(loops)
        ]
        for thread in clients:
            thread.start()
        wait_until(lambda: outcomes["OK"] > 5 * loops)
        assert server.terminate() == 0
        ended.set()
        for thread in clients:
            thread.join(PATIENCE_S)
        for channel in channels:
            channel.close()
    assert outcomes.keys() == {"OK", "UNAVAILABLE"}
