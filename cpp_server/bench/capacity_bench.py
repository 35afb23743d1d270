"""What `tessera capacity` simulates beside what tessera-server does, under several loads.

    python cpp_server/bench/capacity_bench.py [--rounds 5] [--samples 64] [--loads 0.3 0.6 0.8] [--json FILE]

The model is the DLRM of the forward benchmark: 26 int8 tables, D=64, 13 dense features.  Each round measures the
costs anew with tessera-load --calibrate: calls at random times at a quarter, half, three quarters and nine tenths of
what the server answers with four in flight for each CPU, of which the costs are made, and in turn with these at the
loads compared, which are simulated with the round's costs, the client on the same CPUs.  All are medians of windows.
Figures are medians over the rounds; a ratio is the simulated figure by the measured one, the median of the rounds'
ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tessera.cpus import usable_cpus
from tessera.serving.bench.forward import dlrm
from tessera.serving.capacity.calibration import Calibration, Run, read_calibration
from tessera.serving.capacity.fit import fitted_costs
from tessera.serving.capacity.model import Costs, Host, Load
from tessera.serving.capacity.simulate import simulate
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tessera.serving.server.background import ServerProcess
from tessera.training.bench.harness import machine, print_head, print_row

BUILD = Path(__file__).resolve().parents[2] / "build/cpp/release"
SIMULATED = 100_000  # requests; with fewer, chance moves the p99 by some 5%
OF_COSTS = (0.25, 0.5, 0.75, 0.9)  # the loads that the costs are made of
FIGURES = ("throughput", "p50_ms", "p99_ms", "cpus")
Row = dict[str, float]


def calibrated(
    server: ServerProcess, package: Path, file: Path, args: argparse.Namespace
) -> Calibration:
    """The costs and what the server does under the loads compared, measured now, in ``file``."""
    loads = sorted({*OF_COSTS, *args.loads})
    # Windows of calls at random times take two elevenths of the duration, their warm-up as much of its own.
    seconds, warm_up_s = 5.5 * args.seconds, 5.5 * 0.3
    command = [BUILD / "tessera-load", "--address", server.address, "--model-file", package]
    command += ["--calibrate", file, "--http-address", f"127.0.0.1:{server.http_port}"]
    command += ["--samples", args.samples, "--calibrate-loads", ",".join(map(str, loads))]
    command += ["--duration-s", seconds, "--warm-up-s", warm_up_s]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return read_calibration(file)


def divided(
    calibration: Calibration, shares: Sequence[float]
) -> tuple[Calibration, dict[float, Run]]:
    """What the costs are made of, and the runs under the loads compared, by ``shares``."""
    loads = sorted({*OF_COSTS, *shares})
    runs = dict(zip(loads, calibration.rated, strict=True))
    others = [run for load, run in runs.items() if load not in OF_COSTS]
    own = tuple(run for run in calibration.runs if run not in others)
    return replace(calibration, runs=own), {share: runs[share] for share in shares}


def measured(run: Run) -> Row:
    """The figures of ``run``."""
    return {
        "throughput": run.calls / run.seconds,
        "p50_ms": 1e3 * run.latency_s(0.5),
        "p99_ms": 1e3 * run.latency_s(0.99),
        "cpus": run.cores_used,
    }


def simulated(host: Host, costs: Costs, rate: float, args: argparse.Namespace) -> Row:
    """What the simulation says of the same load."""
    outcome = simulate(host, costs, Load(rate=rate, samples=args.samples, requests=SIMULATED))
    return {
        "throughput": outcome.throughput,
        "p50_ms": 1e3 * outcome.percentile_s(50),
        "p99_ms": 1e3 * outcome.percentile_s(99),
        "cpus": outcome.cores * outcome.utilisation,
    }


def parse() -> argparse.Namespace:
    """The flags of this script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", type=int, default=100_000, help="rows per table (default: %(default)s)")
    add("--rounds", type=int, default=5, help="(default: %(default)s)")
    add("--samples", type=int, default=64, help="of a call (default: %(default)s)")
    add(
        "--seconds", type=float, default=2.0, help="of a window under a load (default: %(default)s)"
    )
    add(
        "--loads",
        type=float,
        nargs="+",
        default=(0.3, 0.6, 0.8),
        help="by what the server answers with four calls in flight for each CPU (default: %(default)s)",
    )
    add("--json", type=Path, help="also write the figures to this file")
    add("--keep", type=Path, help="a folder for what each round has measured")
    return parser.parse_args()


def main() -> None:
    """Measure, simulate and print both."""
    args = parse()
    print(f"{machine()} at the start; {usable_cpus()} CPUs for server and client together")
    print(
        f"{args.samples} samples a call; medians of {args.rounds} rounds, windows of {args.seconds} s"
    )
    rounds: dict[float, list[tuple[Row, Row]]] = {share: [] for share in args.loads}
    with tempfile.TemporaryDirectory() as name:
        folder = args.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        package = Path(name) / "dlrm.pt"
        write_model(dlrm(args.rows, "murmur3"), package, PackageOptions(name="dlrm"))
        flags = ["--model", str(package), "--drain-propagation-ms", "0"]
        with ServerProcess(flags, program=[str(BUILD / "tessera-server")]) as server:
            for number in range(args.rounds):
                whole = calibrated(server, package, folder / f"costs-{number}.json", args)
                calibration, runs = divided(whole, args.loads)
                host = Host.of_server(calibration.server, calibration.cpus, clients=1)
                costs = fitted_costs(calibration, args.samples)
                for share, run in runs.items():
                    rate = run.calls / run.seconds
                    said = simulated(host, costs, rate, args)
                    rounds[share].append((measured(run), said))
    print_head("load", "calls/s", "", "measured", "simulated", "ratio", "ratios of the rounds")
    figures = []
    for share, pairs in rounds.items():
        for figure in FIGURES:
            ratios = [said[figure] / found[figure] for found, said in pairs]
            row = {
                "load": share,
                "rate": statistics.median(found["throughput"] for found, _ in pairs),
                "figure": figure,
                "measured": statistics.median(found[figure] for found, _ in pairs),
                "simulated": statistics.median(said[figure] for _, said in pairs),
                "ratio": statistics.median(ratios),
                "ratios": sorted(ratios),
            }
            figures.append(row)
            both = (f"{row['measured']:.4g}", f"{row['simulated']:.4g}", f"{row['ratio']:.2f}")
            each = " ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
            print_row(f"{share:.0%}", f"{row['rate']:.0f}", figure, *both, each)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
