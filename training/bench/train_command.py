"""Samples per second of ``torchrun -m tessera train`` beside those of `training.bench.scaling`.

Both train the model of `scaling` at the same batch size on the same machine, in one run.  There the
batches are drawn before the clock starts; here the command reads generated Criteo data, shuffled,
from its prepared cache: gathering, copies, hashing, logging and the exchange of stop requests are
part of the time.

The command's figure is the median over its log rows (`LOG_STEPS` steps each) after the first
`WARM_ROWS`; what `scaling` says is the better one of its two loops.  The command is killed when
enough rows are there, so that nobody waits for a checkpoint of the whole model.

    python -m tessera.training.bench.train_command --device cuda --worlds 1,2 --rows 16000000
    python -m tessera.training.bench.train_command --rows 200000 --rows-cap 1000 --batch-size 1024
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
import yaml

from tessera.errors import UserError
from tessera.training.bench.harness import arguments, machine
from tessera.training.bench.scaling import CRITEO_ROWS, DIM, Settings, measure_world
from tessera.training.data.config import DataConfig
from tessera.training.data.criteo_format import SPARSE_NAMES
from tessera.training.data.datagen import generate
from tessera.training.data.dataset import packing
from tessera.training.data.formats.criteo import CriteoConfig
from tessera.training.data.loader import BatchLoader
from tessera.training.data.opening import open_data
from tessera.training.trainer.logs import read_metrics
from tessera.training.trainer.loop import GPU_LOADER_THREADS
from tessera.training.trainer.precision import Precision

LOG_STEPS = 50
WARM_ROWS = 3
MANY_EPOCHS = 100_000
VALID_FRACTION = 0.001


def experiment(
    args: argparse.Namespace, data: Path, world: int, precision: Precision
) -> dict[str, Any]:
    """The config of a run that trains the model of `scaling` and is never done."""
    rows = [min(count, args.rows_cap) for count in CRITEO_ROWS]
    return {
        "data": {
            "format": "criteo",
            "path": str(data),
            "valid_fraction": VALID_FRACTION,
            "test_fraction": 0.0,
        },
        "model": {
            "arch": "dlrm",
            "embedding_dim": DIM,
            "dense_layers": [512, 256],
            "over_layers": [1024, 1024, 512, 256],
            "dense_missing": "zero",
            "tables": {
                name: {"rows": count} for name, count in zip(SPARSE_NAMES, rows, strict=True)
            },
        },
        "train": {
            "batch_size": args.batch_size * world,
            "epochs": MANY_EPOCHS,
            "eval_every_epochs": MANY_EPOCHS,
            "dense_optimizer": {"name": "adam", "learning_rate": 1e-3},
            "embedding_optimizer": {"name": "rowwise_adagrad", "learning_rate": 0.01},
            "metric": "log_loss",
            "log_every_steps": args.log_steps,
            "device": args.device,
            "pipeline": args.pipeline,
            "precision": precision,
            "cuda_graphs": args.cuda_graphs,
        },
        "run": {"tensorboard": False, "report": False},
    }


def scaling_speed(args: argparse.Namespace, world: int, precision: Precision) -> float:
    """Samples per second of the better loop of `scaling`."""
    settings = Settings(
        args.device,
        args.rows_cap,
        args.batch_size,
        args.steps,
        args.rounds,
        precision,
        args.cuda_graphs,
    )
    found = measure_world(world, settings)["contenders"]
    return max(float(figure["samples_per_s"]) for figure in found.values())


def command_speeds(
    args: argparse.Namespace, data: Path, world: int, precision: Precision
) -> list[float]:
    """Samples per second of the command, log row by log row, without the first ones."""
    with tempfile.TemporaryDirectory() as folder:
        config, out = Path(folder) / "bench.yaml", Path(folder) / "run"
        config.write_text(yaml.safe_dump(experiment(args, data, world, precision)))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(world), "-m", "tessera", "train", "--quiet"]
        said = Path(folder) / "said.txt"
        command += ["--config", str(config), "--out", str(out)]
        with said.open("wb") as stream, running(command, stream) as process:
            speeds: list[float] = []
            seconds = 0.0
            while seconds < args.seconds:
                if process.poll() is not None:
                    raise UserError(f"the command has ended:\n{said.read_text()[-2000:]}")
                time.sleep(1)
                path = out / "metrics.csv"
                rows = read_metrics(path) if path.exists() else []
                speeds = [float(row["samples_per_second"]) for row in rows[WARM_ROWS:]]
                samples = args.batch_size * world * args.log_steps
                seconds = sum(samples / speed for speed in speeds)
        return speeds


@contextlib.contextmanager
def running(command: list[str], said: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The command while it runs; at the end it is killed, and its workers before it."""
    process = subprocess.Popen(command, stdout=said, stderr=said)
    try:
        yield process
    finally:
        for child in children_of(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        process.kill()
        process.wait()


def children_of(parent: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if f"\nPPid:\t{parent}\n" in status.read_text():
                found.append(int(status.parent.name))
    return found


def loader_speed(args: argparse.Namespace, config: DataConfig, threads: int) -> float:
    """Rows per second of one rank's loader alone, shuffled, in host memory."""
    view = open_data(config, progress=False).train
    on_gpu = args.device == "cuda"
    if on_gpu:
        view = packing(view)
    loader = BatchLoader(
        view,
        batch_size=args.batch_size,
        shuffle=True,
        seed=0,
        prefetch=2 * threads,
        threads=threads,
        finish=(lambda batch: batch.pin_memory()) if on_gpu else None,
    )
    batches = loader.epoch(0)
    rows = next(batches).size
    began, rows = time.perf_counter(), 0
    for batch in batches:
        rows += batch.size
        if time.perf_counter() - began > args.loader_seconds:
            break
    return rows / (time.perf_counter() - began)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: cpu")
    parser.add_argument("--worlds", default="1", help="numbers of ranks; default: 1")
    parser.add_argument("--rows", type=int, default=1_000_000, help="generated; default: 1000000")
    parser.add_argument("--data", type=Path, help="where they lie; made if not there; default: tmp")
    parser.add_argument(
        "--rows-cap", type=int, default=max(CRITEO_ROWS), help="most rows of a table; default: all"
    )
    parser.add_argument("--batch-size", type=int, default=8192, help="samples per rank and step")
    parser.add_argument("--pipeline", default="auto", help="train.pipeline; default: auto")
    parser.add_argument(
        "--precisions", default="fp32", help="values of train.precision; default: fp32"
    )
    parser.add_argument("--cuda-graphs", action="store_true", help="train.cuda_graphs, of both")
    parser.add_argument("--log-steps", type=int, default=LOG_STEPS, help="steps of a log row")
    parser.add_argument("--seconds", type=float, default=30, help="of the command, after warm-up")
    parser.add_argument("--loader-seconds", type=float, default=3, help="of the loader alone")
    parser.add_argument("--steps", type=int, default=20, help="of a round of scaling; default: 20")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of scaling; default: 5")
    args = parser.parse_args()
    gpu = f", {torch.cuda.get_device_name()}" if args.device == "cuda" else ""
    print(f"{machine()}{gpu}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        data = args.data or Path(folder) / "clicks.tsv"
        workers = max(1, (os.cpu_count() or 2) - 2)
        began = time.perf_counter()
        if not data.exists():
            generate(data, rows=args.rows, seed=0, workers=workers, progress=False)
        made = time.perf_counter()
        config = CriteoConfig(
            path=str(data),
            workers=workers,
            valid_fraction=VALID_FRACTION,
            test_fraction=0.0,
        )
        rows = len(open_data(config, progress=False).train)
        print(
            f"{rows:,} rows: generated in {made - began:.0f} s, prepared in "
            f"{time.perf_counter() - made:.0f} s",
            flush=True,
        )
        for threads in sorted({1, GPU_LOADER_THREADS}):
            speed = loader_speed(args, config, threads)
            print(f"loader alone, {threads} threads: {speed:,.0f} rows/s", flush=True)
        print("ranks  precision  scaling samples/s  tessera train samples/s (range)  ratio")
        worlds = [int(number) for number in args.worlds.split(",")]
        for world, precision in itertools.product(worlds, args.precisions.split(",")):
            peer = scaling_speed(args, world, precision)
            speeds = command_speeds(args, data, world, precision)
            ours = statistics.median(speeds)
            print(
                f"{world:>5}  {precision:>9}  {peer:>17,.0f}  {ours:>11,.0f} ({min(speeds):,.0f} to "
                f"{max(speeds):,.0f}, {len(speeds)} rows)  {ours / peer:>6.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
