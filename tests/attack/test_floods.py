"""Each flood for a moment against both servers: a polite client is answered rightly meanwhile, and what the flood took
comes back.

``make attack`` runs the same floods for longer and reports latencies; nothing here depends on how quick the machine is.
"""

import resource
import signal
import time

import pytest

from tests.attack.attacking import FLOODS, attack, settled, start_flood
from tests.attack.watching import PoliteClient, footprint
from tests.conformance.conformance_harness import TIMEOUT_S, RunningServer
from tests.conformance.test_bounded_memory import BOUND_BYTES, FLAGS, grew_less

SECONDS = 0.15
FILLING = (
    *(
        "whole_calls_reset",
        "valid_calls_unread",
        "window_sizes",
        "trailing_headers",
        "two_messages",
    ),
    *("wrong_timeouts", "half_messages", "headers_without_end", "large_metadata"),
)
"""Floods of requests that come in whole, or that take the places of messages being received. While they last, a full server may
say so to others, too."""


@pytest.fixture(scope="module")
def at_rest(running, polite):
    """What the server holds before the first flood, with the polite client connected."""
    return footprint(running.process.pid)


@pytest.mark.parametrize("name", FLOODS)
def test_a_polite_client_beside_a_flood(running, attacked, polite, at_rest, name):
    outcome = attack(name, attacked, polite, SECONDS)
    assert outcome.connections > 0
    full = [end for end in outcome.ends if end.startswith("RESOURCE_EXHAUSTED: the server is full")]
    assert outcome.ends.keys() <= {"OK", *(full if name in FILLING else [])}
    assert grew_less(running, at_rest.resident_bytes, BOUND_BYTES)
    assert running.process.poll() is None


def test_what_the_floods_took_comes_back(attacked, at_rest):
    """Descriptors and memory, after all of them."""
    assert settled(attacked, at_rest, bytes_more=BOUND_BYTES, within_s=TIMEOUT_S)


@pytest.mark.parametrize("name", ["headers_without_end", "watches"])
def test_sigterm_in_the_middle_of_a_flood(running, attacked_package, request_file, attacked, name):
    """The server ends with status 0 and tells the polite client nothing but OK or UNAVAILABLE."""
    with RunningServer(running.kind, "--model", attacked_package, *FLAGS) as server:
        target = type(attacked)(
            server.address, server.http_address, server.process.pid, request_file
        )
        client = PoliteClient(server.address, request_file.read_bytes(), timeout_s=TIMEOUT_S)
        flood = start_flood(FLOODS[name], target, TIMEOUT_S)
        server.wait_for(lambda: server.value("process_open_fds") > 0)
        stop_at = time.monotonic() + SECONDS
        client.run(lambda: time.monotonic() > stop_at)
        server.signal(signal.SIGTERM)
        assert server.exit_status() == 0
        flood.kill()
        flood.communicate()
        client.close()
        assert client.ends == {"OK": len(client.latencies_s)}


def test_out_of_descriptors_and_back(running, attacked, request_file):
    """A server that ran out of descriptors serves new clients when the others have gone."""
    pid = running.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    room = footprint(pid).descriptors + 60
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (room, limits[1]))
    try:
        for name in ("idle_connections", "idle_http"):
            flood = start_flood(FLOODS[name], attacked, SECONDS)
            flood.communicate()
            client = PoliteClient(attacked.address, request_file.read_bytes(), timeout_s=TIMEOUT_S)
            client.close()
            assert running.http("/readyz")[0] == 200
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
