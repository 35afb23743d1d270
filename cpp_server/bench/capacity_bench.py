"""What `tessera capacity` simulates beside what tessera-server does, under several loads.

    python cpp_server/bench/capacity_bench.py [--rounds 5] [--samples 64] [--loads 0.3 0.6 0.8] [--json FILE]

The model is the DLRM of the forward benchmark: 26 int8 tables, D=64, 13 dense features.  Each round measures the
costs anew (tessera-load --calibrate, at a quarter, half and three quarters of what the server answers with 64 in
flight), sends calls at random times at 30, 60 and 80% of that, or at other loads, and simulates the same rates with
the round's costs, the client on the same CPUs.  Figures are medians over the rounds; a ratio is the simulated figure
by the measured one, the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tessera.cpus import usable_cpus
from tessera.serving.bench.forward import dlrm
from tessera.serving.capacity.calibration import Calibration, read_calibration
from tessera.serving.capacity.fit import fitted_costs
from tessera.serving.capacity.model import Costs, Host, Load
from tessera.serving.capacity.simulate import simulate
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tessera.serving.server.background import ServerProcess
from tessera.training.bench.harness import machine, print_head, print_row

BUILD = Path(__file__).resolve().parents[2] / "build/cpp/release"
SIMULATED = 100_000  # requests; with fewer, chance moves the p99 by some 5%
FIGURES = ("throughput", "p50_ms", "p99_ms")
Row = dict[str, float]


def load(server: ServerProcess, package: Path, *flags: object) -> None:
    """Run tessera-load against ``server``, which may refuse calls."""
    command = [BUILD / "tessera-load", "--address", server.address, "--model-file", package, *flags]
    done = subprocess.run(list(map(str, command)), check=False, stdout=subprocess.DEVNULL)
    if done.returncode > 1:
        raise SystemExit(done.returncode)


def calibrated(
    server: ServerProcess, package: Path, folder: Path, args: argparse.Namespace
) -> Calibration:
    """The costs, measured now."""
    file = folder / "costs.json"
    # Windows of the costs' runs take two fifths of the duration.
    length = ("--samples", args.samples, "--duration-s", args.seconds / 0.4, "--warm-up-s", "0.5")
    http = f"127.0.0.1:{server.http_port}"
    load(server, package, "--calibrate", file, "--http-address", http, *length)
    return read_calibration(file)


def measured(
    server: ServerProcess, package: Path, folder: Path, rate: float, args: argparse.Namespace
) -> Row:
    """What the server does under ``rate`` calls a second."""
    file = folder / "load.csv"
    file.unlink(missing_ok=True)
    length = ("--samples", args.samples, "--duration-s", args.seconds, "--warm-up-s", "0.5")
    load(server, package, "--rate", rate, "--csv", file, *length)
    names, values = file.read_text().splitlines()
    row = dict(zip(names.split(","), map(float, values.split(",")), strict=True))
    return {
        "throughput": row["requests_per_second"],
        "p50_ms": row["p50_ms"],
        "p99_ms": row["p99_ms"],
    }


def medians(windows: Sequence[Row]) -> Row:
    """What a usual window has."""
    return {figure: statistics.median(row[figure] for row in windows) for figure in FIGURES}


def simulated(host: Host, costs: Costs, rate: float, args: argparse.Namespace) -> Row:
    """What the simulation says of the same load."""
    outcome = simulate(host, costs, Load(rate=rate, samples=args.samples, requests=SIMULATED))
    return {
        "throughput": outcome.throughput,
        "p50_ms": 1e3 * outcome.percentile_s(50),
        "p99_ms": 1e3 * outcome.percentile_s(99),
    }


def keep(
    folder: Path, number: int, calibration: Calibration, windows: Mapping[float, Sequence[Row]]
) -> None:
    """Write what round ``number`` has measured."""
    folder.mkdir(parents=True, exist_ok=True)
    calibration.write(folder / f"costs-{number}.json")
    content = [{"load": share, "windows": rows} for share, rows in windows.items()]
    (folder / f"windows-{number}.json").write_text(json.dumps(content, indent=1))


def parse() -> argparse.Namespace:
    """The flags of this script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", type=int, default=100_000, help="rows per table (default: %(default)s)")
    add("--rounds", type=int, default=5, help="(default: %(default)s)")
    add("--samples", type=int, default=64, help="of a call (default: %(default)s)")
    add("--seconds", type=float, default=4.0, help="of a window (default: %(default)s)")
    add("--windows", type=int, default=5, help="of each load (default: %(default)s)")
    add(
        "--loads",
        type=float,
        nargs="+",
        default=(0.3, 0.6, 0.8),
        help="by what the server answers with 64 calls in flight (default: %(default)s)",
    )
    add("--json", type=Path, help="also write the figures to this file")
    add("--keep", type=Path, help="a folder for the costs and windows of each round")
    return parser.parse_args()


def main() -> None:
    """Measure, simulate and print both."""
    args = parse()
    print(f"{machine()} at the start; {usable_cpus()} CPUs for server and client together")
    print(
        f"{args.samples} samples a call; medians of {args.rounds} rounds, each of {args.windows} windows"
        f" of {args.seconds} s"
    )
    rounds: dict[float, list[tuple[Row, Row]]] = {share: [] for share in args.loads}
    rates: dict[float, list[float]] = {share: [] for share in args.loads}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        package = folder / "dlrm.pt"
        write_model(dlrm(args.rows, "murmur3"), package, PackageOptions(name="dlrm"))
        flags = ["--model", str(package), "--drain-propagation-ms", "0"]
        with ServerProcess(flags, program=[str(BUILD / "tessera-server")]) as server:
            for number in range(args.rounds):
                calibration = calibrated(server, package, folder, args)
                most = calibration.busiest.calls / calibration.busiest.seconds
                host = Host.of_server(calibration.server, calibration.cpus, clients=1)
                windows: dict[float, list[Row]] = {share: [] for share in args.loads}
                for _ in range(args.windows):
                    for share in args.loads:
                        found = measured(server, package, folder, share * most, args)
                        windows[share].append(found)
                if args.keep:
                    keep(args.keep, number, calibration, windows)
                costs = fitted_costs(calibration, args.samples)
                for share in args.loads:
                    said = simulated(host, costs, share * most, args)
                    rounds[share].append((medians(windows[share]), said))
                    rates[share].append(share * most)
    print_head("load", "calls/s", "", "measured", "simulated", "ratio", "ratios of the rounds")
    figures = []
    for share, pairs in rounds.items():
        for figure in FIGURES:
            ratios = [said[figure] / found[figure] for found, said in pairs]
            row = {
                "load": share,
                "rate": statistics.median(rates[share]),
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
