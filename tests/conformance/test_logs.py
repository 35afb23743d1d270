"""A log that cannot be written costs lines, which are counted, and nothing else."""

import contextlib
import fcntl
import os
import signal
import socket
from pathlib import Path

import pytest

from tests.conformance.conformance_harness import TIMEOUT_S, GivenServer, start_server


def free_ports():
    """Two ports that nobody has now: a server whose log cannot be read cannot tell its own."""
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]


@contextlib.contextmanager
def server_logging_to(kind, package, stderr):
    """A ready server whose log lines, one for each request, go to the descriptor ``stderr``."""
    if kind == "given":
        pytest.skip("needs a server with a log of its own")
    port, http_port = free_ports()
    options = ["--model", package, "--host", "127.0.0.1"]
    options += ["--port", port, "--http-port", http_port, "--log-level", "debug"]
    options += ["--drain-propagation-ms", 300]
    process = start_server(kind, options, stderr=stderr)
    server = GivenServer(f"127.0.0.1:{port}", f"127.0.0.1:{http_port}")

    def ready():
        assert process.poll() is None
        with contextlib.suppress(OSError):
            return server.http("/readyz")[1] == "ready\n"
        return False

    try:
        server.wait_for(ready)
        with server:
            yield server, process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("fault", ["reader gone", "nobody reads", "full disk"])
def test_a_log_that_fails_changes_nothing_else(kind, package, drawn, fault):
    message = drawn.samples(1)
    with contextlib.ExitStack() as stack:
        read_end, write_end = os.pipe()
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4_096)
        stack.callback(os.close, write_end)
        if fault == "reader gone":
            os.close(read_end)
        else:
            stack.callback(os.close, read_end)
        full = stack.enter_context(Path("/dev/full").open("wb"))
        stderr = full if fault == "full disk" else write_end
        server, process = stack.enter_context(server_logging_to(kind, package, stderr))
        # Each call is a line, and all of them are more than the pipe holds.
        for call in [server.start(message, timeout=TIMEOUT_S) for _ in range(200)]:
            assert call.result()
        if fault != "nobody reads":
            server.wait_for(lambda: server.value("tessera_log_lines_dropped_total") >= 200)
        process.send_signal(signal.SIGTERM)
        late = [server.start(message, timeout=TIMEOUT_S) for _ in range(20)]
        assert {call.code().name for call in late} <= {"OK", "UNAVAILABLE"}
        assert process.wait(TIMEOUT_S) == 0
