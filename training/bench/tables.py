"""Rows per second from Parquet to finished batches, beside pyarrow's decoding and two peers.

    python -m tessera.training.bench.tables [--rows 1000000] [--threads 2] [--lists]

Rows have Criteo's shape, 13 numbers and 26 categories with some missing; with ``--lists``, 13 numbers and
4 lists of 50 ids.  "pyarrow" decodes the same columns by as many threads and makes nothing of them.
"DataLoader" has as many worker processes, each of which reads its row groups with pyarrow and makes
tensors of whole batches (dense values, and of each feature values and lengths).  "datasets" is Hugging
Face's, streaming from the file in torch's format; it is left out where it is not installed.  Rounds are
interleaved and medians printed, also of the CPU time of this process, which a busy machine disturbs less.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tessera.training.bench.harness import arguments, in_turns, machine
from tessera.training.data.columns import ColumnConfig
from tessera.training.data.dataset import View
from tessera.training.data.formats.table import TableConfig
from tessera.training.data.loader import BatchLoader
from tessera.training.data.opening import open_data

BATCH_SIZE = 4096
ROUNDS = 5
GROUP_ROWS = 1 << 17
DENSE, CATEGORIES, LISTS, LENGTH = 13, 26, 4, 50


def write_rows(file: Path, rows: int, *, lists: bool) -> None:
    random = np.random.default_rng(0)
    writer = None
    for start in range(0, rows, GROUP_ROWS):
        count = min(GROUP_ROWS, rows - start)
        columns: dict[str, Any] = {"label": random.integers(0, 2, count, np.int32)}
        for number in range(DENSE):
            values = random.lognormal(2, 1.5, count).astype(np.int32)
            columns[f"I{number}"] = pa.array(values, mask=random.random(count) < 0.1 * (number % 3))
        for number in range(0 if lists else CATEGORIES):
            ids = ((100, 1000, 100_000, 1_000_000)[number % 4] * random.random(count) ** 3) // 1
            missing = random.random(count) < 0.05 * (number % 2)
            columns[f"C{number}"] = pa.array(ids.astype(np.int64) * 7919, mask=missing)
        for number in range(LISTS if lists else 0):
            items = (1e6 * random.random(count * LENGTH) ** 3).astype(np.int64)
            ends = np.arange(0, len(items) + 1, LENGTH, dtype=np.int32)
            columns[f"L{number}"] = pa.ListArray.from_arrays(ends, items)
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(file, table.schema)
        writer.write_table(table, row_group_size=GROUP_ROWS)
    assert writer is not None
    writer.close()


def open_view(file: Path, *, lists: bool) -> View:
    columns = {"label": ColumnConfig(kind="label")}
    columns |= {f"I{number}": ColumnConfig(kind="dense") for number in range(DENSE)}
    if lists:
        columns |= {f"L{number}": ColumnConfig(kind="categorical_list") for number in range(LISTS)}
    else:
        columns |= {f"C{number}": ColumnConfig(kind="categorical") for number in range(CATEGORIES)}
    config = TableConfig(path=str(file), columns=columns, valid_fraction=0.0, test_fraction=0.0)
    return open_data(config, progress=False).train


def ours(view: View, threads: int, *, shuffle: bool) -> None:
    loader = BatchLoader(
        view, batch_size=BATCH_SIZE, shuffle=shuffle, seed=0, threads=threads, prefetch=2 * threads
    )
    for _batch in loader.epoch(0):
        pass


def pyarrow_alone(file: Path, threads: int) -> None:
    metadata = pq.read_metadata(file)

    def read(group: int) -> int:
        with pq.ParquetFile(file, metadata=metadata, pre_buffer=False) as found:
            return int(found.read_row_group(group, use_threads=False).num_rows)

    with ThreadPoolExecutor(threads) as pool:
        sum(pool.map(read, range(metadata.num_row_groups)))


class ByHand(IterableDataset[dict[str, torch.Tensor]]):
    """Batches of tensors from the row groups of this worker."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        with pq.ParquetFile(self._file) as found:
            groups = list(range(first, found.num_row_groups, step))
            for batch in found.iter_batches(BATCH_SIZE, row_groups=groups, use_threads=False):
                yield _tensors(batch)


def _tensors(batch: Any) -> dict[str, torch.Tensor]:
    dense = [
        batch.column(f"I{number}").cast(pa.float32()).to_numpy(zero_copy_only=False)
        for number in range(DENSE)
    ]
    made = {"dense": torch.from_numpy(np.stack(dense, axis=1))}
    for name in batch.schema.names:
        column = batch.column(name)
        if name[0] == "C":
            present = column.is_valid().to_numpy(zero_copy_only=False)
            made[f"{name}.lengths"] = torch.from_numpy(present.astype(np.int32))
            made[name] = torch.from_numpy(column.drop_null().to_numpy().copy())
        elif name[0] == "L":
            made[f"{name}.lengths"] = torch.from_numpy(np.diff(column.offsets.to_numpy()))
            made[name] = torch.from_numpy(column.flatten().to_numpy().copy())
    made["label"] = torch.from_numpy(batch.column("label").to_numpy().astype(np.float32))
    return made


def data_loader(file: Path, threads: int) -> None:
    for _batch in DataLoader(ByHand(file), batch_size=None, num_workers=threads):
        pass


def hugging_face(file: Path) -> None:
    datasets = importlib.import_module("datasets")
    stream = datasets.load_dataset(
        "parquet", data_files=str(file), split="train", streaming=True
    ).with_format("torch")
    for _batch in stream.iter(BATCH_SIZE):
        pass


def measured(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds on the wall, and of this process on the CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows (default: 1000000)")
    parser.add_argument("--threads", type=int, default=2, help="threads (default: 2)")
    parser.add_argument(
        "--lists", action="store_true", help="lists of 50 (default: Criteo's shape)"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds (default: {ROUNDS})")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.parquet"
        write_rows(file, args.rows, lists=args.lists)
        view = open_view(file, lists=args.lists)
        ways: dict[str, Callable[[], None]] = {
            "pyarrow, decoding alone": partial(pyarrow_alone, file, args.threads),
            "tessera, in order": partial(ours, view, args.threads, shuffle=False),
            "tessera, shuffled": partial(ours, view, args.threads, shuffle=True),
            "DataLoader over pyarrow": partial(data_loader, file, args.threads),
        }
        if importlib.util.find_spec("datasets") is not None:
            ways["datasets, streaming"] = partial(hugging_face, file)
        found = in_turns({name: partial(measured, way) for name, way in ways.items()}, args.rounds)
    shape = f"{LISTS} lists of {LENGTH}" if args.lists else f"{CATEGORIES} categories"
    print(f"{machine()}; {args.rows} rows, {DENSE} numbers, {shape}; median of {args.rounds}\n")
    print(f"{'':26}{'rows/s':>12}{'x pyarrow':>11}{'CPU ns/row':>12}{'x pyarrow':>11}")
    walls = {name: statistics.median(wall for wall, _ in times) for name, times in found.items()}
    cpus = {name: statistics.median(cpu for _, cpu in times) for name, times in found.items()}
    first = next(iter(found))
    for name in found:
        cpu = f"{cpus[name] / args.rows * 1e9:12.0f}{cpus[first] / cpus[name]:11.2f}"
        shown = f"{'in processes':>23}" if name.startswith("DataLoader") else cpu
        print(f"{name:26}{args.rows / walls[name]:12.0f}{walls[first] / walls[name]:11.2f}{shown}")


if __name__ == "__main__":
    main()
