"""A log that cannot be written costs lines, which are counted, and nothing else."""

import contextlib
import json
import os
import threading
import time

import pytest
import structlog

from tessera.serving.server.log import LINES_PER_SECOND, LineLimit, make_logger
from tessera.serving.server.log_writer import LogWriter
from tests.patience import PATIENCE_S


def read_all(descriptor):
    with os.fdopen(descriptor, "rb") as stream:
        return stream.read()


@pytest.fixture
def pipe():
    read_end, write_end = os.pipe()
    yield read_end, write_end
    for end in (read_end, write_end):
        with contextlib.suppress(OSError):
            os.close(end)


def wait_until(holds):
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.005)


def test_lines_come_whole_and_in_order_whatever_the_pieces(pipe):
    read_end, write_end = pipe
    with LogWriter(write_end) as writer:
        for piece in ("one\ntw", "o\n", "", "three", "\n", "never ended"):
            writer.write(piece)
        print("four \udcff", file=writer)
    os.close(write_end)
    assert read_all(read_end) == b"one\ntwo\nthree\nnever endedfour \\udcff\n"
    assert writer.dropped == 0


@pytest.mark.parametrize("bounds", [{"max_lines": 10}, {"max_bytes": 10 * 1024}])
def test_a_pipe_that_nobody_reads_drops_what_does_not_fit(pipe, bounds):
    _, write_end = pipe
    writer = LogWriter(write_end, **bounds)
    line = "x" * 1023 + "\n"
    sent = 500
    for _ in range(sent):
        writer.write(line)
    # The pipe holds 64 KiB; the queue no more than its bound, and the thread one line.
    assert sent - 64 - 11 <= writer.dropped <= sent - 10
    began = time.monotonic()
    writer.end(0.05)
    assert time.monotonic() - began < PATIENCE_S
    before = writer.dropped
    writer.write(line)
    assert writer.dropped == before + 1


def test_a_reader_that_has_gone_costs_every_line(pipe):
    read_end, write_end = pipe
    os.close(read_end)
    with LogWriter(write_end) as writer:
        writer.write("a\nb\nc\n")
    assert writer.dropped == 3


def test_a_descriptor_that_is_nowhere_costs_every_line():
    with LogWriter(-1) as writer:
        writer.write("a\n")
    assert writer.dropped == 1


def test_a_pipe_made_non_blocking_loses_nothing(pipe):
    read_end, write_end = pipe
    os.set_blocking(write_end, False)
    contents = []
    with LogWriter(write_end) as writer:
        for _ in range(300):
            writer.write("y" * 1023 + "\n")
        reader = threading.Thread(target=lambda: contents.append(read_all(read_end)))
        reader.start()
        wait_until(lambda: not writer._lines)
    os.close(write_end)
    reader.join(PATIENCE_S)
    assert len(contents[0]) == 300 * 1024
    assert writer.dropped == 0


def test_what_a_client_causes_is_limited_to_so_many_lines_a_second():
    now = [100.0]
    later, told = [], []
    limit = LineLimit(
        lambda: now[0],
        lambda seconds, call: later.append((seconds, call)),
        lambda event, lines: told.append((event, lines)),
    )

    def written(event, count, **fields):
        lines = 0
        for _ in range(count):
            try:
                limit(None, "warning", {"event": event, **fields})
            except structlog.DropEvent:
                continue
            lines += 1
        return lines

    assert written("free", 50) == 50
    assert written("bad", LINES_PER_SECOND + 7, limited=True) == LINES_PER_SECOND
    now[0] += 0.75
    assert written("bad", 5, limited=True) == 0
    assert written("other", 1, limited=True) == 1
    ((seconds, call),) = later
    assert seconds == 1.0
    call()
    assert told == [("bad", 12)]
    now[0] += 0.25
    assert written("bad", 3, limited=True) == 3
    assert len(later) == 1


def test_the_line_that_tells_how_many_were_suppressed(pipe):
    read_end, write_end = pipe
    with LogWriter(write_end) as writer:
        log = make_logger("info", "json", writer)
        for _ in range(LINES_PER_SECOND + 3):
            log.warning("bad", limited=True)
        with os.fdopen(read_end) as stream:
            lines = [json.loads(next(stream)) for _ in range(LINES_PER_SECOND + 1)]
    assert [line["event"] for line in lines] == ["bad"] * LINES_PER_SECOND + ["suppressed"]
    assert (lines[-1]["suppressed"], lines[-1]["lines"]) == ("bad", 3)
    assert "limited" not in lines[0]
