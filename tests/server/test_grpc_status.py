"""The table "answers to trouble", row by row, over the wire, with its counts."""

import io

import grpc
import numpy as np
import pytest

from tessera.serving.protocol import predictor_pb2 as pb
from tessera.serving.server.background import ServerThread
from tessera.serving.server.config import ModelLimits
from tessera.serving.server.log import make_logger
from tests.patience import PATIENCE_S
from tests.server.server_harness import (
    FakeLoader,
    Running,
    config,
    f32,
    i32,
    make_schema,
    request,
    scores_of,
    serving,
    value,
)


@pytest.fixture(scope="module")
def server():
    with serving(config("m", "other")) as running:
        yield running


def status(error):
    return error.code().name


def test_scores_and_what_comes_with_them(server):
    message = request(3, bag=2)
    before = server.metrics()
    answer = server.predict(message)
    got = np.array(answer.predictions["default"].data, "<f4")
    np.testing.assert_array_equal(got, scores_of(message))
    assert len(answer.predictions["pair"].data) == 6
    assert (answer.model_name, answer.model_version) == ("m", "m-v1")
    assert answer.timings.batch_samples == 3
    assert answer.timings.batch_requests == 1
    after = server.metrics()
    for name in ("tessera_requests_total", "tessera_request_duration_seconds_count"):
        labels = {"code": "OK"} if name.endswith("total") else {}
        grown = value(after, name, model="m", **labels) - value(before, name, model="m", **labels)
        assert grown == 1
    ids = value(after, "tessera_ids_total", model="m") - value(
        before, "tessera_ids_total", model="m"
    )
    assert ids == 3 * 2 * 4


def test_a_torchrec_message_works_unchanged(server):
    """Only the fields below 100, and the unused groups present but empty, as its client sends."""
    message = request(2)
    message.embedding_features.num_features = 0
    message.unary_features.num_features = 0
    assert len(server.predict(message).predictions["default"].data) == 2


def bad_size(m):
    m.float_features.values = b"123"


def negative_length(m):
    m.id_list_features.lengths = i32([-1, 1, 1])


def wrong_sum(m):
    m.id_list_features.lengths = i32([1, 1, 9])


def too_many_samples(m):
    m.batch_size = 16_385


def bad_id(m):
    m.id_list_features.values = i32([100, 1, 1])


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (bad_size, "float_features.values has 3 bytes, expected 8"),
        (negative_length, "id_list_features.lengths[0] is -1, expected >= 0"),
        (wrong_sum, "id_list_features.values has 12 bytes, expected 44"),
        (too_many_samples, "batch_size is 16385, the limit is 16384"),
        (bad_id, "feature 'a', row 0: id 100 is outside [0, 100)"),
    ],
)
def test_invalid_argument(server, edit, text):
    message = request()
    edit(message)
    before = server.metrics()
    error = server.refused(message)
    assert status(error) == "INVALID_ARGUMENT"
    assert text in error.details()
    after = server.metrics()
    for name, labels in (
        ("tessera_requests_total", {"code": "INVALID_ARGUMENT"}),
        ("tessera_rejected_total", {"reason": "invalid"}),
    ):
        assert (
            value(after, name, model="m", **labels) == value(before, name, model="m", **labels) + 1
        )


def test_bytes_that_are_no_message(server):
    with pytest.raises(grpc.RpcError) as caught:
        server.raw(b"\xff" * 7, timeout=PATIENCE_S)
    assert status(caught.value) == "INVALID_ARGUMENT"
    assert "the message (7 bytes) is not a valid PredictionRequest" in caught.value.details()
    assert value(server.metrics(), "tessera_requests_total", code="INVALID_ARGUMENT", model="") >= 1


def test_out_of_range_under_clamp_is_served_and_counted(server):
    before = value(server.metrics(), "tessera_out_of_range_ids_total", model="m")
    message = request()
    message.id_list_features.values = i32([1, 1, 10])
    server.predict(message)
    assert value(server.metrics(), "tessera_out_of_range_ids_total", model="m") == before + 1


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model_name": "nobody"}, "model_name 'nobody' is unknown; this server has 'm', 'other'"),
        ({"model_version": "9"}, "model_version '9' of model 'm' is not loaded"),
        ({"model_name": "x" * 100_000}, "model_name 'xxx"),
    ],
)
def test_not_found(server, fields, text):
    error = server.refused(request(**fields))
    assert status(error) == "NOT_FOUND"
    assert text in error.details()
    assert len(error.details()) <= 1000


def test_models_by_name_and_version(server):
    assert server.predict(request(model_name="other")).model_name == "other"
    answer = server.predict(request(model_name="m", model_version="m-v1"))
    assert answer.model_name == "m"
    assert value(server.metrics(), "tessera_requests_total", model="other", code="OK") >= 1


def test_resource_exhausted():
    with serving(config(limits=ModelLimits(workers=1, max_queue_requests=1))) as server:
        server.runner.open.clear()
        busy = server.start(request())
        server.runner.entered.acquire()
        waiting = server.start(request())
        # Calls overtake each other on their way in, so one of two more finds the queue full.
        errors = [server.refused(request(), timeout=PATIENCE_S) for _ in range(1)]
        server.runner.open.set()
        outcomes = [f.code().name for f in (busy, waiting)]
        assert [status(error) for error in errors] + outcomes == ["RESOURCE_EXHAUSTED", "OK", "OK"]
        assert "the queue is full" in errors[0].details()
        metrics = server.metrics()
        assert value(metrics, "tessera_rejected_total", reason="queue_full") == 1
        assert value(metrics, "tessera_requests_total", code="RESOURCE_EXHAUSTED") == 1


MOST = 50


def test_deadline_passed_before_the_work_began():
    with serving() as server:
        server.runner.open.clear()
        busy = server.start(request())
        server.runner.entered.acquire()
        # Where cores are short, what the client sends at its deadline may come well before the
        # server's clock strikes, and is then a call that was cancelled: ask until one is not.
        asked = 0
        while not value(server.metrics(), "tessera_requests_total", code="DEADLINE_EXCEEDED"):
            asked += 1
            assert asked <= MOST
            assert status(server.refused(request(7), timeout=0.2)) == "DEADLINE_EXCEEDED"
        server.runner.open.set()
        assert busy.code().name == "OK"
        server.predict(request(2))
        assert server.runner.batch_sizes == [1, 2]  # the 7 samples were never computed
        metrics = server.metrics()
        late = value(metrics, "tessera_rejected_total", reason="deadline")
        assert late >= 1
        assert late + value(metrics, "tessera_rejected_total", reason="cancelled") == asked
        assert value(metrics, "tessera_requests_total", code="DEADLINE_EXCEEDED") == late


def test_cancelled_by_the_client():
    with serving() as server:
        server.runner.open.clear()
        busy = server.start(request())
        server.runner.entered.acquire()
        gone = server.start(request(7))
        wait_for(server, "tessera_queue_requests", 1)
        gone.cancel()
        wait_for(server, "tessera_requests_total", 1, code="CANCELLED")
        server.runner.open.set()
        assert busy.code().name == "OK"
        server.predict(request(2))
        assert server.runner.batch_sizes == [1, 2]
        assert value(server.metrics(), "tessera_rejected_total", reason="cancelled") == 1


def wait_for(server, name, wanted, **labels):
    """Ask until the server has noticed what was just sent to it."""
    for _ in range(10_000):
        if value(server.metrics(), name, **labels) == wanted:
            return
    raise AssertionError(f"{name} never became {wanted}")


def test_unavailable_while_loading():
    loader = FakeLoader()
    loader.open.clear()
    thread = ServerThread(config(), loader=loader, log=make_logger("error", "json", io.StringIO()))
    thread._thread.start()
    while thread.server is None or thread.server.port == 0:
        thread._thread.join(0.001)
    with grpc.insecure_channel(f"127.0.0.1:{thread.server.port}") as channel:
        call = channel.unary_unary("/predictor.Predictor/Predict")
        with pytest.raises(grpc.RpcError) as caught:
            call(request().SerializeToString(), timeout=PATIENCE_S)
        assert status(caught.value) == "UNAVAILABLE"
        assert "model 'm' is still loading" in caught.value.details()
        running = Running(thread, channel, loader, None)
        thread.http_port = thread.server.http_port
        assert running.http("/healthz") == "ok\n"
        assert running.http_state() == 503
        assert value(running.metrics(), "tessera_model_ready", model="m") == 0
        loader.open.set()
        thread._ready.wait(PATIENCE_S)
        call(request().SerializeToString(), timeout=PATIENCE_S)
    thread.__exit__(None, None, None)


def test_a_bug_has_an_id_that_is_in_the_log_and_the_server_lives_on():
    with serving() as server:
        server.runner.fails_on = {9}
        error = server.refused(request(first_id=9))
        assert status(error) == "INTERNAL"
        error_id = error.details().split("id ")[1].split()[0]
        assert error_id in server.log.getvalue()
        assert "a table is on fire" in server.log.getvalue()
        assert "fire" not in error.details()
        server.predict(request())


def test_a_bug_outside_the_model_too(monkeypatch):
    with serving() as server:
        monkeypatch.setattr(
            "tessera.serving.server.request.encoder.ResponseEncoder.encode", lambda *_: 1 / 0
        )
        error = server.refused(request())
        assert status(error) == "INTERNAL"
        assert error.details().split("id ")[1].split()[0] in server.log.getvalue()
        monkeypatch.undo()
        server.predict(request())


def test_a_message_over_the_limit_is_refused_by_grpc_itself():
    with serving(config(max_message_bytes=2048)) as server:
        message = request()
        message.float_features.values = b"\0" * 4096
        assert status(server.refused(message)) == "RESOURCE_EXHAUSTED"
        server.predict(request())


def test_large_requests_come_back_whole():
    with serving(config(limits=ModelLimits(workers=2, max_batch_samples=64))) as server:
        message = request(1000)
        got = np.array(server.predict(message).predictions["default"].data, "<f4")
        np.testing.assert_array_equal(got, scores_of(message))


def test_shared_features_over_the_wire(server):
    message = request(2)
    message.shared_features.names.append("b")
    message.shared_features.num_rows = 1
    message.shared_features.features.num_features = 1
    message.shared_features.features.lengths = i32([2])
    message.shared_features.features.values = i32([7, 8])
    message.shared_features.row_index = i32([0, 0])
    message.id_list_features.num_features = 2
    message.id_list_features.lengths = i32([1] * 4)
    message.id_list_features.values = i32([1, 2, 3, 4])
    repeated = pb.PredictionRequest()
    repeated.CopyFrom(message)
    repeated.ClearField("shared_features")
    repeated.id_list_features.num_features = 3
    repeated.id_list_features.lengths = i32([1, 1, 2, 2, 1, 1])
    repeated.id_list_features.values = i32([1, 2, 7, 8, 7, 8, 3, 4])
    assert server.predict(message).predictions == server.predict(repeated).predictions


def test_nan_is_missing(server):
    message = request()
    message.float_features.values = f32([np.nan, 1])
    got = server.predict(message).predictions["default"].data
    assert got == pytest.approx(scores_of(message))


def test_schema_of_the_harness_covers_every_rule():
    rules = {(f.hashing, f.out_of_range) for f in make_schema().features}
    assert {("none", "reject"), ("none", "clamp"), ("murmur3", "reject")} <= rules
