"""Rows of files to vectors: a package or a tower of a run, over all cores, batch by batch.

Shapes: ``n`` rows of a batch, ``D`` numbers of a vector.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from tessera.cpus import usable_cpus
from tessera.errors import UserError
from tessera.serving.client.row_files import RowBatch, read_row_batches
from tessera.serving.client.rows import rows_to_parts
from tessera.serving.package.loading import load_package
from tessera.serving.package.runner import HostBatch, Runner, TorchScriptRunner
from tessera.serving.package.schema import InputSchema
from tessera.serving.package.torchscript import optimize
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import id_column
from tessera.serving.packaging.ranking import tower_source
from tessera.serving.packaging.servable import make_servable
from tessera.training.models.retrieval import TowerSide
from tessera.training.trained import load_trained

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class VectorModel:
    """A model whose first output is a vector.

    Attributes:
        runner: scores batches; called by several threads at once.
        schema: its inputs and outputs.
        id_column: the column that says whose vector a row gives, as far as the model knows; or empty.
        tower: ``user`` or ``item``; empty where the model does not say.
    """

    runner: Runner
    schema: InputSchema
    id_column: str
    tower: str

    @property
    def width(self) -> int:
        """How many numbers a vector has, ``D``."""
        return self.schema.outputs[0].width


def open_vector_model(path: Path, *, tower: TowerSide | None = None) -> VectorModel:
    """A package that gives vectors, or a tower of a run or checkpoint, with float32 rows.

    ``tower`` says which of a run; a package must be of this tower, if one is named.

    Raises:
        UserError: the file is neither, is a package that gives no vectors, or is of the other tower.
    """
    if path.is_dir() or path.name.startswith("step-"):
        trained, side = load_trained(path), tower or "item"
        options = PackageOptions(name="tower", dtype="fp32")
        servable = make_servable(tower_source(trained.model, side, trained.columns), options)
        return VectorModel(
            runner=TorchScriptRunner(optimize(servable.scripted)),
            schema=servable.schema,
            id_column=id_column(trained.columns, side),
            tower=side,
        )
    loaded = load_package(path)
    source, schema = loaded.manifest.source, loaded.manifest.schema
    of = source.get("tower", "")
    if schema.outputs[0].width == 1:
        raise UserError(
            f"{path}: the package gives one number for a row, and not a vector; package a tower with"
            " tessera package-model RUN --tower user (or item)"
        )
    if tower is not None and of not in {"", tower}:
        raise UserError(
            f"{path}: the package is the {of}'s tower, and the {tower}'s is needed; package it with"
            f" tessera package-model RUN --tower {tower}"
        )
    return VectorModel(
        runner=loaded.runner, schema=schema, id_column=source.get("id_column", ""), tower=of
    )


def vectors_of_file(
    model: VectorModel, data: Path, *, keep: Sequence[str], batch_size: int
) -> Iterator[tuple[dict[str, Any], Vectors]]:
    """The rows of a file in order: columns of Arrow of the names ``keep``, and vectors ``[n, D]``.

    Batches are computed by as many threads as there are cores, a few of them ahead.  Columns of the
    file that the model does not take are left alone.

    Raises:
        UserError: the file cannot be read, lacks a column of ``keep``, or a value does not fit.
    """
    cores = usable_cpus()
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(
        cores, "tessera-vectors", initializer=torch.set_num_threads, initargs=(1,)
    )
    try:
        waiting: deque[Future[tuple[dict[str, Any], Vectors]]] = deque()
        for batch in read_row_batches(data, batch_size=batch_size, schema=model.schema):
            waiting.append(pool.submit(_computed, model, data, batch, keep))
            if len(waiting) > 2 * cores:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)


def _computed(
    model: VectorModel, data: Path, batch: RowBatch, keep: Sequence[str]
) -> tuple[dict[str, Any], Vectors]:
    names = _names(batch.rows)
    kept = {name: _column(batch.rows, name, names, data) for name in keep}
    try:
        dense, bags = rows_to_parts(batch.rows, model.schema, ignore=names, first_row=batch.first)
    except UserError as error:
        raise UserError(f"{data}: {error}") from error
    groups = []
    for group in ("id_list", "id_score_list"):
        own = [bags[feature.name] for feature in model.schema.group(group)]
        parts = (
            np.concatenate([np.empty(0, np.int32), *(one.lengths for one in own)]),
            np.concatenate([np.empty(0, np.int64), *(one.values for one in own)]),
            np.concatenate(
                [np.empty(0, np.float32), *(one.weights for one in own if one.weights is not None)]
            ),
        )
        groups.append([torch.from_numpy(part) for part in parts])
    (lengths, ids, _), (scored_lengths, scored_ids, weights) = groups
    values = np.empty((batch.size, 0), np.float32) if dense is None else dense
    found = model.runner.forward(
        HostBatch.of(
            torch.from_numpy(np.ascontiguousarray(values, np.float32)),
            (lengths, ids),
            (scored_lengths, scored_ids, weights),
        )
    )[model.schema.outputs[0].name]
    return kept, found.numpy()


def _names(rows: Any) -> list[str]:
    """The columns of a batch of rows."""
    if isinstance(rows, list):
        return list(rows[0])
    return list(rows.schema.names)


def _column(rows: Any, name: str, names: Sequence[str], data: Path) -> Any:
    if name not in names:
        raise UserError(f"{data}: has no column {name!r}; it has {', '.join(names[:20])}")
    if isinstance(rows, list):
        return pa.array([row[name] for row in rows])
    return rows.column(name)
