"""``tessera search``: each user's items with the largest products, by FAISS.

Shapes: ``I`` items, ``n`` users of a batch, ``D`` numbers of a vector, ``k`` items of a user.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from tessera.durable import replacing
from tessera.errors import UserError
from tessera.serving.offline.embeddings import VECTOR
from tessera.serving.offline.vectors import VectorModel, Vectors, vectors_of_file

IndexKind = Literal["flat", "hnsw", "ivf"]
Places = npt.NDArray[np.int64]

HNSW_LINKS = 32
SAMPLED_USERS = 1000
"""So many users' items are also found exactly, to say how many of them an approximate index finds."""


@dataclass(frozen=True)
class Embeddings:
    """Items that are searched.

    Attributes:
        name: the ids' column.
        ids: ``[I]``, an Arrow array of integers or strings.
        vectors: ``[I, D]``.
    """

    name: str
    ids: Any
    vectors: Vectors


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search came to.

    Attributes:
        users: how many were given items.
        recall: share of the ``k`` best items of the first users that the index found; 1 of ``flat``.
    """

    users: int
    recall: float


def read_embeddings(path: Path) -> Embeddings:
    """What ``tessera export-embeddings`` wrote.

    Raises:
        UserError: the file cannot be read or is another one.
    """
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: cannot be read as Parquet ({error})") from error
    names = [name for name in table.schema.names if name != VECTOR]
    kind = table.schema.field(VECTOR).type if VECTOR in table.schema.names else None
    if kind is None or not pa.types.is_fixed_size_list(kind) or len(names) != 1:
        raise UserError(
            f"{path}: is not a file of vectors with their ids; write one with tessera"
            " export-embeddings"
        )
    column = table.column(VECTOR).combine_chunks()
    flat = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
    values = flat.flatten().to_numpy(zero_copy_only=False)
    vectors = np.ascontiguousarray(values, np.float32).reshape(-1, kind.list_size)
    ids = table.column(names[0]).combine_chunks()
    if isinstance(ids, pa.ChunkedArray):
        ids = pa.concat_arrays(ids.chunks)
    if len(vectors) == 0:
        raise UserError(f"{path}: there are 0 vectors; export some first")
    return Embeddings(names[0], ids, vectors)


def faiss() -> Any:
    """FAISS.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise UserError(
            "tessera search needs FAISS; install it with: pip install 'tessera-rec[search]'"
        ) from error


def make_index(vectors: Vectors, kind: IndexKind, *, effort: int) -> Any:
    """An index of FAISS for the largest products.

    Args:
        vectors: ``[I, D]``.
        kind: ``flat`` compares all; ``hnsw`` walks a graph; ``ivf`` looks into the nearest of about
            ``4 * sqrt(I)`` cells.
        effort: candidates that ``hnsw`` keeps, or cells that ``ivf`` looks into.
    """
    library, (count, dim) = faiss(), vectors.shape
    if kind == "hnsw":
        index = library.IndexHNSWFlat(dim, HNSW_LINKS, library.METRIC_INNER_PRODUCT)
        index.hnsw.efSearch = effort
    elif kind == "ivf":
        # FAISS wants 39 vectors a cell to place the cells well.
        cells = max(1, min(round(4 * math.sqrt(count)), count // 39))
        index = library.IndexIVFFlat(
            library.IndexFlatIP(dim), dim, cells, library.METRIC_INNER_PRODUCT
        )
        index.nprobe = min(effort, cells)
        index.train(vectors)
    else:
        index = library.IndexFlatIP(dim)
    index.add(vectors)
    return index


def best(
    index: Any, users: Vectors, k: int, excluded: Sequence[Places] | None
) -> tuple[Vectors, Places]:
    """The scores and places ``[n, k]`` of each user's best items; place -1 where too few are left."""
    most = 0 if not excluded else max(map(len, excluded))
    scores, places = index.search(np.ascontiguousarray(users), min(k + most, index.ntotal))
    if excluded is not None:
        own = np.stack(
            [np.isin(row, left_out) for row, left_out in zip(places, excluded, strict=True)]
        )
        # What is left out goes behind the rest, whose order stays.
        order = np.argsort(own, axis=1, kind="stable")
        scores = np.take_along_axis(np.where(own, -np.inf, scores), order, axis=1)
        places = np.take_along_axis(np.where(own, -1, places), order, axis=1)
    return scores[:, :k], places[:, :k]


def search(
    items: Embeddings,
    model: VectorModel,
    data: str,
    out: Path,
    *,
    k: int,
    kind: IndexKind,
    effort: int,
    exclude: str | None,
    batch_size: int,
    progress: bool,
) -> Found:
    """Write each row's best items.

    The columns are ``row``, the user's id if the model names its column, ``items`` and ``scores``.

    Args:
        items: what is searched.
        model: the user's tower.
        data: rows of raw values of the users: a file, a pattern, a folder or a URL.
        out: the Parquet file to write or replace.
        k: items of a user.
        kind: see `make_index`.
        effort: as of `make_index`.
        exclude: a column with ids of items, one or a list, that the row is not given; None: none.
        batch_size: rows that are computed at a time.
        progress: show a bar on a terminal.

    Raises:
        UserError: the vectors have other sizes, a column is missing, or the data does not fit.
    """
    if model.width != items.vectors.shape[1]:
        raise UserError(
            f"the users' vectors have {model.width} numbers and the items' {items.vectors.shape[1]};"
            " export the items with the tower of the same run"
        )
    index = make_index(items.vectors, kind, effort=effort)
    exact = index if kind == "flat" else make_index(items.vectors, "flat", effort=1)
    places_of = _Places(items)
    keep = [model.id_column] if model.id_column else []
    wanted = list(dict.fromkeys([*keep, *([exclude] if exclude else [])]))
    users = compared = 0
    hits = 0.0
    bar = tqdm(unit=" rows", unit_scale=True, desc="Searching", disable=None if progress else True)
    with replacing(out) as stream, bar:
        writer: Any = None
        for kept, vectors in vectors_of_file(model, data, keep=wanted, batch_size=batch_size):
            excluded = places_of.of_lists(kept[exclude]) if exclude else None
            scores, places = best(index, vectors, k, excluded)
            if kind != "flat" and compared < SAMPLED_USERS:
                some = slice(0, SAMPLED_USERS - compared)
                part = None if excluded is None else excluded[some]
                _, right = best(exact, vectors[some], k, part)
                compared += len(right)
                pairs = zip(right, places[some], strict=True)
                hits += sum(
                    int(np.isin(a[a >= 0], b).sum()) / max(1, int((a >= 0).sum())) for a, b in pairs
                )
            table = pa.table(
                {
                    "row": pa.array(np.arange(users, users + len(vectors))),
                    **{name: kept[name] for name in keep},
                    **_lists(items, scores, places),
                }
            )
            writer = writer or pq.ParquetWriter(stream, table.schema)
            writer.write_table(table)
            users += len(vectors)
            bar.update(len(vectors))
        if writer is None:
            raise UserError(f"{data}: there are 0 rows; give a file with some")
        writer.close()
    return Found(users=users, recall=hits / compared if compared else 1.0)


class _Places:
    """Ids of items to their places."""

    def __init__(self, items: Embeddings) -> None:
        self._ids = items.ids
        self._name = items.name

    def of_lists(self, column: Any) -> list[Places]:
        """By row, the places of the items in a column of ids or lists of ids; others are left out."""
        array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        kind = array.type
        single = not (pa.types.is_list(kind) or pa.types.is_large_list(kind))
        flat = array if single else array.flatten()
        if flat.type != self._ids.type:
            try:
                flat = flat.cast(self._ids.type)
            except pa.ArrowException as error:
                raise UserError(
                    f"--exclude: its ids are {flat.type}, and those of the items {self._ids.type};"
                    f" give a column of the same type ({error})"
                ) from error
        found = pa.compute.index_in(flat, value_set=self._ids).fill_null(-1).to_numpy()
        if single:
            return [row[row >= 0] for row in found.reshape(-1, 1)]
        lengths = pa.compute.list_value_length(array).fill_null(0).to_numpy()
        return [part[part >= 0] for part in np.split(found, np.cumsum(lengths)[:-1])]


def _lists(items: Embeddings, scores: Vectors, places: Places) -> dict[str, Any]:
    there = places >= 0
    offsets = pa.array(np.concatenate([[0], np.cumsum(there.sum(axis=1))]), pa.int32())
    ids = items.ids.take(pa.array(places[there]))
    return {
        "items": pa.ListArray.from_arrays(offsets, ids),
        "scores": pa.ListArray.from_arrays(offsets, pa.array(scores[there], pa.float32())),
    }
