"""Latency of tessera-server in an open loop under several settings of it, measured in turn in one run.

    python cpp_server/bench/open_loop.py --flags='--worker-niceness 5' --flags='--worker-niceness 0' --rates 45000,70000

The model is the DLRM of the forward benchmark: 13 dense features, 26 int8 tables, D=64; one sample a request, one id
a bag.  A server is started anew for each turn, as the kernel's choice of CPUs for its threads is a part of what is
measured, and shares this machine's CPUs with the client (tessera-load, one connection).  Latency counts from when a
call was due.  Figures are medians over the rounds, of p99 also the smallest and the largest; "CPU" is the server's
time per request, and "waits" the largest part of a turn for which workers were ready and had no CPU.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path

from tessera.serving.bench.forward import dlrm
from tessera.serving.bench.processes import (
    LOADER,
    WARM_UP_S,
    Load,
    Measurement,
    measure,
    tessera_load,
)
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tessera.serving.server.background import ServerProcess
from tessera.training.bench.harness import arguments, in_turns, machine, print_head, print_row

SERVER = LOADER.with_name("tessera-server")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """What one server did: its calls, and for how much of the time its workers waited for a CPU."""

    calls: Measurement
    waits: float


def waited_s(pid: int) -> float:
    """For how long the workers of a server have been ready without a CPU."""
    total = 0.0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        if (thread / "comm").read_text(encoding="utf-8").startswith("worker-"):
            total += int((thread / "schedstat").read_text(encoding="utf-8").split()[1]) / 1e9
    return total


def turn(package: Path, flags: str, rate: float, seconds: float) -> Turn:
    """One turn of a server with ``flags``."""
    with ServerProcess(["--model", str(package), *flags.split()], [str(SERVER)]) as server:
        client = partial(tessera_load, package, sorted(os.sched_getaffinity(0)))
        before = waited_s(server.process.pid)
        calls = measure(server, client, Load(in_flight=0, connections=1, rate=rate), seconds)
        waits = (waited_s(server.process.pid) - before) / (seconds + WARM_UP_S)
    return Turn(calls=calls, waits=waits)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--flags", action="append", required=True, help="of the server; once for each setting"
    )
    parser.add_argument("--rates", default="45000", help="requests/s, by commas (default 45000)")
    parser.add_argument("--rows", type=int, default=100_000, help="rows per table (default 100000)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a turn (default 8)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each setting (default 5)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    print(f"{machine()} at the start; medians of {args.rounds} rounds of {args.seconds} s")
    print_head("requests/s", "flags", "answered/s", "p50 ms", "p99 ms", "CPU us", "waits", "failed")
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "dlrm.pt"
        write_model(dlrm(args.rows, "murmur3"), package, PackageOptions(name="dlrm"))
        for rate in map(float, args.rates.split(",")):
            found = in_turns(
                {flags: partial(turn, package, flags, rate, args.seconds) for flags in args.flags},
                args.rounds,
            )
            for flags, turns in found.items():
                calls = [one.calls for one in turns]
                p99 = [one.p99_ms for one in calls]
                print_row(
                    *(f"{rate:.0f}", flags),
                    f"{statistics.median(one.rate for one in calls):.0f}",
                    f"{statistics.median(one.p50_ms for one in calls):.2f}",
                    f"{statistics.median(p99):.2f} ({min(p99):.2f} to {max(p99):.2f})",
                    f"{statistics.median(one.cpu_us for one in calls):.1f}",
                    f"{max(one.waits for one in turns):.2f}",
                    sum(one.failed for one in calls),
                )
                turns_json = [dataclasses.asdict(one) for one in turns]
                rows.append({"rate": rate, "flags": flags, "turns": turns_json})
    if args.json:
        args.json.write_text(
            json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
