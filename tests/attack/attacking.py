"""One flood against one server: sent from another process while a polite client is served and the server watched."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from tests.attack import grpc_floods, http_floods
from tests.attack.pouring import Flood
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
    """What one flood did. ``most`` and ``before`` are the server's footprint at worst and before it."""

    flood: str
    sent_bytes: int
    connections: int
    closed_by_server: int
    ends: Counter[str]
    median_s: float
    p99_s: float
    worst_s: float
    before: Footprint
    most: Footprint

    @property
    def grew_bytes(self) -> int:
        return self.most.resident_bytes - self.before.resident_bytes


def start_flood(flood: Flood, server: Server, seconds: float) -> subprocess.Popen[str]:
    address = server.address if flood.port == "grpc" else server.http_address
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.attack.pouring", flood.name, "--address", address),
            *("--request", str(server.request), "--seconds", str(seconds)),
        ],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def attack(name: str, server: Server, client: PoliteClient, seconds: float) -> Outcome:
    """Runs flood ``name`` for ``seconds`` with ``client`` beside it."""
    client.latencies_s.clear()
    client.ends.clear()
    with Peak(server.pid) as peak:
        flood = start_flood(FLOODS[name], server, seconds)
        client.run(lambda: flood.poll() is not None)
    output, _ = flood.communicate()
    if flood.returncode != 0:
        raise RuntimeError(f"the flood {name} ended with status {flood.returncode}")
    sent = json.loads(output)
    return Outcome(
        flood=name,
        sent_bytes=sent["bytes"],
        connections=sent["connections"],
        closed_by_server=sent["closed_by_server"],
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
