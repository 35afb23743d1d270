"""Calls under random faults, until a given number was answered: none that was accepted is lost or answered wrongly.

``python -m tests.attack.faults --server cpp --calls 1000000`` keeps one server of a small package busy from client
processes of its own; each call is one of a hundred requests whose right scores are known. Meanwhile faults come at
random: clients that abort connections within a message, half-close, give deadlines too short, cancel; SIGSTOP for a
moment; no descriptors left; a log that nobody reads; SIGTERM with a restart on the same port. A call may end as OK
with the right bits, as what its own fault asks for (CANCELLED, DEADLINE_EXCEEDED), or as UNAVAILABLE while the server
drains or is not there. Anything else is lost or wrong, is printed, and makes the exit status 1.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import random
import resource
import signal
import sys
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import grpc

from tessera.serving.package.loading import load_package
from tests.attack.attacking import FLOODS, start_flood
from tests.attack.attacking import Server as Address
from tests.attack.watching import PREDICT, footprint, scores
from tests.conformance.conformance_harness import RunningServer
from tests.conformance.conftest import Drawn
from tests.package_factory import make_package

REQUESTS = 100
IN_FLIGHT = 32
TIMEOUT_S = 120.0
REFUSALS = (
    "draining",
    "still loading",
    "Connection refused",
    "connections to all backends failing",
    "GOAWAY",
)
"""What UNAVAILABLE says of a call that the server did not accept."""

FAULTY_FLOODS = (
    "mid_message_aborts",
    "rapid_reset",
    "garbage",
    "half_header_blocks",
    "whole_calls_reset",
)


class Caller:
    """One client process's loop: calls, faults of its own, and the count of how calls ended."""

    def __init__(self, address, requests, expected, seed):
        self._draw = random.Random(seed)
        self._requests, self._expected = requests, expected
        self._address = address
        self.ends = collections.Counter()
        self._connect()

    def _connect(self):
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 200),
        ]
        self._channel = grpc.insecure_channel(self._address, options=options)
        self._call = self._channel.unary_unary(PREDICT)

    def _start(self):
        number = self._draw.randrange(REQUESTS)
        fault = self._draw.choices(["none", "deadline", "cancel"], [95, 3, 2])[0]
        timeout = self._draw.uniform(0, 0.01) if fault == "deadline" else TIMEOUT_S
        call = self._call.future(self._requests[number], timeout=timeout)
        if fault == "cancel":
            call.cancel()
        return number, fault, call

    def _count(self, number, fault, call):
        try:
            answer = call.result()
        except grpc.FutureCancelledError:
            self.ends["cancelled by us"] += 1
            return
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
            if code is grpc.StatusCode.DEADLINE_EXCEEDED and fault == "deadline":
                self.ends["deadline of ours"] += 1
            elif code is grpc.StatusCode.UNAVAILABLE and any(word in details for word in REFUSALS):
                self.ends["not accepted"] += 1
                time.sleep(0.002)
            else:
                self.ends[f"LOST: {code.name}: {details}"] += 1
            return
        right = scores(answer) == self._expected[number]
        self.ends["OK" if right else "WRONG SCORES"] += 1

    def run(self, count, stop):
        """Calls until ``count`` were answered rightly or ``stop`` is set."""
        while self.ends["OK"] < count and not stop.is_set():
            for started in [self._start() for _ in range(IN_FLIGHT)]:
                self._count(*started)
            if self._draw.random() < 0.01:
                self._channel.close()
                self._connect()
        self._channel.close()


def client(work, count, stop: Event, ends):
    caller = Caller(*work)
    caller.run(count, stop)
    ends.put(dict(caller.ends))


class Chaos:
    """What happens to the server from outside."""

    def __init__(self, kind, package, request, draw):
        self._kind, self._package, self._request, self._draw = kind, package, request, draw
        self.done = collections.Counter()
        self._server = RunningServer(kind, "--model", package).__enter__()
        self.port = int(self._server.address.rpartition(":")[2])

    def close(self):
        self._server.__exit__()

    @property
    def address(self):
        return self._server.address

    def fault(self):
        """One fault, then a moment of rest."""
        name = self._draw.choice(["restart", "pause", "descriptors", "flood", "flood", "flood"])
        getattr(self, f"_{name}")()
        self.done[name] += 1
        time.sleep(self._draw.uniform(0, 1))

    def _restart(self):
        self._server.signal(signal.SIGTERM)
        status = self._server.exit_status()
        if status != 0:
            raise RuntimeError(f"the server ended with status {status} after SIGTERM")
        self._server.__exit__()
        self._server = RunningServer(
            self._kind, "--model", self._package, port=self.port
        ).__enter__()

    def _pause(self):
        self._server.signal(signal.SIGSTOP)
        time.sleep(self._draw.uniform(0, 0.5))
        self._server.signal(signal.SIGCONT)

    def _descriptors(self):
        pid = self._server.process.pid
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        room = footprint(pid).descriptors + 40
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (room, limits[1]))
        self._flood("idle_connections")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)

    def _flood(self, name=None):
        flood = FLOODS[name or self._draw.choice(FAULTY_FLOODS)]
        server = self._server
        where = Address(server.address, server.http_address, server.process.pid, self._request)
        start_flood(flood, where, self._draw.uniform(0.1, 0.5)).communicate()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.attack.faults",
        description=(__doc__ or "").split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--server", choices=["python", "cpp"], required=True)
    parser.add_argument("--calls", type=int, default=1_000_000, help="right answers to be had")
    parser.add_argument("--clients", type=int, default=2, help="client processes")
    parser.add_argument("--seed", type=int, default=0, help="of requests and faults")
    return parser.parse_args()


def main() -> int:
    given = parse()
    draw = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        package = make_package(Path(folder))[0]
        drawn = Drawn(load_package(package).manifest.schema, seed=given.seed)
        requests = [drawn.samples(1).SerializeToString() for _ in range(REQUESTS)]
        request = Path(folder) / "request"
        request.write_bytes(requests[0])
        chaos = Chaos(given.server, package, request, draw)
        with grpc.insecure_channel(chaos.address) as channel:
            call = channel.unary_unary(PREDICT)
            expected = [scores(call(content, timeout=TIMEOUT_S)) for content in requests]
        context = multiprocessing.get_context("spawn")
        stop, ends = context.Event(), context.Queue()
        clients = [
            context.Process(
                target=client,
                args=(
                    (f"127.0.0.1:{chaos.port}", requests, expected, given.seed + number),
                    *(given.calls // given.clients, stop, ends),
                ),
            )
            for number in range(given.clients)
        ]
        for process in clients:
            process.start()
        total: collections.Counter[str] = collections.Counter()
        try:
            while any(process.is_alive() for process in clients) and ends.qsize() < len(clients):
                chaos.fault()
        finally:
            stop.set()
            for _ in clients:
                total.update(ends.get(timeout=2 * TIMEOUT_S))
            for process in clients:
                process.join()
            chaos.close()
    print(f"faults: {dict(chaos.done)}")
    for end, count in total.most_common():
        print(f"{count:10,}  {end}")
    return 1 if any(end.startswith(("LOST", "WRONG")) for end in total) else 0


if __name__ == "__main__":
    sys.exit(main())
