"""Each flood for a moment against both servers, some at once: a polite client is answered rightly meanwhile, and what
the floods took comes back.

``make attack`` runs the same floods for longer and reports latencies; nothing here depends on how quick the machine is.
"""

import resource
import signal
import time

import pytest

from tests.attack.attacking import FLOODS, attack, settled, start_floods
from tests.attack.watching import PoliteClient, footprint
from tests.conformance.conformance_harness import TIMEOUT_S, RunningServer
from tests.conformance.test_bounded_memory import BOUND_BYTES, FLAGS, grew_less

SECONDS = 0.3
AT_ONCE = 6
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

LARGE_HEADERS = ("many_headers", "header_bomb")
"""Floods of whole headers, of which grpcio makes Python objects before the Python server sees them. The bound of memory holds
for each of them, and not for both at once, so that each has a server of its own."""


def groups():
    """Every flood but `LARGE_HEADERS` in one group of `AT_ONCE`; those that fill the server are by themselves."""
    others = [name for name in FLOODS if name not in (*FILLING, *LARGE_HEADERS)]
    return [
        pytest.param(names[at : at + AT_ONCE], id=f"{names[at]}-{len(names[at : at + AT_ONCE])}")
        for names in (list(FILLING), others)
        for at in range(0, len(names), AT_ONCE)
    ]


@pytest.fixture(scope="module")
def at_rest(running, polite):
    """What the server holds before the first flood, with the polite client connected."""
    return footprint(running.process.pid)


@pytest.mark.parametrize("names", groups())
def test_a_polite_client_beside_floods(running, attacked, polite, at_rest, names):
    outcome = attack(names, attacked, polite, SECONDS)
    assert outcome.sent.keys() == set(names)
    assert all(sent.connections > 0 for sent in outcome.sent.values())
    full = [end for end in outcome.ends if end.startswith("RESOURCE_EXHAUSTED: the server is full")]
    assert outcome.ends.keys() <= {"OK", *(full if names[0] in FILLING else [])}
    assert grew_less(running, at_rest.resident_bytes, BOUND_BYTES)
    assert running.process.poll() is None


@pytest.mark.parametrize("name", LARGE_HEADERS)
def test_a_polite_client_beside_large_headers(
    running, attacked, attacked_package, request_file, name
):
    with RunningServer(running.kind, "--model", attacked_package, *FLAGS) as server:
        target = type(attacked)(
            server.address, server.http_address, server.process.pid, request_file
        )
        polite = PoliteClient(server.address, request_file.read_bytes(), timeout_s=TIMEOUT_S)
        before = footprint(server.process.pid)
        outcome = attack([name], target, polite, SECONDS)
        assert all(sent.connections > 0 for sent in outcome.sent.values())
        assert outcome.ends.keys() == {"OK"}
        assert grew_less(server, before.resident_bytes, BOUND_BYTES)
        assert server.process.poll() is None


def test_what_the_floods_took_comes_back(attacked, at_rest):
    """Descriptors and memory, after all of them."""
    assert settled(attacked, at_rest, bytes_more=BOUND_BYTES, within_s=TIMEOUT_S)


def test_sigterm_in_the_middle_of_floods(running, attacked_package, request_file, attacked):
    """The server ends with status 0 and tells the polite client nothing but OK or UNAVAILABLE."""
    with RunningServer(running.kind, "--model", attacked_package, *FLAGS) as server:
        target = type(attacked)(
            server.address, server.http_address, server.process.pid, request_file
        )
        client = PoliteClient(server.address, request_file.read_bytes(), timeout_s=TIMEOUT_S)
        floods = start_floods(["headers_without_end", "watches"], target, TIMEOUT_S)
        server.wait_for(lambda: server.value("process_open_fds") > 0)
        stop_at = time.monotonic() + SECONDS
        client.run(lambda: time.monotonic() > stop_at)
        server.signal(signal.SIGTERM)
        assert server.exit_status() == 0
        floods.kill()
        floods.communicate()
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
            start_floods([name], attacked, SECONDS).communicate()
            client = PoliteClient(
                attacked.address,
                request_file.read_bytes(),
                timeout_s=TIMEOUT_S,
                lives=lambda: running.process.poll() is None,
            )
            client.close()
            assert running.http("/readyz")[0] == 200
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
