"""Megabytes and rows per second: Criteo's text parsed, and the prepared cache read again.

    python -m tessera.training.bench.reader [--rows 400000] [--workers 2]

Rows come from `tessera datagen`.  "cache" is an epoch of batches in the order of the file, "shuffled" one
in random order, both to the finished `Batch`; the text's rate is that of the same rows to the end
of preparation in memory, by one process and by ``--workers``.  Rounds are interleaved and the
median is printed; torch has one thread, as the little that it does here is not worth more.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch

from tessera.training.bench.harness import arguments, in_turns, machine, medians, seconds_of
from tessera.training.data.criteo_read import read_criteo
from tessera.training.data.datagen import generate
from tessera.training.data.dataset import View
from tessera.training.data.formats.criteo import CriteoConfig
from tessera.training.data.loader import BatchLoader
from tessera.training.data.opening import open_data

BATCH_SIZE = 4096
ROUNDS = 5


def parse_text(file: Path, workers: int) -> None:
    for _part in read_criteo([file], workers=workers):
        pass


def read_batches(view: View, *, shuffle: bool) -> None:
    loader = BatchLoader(view, batch_size=BATCH_SIZE, shuffle=shuffle, seed=0, prefetch=0)
    for _batch in loader.epoch(0):
        pass


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=400_000, help="rows (default: 400000)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.tsv"
        generate(file, rows=args.rows, seed=0, workers=args.workers)
        config = CriteoConfig(path=str(file), valid_fraction=0.0, test_fraction=0.0, split="time")
        view = open_data(config).train
        ways = {
            "text, 1 process": partial(parse_text, file, 1),
            f"text, {args.workers} processes": partial(parse_text, file, args.workers),
            "cache, in order": partial(read_batches, view, shuffle=False),
            "cache, shuffled": partial(read_batches, view, shuffle=True),
        }
        works = {name: partial(seconds_of, work) for name, work in ways.items()}
        found = medians(in_turns(works, ROUNDS))
        megabytes = file.stat().st_size / 1e6
    print(f"{machine()}; {args.rows} rows, {megabytes:.0f} MB of text; median of {ROUNDS}\n")
    print(f"{'':24}{'s':>8}{'rows/s':>12}{'MB/s of text':>14}{'x text, 1 process':>19}")
    base = found["text, 1 process"]
    for name, median in found.items():
        print(
            f"{name:24}{median:8.3f}{args.rows / median:12.0f}{megabytes / median:14.0f}"
            f"{base / median:19.1f}"
        )


if __name__ == "__main__":
    main()
