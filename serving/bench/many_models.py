"""Requests per second and latency of ``tessera serve`` over few and many models, with and without short passes.

A server of as many models as are asked for, copies of one package in a repository, answers calls to random ones of
them.  With ``--max-delay-us 0``, which is the default, the event loop computes short passes of models whose requests
come one by one (`tessera.serving.server.batching.policy.runs_here`); with ``--max-delay-us 1`` workers compute all.
Both servers are started anew for each turn and take turns.  Client processes keep a fixed number of calls in flight, or
send them at random times at a rate; they share the CPUs with the server where there are fewer than four.

The package: 13 dense features, 26 int8 tables of D=64, MLP 13-512-256-64, dot interaction, MLP 512-256-1, random
weights; one sample a request, one id a bag.  Figures are medians over the rounds; "CPU" is what the server spent per
request, "ratio" the median of requests per second over those without short passes in the same round, with the smallest
and the largest.

    python -m tessera.serving.bench.many_models [--models 1,3,10,50] [--rates 0,500] [--json FILE]
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tessera.serving.bench.forward import dlrm
from tessera.serving.bench.processes import (
    Client,
    Load,
    Measurement,
    PythonClients,
    halves,
    measure,
    show,
)
from tessera.serving.client import Draw, RequestDrawer, encode_request, read_schema
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.serving.server.background import ServerProcess
from tessera.training.bench.harness import arguments, in_turns, machine, print_head

DISTINCT = 1_000
IN_FLIGHT = 32
SETTINGS = {"workers alone": "1", "short passes": "0"}
"""``--max-delay-us`` of each."""


def repository(folder: Path, package: Path, models: int) -> Path:
    """A repository of ``models`` models of one version, all of them ``package``."""
    root = folder / f"models{models}"
    for number in range(models):
        version = root / f"m{number}" / "1"
        version.mkdir(parents=True)
        shutil.copyfile(package, version / "model.pt")
    return root


def requests(package: Path, models: int) -> list[bytes]:
    """Requests to random models."""
    drawer = RequestDrawer(read_schema(package), Draw(ids="uniform"), seed=1)
    draw = random.Random(1)  # noqa: S311 - not a secret
    # Messages of protobuf may be joined; of a field that is there twice the last one counts.
    return [
        encode_request(drawer.samples(1))
        + pb.PredictionRequest(model_name=f"m{draw.randrange(models)}").SerializeToString()
        for _ in range(DISTINCT)
    ]


def turn(root: Path, delay_us: str, client: Client, load: Load, seconds: float) -> Measurement:
    """One turn of one server."""
    flags = ["--model-repository", str(root), "--max-delay-us", delay_us]
    with ServerProcess(flags) as server:
        return measure(server, client, load, seconds)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", default="1,3,10,50", help="by commas (default 1,3,10,50)")
    parser.add_argument(
        "--rates",
        default="0",
        help=f"requests/s of open loops, by commas; 0: a closed loop with {IN_FLIGHT} in flight (default 0)",
    )
    parser.add_argument("--rows", type=int, default=1_000, help="rows per table (default 1000)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a turn (default 5)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each server (default 5)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    server_cores, client_cores = halves()
    os.sched_setaffinity(0, server_cores)
    print(f"{machine()} at the start; medians of {args.rounds} rounds of {args.seconds} s")
    print_head("load", "models", "requests/s", "p50 ms", "p99 ms", "CPU us", "failed", "ratio")
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        package = folder / "dlrm.pt"
        write_model(dlrm(args.rows, "murmur3"), package, PackageOptions(name="dlrm"))
        for models in map(int, args.models.split(",")):
            root = repository(folder, package, models)
            with PythonClients(requests(package, models), client_cores) as client:
                for rate in map(float, args.rates.split(",")):
                    load = Load(in_flight=IN_FLIGHT, connections=2, rate=rate)
                    contenders = {
                        setting: partial(turn, root, delay, client, load, args.seconds)
                        for setting, delay in SETTINGS.items()
                    }
                    found = in_turns(contenders, args.rounds)
                    for setting, turns in found.items():
                        told = show(f"{load}; {setting}", models, turns, found["workers alone"])
                        del told["processes"]
                        rows.append(
                            told | {"models": models, "setting": setting, "load": asdict(load)}
                        )
            shutil.rmtree(root)
    if args.json:
        args.json.write_text(
            json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
