"""``tessera export-embeddings``: vectors with their ids, and rows of tables, as Parquet.

A file has two columns: the ids under their column's own name (of a table ``row``, and ``id`` where a
vocabulary says whose row it is) and ``vector``, a list of float32 of fixed size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from tessera.durable import replacing
from tessera.errors import UserError
from tessera.serving.offline.table_rows import package_table, run_table
from tessera.serving.offline.vectors import VectorModel, Vectors, vectors_of_file

VECTOR = "vector"
ROWS_AT_A_TIME = 1 << 16


def export_vectors(
    model: VectorModel,
    data: str,
    out: Path,
    *,
    id_column: str | None,
    unique: bool,
    batch_size: int,
    progress: bool,
) -> int:
    """Write the vectors of all rows of ``data``; returns how many there are.

    Args:
        model: what gives the vectors.
        data: rows of raw values: a file, a pattern, a folder or a URL, as `data.path` takes them.
        out: the file to write or replace.
        id_column: the column with the ids; None: the one that the model names.
        unique: write an id once, with the vector of its last row.  All vectors are then held in memory.
        batch_size: rows that are computed at a time.
        progress: show a bar on a terminal.

    Raises:
        UserError: no id column is known, an id is missing, or the data does not fit the model.
    """
    name = id_column or model.id_column
    if not name:
        raise UserError("the model does not say which column has the ids; name it with --id")
    if name == VECTOR:
        raise UserError(f"--id {name}: that is the name of the column of vectors; rename the ids")
    bar = tqdm(unit=" rows", unit_scale=True, desc="Vectors", disable=None if progress else True)
    parts = []
    with replacing(out) as stream, bar:
        writer: Any = None
        for kept, vectors in vectors_of_file(model, data, keep=[name], batch_size=batch_size):
            ids = kept[name]
            if ids.null_count:
                raise UserError(f"{data}: column {name!r} has rows without an id; leave them out")
            table = pa.table({name: ids, VECTOR: fixed_lists(vectors)})
            if unique:
                parts.append(table)
            else:
                writer = writer or pq.ParquetWriter(stream, table.schema)
                writer.write_table(table)
            bar.update(len(ids))
        if unique and parts:
            table = _last_of_each(pa.concat_tables(parts), name)
            writer = pq.ParquetWriter(stream, table.schema)
            writer.write_table(table)
        if writer is None:
            raise UserError(f"{data}: there are 0 rows; give a file with some")
        writer.close()
    return int(pq.read_metadata(out).num_rows)


def _last_of_each(table: Any, name: str) -> Any:
    """The last row of each id, in the order of these rows."""
    ids = table.column(name).combine_chunks()
    codes = ids.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    _, from_behind = np.unique(codes[::-1], return_index=True)
    return table.take(pa.array(np.sort(len(codes) - 1 - from_behind)))


def fixed_lists(vectors: Vectors) -> Any:
    """``[n, D]`` as an Arrow array of ``n`` lists of ``D`` float32."""
    flat = pa.array(np.ascontiguousarray(vectors).reshape(-1), pa.float32())
    return pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])


def export_table(source: Path, name: str, out: Path, *, progress: bool) -> int:
    """Write the rows of an embedding table, float32; returns how many there are.

    Column ``row`` is the row's number.  Where the table's ids have a vocabulary, column ``id`` is the id
    whose row it is, null for row 0, which all other ids share.

    Raises:
        UserError: ``source`` is not a run, checkpoint or package, or has no such table.
    """
    is_run = source.is_dir() or source.name.startswith("step-")
    table = run_table(source, name) if is_run else package_table(source, name)
    ids = None if table.ids is None else np.concatenate([[0], table.ids])
    bar = tqdm(total=table.rows, unit=" rows", unit_scale=True, disable=None if progress else True)
    with replacing(out) as stream, bar:
        writer: Any = None
        for start in range(0, table.rows, ROWS_AT_A_TIME):
            part = table.read(start, min(start + ROWS_AT_A_TIME, table.rows)).numpy()
            numbers = np.arange(start, start + len(part))
            columns = {"row": pa.array(numbers)}
            if ids is not None:
                columns["id"] = pa.array(ids[numbers], pa.int64(), mask=numbers == 0)
            written = pa.table({**columns, VECTOR: fixed_lists(part)})
            writer = writer or pq.ParquetWriter(stream, written.schema)
            writer.write_table(written)
            bar.update(len(part))
        writer.close()
    return table.rows
