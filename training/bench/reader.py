"""Megabytes and rows per second: Criteo's text parsed, and the prepared cache read again.

    python -m tessera.training.bench.reader [--rows 400000] [--workers 2]

Rows come from `tessera datagen`.  "cache" is an epoch of batches in the order of the file, "shuffled" one
in random order, both to the finished `Batch`; the text's rate is that of the same rows to the end
of preparation in memory, by one process and by ``--workers``.  Rounds are interleaved and the
median is printed; torch has one thread, as the little that it does here is not worth more.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tessera.training.data.config import DataConfig
from tessera.training.data.criteo_read import read_criteo
from tessera.training.data.datagen import generate
from tessera.training.data.dataset import DatasetView
from tessera.training.data.loader import BatchLoader
from tessera.training.data.opening import open_data

BATCH_SIZE = 4096
ROUNDS = 5


def parse_text(file: Path, workers: int) -> None:
    for _part in read_criteo([file], workers=workers):
        pass


def read_batches(view: DatasetView, *, shuffle: bool) -> None:
    loader = BatchLoader(view, batch_size=BATCH_SIZE, shuffle=shuffle, seed=0, prefetch=0)
    for _batch in loader.epoch(0):
        pass


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=400_000, help="rows (default: 400000)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.tsv"
        generate(file, rows=args.rows, seed=0, workers=args.workers)
        config = DataConfig(
            format="criteo", path=str(file), valid_fraction=0.0, test_fraction=0.0, split="time"
        )
        view = open_data(config).train
        ways: dict[str, Callable[[], None]] = {
            "text, 1 process": lambda: parse_text(file, 1),
            f"text, {args.workers} processes": lambda: parse_text(file, args.workers),
            "cache, in order": lambda: read_batches(view, shuffle=False),
            "cache, shuffled": lambda: read_batches(view, shuffle=True),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, work in ways.items():
                times[name].append(seconds(work))
        megabytes = file.stat().st_size / 1e6
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; ", end="")
    print(f"{args.rows} rows, {megabytes:.0f} MB of text; median of {ROUNDS}\n")
    print(f"{'':24}{'s':>8}{'rows/s':>12}{'MB/s of text':>14}{'x text, 1 process':>19}")
    base = medians["text, 1 process"]
    for name, median in medians.items():
        print(
            f"{name:24}{median:8.3f}{args.rows / median:12.0f}{megabytes / median:14.0f}"
            f"{base / median:19.1f}"
        )


if __name__ == "__main__":
    main()
