"""The HTTP port answers whoever asks, however many others hold connections without asking."""

import contextlib
import itertools
import resource
import socket
from pathlib import Path

import pytest

from tests.conformance.conformance_harness import TIMEOUT_S, RunningServer

GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
CONNECTIONS = 32
HOLDERS = 1_000


def descriptors(server):
    return {int(entry.name) for entry in Path(f"/proc/{server.process.pid}/fd").iterdir()}


def http_client(server, stack):
    host, _, port = server.http_address.rpartition(":")
    return stack.enter_context(socket.create_connection((host, int(port)), TIMEOUT_S))


def probe(server, stack):
    """The first line of an answer to a client of its own."""
    client = http_client(server, stack)
    client.sendall(GET)
    return client.makefile("rb").readline()


def test_no_answer_tells_versions_of_the_software(server):
    requests = {
        b"GET /healthz HTTP/1.1\r\nHost: x": b"200",
        b"GET /nothing HTTP/1.1\r\nHost: x": b"404",
        b"POST /v2/models/none/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 0": b"40",
        b"no request": b"400",
    }
    with contextlib.ExitStack() as stack:
        for request, status in requests.items():
            client = http_client(server, stack)
            client.sendall(request + b"\r\nConnection: close\r\n\r\n")
            head = client.makefile("rb").read().partition(b"\r\n\r\n")[0].lower()
            assert head.split()[1].startswith(status), request
            named = [line for line in head.split(b"\r\n") if line.startswith(b"server:")]
            assert named in ([], [b"server: tessera"]), request


@pytest.mark.parametrize(
    "line",
    [
        "Content-Length : 9",
        "Content-Length: 9\r\nContent-Length: 0",
        "X: 1\nContent-Length: 9",
        "X: 1\r\n folded",
        "no colon",
        "X: \0",
    ],
)
def test_a_head_that_a_proxy_might_read_in_another_way_is_refused(server, line):
    with contextlib.ExitStack() as stack:
        client = http_client(server, stack)
        client.sendall(f"POST /v2/repository/index HTTP/1.1\r\nHost: x\r\n{line}\r\n\r\n".encode())
        answer = client.makefile("rb").read()  # the connection ends
        assert answer.split()[1] == b"400"
        assert answer.lower().count(b"content-length") == 1


@pytest.mark.parametrize("late", [False, True])
def test_the_body_of_a_get_is_not_a_request(server, late):
    with contextlib.ExitStack() as stack:
        client = http_client(server, stack)
        body = b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n"
        head = b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        client.sendall(head if late else head + body)
        answers = client.makefile("rb")
        assert b" 200 " in answers.readline()
        with contextlib.suppress(ConnectionError):
            if late:
                client.sendall(body)
            client.sendall(GET)
            rest = answers.read()
            assert b" 404 " not in rest


def test_probes_are_answered_while_a_thousand_hold_connections(kind, package):
    flags = ["--model", package, "--max-http-connections", CONNECTIONS]
    flags += ["--drain-propagation-ms", 0]
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 2 * HOLDERS), most))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (limit, most))
        server = stack.enter_context(RunningServer(kind, *flags))
        before = len(descriptors(server))
        for number in range(HOLDERS):
            holder = http_client(server, stack)
            # Silent ones, ones with a part of a request, and ones that sent a byte at a time.
            with contextlib.suppress(ConnectionError):
                if number % 3:
                    holder.sendall(GET[: number % len(GET)])
            if number % 100 == 99:
                assert b" 200 " in probe(server, stack)
        server.wait_for(lambda: len(descriptors(server)) <= before + CONNECTIONS + 4)
        assert server.http("/readyz") == (200, "ready\n")


@contextlib.contextmanager
def no_descriptor_left(server):
    """The server can open nothing more."""
    pid = server.process.pid
    held = descriptors(server)
    lowest_free = next(number for number in itertools.count() if number not in held)
    _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free, most))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def accept_failures(server):
    return [line for line in server.log if line["event"] == "http_accept_failed"]


def test_without_descriptors_the_log_stays_quiet(kind, package, drawn):
    """Clients that ask take the places of those that do not, and few lines tell of it."""
    with (
        RunningServer(kind, "--model", package, "--drain-propagation-ms", 0) as server,
        contextlib.ExitStack() as stack,
    ):
        server.predict(drawn.samples(1))
        idle = [http_client(server, stack) for _ in range(20)]
        # Clients are let in in the order in which they came.
        assert b" 200 " in probe(server, stack)
        with no_descriptor_left(server):
            for _ in range(5):
                assert b" 200 " in probe(server, stack)
        server.predict(drawn.samples(1))
        assert len(accept_failures(server)) <= 2 * len(idle)


def test_a_probe_is_answered_where_there_is_neither_a_descriptor_nor_a_connection_to_close(
    kind, package
):
    with (
        RunningServer(kind, "--model", package, "--drain-propagation-ms", 0) as server,
        contextlib.ExitStack() as stack,
    ):
        assert b" 200 " in probe(server, stack)
        with no_descriptor_left(server):
            for _ in range(3):
                assert b" 200 " in probe(server, stack)
            silent = [http_client(server, stack) for _ in range(3)]
            assert b" 200 " in probe(server, stack)
            assert silent[0].recv(1) == b""  # closed in favour of the others
        assert server.http("/readyz") == (200, "ready\n")
