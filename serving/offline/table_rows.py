"""The rows of embedding tables: of runs as they were trained, of packages as their lookups see them.

Where a package's rows are follows from its manifest alone (`tessera.serving.packaging.tables.stored`),
so that they are read without a call of the model.  Shapes: ``R`` rows of a table, ``D`` columns, ``U`` ids of
a vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from tessera.errors import UserError
from tessera.kernels.row_types import ROW_TYPES
from tessera.serving.package.devices import shard_of
from tessera.serving.package.loading import CheckedModule, open_module
from tessera.serving.package.vocabulary import Vocabularies
from tessera.serving.packaging.tables.stored import StoredTable, StoredTables, lay_out
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.trained import load_trained
from tessera.training.transforms.kinds.vocabulary import VocabularyLookup

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TableRows:
    """A table that can be read in parts.

    Attributes:
        rows: ``R``.
        read: from the first row and the one behind the last to ``[n, D]`` float32.
        ids: ``[U]``, whose rows are those from 1 on; None where the table's ids have no vocabulary.
    """

    rows: int
    read: Callable[[int, int], torch.Tensor]
    ids: Ids | None


def run_table(run: Path, name: str) -> TableRows:
    """A table of a run's best checkpoint, or of one checkpoint.

    Raises:
        UserError: ``run`` is neither, or has no such table.
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
        raise _no_table(name, tables)
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
        ids = _run_ids(model.preprocessor.vocabulary, vocabulary)
    return TableRows(rows=len(weight), read=lambda begin, end: weight[begin:end].float(), ids=ids)


def package_table(path: Path, name: str) -> TableRows:
    """A table of a package, its numbers those that lookups see.

    Raises:
        UserError: the package has no such table, or cannot be opened.
    """
    opened = open_module(path)
    tables = _stored(path, opened)
    names = [table.info.name for table in tables.tables]
    if name not in names:
        raise _no_table(name, names)
    return TableRows(
        rows=tables.table(name).info.rows,
        read=lambda begin, end: tables.values(name, begin, end),
        ids=_package_ids(opened, name),
    )


def _no_table(name: str, there: Iterable[str]) -> UserError:
    return UserError(f"--table {name}: the model has no such table; it has {', '.join(there)}")


def _run_ids(lookup: VocabularyLookup, name: str) -> Ids:
    number = lookup.names.index(name)
    start = sum(list(lookup.sizes.values())[:number])
    held = Vocabularies(*(own.numpy() for own in (lookup.keys_U, lookup.places_U, lookup.seeds_V)))
    return held.ids(number, start, lookup.sizes[name])


def _package_ids(opened: CheckedModule, table: str) -> Ids | None:
    """The ids of the table's vocabulary; None where it has none, or that of another member."""
    held = Vocabularies.of(opened.module)
    features = opened.manifest.schema.features
    rows = next(own.rows for own in opened.manifest.tables if own.name == table)
    sizes = {f.vocabulary: f.rows - 1 for f in features if f.vocabulary is not None}
    for feature in features:
        if feature.table == table and feature.vocabulary is not None and held is not None:
            if feature.rows != rows or feature.vocabulary >= len(held.seeds):
                return None
            before = sum(size for number, size in sizes.items() if number < feature.vocabulary)
            return held.ids(feature.vocabulary, before, rows - 1)
    return None


def _stored(path: Path, opened: CheckedModule) -> StoredTables:
    manifest = opened.manifest
    kinds = {table.name: ROW_TYPES[table.dtype] for table in manifest.tables}
    for_gpu = manifest.device == "cuda"
    pieces, sizes = lay_out(manifest.plan.placements, kinds, for_gpu=for_gpu)
    found: dict[int, torch.Tensor] = {}
    for name, buffer in opened.module.named_buffers():
        shard = shard_of(name)
        whole = name.endswith("rows") and buffer.dtype == torch.uint8 and buffer.dim() == 1
        if whole and shard < len(sizes) and len(buffer) == sizes[shard]:
            found.setdefault(shard, buffer)
    if len(found) < len(sizes):
        raise UserError(
            f"{path}: its tables do not lie as its manifest says, so that their rows cannot be read; give"
            " the run that it was made of"
        )
    tables = []
    for info in manifest.tables:
        own = tuple(piece for piece in pieces if piece.placement.table == info.name)
        kind = kinds[info.name]
        if kind.blocks:
            book = found[own[0].placement.shard].narrow(0, own[0].scale_offset, kind.book_bytes)
            kind = replace(kind, book=book.clone().view(torch.float32))
        tables.append(StoredTable(info=info, kind=kind, pieces=own))
    buffers = tuple(found[shard] for shard in range(len(sizes)))
    return StoredTables(buffers=buffers, tables=tuple(tables), for_gpu=for_gpu)
