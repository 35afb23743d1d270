"""Calls under random faults, until a given number was answered: none that was accepted is lost or answered wrongly.

``python -m tests.attack.faults --server cpp --calls 1000000 --clients 8`` keeps one server of a small package busy from
client processes; each call is one of a hundred requests whose right scores were computed from the package in
this process.  Meanwhile faults come at random: clients that abort connections within a message or behind it, close
their half of one, reset calls, give deadlines too short, cancel; SIGSTOP for a moment; no descriptors left; a log whose
reader is gone, that nobody reads, or whose disk is full; SIGTERM with a restart on the same port.

A call may end as OK with the right bits, as what its own fault asks for (CANCELLED, DEADLINE_EXCEEDED), or as
UNAVAILABLE while the server drains or is not there.  The C++ server says so to every call; the Python server, whose
gRPC library can only be told to cancel calls, ends its connections once it has drained, and a call that is under way
to it just then sees that.  Anything else is lost or wrong; a server that ends by
itself or with a status other than 0 is broken.  The summary tells each kind, and any of these, or fewer calls than
were asked for, makes the exit status 1.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import json
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from tessera.serving.client import Draw, RequestDrawer, encode_request
from tessera.serving.package.loading import load_package
from tessera.serving.package.runner import HostBatch
from tessera.serving.protocol import predictor_pb2 as pb
from tests.attack import calling
from tests.attack.attacking import ROOT, start_floods
from tests.attack.attacking import Server as Address
from tests.attack.watching import footprint, scores
from tests.attack.wire import GREETING, data, message, open_call
from tests.conformance.conformance_harness import commands, start_server
from tests.package_factory import make_package

REQUESTS = 100
TIMEOUT_S = calling.TIMEOUT_S
BROKEN = "BROKEN"
HANGS_UP = {"python"}
"""The servers that may end connections under calls which they have not accepted, at the end of their drain."""
CLOSING_S = 0.5
"""How long after the server's end a client may see the end of its connection."""
FAULTY_FLOODS = (
    "mid_message_aborts",
    "rapid_reset",
    "garbage",
    "half_header_blocks",
    "whole_calls_reset",
)
LOGS = ("file", "reader gone", "nobody reads", "full disk")
"""Where a server's log goes: one of these from each restart to the next; all but the first with a line a call."""
HALF_CLOSED = 20
LOWEST_PORT = 10_000
"""Where servers' ports are looked for, up to those that the system gives to clients."""
FAULTS = ("restart", "pause", "descriptors", "half_close", "flood", "flood")


def make_answers(package: Path, seed: int) -> list[tuple[bytes, dict[str, list[float]]]]:
    """Random requests of one sample, and what the package itself says of each."""
    loaded = load_package(package)
    drawer = RequestDrawer(
        loaded.manifest.schema, Draw(ids="uniform", bags="uniform", max_bag=5), seed=seed
    )
    contents = [encode_request(drawer.samples(1)) for _ in range(REQUESTS)]
    return [(content, _scores_of(loaded, content)) for content in contents]


def _scores_of(loaded, content: bytes) -> dict[str, list[float]]:
    request = pb.PredictionRequest.FromString(content)
    group = request.id_list_features
    wide = group.values_int64
    values = np.frombuffer(wide, "<i8") if wide else np.frombuffer(group.values, "<i4")
    batch = HostBatch(
        float_features=torch.from_numpy(
            np.frombuffer(request.float_features.values, "<f4").copy()
        ).view(request.batch_size, -1),
        id_list_features_lengths=torch.from_numpy(np.frombuffer(group.lengths, "<i4").copy()),
        id_list_features_values=torch.from_numpy(values.copy()),
        id_score_list_features_lengths=torch.empty(0, dtype=torch.int32),
        id_score_list_features_values=torch.empty(0, dtype=torch.int64),
        id_score_list_features_weights=torch.empty(0),
        batch_size=request.batch_size,
    )
    return {name: found.tolist() for name, found in loaded.runner.forward(batch).items()}


def free_ports() -> tuple[int, int]:
    """Two ports that nobody has now, of those that the system gives to no client where there are enough.

    A flood's connection that began from a server's port while that restarts would keep it from coming back.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = range(LOWEST_PORT, first) or [0]
    with contextlib.ExitStack() as stack:
        found = []
        while len(found) < 2:
            bound = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # somebody has it
                bound.bind(("127.0.0.1", random.SystemRandom().choice(candidates)))
                found.append(bound.getsockname()[1])
    return found[0], found[1]


@contextlib.contextmanager
def log_of(kind: str, folder: Path) -> Iterator[int]:
    """A descriptor for a server's log that fails as ``kind`` says."""
    with contextlib.ExitStack() as stack:
        if kind == "file":
            yield stack.enter_context((folder / "log").open("ab")).fileno()
        elif kind == "full disk":
            yield stack.enter_context(Path("/dev/full").open("wb")).fileno()
        else:
            read_end, write_end = os.pipe()
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4_096)
            stack.callback(os.close, write_end)
            if kind == "reader gone":
                os.close(read_end)
            else:
                stack.callback(os.close, read_end)
            yield write_end


class Chaos:
    """A server and what happens to it from outside."""

    def __init__(self, kind, package, answers, folder, draw):
        self._kind, self._package, self._folder, self._draw = kind, package, folder, draw
        self._content, self._right = answers[0]
        self._request = folder / "request"
        self._request.write_bytes(self._content)
        self.port, self._http_port = free_ports()
        self.done = collections.Counter()
        self.ends = collections.Counter()
        self.drains = []
        self._stack = contextlib.ExitStack()
        self._start(LOGS[0])

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def _start(self, log):
        self._stack.close()
        level = "warning" if log == "file" else "debug"
        flags = ["--model", self._package, "--host", "127.0.0.1", "--port", self.port]
        flags += ["--http-port", self._http_port, "--log-level", level]
        stderr = self._stack.enter_context(log_of(log, self._folder))
        self._process = start_server(self._kind, flags, stderr=stderr)
        until = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until and self._process.poll() is None:
            with contextlib.suppress(OSError):
                url = f"http://127.0.0.1:{self._http_port}/readyz"
                with urllib.request.urlopen(url, timeout=1):
                    return
            time.sleep(0.02)
        written = (self._folder / "log").read_text(errors="backslashreplace")
        raise RuntimeError(f"the server did not become ready; its log:\n{written[-2_000:]}")

    def fault(self):
        """One fault, then a moment of rest."""
        name = self._draw.choice(FAULTS)
        getattr(self, f"_{name}")()
        self.done[name] += 1
        time.sleep(self._draw.uniform(0, 1))
        if (status := self._process.poll()) is not None:
            self.ends[f"{BROKEN}: the server ended by itself with status {status}"] += 1
            self._start(LOGS[0])

    def end(self):
        """SIGTERM, and the end of the server."""
        began = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if status != 0:
            self.ends[f"{BROKEN}: status {status} after SIGTERM"] += 1
        elif self._kind in HANGS_UP:  # status 0: it has answered every call that it accepted
            self.drains.append((began, time.monotonic() + CLOSING_S))
        self._stack.close()

    def _restart(self):
        self.end()
        log = LOGS[(self.done["restart"] + 1) % len(LOGS)]
        self.done[f"log: {log}"] += 1
        self._start(log)

    def _pause(self):
        self._process.send_signal(signal.SIGSTOP)
        time.sleep(self._draw.uniform(0, 0.5))
        self._process.send_signal(signal.SIGCONT)

    def _descriptors(self):
        pid = self._process.pid
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        room = footprint(pid).descriptors + 40
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (room, limits[1]))
        self._pour("idle_connections")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)

    def _flood(self):
        self._pour(self._draw.choice(FAULTY_FLOODS))

    def _pour(self, name):
        http = f"127.0.0.1:{self._http_port}"
        where = Address(self.address, http, self._process.pid, self._request)
        start_floods([name], where, self._draw.uniform(0.1, 0.5)).communicate()

    def _half_close(self):
        """Whole calls whose clients then send no more; what the server answers must be right."""
        call = GREETING + open_call(1) + data(1, message(self._content), ends=True)
        with contextlib.ExitStack() as stack:
            clients = []
            for _ in range(HALF_CLOSED):
                with contextlib.suppress(OSError):
                    client = socket.create_connection(("127.0.0.1", self.port), 10)
                    clients.append(stack.enter_context(client))
                    client.sendall(call)
                    client.shutdown(socket.SHUT_WR)
            for client in clients:
                answer = _answer_on(client)
                if answer is None:
                    self.ends["half-closed connection ended by the server"] += 1
                elif scores(answer) == self._right:
                    self.ends["half-closed and answered rightly"] += 1
                else:
                    self.ends[f"{calling.WRONG} scores on a half-closed connection"] += 1


def _answer_on(client: socket.socket) -> bytes | None:
    """The message that comes on stream 1 before the server ends the connection, or None."""
    received = bytearray()
    with contextlib.suppress(OSError):
        while content := client.recv(1 << 16):
            received += content
    body, at = b"", 0
    while at + 9 <= len(received):
        size = int.from_bytes(received[at : at + 3], "big")
        kind, _, stream = struct.unpack(">BBI", received[at + 3 : at + 9])
        if kind == 0 and stream == 1:
            body += bytes(received[at + 9 : at + 9 + size])
        at += 9 + size
    whole = len(body) >= 5 and len(body) == 5 + int.from_bytes(body[1:5], "big")
    return body[5:] if whole else None


class Clients:
    """Client processes, and how all their calls have ended so far."""

    def __init__(self, address: str, answers: Path, count: int, seed: int) -> None:
        self._ends: collections.Counter[str] = collections.Counter()
        self._hung_up: list[float] = []
        self._lock = threading.Lock()
        command = [sys.executable, "-m", "tests.attack.calling", "--address", address]
        self._processes = [
            subprocess.Popen(
                [*command, "--answers", str(answers), "--seed", str(seed + number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            for number in range(count)
        ]
        self._readers = [
            threading.Thread(target=self._read, args=(process,)) for process in self._processes
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, process):
        for line in process.stdout:
            told = json.loads(line)
            with self._lock:
                self._ends.update(told["ends"])
                self._hung_up += told["hung_up"]

    def right(self) -> int:
        """Calls that were answered rightly."""
        with self._lock:
            return self._ends[calling.OK]

    def ends(self, drains: Sequence[tuple[float, float]]) -> collections.Counter[str]:
        """How calls have ended; ``drains`` are the times in which a connection may end under a call."""
        with self._lock:
            ends = collections.Counter(self._ends)
            for time_s in self._hung_up:
                drained = any(begin <= time_s <= end for begin, end in drains)
                ends[
                    "not accepted, the connection ended" if drained else f"{calling.LOST}: hung up"
                ] += 1
            return ends

    def stop(self) -> None:
        """Let every call end; a client that fails is an error.

        Raises:
            RuntimeError: a client ended with a status other than 0.
        """
        for process in self._processes:
            process.stdin.close()
        for process, reader in zip(self._processes, self._readers, strict=True):
            reader.join()
            if process.wait() != 0:
                raise RuntimeError(f"a client ended with status {process.returncode}")


def is_bad(end: str) -> bool:
    return end.startswith((calling.LOST, calling.WRONG, BROKEN))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.attack.faults",
        description=(__doc__ or "").split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--server", choices=sorted(commands()), required=True)
    parser.add_argument("--calls", type=int, default=1_000_000, help="right answers to be had")
    parser.add_argument("--clients", type=int, default=2, help="client processes")
    parser.add_argument("--seed", type=int, default=0, help="of requests and faults")
    parser.add_argument(
        "--limit-s", type=float, default=float("inf"), help="end after so long in any case"
    )
    parser.add_argument("--progress-s", type=float, default=10.0, help="time between two lines")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        package = make_package(folder)[0]
        answers = make_answers(package, given.seed)
        calling.write_answers(folder / "answers", answers)
        draw = random.Random(given.seed)
        chaos = Chaos(given.server, package, answers, folder, draw)
        clients = Clients(chaos.address, folder / "answers", given.clients, given.seed)
        began = told = time.monotonic()
        try:
            while (
                right := clients.right()
            ) < given.calls and time.monotonic() - began < given.limit_s:
                chaos.fault()
                if time.monotonic() - told > given.progress_s:
                    told = time.monotonic()
                    ends = clients.ends(chaos.drains) + chaos.ends
                    bad = {end: count for end, count in ends.items() if is_bad(end)}
                    print(
                        f"{told - began:6.0f} s: {right:,} of {given.calls:,} answered rightly, "
                        f"{chaos.done.total()} faults, {sum(bad.values())} lost, wrong or broken",
                        *(f"{count:12,}  {end}" for end, count in bad.items()),
                        sep="\n",
                        flush=True,
                    )
        finally:
            clients.stop()
            chaos.end()
        took_s = time.monotonic() - began
    return summary(given, took_s, chaos.done, clients.ends(chaos.drains) + chaos.ends)


def summary(
    given: argparse.Namespace,
    took_s: float,
    faults: collections.Counter[str],
    ends: collections.Counter[str],
) -> int:
    """Print what became of the calls; returns the exit status."""
    print(f"{given.server} server, {given.clients} clients, seed {given.seed}, {took_s:.0f} s")
    print("faults: " + ", ".join(f"{count} x {name}" for name, count in faults.most_common()))
    for end, count in ends.most_common():
        print(f"{count:12,}  {end}")
    lost, wrong, broken = (
        sum(count for end, count in ends.items() if end.startswith(kind))
        for kind in (calling.LOST, calling.WRONG, BROKEN)
    )
    enough = ends[calling.OK] >= given.calls
    kept = enough and not lost + wrong + broken
    print(
        f"{lost} lost, {wrong} wrong, {broken} times broken, {ends[calling.OK]:,} of "
        f"{given.calls:,} answered rightly: the promise was {'kept' if kept else 'NOT kept'}"
    )
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
