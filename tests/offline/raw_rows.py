"""Rows of raw values in every format of files, and their scores row by row."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tessera.serving.client.assemble import assemble
from tessera.serving.client.rows import rows_to_parts
from tessera.serving.package.runner import HostBatch

TYPES = {
    "id": pa.int64(),
    **{f"dense_{index}": pa.float64() for index in range(4)},
    "user": pa.string(),
    "item": pa.list_(pa.int64()),
    "history": pa.list_(pa.string()),
    "genre": pa.list_(pa.int64()),
    "region": pa.list_(pa.int64()),
    "tag": pa.list_(pa.int64()),
    "bucket": pa.list_(pa.string()),
    "note": pa.string(),
}
"""The columns of `make_package`'s model with `string_columns`, and two that it does not take."""


def rows(count, seed=0):
    """Rows with missing values, empty lists and long ones; strings are not ASCII alone."""
    random = np.random.default_rng(seed)

    def some(make, most=4):
        return [make(n) for n in random.integers(0, 60, random.integers(0, most + 1)).tolist()]

    made = []
    for number in range(count):
        dense = random.normal(0, 100, 4).round(4)
        missing = random.random(4) < 0.1
        made.append(
            {
                "id": number,
                **{f"dense_{i}": None if missing[i] else float(dense[i]) for i in range(4)},
                "user": None if random.random() < 0.1 else f"Ü{random.integers(0, 99)}",
                "item": some(int),
                "history": some(lambda n: f"i{n}", most=6),
                "genre": some(lambda n: n % 19),
                "region": some(int),
                "tag": some(lambda n: n - 30),
                "bucket": some(lambda n: f"東{n}"),
                "note": f"n{number}",
            }
        )
    return made


def to_table(given):
    return pa.table({n: pa.array([row[n] for row in given], kind) for n, kind in TYPES.items()})


def cell(value):
    if value is None:
        return ""
    return "|".join(map(str, value)) if isinstance(value, list) else str(value)


def to_csv(given, separator=","):
    lines = [separator.join(TYPES), *(separator.join(map(cell, row.values())) for row in given)]
    return "\n".join(lines) + "\n"


def write(path, given):
    """The rows as a file whose format the end of ``path`` says."""
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        pq.write_table(to_table(given), path, row_group_size=64)
    elif name.endswith((".arrow", ".feather")):
        make = pa.ipc.new_file if name.endswith(".arrow") else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as sink, make(sink, to_table(given).schema) as writer:
            writer.write_table(to_table(given), max_chunksize=64)
    else:
        if name.endswith(".jsonl"):
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in given)
        else:
            text = to_csv(given, "\t" if name.endswith(".tsv") else ",")
        data = text.encode()
        path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path


def plain_scores(loaded, given):
    """The scores as a client and a runner give them, row by row; None where a row is refused."""
    schema = loaded.manifest.schema
    found = []
    for row in given:
        known = {n: v for n, v in row.items() if n not in {"id", "note"}}
        arrays = assemble(*rows_to_parts([known], schema), schema=schema)
        plain, scored = arrays.id_list, arrays.id_score_list
        batch = HostBatch.of(
            torch.from_numpy(arrays.dense),
            (torch.from_numpy(plain.lengths.ravel()), torch.from_numpy(plain.values)),
            scored
            and (
                torch.from_numpy(scored.lengths.ravel()),
                torch.from_numpy(scored.values),
                torch.from_numpy(scored.weights),
            ),
        )
        found.append({n: o.numpy() for n, o in loaded.runner.forward(batch).items()})
    return {n: np.concatenate([one[n] for one in found]) for n in found[0]}


def same(column, expected):
    """Whether a column of the output has exactly these numbers."""
    found = column.combine_chunks().to_numpy(zero_copy_only=False)
    return np.array_equal(found.view(np.uint32), expected.view(np.uint32))
