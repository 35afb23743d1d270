"""Rows a second of `tessera score`, beside a loop over the same rows as `predict_rows` prepares them.

    python -m tessera.serving.bench.offline_scores --rows 200000

Parquet in Criteo's shape (13 dense, 26 categories) and a DLRM with int8 tables.  Each way is measured
once after a warm-up of the package, on the same machine and in the same call:

* ``loop``: record batches by `read_row_batches`, `rows_to_parts`, `assemble`, the package's runner: what a client
  and a server do without the network between them; one process, one thread of torch.
* ``score N``: the command's own function with N processes, from the open file to the renamed output.
* ``runner``: the package's forward passes alone, on arrays that are ready: what no reader can beat.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tessera.cpus import usable_cpus
from tessera.serving.client.assemble import assemble
from tessera.serving.client.row_files import read_row_batches
from tessera.serving.client.rows import rows_to_parts
from tessera.serving.offline.raw_columns import RawColumns
from tessera.serving.offline.scoring import ScoreOptions, score_files
from tessera.serving.package.loading import LoadedPackage, load_package
from tessera.serving.package.runner import HostBatch
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tessera.training.bench.harness import machine
from tessera.training.data.criteo_format import COLUMNS, DENSE_NAMES, SPARSE_NAMES
from tessera.training.models.config import ModelConfig
from tessera.training.models.ranking import build_ranking_model


def write_package(path: Path, *, rows: int, dim: int) -> None:
    fields: dict[str, Any] = {"dense_layers": (512, 256), "over_layers": (512, 256)}
    config = ModelConfig(arch="dlrm", embedding_dim=dim, rows=rows, embedding_init=1.0, **fields)
    torch.manual_seed(0)
    model = build_ranking_model(
        config, list(DENSE_NAMES), list(SPARSE_NAMES), transforms=COLUMNS.transforms()
    )
    write_model(model.eval(), path, PackageOptions(name="bench"), columns=COLUMNS)


def write_rows(path: Path, rows: int) -> None:
    random = np.random.default_rng(0)
    columns: dict[str, Any] = {}
    for name in DENSE_NAMES:
        values = random.integers(0, 10_000, rows)
        columns[name] = pa.array(values, mask=random.random(rows) < 0.1)
    for name in SPARSE_NAMES:
        columns[name] = pa.array(random.integers(0, 1 << 32, rows))
    pq.write_table(pa.table(columns), path, row_group_size=1 << 16)


def batches_of_loop(path: Path, loaded: LoadedPackage, batch: int) -> Any:
    schema = loaded.manifest.schema
    for read in read_row_batches(path, batch_size=batch, schema=schema):
        arrays = assemble(*rows_to_parts(read.rows, schema), schema=schema)
        assert arrays.dense is not None
        assert arrays.id_list is not None
        lengths, ids = arrays.id_list.lengths.ravel(), arrays.id_list.values
        yield HostBatch.of(
            torch.from_numpy(arrays.dense), (torch.from_numpy(lengths), torch.from_numpy(ids))
        )


class Spent:
    """Seconds by the clock and of CPU, those of processes that have ended included, since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), sum(os.times()[:4])

    def line(self, name: str, rows: int) -> str:
        """Rows a second of both kinds, after a name."""
        wall, cpu = time.perf_counter() - self._wall, sum(os.times()[:4]) - self._cpu
        return f"{name:<10}{rows / wall:>12,.0f}{rows / cpu:>22,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the file")
    parser.add_argument("--batch", type=int, default=2048, help="rows scored at once")
    parser.add_argument("--table-rows", type=int, default=100_000, help="rows of each table")
    parser.add_argument("--dim", type=int, default=32, help="columns of each table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    print(f"{machine()}, load {load:.1f}; {args.rows:,} rows in batches of {args.batch}")
    with tempfile.TemporaryDirectory() as folder:
        package, data = Path(folder, "m.pt"), Path(folder, "rows.parquet")
        write_package(package, rows=args.table_rows, dim=args.dim)
        write_rows(data, args.rows)
        loaded = load_package(package)
        print(f"{'':<10}{'rows/s':>12}{'rows per CPU second':>22}")
        spent = Spent()
        scores = [
            loaded.runner.forward(b)["default"] for b in batches_of_loop(data, loaded, args.batch)
        ]
        print(spent.line("loop", args.rows))
        expected = torch.cat(scores).numpy()
        table = pq.read_table(data)
        columns = RawColumns(loaded.manifest.schema, table.schema, data)
        ready = [
            columns.host_batch(table.slice(begin, args.batch))
            for begin in range(0, args.rows, args.batch)
        ]
        spent = Spent()
        for batch in ready:
            loaded.runner.forward(batch)
        print(spent.line("runner", args.rows))
        for processes in dict.fromkeys((1, usable_cpus())):
            out = Path(folder, f"{processes}.parquet")
            options = ScoreOptions(processes=processes, batch_rows=args.batch)
            spent = Spent()
            score_files(package, [str(data)], out, options, progress=False)
            print(spent.line(f"score {processes}", args.rows))
            found = pq.read_table(out).column("default").to_numpy()
            assert np.array_equal(found, expected), "the scores differ"


if __name__ == "__main__":
    main()
