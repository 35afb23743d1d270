"""Say how many hosts and cores a load needs, from costs that were measured on one of them.

    tessera-load --calibrate model.costs.json --address HOST:50051 --http-address HOST:8002 --model-file model.pt
    tessera capacity --package model.pt --rate 50000 --samples 1 --p99-ms 10 --plot latency.svg

The first command loads a server of the package on the machine itself; the second one simulates a server of
those costs, with its own rule of batching, under growing rates.  docs/capacity.md says what is simulated and
how near it is to what was measured.

Exit status: 0; 2 a value or the file of costs has to be changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from tessera.serving.commands.flags import not_negative, positive

if TYPE_CHECKING:
    from tessera.serving.capacity.calibration import Calibration
    from tessera.serving.capacity.sweep import Point, Simulated, Sizing, Total


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``tessera capacity``."""
    add = parser.add_argument
    add(
        "--package",
        metavar="MODEL.pt",
        type=Path,
        required=True,
        help="the package that is to be served",
    )
    add(
        "--costs",
        metavar="FILE.json",
        type=Path,
        help="what tessera-load --calibrate wrote (default: MODEL.costs.json beside the package)",
    )
    add(
        "--rate",
        metavar="R",
        type=above_zero,
        required=True,
        help="requests/s of all hosts together",
    )
    add(
        "--samples",
        metavar="N",
        type=positive,
        help="samples of a request (default: those of the measurement)",
    )
    add(
        "--p99-ms",
        metavar="M",
        type=above_zero,
        required=True,
        help="what 99%% of the answers must not take longer than, milliseconds",
    )
    add(
        "--headroom",
        metavar="SHARE",
        type=share,
        default=0.3,
        help="share of the highest rate within --p99-ms that each host keeps free (default: %(default)s)",
    )
    add(
        "--cores",
        metavar="N",
        type=positive,
        help="CPUs of a host (default: those of the machine that was measured)",
    )
    add(
        "--max-batch-samples",
        metavar="N",
        type=positive,
        default=512,
        help="of the servers: samples of a batch at most (default: %(default)s)",
    )
    add(
        "--max-delay-us",
        metavar="N",
        type=not_negative,
        default=0,
        help="of the servers: how long a batch waits for more requests, microseconds (default: %(default)s)",
    )
    add(
        "--client-on-host",
        action="store_true",
        help="a client of one thread shares the CPUs, as in the measurement (default: callers are elsewhere)",
    )
    add(
        "--requests",
        metavar="N",
        type=positive,
        default=20_000,
        help="simulated at each rate (default: %(default)s)",
    )
    add(
        "--seed",
        metavar="N",
        type=not_negative,
        default=0,
        help="of the simulation (default: %(default)s)",
    )
    add("--json", metavar="FILE", type=Path, help="also write all figures to FILE (default: none)")
    add("--plot", metavar="FILE.svg", type=Path, help="also draw latency over load (default: none)")


def above_zero(text: str) -> float:
    """A number above 0 that is not infinite."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number above 0")
    return value


def share(text: str) -> float:
    """A number of at least 0 and below 1."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of at least 0 and below 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def run(args: argparse.Namespace) -> int:
    """Simulate, print the table and write what was asked for; see the module's docstring."""
    from tessera.errors import UserError  # noqa: PLC0415 - with what follows
    from tessera.serving.capacity.calibration import read_calibration  # noqa: PLC0415 - loads numpy
    from tessera.serving.capacity.fit import fitted_costs  # noqa: PLC0415 - likewise
    from tessera.serving.capacity.model import Host, Load  # noqa: PLC0415 - likewise
    from tessera.serving.capacity.policy import BatchLimits  # noqa: PLC0415 - likewise
    from tessera.serving.capacity.sweep import Simulated, size  # noqa: PLC0415 - likewise
    from tessera.serving.package.records import Records  # noqa: PLC0415 - likewise

    manifest = Records(args.package).manifest()
    path = args.costs or args.package.with_suffix(".costs.json")
    if args.costs is None and not path.exists():
        raise UserError(
            f"costs is {path}, which does not exist; start a server of the package and measure it: tessera-load "
            f"--calibrate {path} --address HOST:PORT --http-address HOST:PORT --model-file {args.package}"
        )
    calibration = read_calibration(path)
    measured = (calibration.model, calibration.model_version)
    if measured != (manifest.name, manifest.version):
        raise UserError(
            f"costs is {path}, which was measured with the model {measured[0]}, version {measured[1]}; the package "
            f"is {manifest.name}, version {manifest.version}: measure it with tessera-load --calibrate"
        )
    samples = args.samples or calibration.samples
    cores = args.cores or calibration.cpus
    clients = int(args.client_on_host)
    # Refused here if need be, and not after the costs have been found, which takes a while.
    Load(rate=args.rate, samples=samples, requests=args.requests, seed=args.seed)
    one = Simulated(
        host=Host.of_server(calibration.server, cores, clients=clients),
        costs=fitted_costs(calibration, samples),
        samples=samples,
        limits=BatchLimits(max_samples=args.max_batch_samples, max_delay_s=args.max_delay_us / 1e6),
        requests=args.requests,
        seed=args.seed,
    )
    sizing = size(one, rate=args.rate, p99_ms=args.p99_ms, headroom=args.headroom)
    print(_text(calibration, one, sizing, args))
    if args.json:
        args.json.write_text(_json(calibration, one, sizing, args), encoding="utf-8")
    if args.plot:
        from tessera.serving.capacity.picture import latency_over_load  # noqa: PLC0415 - loads matplotlib

        svg = latency_over_load(sizing, p99_ms=args.p99_ms)
        args.plot.write_text(svg, encoding="utf-8")
    return 0


def _text(
    calibration: Calibration, one: Simulated, sizing: Sizing, args: argparse.Namespace
) -> str:
    costs = one.costs
    program = "tessera-server" if calibration.server == "cpp" else "tessera serve"
    head = (
        f"{program} on {one.host.cores} cores, {one.samples} samples a request, {calibration.model} version "
        f"{calibration.model_version}, measured {calibration.created}"
    )
    waking_us = [1e6 * under.wake_s for under in costs.under]
    slower = costs.under[-1].slower - 1
    of_costs = (
        f"a call outside its pass {1e6 * costs.call_s:.1f} us, waking a thread {waking_us[0]:.1f} us under the lowest "
        f"load measured and {waking_us[-1]:.1f} us under the highest, a pass of "
        f"{one.samples} samples {1e6 * costs.pass_s(one.samples):.1f} us, of {one.limits.max_samples} samples "
        f"{1e6 * costs.pass_s(one.limits.max_samples):.0f} us, {slower:.0%} longer under the highest load measured"
    )
    highest = (
        f"one host keeps up with {sizing.keeps_up_with:.0f} requests/s; p99 is within {args.p99_ms:g} ms up to "
        f"{sizing.within_limit:.0f} requests/s"
    )
    needed = (
        f"{args.rate:g} requests/s need {sizing.needed.hosts} hosts, {sizing.needed.hosts * one.host.cores} cores, at "
        f"{sizing.planned:.0f} requests/s each at most ({args.headroom:.0%} headroom)"
    )
    totals = sorted((*sizing.totals, sizing.needed), key=lambda total: total.rate)
    lines = [
        *(head, of_costs, "", "one host", *_rows(sizing.points), "", highest, ""),
        f"{'requests/s':>12} {'hosts':>7} {'cores':>7} {'p50 ms':>9} {'p99 ms':>9} {'CPU':>5}",
        *(_row_of_total(total, one.host.cores) for total in totals),
        *("", needed),
    ]
    return "\n".join(lines)


def _rows(points: tuple[Point, ...]) -> list[str]:
    head = (
        f"{'requests/s':>12} {'answers/s':>12} {'p50 ms':>9} {'p99 ms':>9} {'CPU':>5} {'batch':>7}"
    )
    return [
        head,
        *(
            f"{point.rate:12.0f} {point.throughput:12.0f} {point.p50_ms:9.3f} {point.p99_ms:9.3f} "
            f"{point.utilisation:5.0%} {point.batch_samples:7.1f}"
            for point in points
        ),
    ]


def _row_of_total(total: Total, cores: int) -> str:
    host = total.host
    return (
        f"{total.rate:12.0f} {total.hosts:7d} {total.hosts * cores:7d} {host.p50_ms:9.3f} {host.p99_ms:9.3f} "
        f"{host.utilisation:5.0%}"
    )


def _json(
    calibration: Calibration, one: Simulated, sizing: Sizing, args: argparse.Namespace
) -> str:
    content = {
        "model": {"name": calibration.model, "version": calibration.model_version},
        "asked": {
            "rate": args.rate,
            "samples": one.samples,
            "p99_ms": args.p99_ms,
            "headroom": args.headroom,
        },
        "host": dataclasses.asdict(one.host),
        "costs": dataclasses.asdict(one.costs),
        "hosts": sizing.needed.hosts,
        "cores": sizing.needed.hosts * one.host.cores,
        **dataclasses.asdict(sizing),
    }
    return json.dumps(_finite(content), indent=1) + "\n"


def _finite(value: object) -> object:
    """The value with null for what was not answered: JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value
