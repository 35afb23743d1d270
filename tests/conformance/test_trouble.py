"""The contract's table "answers to trouble", row by row, with what each row counts."""

import contextlib
import http.client
import signal
import time
import urllib.request
from pathlib import Path

import grpc
import pytest

from tests.conformance.conformance_harness import (
    TIMEOUT_S,
    GivenServer,
    RunningServer,
    f32,
    i32,
    i64,
)
from tests.packaging.test_operators import with_statement

A_MINUTE_US = 60_000_000
"""A worker that waits this long for other requests leaves requests in the queue for the test."""


def waiting_server(kind, package, *flags, delay_us=A_MINUTE_US):
    return RunningServer(
        kind,
        *("--model", package, "--workers", 1, "--max-delay-us", delay_us),
        *("--drain-propagation-ms", 0, *flags),
    )


def queued(server, count):
    return lambda: server.value("tessera_queue_requests") == count


def edit_sizes(message):
    message.float_features.values = b"123"


def edit_features(message):
    message.id_list_features.num_features = 2


def edit_negative(message):
    lengths = [0] * message.id_list_features.num_features
    message.id_list_features.lengths = i32([-1, *lengths[1:]])


def edit_sum(message):
    message.id_list_features.lengths = i32([9] * message.id_list_features.num_features)
    message.id_list_features.values_int64 = i64([1])


def edit_samples(message):
    message.batch_size = 1001


def edit_no_samples(message):
    message.batch_size = 0


def edit_ids(message):
    features = message.id_list_features.num_features
    message.id_list_features.lengths = i32([100_001] + [0] * (features - 1))
    message.id_list_features.values_int64 = i64([1] * 100_001)


def edit_reject(message):
    """Feature "genre", the fourth of seven, has 19 rows and refuses other ids."""
    message.id_list_features.lengths = i32([0, 0, 0, 2, 0, 0, 0])
    message.id_list_features.values_int64 = i64([18, 19])


def edit_infinite(message):
    message.float_features.values = f32([0, float("inf"), 0, 0])


def edit_weights(message):
    message.id_list_features.weights = b"1234"


def edit_both(message):
    message.id_list_features.lengths = i32([1] + [0] * 6)
    message.id_list_features.values = i32([1])
    message.id_list_features.values_int64 = i64([1])


def edit_unused(message):
    message.unary_features.num_features = 5


def edit_shared_name(message):
    message.shared_features.names.append("nobody")


def edit_shared_rows(message):
    message.shared_features.names.append("user")


def edit_too_many_rows(message):
    edit_shared_rows(message)
    message.shared_features.num_rows = 1001


INVALID = [
    (edit_sizes, ("float_features.values has 3 bytes, expected 16 (batch_size * num_features = 4 "
     "float32 numbers)")),
    (edit_features, "id_list_features.num_features is 2, expected 7"),
    (edit_negative, "id_list_features.lengths[0] is -1, expected >= 0"),
    (edit_sum, ("id_list_features.values_int64 has 8 bytes, expected 504 (sum(lengths) = 63 int64 "
     "numbers)")),
    (edit_samples, "batch_size is 1001, the limit is 1000 samples"),
    (edit_no_samples, "batch_size is 0, expected at least 1"),
    (edit_ids, "the request has 100001 ids, the limit is 100000"),
    (edit_reject, "id_list_features: feature 'genre', row 0: id 19 is outside [0, 19)"),
    (edit_infinite, ("float_features.values: feature 'dense_1', row 0 is inf, expected only NaN "
     "(missing) or a finite number")),
    (edit_weights, ("id_list_features.weights has 4 bytes, expected 0: these features have no "
     "weights")),
    (edit_both, ("id_list_features has 4 bytes of values and 8 bytes of values_int64, expected "
     "only one of the two")),
    (edit_unused, ("unary_features has 2 bytes (num_features 5), expected an empty message: no "
     "model here uses it")),
    (edit_shared_name, ("shared_features.names has 'nobody', which is not an id_list feature of the "
     "model")),
    (edit_too_many_rows, "shared_features.num_rows is 1001, the limit is 1000 rows"),
    (edit_shared_rows, "shared_features.num_rows is 0, expected at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "text"), INVALID, ids=[edit.__name__ for edit, _ in INVALID])
def test_invalid_argument_names_the_field_and_both_numbers(server, drawn, edit, text):
    message = drawn.samples(1)
    edit(message)
    before = server.value("tessera_rejected_total", model="ranker", reason="invalid")
    assert server.outcome(message.SerializeToString()) == ("INVALID_ARGUMENT", text)
    after = server.value("tessera_rejected_total", model="ranker", reason="invalid")
    assert after == before + 1


def test_bytes_that_are_no_message(server):
    code, text = server.outcome(b"\xff" * 7)
    assert code == "INVALID_ARGUMENT"
    assert text.startswith("the message (7 bytes) is not a valid PredictionRequest")
    assert server.value("tessera_requests_total", code="INVALID_ARGUMENT", model="") >= 1


def test_out_of_range_ids_under_clamp_and_hash_are_served_and_counted(server, drawn):
    message = drawn.samples(1)
    # Feature "region" clamps to 50 rows and "tag" hashes into 64; the last one takes any id.
    message.id_list_features.lengths = i32([0, 0, 0, 0, 3, 2, 1])
    message.id_list_features.values_int64 = i64([-1, 49, 50, 64, 0, 10**12])
    server.settle()
    before = server.value("tessera_out_of_range_ids_total", model="ranker")
    ids = server.value("tessera_ids_total", model="ranker")
    server.predict(message)
    server.settle()
    assert server.value("tessera_ids_total", model="ranker") == ids + 6
    assert server.value("tessera_out_of_range_ids_total", model="ranker") == before + 3


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model": "nobody"}, "model_name 'nobody' is unknown; this server has 'ranker', 'second'"),
        (
            {"version": "9"},
            "model_version '9' of model 'ranker' is not loaded; version '3' is",
        ),
    ],
)
def test_unknown_model_or_version(server, drawn, fields, text):
    message = drawn.samples(1, **fields)
    assert server.outcome(message.SerializeToString()) == ("NOT_FOUND", text)


def test_models_answer_by_name(server, drawn):
    message = drawn.samples(1, model="second", version="1")
    answer = server.predict(message)
    assert (answer.model_name, answer.model_version) == ("second", "1")
    message.model_name = message.model_version = ""
    assert server.predict(message).model_name == "ranker"


def test_a_full_queue_refuses(kind, package, drawn):
    flags = ["--max-queue-requests", 2, "--max-batch-samples", 100]
    with waiting_server(kind, package, *flags) as server:
        waiting = [server.start(drawn.samples(3)) for _ in range(2)]
        server.wait_for(queued(server, 2))
        code, text = server.outcome(drawn.samples(4).SerializeToString())
        assert code == "RESOURCE_EXHAUSTED"
        assert text == (
            "the queue is full: 2 requests with 6 samples wait (limits 2 and 65536), this request "
            "brings 4; try again later"
        )
        assert server.value("tessera_rejected_total", reason="queue_full") == 1
        assert server.value("tessera_queue_samples") == 6
        server.signal()
        assert [call.result(TIMEOUT_S) for call in waiting]


def test_a_request_in_more_parts_than_requests_may_wait_is_answered(kind, package, drawn):
    """It waits as the one request that it is."""
    # The last 50 of 250 samples wait as long as the delay lets them.
    flags = ["--max-queue-requests", 1, "--max-batch-samples", 100, "--max-delay-us", 10_000_000]
    with waiting_server(kind, package, *flags) as server:
        answer = server.predict(drawn.samples(250))
        assert len(answer.predictions["default"].data) == 250
        waiting = server.start(drawn.samples(50))
        server.wait_for(queued(server, 1))
        assert server.outcome(drawn.samples(250).SerializeToString())[0] == "RESOURCE_EXHAUSTED"
        server.signal()
        assert waiting.result(TIMEOUT_S)


def test_a_deadline_that_passes_in_the_queue_is_not_computed(kind, package, drawn):
    with waiting_server(kind, package) as server:
        with pytest.raises(grpc.RpcError) as caught:
            server.predict(drawn.samples(1), timeout=0.9)  # time enough to reach the queue
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        server.wait_for(lambda: server.value("tessera_rejected_total", reason="deadline") == 1)
        server.wait_for(
            lambda: server.value("tessera_requests_total", code="DEADLINE_EXCEEDED") == 1
        )
        assert server.value("tessera_batch_samples_count") == 0
        server.wait_for(queued(server, 0))


def test_a_cancelled_request_is_dropped_before_assembly(kind, package, drawn):
    with waiting_server(kind, package, "--max-batch-samples", 8) as server:
        cancelled = server.start(drawn.samples(1))
        server.wait_for(queued(server, 1))
        cancelled.cancel()
        server.wait_for(
            lambda: (
                server.outcome(drawn.samples(8).SerializeToString())[0] == "OK"
                and server.value("tessera_rejected_total", reason="cancelled") == 1
            )
        )
        server.wait_for(lambda: server.value("tessera_requests_total", code="CANCELLED") == 1)
        # Every pass was of one request of eight samples.
        assert server.value("tessera_batch_samples_sum") % 8 == 0


def test_higher_priority_is_served_first(kind, package, drawn):
    flags = ["--max-batch-samples", 4]
    with waiting_server(kind, package, *flags) as server:
        low = [server.start(drawn.samples(1, priority=0)) for _ in range(3)]
        server.wait_for(queued(server, 3))
        high = drawn.samples(4, priority=7)
        # Full now: the batch is the high one alone, the low ones go on waiting.
        assert server.predict(high).timings.batch_requests == 1
        server.wait_for(queued(server, 3))
        server.signal()
        assert all(call.result(TIMEOUT_S) for call in low)


def test_draining_answers_what_was_accepted_and_refuses_the_rest(kind, package, drawn):
    with waiting_server(kind, package) as server:
        accepted = [server.start(drawn.samples(2)) for _ in range(20)]
        server.wait_for(queued(server, 20))
        server.signal()
        assert all(call.result(TIMEOUT_S) for call in accepted)
        assert server.exit_status() == 0
        code, _ = server.outcome(drawn.samples(1).SerializeToString())
        assert code == "UNAVAILABLE"


def test_the_wait_before_refusals(kind, package, drawn):
    """Health turns at once; until the wait is over, calls are still answered."""
    with RunningServer(kind, "--model", package, "--drain-propagation-ms", 2000) as server:
        assert server.http("/readyz") == (200, "ready\n")
        server.signal()
        server.wait_for(lambda: server.http("/readyz")[0] == 503)
        assert server.http("/readyz") == (503, "draining\n")
        assert server.value("tessera_model_ready") == 0
        assert server.predict(drawn.samples(1)).model_name == "ranker"
        assert server.exit_status() == 0


def test_the_log_tells_the_servers_life(kind, package):
    with RunningServer(kind, "--model", package, "--drain-propagation-ms", 0) as server:
        server.signal(signal.SIGINT)
        assert server.exit_status() == 0
    # The file's hash is told when it is known.
    events = [entry["event"] for entry in server.log if entry["event"] != "file_hash"]
    assert events == ["start", "load", "loaded", "ready", "signal", "drain", "stop"]
    assert all(entry.keys() >= {"level", "timestamp"} for entry in server.log)


def test_two_signals_at_once_are_one(kind, package, drawn):
    """Supervisors send SIGTERM to a process and to its group."""
    with waiting_server(kind, package) as server:
        accepted = [server.start(drawn.samples(2)) for _ in range(20)]
        server.wait_for(queued(server, 20))
        server.signal()
        server.signal(signal.SIGINT)
        server.signal()
        assert all(call.result(TIMEOUT_S) for call in accepted)
        assert server.exit_status() == 0
    events = [entry["event"] for entry in server.log]
    assert events.count("drain") == 1
    assert "signal_repeated" in events
    assert "forced" not in events


def test_sighup_changes_nothing(kind, package, drawn):
    with RunningServer(kind, "--model", package, "--drain-propagation-ms", 500) as server:
        server.signal(signal.SIGHUP)
        server.wait_for(lambda: "nothing_to_reload" in [entry["event"] for entry in server.log])
        assert server.predict(drawn.samples(1)).model_name == "ranker"
        assert server.http("/readyz") == (200, "ready\n")
        server.signal()
        server.wait_for(lambda: "drain" in [entry["event"] for entry in server.log])
        server.signal(signal.SIGHUP)
        assert server.predict(drawn.samples(1)).model_name == "ranker"
        assert server.exit_status() == 0


def test_a_second_signal_ends_at_once(kind, package):
    with RunningServer(
        kind, "--model", package, "--drain-propagation-ms", 50_000, "--drain-limit-s", 60
    ) as server:
        server.signal()
        server.wait_for(lambda: server.http("/readyz")[0] == 503)
        heard = time.monotonic()
        server.wait_for(lambda: time.monotonic() > heard + 1)  # sooner, it is the same signal
        server.signal()
        assert server.exit_status() == 1
        assert "forced" in [entry["event"] for entry in server.log]


def test_what_answers_while_another_model_loads_is_drained(kind, package, drawn, tmp_path):
    endless = with_statement(
        package, tmp_path / "m.pt", "i = 0\nwhile True:\n  i = torch.add(i, 1)"
    )
    flags = ("--model", f"other={endless}", "--load-timeout-s", TIMEOUT_S)
    server = waiting_server(kind, package, *flags)
    try:
        server.wait_for(lambda: "loaded" in [entry["event"] for entry in server.log])
        addresses = [f"127.0.0.1:{port}" for port in listening_ports(server.process.pid)]
        with GivenServer(*sorted(addresses, key=speaks_http)) as answering:
            accepted = [answering.start(drawn.samples(2)) for _ in range(5)]
            answering.wait_for(queued(answering, 5))
            server.signal()
            assert all(call.result(TIMEOUT_S) for call in accepted)
        assert server.exit_status() == 0
    finally:
        server.process.kill()
        server.process.wait()


def listening_ports(pid):
    """The TCP ports on which a process waits for connections."""
    sockets = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            sockets.add(str(path.readlink()))
    rows = [
        line.split()
        for table in ("tcp", "tcp6")  # gRPC's own sockets are of the second kind
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    listening = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return [int(row[1].split(":")[1], 16) for row in listening]


def speaks_http(address):
    try:
        return urllib.request.urlopen(f"http://{address}/healthz", timeout=5).status == 200
    except (OSError, http.client.HTTPException):
        return False
