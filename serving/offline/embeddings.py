"""``tessera export-embeddings``: vectors with their ids, and rows of tables, as Parquet.

A file has two columns: the ids under their column's own name (of a table ``row``, and ``id`` where a
vocabulary says whose row it is) and ``vector``, a list of float32 of fixed size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from tessera.durable import replacing
from tessera.errors import UserError
from tessera.serving.offline.vectors import VectorModel, Vectors, vectors_of_file
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.trained import load_trained
from tessera.training.transforms.kinds.vocabulary import VocabularyLookup

VECTOR = "vector"
ROWS_AT_A_TIME = 1 << 16


def export_vectors(
    model: VectorModel,
    data: Path,
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
        data: rows of raw values: Parquet, Arrow, CSV or TSV.
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


def export_table(run: Path, name: str, out: Path, *, progress: bool) -> int:
    """Write the rows of a trained embedding table, float32; returns how many there are.

    Column ``row`` is the row's number.  Where the table's ids have a vocabulary, column ``id`` is the id
    whose row it is, null for row 0, which all other ids share.

    Raises:
        UserError: ``run`` is not a run or checkpoint, or has no such table.
    """
    model = load_trained(run).model
    tables = {
        config.name: (collection, config)
        for collection in model.collections().values()
        for config in (
            collection.embedding_bag_configs()
            if isinstance(collection, EmbeddingBagCollection)
            else collection.embedding_configs()
        )
    }
    if name not in tables:
        raise UserError(f"--table {name}: the model has no such table; it has {', '.join(tables)}")
    collection, config = tables[name]
    holder = (
        collection.embedding_bags
        if isinstance(collection, EmbeddingBagCollection)
        else collection.embeddings
    )
    weight = cast("torch.Tensor", holder[name].weight).detach()
    transforms = model.preprocessor.transforms
    vocabulary = next(
        (c.vocabulary for c in transforms.sparse if c.name in config.feature_names), None
    )
    ids = None
    if vocabulary is not None and model.preprocessor.vocabulary is not None:
        ids = vocabulary_ids(model.preprocessor.vocabulary, vocabulary)
    bar = tqdm(total=len(weight), unit=" rows", unit_scale=True, disable=None if progress else True)
    with replacing(out) as stream, bar:
        writer: Any = None
        for start in range(0, len(weight), ROWS_AT_A_TIME):
            part = weight[start : start + ROWS_AT_A_TIME].float().numpy()
            numbers = np.arange(start, start + len(part))
            columns = {"row": pa.array(numbers)}
            if ids is not None:
                own = np.concatenate([[0], ids])[numbers]
                columns["id"] = pa.array(own, pa.int64(), mask=numbers == 0)
            table = pa.table({**columns, VECTOR: fixed_lists(part)})
            writer = writer or pq.ParquetWriter(stream, table.schema)
            writer.write_table(table)
            bar.update(len(part))
        writer.close()
    return len(weight)


def vocabulary_ids(lookup: VocabularyLookup, name: str) -> npt.NDArray[np.int64]:
    """``[U]``: the ids of a vocabulary in the order of their rows, of which the first is row 1."""
    start = sum(size for other, size in _before(lookup, name))
    places, keys = lookup.places_U.numpy(), lookup.keys_U.numpy()
    own = (places >= start) & (places < start + lookup.sizes[name])
    seed = lookup.seeds_V.numpy()[lookup.names.index(name)]
    ids = np.empty(lookup.sizes[name], np.int64)
    ids[places[own] - start] = _inverse_fmix64(keys[own]) ^ seed
    return ids


def _before(lookup: VocabularyLookup, name: str) -> list[tuple[str, int]]:
    return list(lookup.sizes.items())[: lookup.names.index(name)]


def _inverse_fmix64(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """What `tessera.training.modules.hashing.fmix64` makes these numbers of."""
    value = keys.view(np.uint64)
    shift = np.uint64(33)
    for factor in (0xC4CEB9FE1A85EC53, 0xFF51AFD7ED558CCD):
        value = value ^ (value >> shift)
        value = value * np.uint64(pow(factor, -1, 1 << 64))
    return (value ^ (value >> shift)).view(np.int64)
