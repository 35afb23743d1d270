"""Floods against one server: sent from another process while a polite client is served and the server watched."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.attack import grpc_floods, http_floods
from tests.attack.pouring import Flood, Sent
from tests.attack.watching import Footprint, Peak, PoliteClient, footprint

FLOODS: dict[str, Flood] = {**grpc_floods.FLOODS, **http_floods.FLOODS}
ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """Where a server listens and which process it is. ``request`` is a file with a valid request's bytes."""

    address: str
    http_address: str
    pid: int
    request: Path


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What floods did together. ``most`` and ``before`` are the server's footprint at worst and before them."""

    sent: dict[str, Sent]
    ends: Counter[str]
    median_s: float
    p99_s: float
    worst_s: float
    before: Footprint
    most: Footprint

    @property
    def sent_bytes(self) -> int:
        return sum(one.bytes for one in self.sent.values())

    @property
    def connections(self) -> int:
        return sum(one.connections for one in self.sent.values())

    @property
    def grew_bytes(self) -> int:
        return self.most.resident_bytes - self.before.resident_bytes


def start_floods(names: Sequence[str], server: Server, seconds: float) -> subprocess.Popen[str]:
    """A process that sends all floods of ``names`` at once."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.attack.pouring", *names, "--grpc", server.address),
            *("--http", server.http_address, "--request", str(server.request)),
            *("--seconds", str(seconds)),
        ],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def attack(names: Sequence[str], server: Server, client: PoliteClient, seconds: float) -> Outcome:
    """Runs the floods ``names`` at once for ``seconds`` with ``client`` beside them."""
    client.latencies_s.clear()
    client.ends.clear()
    with Peak(server.pid) as peak:
        flood = start_floods(names, server, seconds)
        client.run(lambda: flood.poll() is not None)
    output, _ = flood.communicate()
    if flood.returncode != 0:
        raise RuntimeError(f"the floods {names} ended with status {flood.returncode}")
    return Outcome(
        sent={name: Sent(**one) for name, one in json.loads(output).items()},
        ends=Counter(client.ends),
        median_s=client.median_s(),
        p99_s=client.quantile_s(0.99),
        worst_s=max(client.latencies_s),
        before=peak.before,
        most=peak.most,
    )


def settled(server: Server, before: Footprint, *, bytes_more: int, within_s: float) -> bool:
    """Whether the server's descriptors and memory come back to what they were within that time."""
    end = time.monotonic() + within_s
    while True:
        now = footprint(server.pid)
        if (
            now.descriptors <= before.descriptors
            and now.resident_bytes <= before.resident_bytes + bytes_more
        ):
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
