"""The access log's lines, where calls come from, and what a file that cannot be written costs."""

import json
import os
from datetime import datetime, timezone
from pathlib import Path

import pytest

from tessera.errors import UserError
from tessera.serving.server.errors import Code
from tessera.serving.server.observe.access_log import AccessLog, access_line, check_access_log
from tessera.serving.server.observe.call_record import CallRecord, CallStages
from tessera.serving.server.observe.origin import (
    CallOrigin,
    GrpcOrigins,
    RestOrigins,
    forwarding,
    read_traceparent,
    request_id_of,
)
from tests.server.test_log_writer import wait_until

CASES = json.loads(Path(__file__).with_name("trace_cases.json").read_text())
STAGES = CallStages(
    decode=0.0,
    queue=0.0001,
    assemble=0.0,
    transfer=0.0,
    forward=0.001,
    encode=0.0,
    batch_requests=1,
    batch_samples=5,
)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def record(request_id="an id", **fields):
    told = {
        "origin": CallOrigin("rest", "10.0.0.7", request_id, read_traceparent(TRACE)),
        "method": "ModelInfer",
        "model": 'a "b"\n',
        "version": "3",
        "samples": 5,
        "ids": 120,
        "code": Code.OK,
        "http_status": 200,
        "seconds": 0.0012345,
        "stages": STAGES,
    }
    return CallRecord(**{**told, **fields})


def test_a_line_has_every_field_in_its_order():
    now = datetime(2026, 11, 24, 0, 10, 5, 7_999, tzinfo=timezone.utc)
    line = access_line(record(), now)
    # cpp_server/tests/access_log_test.cc expects the same of the same call.
    assert line == (
        '{"time":"2026-11-24T00:10:05.007Z","protocol":"rest","method":"ModelInfer","peer":"10.0.0.7",'
        '"model":"a \\"b\\"\\n","version":"3","samples":5,"ids":120,"code":"OK","http_status":200,'
        '"duration_ms":1.234,"queue_ms":0.1,"forward_ms":1.0,"request_id":"an id",'
        '"trace_id":"0af7651916cd43dd8448eb211c80319c"}\n'
    )
    plain = CallOrigin("grpc", "::1", "x", None)
    told = json.loads(access_line(record(origin=plain, stages=None), now))
    assert not {"http_status", "queue_ms", "forward_ms", "trace_id"} & told.keys()


@pytest.mark.parametrize("case", CASES, ids=[case["header"] for case in CASES])
def test_a_traceparent_is_read_as_the_standard_has_it(case):
    parent = read_traceparent(case["header"])
    if "trace" not in case:
        assert parent is None
        return
    assert (parent.trace_id, parent.span_id) == (case["trace"], case["span"])
    assert parent.sampled is case["sampled"]


def test_a_request_id_is_the_clients_where_it_can_be_told():
    assert request_id_of("Any printable ~ id") == "Any printable ~ id"
    assert request_id_of("x" * 1_025) == "x" * 1_024
    for strange in ("", "a\nb", "\x7f", "é"):
        assert len(bytes.fromhex(request_id_of(strange))) == 16
    assert request_id_of("") != request_id_of("")


def test_only_a_process_of_the_server_can_forward_an_origin():
    origin = RestOrigins(sampler=None, logged=True).of(
        {"x-request-id": "id with  spaces", "traceparent": TRACE}, "::ffff:1.2.3.4", "/r"
    )
    parent = read_traceparent(TRACE)
    assert origin == CallOrigin("rest", "1.2.3.4", "id with  spaces", parent, route="/r")
    forwarded = forwarding(origin, "secret")

    def found_by(known, metadata):
        return GrpcOrigins(known, sampler=None, logged=True).of(metadata, lambda: "127.0.0.1")

    assert found_by("secret", forwarded) == origin
    mine = (("x-request-id", "mine"),)
    for known, shown in (("secret", "secre"), ("secret", ""), ("", ""), ("", "secret")):
        found = found_by(known, (*forwarding(origin, shown), *mine))
        assert (found.protocol, found.peer, found.request_id) == ("grpc", "127.0.0.1", "mine")


def test_a_file_that_was_renamed_gets_no_line_once_it_was_reopened(tmp_path):
    path, old = tmp_path / "access", tmp_path / "access.1"
    log = AccessLog(str(path))
    told = []

    class Told:
        info = staticmethod(told.append)
        warning = staticmethod(lambda event, error: told.append((event, error)))

    log.write(record("first"))
    wait_until(lambda: path.stat().st_size)
    path.rename(old)
    log.reopen(Told)
    log.write(record("second"))
    wait_until(lambda: path.stat().st_size)
    path.unlink()
    path.mkdir()
    log.reopen(Told)
    log.write(record("third"))
    log.close()
    log.close()
    assert '"first"' in old.read_text()
    assert '"second"' not in old.read_text()
    assert old.stat().st_mode & 0o137 == 0
    assert told[0] == "access_log_reopened"
    assert told[1][0] == "access_log_not_reopened"
    assert "Is a directory" in told[1][1]
    assert log.dropped() == 0


def test_lines_that_cannot_be_written_are_counted():
    log = AccessLog("/dev/full")
    for _ in range(10):
        log.write(record())
    log.close()
    wait_until(lambda: log.dropped() == 10)


def test_a_log_that_cannot_be_opened_is_refused(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, why in (
        (tmp_path / "no" / "file", "No such file"),
        (tmp_path, "directory"),
        (pipe, ""),
    ):
        with pytest.raises(UserError, match=f"the access log '{path}' cannot be opened") as caught:
            check_access_log(str(path))
        assert why in str(caught.value)
    check_access_log("")
