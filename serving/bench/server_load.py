"""Requests per second and latency of ``tessera serve``, with and without batching.

Two servers of the same package run as processes of their own, one as it comes and one that
computes every request alone (``--max-batch-samples`` is the request's size); the client, a
process of its own too, sends to one and then to the other, in rounds, so that whatever else the
machine does falls on both.  The client keeps a fixed number of calls in flight and sends bytes
that were encoded before; it shares the machine with the servers.

The package: 13 dense features, 26 int8 tables of D=64, MLP 13-512-256-64, dot interaction, MLP
512-256-1, random weights; one id per bag.  Figures are medians over the rounds; "CPU" is what
the server process spent per request, "batch" the mean number of requests of a forward pass.

    python -m tessera.serving.bench.server_load [--seconds 2] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import grpc.aio
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from tessera.serving.bench.forward import dlrm
from tessera.serving.client import Draw, RequestDrawer, encode_request, read_schema
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tessera.serving.server.background import ServerProcess
from tessera.training.bench.harness import (
    arguments,
    in_turns,
    machine,
    medians,
    print_head,
    print_row,
)

IN_FLIGHT = (1, 8, 32, 64)
SAMPLES = (1, 100)
DISTINCT = 256
METHOD = "/predictor.Predictor/Predict"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One round of one server.

    ``batch`` is the mean number of requests of a forward pass, ``cpu_us`` the CPU time of the
    server's process per request.
    """

    rate: float
    p50_ms: float
    p99_ms: float
    batch: float
    cpu_us: float


async def _closed_loop(
    address: str, contents: list[bytes], in_flight: int, seconds: float
) -> tuple[list[float], float]:
    """Latencies of all calls, and the seconds that they took together."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(METHOD, None, None)
        latencies: list[float] = []
        begin = time.perf_counter()
        end = begin + seconds

        async def caller(first: int) -> None:
            turn = first
            while (sent := time.perf_counter()) < end:
                await call(contents[turn % len(contents)])
                latencies.append(time.perf_counter() - sent)
                turn += in_flight

        await asyncio.gather(*[caller(first) for first in range(in_flight)])
        return latencies, time.perf_counter() - begin


def _client(orders: Connection, contents: dict[int, list[bytes]]) -> None:
    """The client's process: measures what it is told to until it is told None."""
    while (order := orders.recv()) is not None:
        address, samples, in_flight, seconds = order
        asyncio.run(_closed_loop(address, contents[samples], in_flight, seconds / 10))
        orders.send("warm")
        orders.recv()
        orders.send(asyncio.run(_closed_loop(address, contents[samples], in_flight, seconds)))


def counters(server: ServerProcess) -> dict[str, float]:
    """What a server has counted of batches and CPU time, by the metric's name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/metrics") as reply:
        text = reply.read().decode()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in {"tessera_batch_requests_sum", "tessera_batch_requests_count"}
        or sample.name == "process_cpu_seconds_total"
    }


def measure(
    server: ServerProcess, client: Connection, samples: int, in_flight: int, seconds: float
) -> Measurement:
    """The requests per second and the costs of one round of ``seconds``."""
    client.send((server.address, samples, in_flight, seconds))
    client.recv()
    before = counters(server)
    client.send("go")
    latencies, elapsed = client.recv()
    after = counters(server)
    grown = {name: after[name] - before[name] for name in after}
    p50, p99 = np.quantile(latencies, [0.5, 0.99]) * 1e3
    return Measurement(
        rate=len(latencies) / elapsed,
        p50_ms=float(p50),
        p99_ms=float(p99),
        batch=grown["tessera_batch_requests_sum"] / grown["tessera_batch_requests_count"],
        cpu_us=grown["process_cpu_seconds_total"] / len(latencies) * 1e6,
    )


def median_of(rounds: list[Measurement]) -> Measurement:
    rows = [asdict(found) for found in rounds]
    return Measurement(**medians({name: [row[name] for row in rows] for name in rows[0]}))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="rows per table (default 100000)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a round (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="per server and load (default 5)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    print(f"{machine()} at the start; medians of {args.rounds} rounds of {args.seconds} s")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dlrm.pt"
        write_model(dlrm(args.rows, "murmur3"), path, PackageOptions(name="dlrm"))
        drawer = RequestDrawer(read_schema(path), Draw(ids="uniform", bags="one"), seed=0)
        contents = {
            samples: [encode_request(drawer.samples(samples)) for _ in range(DISTINCT)]
            for samples in SAMPLES
        }
        client = context.Process(target=_client, args=(theirs, contents), daemon=True)
        client.start()
        figures = ("requests/s", "p50 ms", "p99 ms", "batch", "CPU us", "ratio")
        print_head("samples", "in flight", "", *figures)
        for samples in SAMPLES:
            unbatched = ["--model", str(path), "--max-batch-samples", str(samples)]
            with ServerProcess(["--model", str(path)]) as one, ServerProcess(unbatched) as other:
                servers = {"batched": one, "unbatched": other}
                for in_flight in IN_FLIGHT:
                    load = (ours, samples, in_flight, args.seconds)
                    measures = {n: partial(measure, server, *load) for n, server in servers.items()}
                    rounds = in_turns(measures, args.rounds)
                    found = {name: median_of(own) for name, own in rounds.items()}
                    for name, row in found.items():
                        ratio = row.rate / found["unbatched"].rate
                        shown = (f"{row.rate:.0f}", f"{row.p50_ms:.2f}", f"{row.p99_ms:.2f}")
                        costs = (f"{row.batch:.1f}", f"{row.cpu_us:.0f}", f"{ratio:.2f}")
                        print_row(samples, in_flight, name, *shown, *costs)
                        about = {"samples": samples, "in_flight": in_flight, "server": name}
                        results.append({**about, **asdict(row)})
        ours.send(None)
        client.join()
    if args.json:
        args.json.write_text(
            json.dumps({"machine": machine(), "rows": results}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
