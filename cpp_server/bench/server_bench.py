"""Throughput and latency of tessera-server against its peers, measured in turn in one run.

    python cpp_server/bench/server_bench.py [--rounds 5] [--seconds 3] [--json FILE]

The model is the DLRM of the forward benchmark: 26 int8 tables, D=64, 13 dense features.  The
peers are the same server unbatched on gRPC's synchronous API, the same front end without a model
(the ceiling), and ``tessera serve``.  Client (tessera-load, one connection) and servers share
this machine.  Every figure is the median over the rounds; between two rounds of one server every
other server has had its turn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tessera.serving.bench.forward import dlrm
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tessera.serving.server.background import ServerProcess

BUILD = Path(__file__).resolve().parents[2] / "build/cpp/release"
LOADS = (
    # samples of a request, requests in flight
    (1, 1),
    (1, 8),
    (1, 64),
    (100, 1),
    (100, 8),
    (100, 32),
)
Process = subprocess.Popen[str]
TICKS = os.sysconf("SC_CLK_TCK")


class Peer:
    """A server process of this benchmark: tessera-server itself or `peer_server`."""

    def __init__(self, command: Sequence[object], ready: Callable[[Process], int]) -> None:
        self.process = subprocess.Popen(
            list(map(str, command)), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port = ready(self.process)

    def __enter__(self) -> Peer:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()


def printed_port(process: Process) -> int:
    """The first line that `peer_server` prints."""
    assert process.stdout is not None
    return int(process.stdout.readline())


def logged_port(process: Process) -> int:
    """The port in tessera-server's ready line."""
    assert process.stderr is not None
    for line in process.stderr:
        entry = json.loads(line)
        if entry["event"] == "ready":
            return int(entry["port"])
    raise RuntimeError("tessera-server did not start")


def cpu_seconds(pid: int) -> float:
    """CPU that the process has used, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def rss_megabytes(pid: int) -> float:
    """Resident memory of the process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1e6


def measure(
    server: Peer | ServerProcess,
    package: Path,
    samples: int,
    in_flight: int,
    seconds: float,
    *,
    flags: Sequence[str | Path] = (),
) -> dict[str, float]:
    """One round: tessera-load's row, and the server's CPU per request.

    ``flags`` are further ones of tessera-load.
    """
    with tempfile.NamedTemporaryFile(suffix=".csv") as file:
        before = cpu_seconds(server.process.pid)
        done = subprocess.run(
            [
                *(BUILD / "tessera-load", "--address", f"127.0.0.1:{server.port}"),
                *("--model-file", package, "--samples", str(samples)),
                *("--in-flight", str(in_flight), "--duration-s", str(seconds)),
                *("--warm-up-s", "0.5", "--csv", file.name),
                *flags,
            ],
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(
                f"{done.stdout}{done.stderr}\ntessera-load ended with {done.returncode}"
            )
        used = cpu_seconds(server.process.pid) - before
        names, values = Path(file.name).read_text().splitlines()
    row = dict(zip(names.split(","), map(float, values.split(",")), strict=True))
    # The warm-up is in the CPU as well.
    row["cpu_us"] = 1e6 * used * seconds / (seconds + 0.5) / max(row["answered"], 1)
    # The share of the time in which a worker computes: how near this is to the in-process rate.
    batches = row["requests_per_second"] * samples / max(row["batch_samples"], 1)
    row["busy"] = batches * row["forward_us"] / 1e6
    return row


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Each column's median."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows", type=int, default=100_000, help="rows per table (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds per server and load (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=3.0,
        help="length of a round, seconds (default: %(default)s)",
    )
    parser.add_argument(
        "--backend",
        default="tessera",
        help="whose operators the package uses: 'fbgemm' makes a heavier forward (default: tessera)",
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        package = Path(folder) / "dlrm.pt"
        write_model(
            dlrm(args.rows, "murmur3"), package, PackageOptions(name="dlrm", backend=args.backend)
        )
        ours = [BUILD / "tessera-server", "--model", package, "--host", "127.0.0.1"]
        ours += ["--port", "0", "--http-port", "0", "--drain-propagation-ms", "0"]
        begin = time.perf_counter()
        servers: dict[str, Peer | ServerProcess] = {
            "tessera-server": stack.enter_context(Peer(ours, logged_port))
        }
        start_seconds = time.perf_counter() - begin
        for name, mode in (("sync, unbatched", "sync"), ("no model", "no-model")):
            command = [BUILD / "peer_server", mode, package]
            servers[name] = stack.enter_context(Peer(command, printed_port))
        servers["tessera serve"] = stack.enter_context(ServerProcess(["--model", str(package)]))
        figures = run(servers, package, args)
        size = package.stat().st_size / 1e6
    print(f"\n{size:.0f} MB package: start to ready in {start_seconds:.2f} s")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "figures": figures}, indent=1))


def run(
    servers: Mapping[str, Peer | ServerProcess], package: Path, args: argparse.Namespace
) -> list[dict[str, object]]:
    """Measure and print; the rows of the table as dictionaries."""
    print(f"{machine()}; medians of {args.rounds} rounds of {args.seconds} s")
    print(f"{'':16} {'samples':>7} {'flight':>6} {'req/s':>8} {'p50 ms':>7} {'p99 ms':>7}", end="")
    print(f" {'batch':>6} {'CPU us':>7} {'forward':>6} {'RSS MB':>7}")
    figures: list[dict[str, object]] = []
    for samples, in_flight in LOADS:
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
        for _ in range(args.rounds):
            for name, server in servers.items():
                rounds[name].append(measure(server, package, samples, in_flight, args.seconds))
        rates = {}
        for name, rows in rounds.items():
            row = medians(rows)
            rates[name] = row["requests_per_second"]
            row["rss_mb"] = rss_megabytes(servers[name].process.pid)
            figures.append({"server": name, "samples": samples, **row})
            print(
                f"{name:16} {samples:7} {in_flight:6} {row['requests_per_second']:8.0f} "
                f"{row['p50_ms']:7.2f} {row['p99_ms']:7.2f} {row['batch_samples']:6.1f} "
                f"{row['cpu_us']:7.1f} {row['busy']:6.0%} {row['rss_mb']:7.0f}"
            )
        ours = rates["tessera-server"]
        ratios = (f"{ours / rate:.2f}x {name}" for name, rate in rates.items() if rate != ours)
        print(f"{'':16} tessera-server is {', '.join(ratios)}")
    return figures


def machine() -> str:
    """What this ran on."""
    names = (
        line.partition(": ")[2]
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    name = next(names, platform.machine())
    return f"{os.cpu_count()} CPUs ({name}), load {os.getloadavg()[0]:.1f} at the start"


if __name__ == "__main__":
    main()
