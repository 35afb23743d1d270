"""What a server does while the system has no more of something for it."""

import itertools
import os
import resource
import socket
import time
from pathlib import Path

import pytest

from tests.conformance.conformance_harness import TIMEOUT_S, RunningServer, cpp_program

LOOK_S = 1.0


def cpu_seconds(pid):
    """What a process has used of CPUs."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_without_descriptors_the_pages_wait(kind, package):
    """A client that cannot be let in is not asked for again and again, and is let in later."""
    if kind == "cpp" and b"__ubsan_handle" in cpp_program().read_bytes():
        pytest.skip("UndefinedBehaviorSanitizer opens a pipe to see whether an object is there")
    with RunningServer(kind, "--model", package, "--drain-propagation-ms", 0) as server:
        pid = server.process.pid
        host, _, port = server.http_address.rpartition(":")
        _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        held = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
        lowest_free = next(number for number in itertools.count() if number not in held)
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free, most))
        with socket.create_connection((host, int(port)), TIMEOUT_S) as client:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            began = cpu_seconds(pid)
            time.sleep(LOOK_S)
            used_s = cpu_seconds(pid) - began
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
            with client.makefile("rb") as answer:
                assert b" 200 " in answer.readline()
        assert used_s < LOOK_S / 4
