"""Rows per second from Parquet to batches, beside pyarrow alone, HuggingFace datasets and a DataLoader.

    python -m tessera.training.bench.table_reader [--rows 1000000] [--rounds 5] [--shapes 6]

Needs ``pip install datasets`` for the second peer, which is left out where it is not installed.

The first table has Criteo's shape (13 dense columns and 26 of ids, some values missing), the second four
columns with lists of 50 ids on average.  "pyarrow" only decodes all columns with two threads.  Ours
makes finished batches of 4,096 rows with two threads, in order and shuffled; the peers make a dictionary
of tensors of each batch's columns (values and lengths of a list): "datasets" from its own Arrow file, which
it has made before, and "DataLoader" over an iterable dataset that cuts pyarrow's record batches, by this process and by
two workers.  "DataLoader, by rows" is the usual form, with rows that are collated, on a fiftieth of the rows.
Rounds are interleaved and medians printed.

Then random shapes (columns, lists, strings, missing values, row groups, compression), and the most
memory that a shuffled epoch over a larger file takes, in a process of its own.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tessera.training.bench.harness import (
    arguments,
    in_turns,
    machine,
    medians,
    print_head,
    print_row,
    seconds_of,
)
from tessera.training.config import ExperimentConfig
from tessera.training.data.dataset import View
from tessera.training.data.loader import BatchLoader
from tessera.training.data.opening import open_data

BATCH_SIZE = 4096
THREADS = 2
BY_ROWS = 50
"""The DataLoader by rows sees one in so many rows."""


def column(draw: np.random.Generator, kind: str, rows: int, missing: float, length: int) -> Any:
    """A column of random values; lists are up to half shorter or longer than ``length``."""
    mask = draw.random(rows) < missing if missing else None
    if kind == "dense":
        return pa.array(draw.lognormal(2, 1.5, rows).astype(np.float32), mask=mask)
    if kind == "list":
        lengths = draw.integers(length // 2, length * 3 // 2 + 1, rows)
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        ids = draw.zipf(1.2, ends[-1]) % 1_000_003
        return pa.ListArray.from_arrays(ends, pa.array(ids.astype(np.int64)))
    ids = draw.zipf(1.2, rows) % int(10 ** draw.uniform(0.5, 6))
    if kind == "string":
        return pc.binary_join_element_wise(pa.array(["v"] * rows), pa.array(ids).cast("string"), "")
    return pa.array(ids.astype(np.int64) * 7919, mask=mask)


def write_table(
    path: Path,
    columns: list[tuple[str, str, float, int]],
    *,
    rows: int,
    seed: int,
    group_rows: int = 1 << 16,
    compression: str = "snappy",
) -> None:
    """A Parquet file with columns (name, kind, share missing, length) and a label, in pieces."""
    draw = np.random.default_rng(seed)
    writer = None
    for start in range(0, rows, 1 << 18):
        count = min(1 << 18, rows - start)
        made = {"label": pa.array((draw.random(count) < 0.25).astype(np.int8))}
        made |= {n: column(draw, kind, count, gaps, size) for n, kind, gaps, size in columns}
        table = pa.table(made)
        writer = writer or pq.ParquetWriter(path, table.schema, compression=compression)
        writer.write_table(table, row_group_size=group_rows)
    assert writer is not None
    writer.close()


CRITEO = [
    *((f"I{n}", "dense", 0.1, 0) for n in range(1, 14)),
    *((f"C{n}", "id", 0.1 if n % 3 == 0 else 0.0, 0) for n in range(1, 27)),
]
LISTS = [*((f"L{n}", "list", 0.0, 50) for n in range(1, 5)), ("C1", "id", 0.0, 0)]
KINDS = {"dense": "dense", "id": "categorical", "string": "categorical", "list": "categorical_list"}


def opened(path: Path, columns: list[tuple[str, str, float, int]]) -> View:
    """The rows of a file for our reader."""
    named: dict[str, Any] = {name: {"kind": KINDS[kind]} for name, kind, _, _ in columns}
    named["label"] = {"kind": "label"}
    data: dict[str, Any] = {"format": "table", "path": str(path), "columns": named}
    data |= {"valid_fraction": 0.0, "test_fraction": 0.0}
    config = ExperimentConfig.from_plain({"data": data}, name="bench")
    return open_data(config.data, progress=False).train


def ours(view: View, *, shuffle: bool) -> None:
    loader = BatchLoader(
        view, batch_size=BATCH_SIZE, shuffle=shuffle, seed=0, threads=THREADS, prefetch=4
    )
    for _batch in loader.epoch(0):
        pass


def decode(path: Path) -> None:
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            file.read_row_group(group, use_threads=True)


def tensors(batch: Any) -> dict[str, torch.Tensor]:
    """The columns of a record batch; missing ids are 0, of lists there are values and lengths."""
    found = {}
    for name, values in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_list(values.type):
            ends = values.offsets.to_numpy()
            found[f"{name}.lengths"] = torch.from_numpy(np.diff(ends))
            found[name] = torch.from_numpy(values.flatten().to_numpy().copy())
            continue
        known = values if pa.types.is_floating(values.type) else pc.fill_null(values, 0)
        found[name] = torch.from_numpy(known.to_numpy(zero_copy_only=False).copy())
    return found


class RecordBatches(IterableDataset):  # type: ignore[type-arg] # it has no parameters at run time
    """A file's batches, or its rows one by one, each worker's share of the row groups."""

    def __init__(self, path: Path, *, by_rows: bool = False, limit: int | None = None) -> None:
        self._path, self._by_rows, self._limit = path, by_rows, limit

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        seen = 0
        with pq.ParquetFile(self._path) as file:
            groups = list(range(first, file.num_row_groups, step))
            for batch in file.iter_batches(BATCH_SIZE, row_groups=groups):
                if not self._by_rows:
                    yield tensors(batch)
                    continue
                for row in batch.to_pylist():
                    yield {n: torch.tensor(v if v is not None else 0) for n, v in row.items()}
                    seen += 1
                    if seen == self._limit:
                        return


def joined(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows collated to a batch, lists one after the other."""
    batch = {}
    for name, first in rows[0].items():
        values = [row[name] for row in rows]
        if first.dim():
            batch[f"{name}.lengths"] = torch.tensor([len(value) for value in values])
        batch[name] = torch.cat(values) if first.dim() else torch.stack(values)
    return batch


def data_loader(path: Path, workers: int) -> None:
    for _batch in DataLoader(RecordBatches(path), batch_size=None, num_workers=workers):
        pass


def data_loader_by_rows(path: Path, limit: int) -> None:
    rows = RecordBatches(path, by_rows=True, limit=limit)
    for _batch in DataLoader(rows, batch_size=BATCH_SIZE, collate_fn=joined):
        pass


def hugging_face(path: Path, cache: Path) -> Callable[[], None]:
    """A pass over the file by HuggingFace datasets, whose own copy is made here."""
    import datasets  # type: ignore[import-not-found,import-untyped,unused-ignore] # noqa: PLC0415

    datasets.disable_progress_bars()
    made = datasets.Dataset.from_parquet(str(path), cache_dir=str(cache)).with_format("arrow")

    def read() -> None:
        for table in made.iter(BATCH_SIZE):
            tensors(table.combine_chunks().to_batches()[0])

    return read


def hugging_face_tensors(path: Path, cache: Path, rows: int) -> Callable[[], None]:
    """The same by its own conversion to tensors, on the first ``rows``."""
    import datasets  # noqa: PLC0415

    whole = datasets.Dataset.from_parquet(str(path), cache_dir=str(cache))
    made = whole.select(range(rows)).with_format("torch")

    def read() -> None:
        for _batch in made.iter(BATCH_SIZE):
            pass

    return read


def compare(name: str, columns: list[tuple[str, str, float, int]], rows: int, rounds: int) -> None:
    """Print a table of all readers on one shape."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        write_table(path, columns, rows=rows, seed=0)
        view = opened(path, columns)
        few = max(BATCH_SIZE, rows // BY_ROWS)
        ways: dict[str, tuple[Callable[[], object], int]] = {
            "pyarrow decodes": (partial(decode, path), rows),
            "ours, in order": (partial(ours, view, shuffle=False), rows),
            "ours, shuffled": (partial(ours, view, shuffle=True), rows),
            "DataLoader, batches, this process": (partial(data_loader, path, 0), rows),
            "DataLoader, batches, 2 workers": (partial(data_loader, path, 2), rows),
            "DataLoader, by rows": (partial(data_loader_by_rows, path, few), few),
        }
        if importlib.util.find_spec("datasets") is not None:
            cache = Path(folder) / "cache"
            ways["datasets, Arrow to tensors"] = (hugging_face(path, cache), rows)
            ways["datasets, format torch"] = (hugging_face_tensors(path, cache, few), few)
        works: dict[str, Callable[[], float]] = {
            way: partial(seconds_of, work) for way, (work, _) in ways.items()
        }
        seconds = medians(in_turns(works, rounds))
    rates = {way: count / seconds[way] for way, (_, count) in ways.items()}
    print(f"\n{name}: {rows:,} rows; median of {rounds}\n")
    print_head("reader", "M rows/s", "of pyarrow's", "ours in order / it")
    for way, rate in rates.items():
        shares = (rate / rates["pyarrow decodes"], rates["ours, in order"] / rate)
        print_row(way, f"{rate / 1e6:.3f}", *(f"{share:.2f}" for share in shares))
    ratio = rates["ours, shuffled"] / rates["ours, in order"]
    print(f"\nshuffled / in order: {ratio:.2f}", flush=True)


def random_shapes(count: int, seed: int, rounds: int) -> None:
    """Print pyarrow's share and the shuffled share on random shapes, and the worst of each."""
    print(f"\n{count} random shapes, seed {seed}; median of {rounds}\n")
    print_head("dense/ids/strings/lists", "rows", "of pyarrow's", "shuffled / in order")
    worst = [np.inf, np.inf]
    for number in range(count):
        draw = np.random.default_rng([seed, number])
        dense, ids = int(draw.integers(0, 41)), int(draw.integers(1, 41))
        strings, lists = int(draw.integers(0, 6)), int(draw.integers(0, 4))
        gaps, length = float(draw.choice([0, 0.05, 0.5])), int(draw.integers(2, 81))
        columns = [(f"d{n}", "dense", gaps, 0) for n in range(dense)]
        columns += [(f"c{n}", "id", gaps, 0) for n in range(ids)]
        columns += [(f"s{n}", "string", 0.0, 0) for n in range(strings)]
        columns += [(f"l{n}", "list", 0.0, length) for n in range(lists)]
        size = 4 * dense + 8 * (ids + strings + lists * length)
        rows = int(1.5e8 / size)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.parquet"
            write_table(
                path,
                columns,
                rows=rows,
                seed=number,
                group_rows=1 << int(draw.integers(12, 18)),
                compression=str(draw.choice(["snappy", "zstd", "none"])),
            )
            view = opened(path, columns)
            works: dict[str, Callable[[], float]] = {
                "pyarrow": partial(seconds_of, partial(decode, path)),
                "order": partial(seconds_of, partial(ours, view, shuffle=False)),
                "shuffled": partial(seconds_of, partial(ours, view, shuffle=True)),
            }
            found = medians(in_turns(works, rounds))
        shares = [found["pyarrow"] / found["order"], found["order"] / found["shuffled"]]
        worst = [min(pair) for pair in zip(worst, shares, strict=True)]
        shape = f"{dense}/{ids}/{strings}/{lists} of {length}, {gaps:.0%} missing"
        print_row(shape, f"{rows:,}", *(f"{share:.2f}" for share in shares))
    print(f"\nworst: {worst[0]:.2f} of pyarrow's, shuffled {worst[1]:.2f} of in order", flush=True)


def most_megabytes() -> float:
    """The most memory that this program held; ``ru_maxrss`` knows that of the one that started it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def megabytes_of_epoch(path: str, answer: Any) -> None:
    """Send the most memory of this process before and after a shuffled epoch."""
    torch.set_num_threads(1)
    view = opened(Path(path), CRITEO)
    next(iter(opened(Path(path), CRITEO).order(0, seed=None, threads=1).place(0, 1)))
    before = most_megabytes()
    ours(view, shuffle=True)
    answer.send((before, most_megabytes()))


def memory(rows: int) -> None:
    """Print the most memory of a shuffled epoch over ``rows`` rows and over four times as many."""
    print("\nmost memory of a shuffled epoch, Criteo's shape (MB)\n")
    print_head("rows", "decoded", "before", "most")
    for count in (rows, 4 * rows):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.parquet"
            write_table(path, CRITEO, rows=count, seed=0)
            spawn = multiprocessing.get_context("spawn")
            ours_end, theirs = spawn.Pipe(duplex=False)
            process = spawn.Process(target=megabytes_of_epoch, args=(str(path), theirs))
            process.start()
            before, most = ours_end.recv()
            process.join()
        decoded = count * (13 * 4 + 26 * 8) / 1e6
        print_row(f"{count:,}", f"{decoded:,.0f}", f"{before:,.0f}", f"{most:,.0f}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows (default: 1000000)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--shapes", type=int, default=6, help="random shapes (default: 6)")
    parser.add_argument("--seed", type=int, default=0, help="of the random shapes (default: 0)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    compare("Criteo's shape", CRITEO, args.rows, args.rounds)
    compare("lists of 50", LISTS, args.rows // 10, args.rounds)
    random_shapes(args.shapes, args.seed, args.rounds)
    memory(args.rows)


if __name__ == "__main__":
    main()
