"""Rows of files to vectors: a package or a tower of a run, over all cores, batch by batch.

Shapes: ``n`` rows of a batch, ``D`` numbers of a vector.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from tessera.cpus import usable_cpus
from tessera.errors import UserError
from tessera.serving.offline.raw_text import chunks_of, units_of
from tessera.serving.offline.raw_units import TEXT_FORMATS, Chunk, Kept, Reading, Unit, kept_types
from tessera.serving.offline.scoring_inputs import find_inputs, reading_of
from tessera.serving.offline.scoring_work import Scorer
from tessera.serving.package.loading import load_package
from tessera.serving.package.runner import Runner, TorchScriptRunner
from tessera.serving.package.schema import InputSchema
from tessera.serving.package.torchscript import optimize
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import id_column
from tessera.serving.packaging.ranking import tower_source
from tessera.serving.packaging.servable import make_servable
from tessera.training.data.table.text import TextColumn
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
    model: VectorModel, data: str, *, keep: Sequence[str], batch_size: int
) -> Iterator[tuple[dict[str, Any], Vectors]]:
    """The rows of files in order: columns of Arrow of the names ``keep``, and vectors ``[n, D]``.

    Rows are read as `tessera score` reads them.  Chunks are computed by as many threads as there are
    cores, a few of them ahead.  Columns that the model does not take are left alone.

    Args:
        model: what gives the vectors.
        data: a file, a pattern, a folder or a URL, as `data.path` takes them.
        keep: columns that come with the vectors.
        batch_size: rows that are computed at a time.

    Raises:
        UserError: a file cannot be read, lacks a column, or a row's value does not fit.
    """
    files, criteo = find_inputs([data], model.schema)
    reading = reading_of(model.schema, files, keep=(), separator=None, criteo=criteo)
    reading = replace(reading, kept=tuple(Kept(column=name, name=name) for name in keep))
    kept_types(files, reading)  # a column that a file lacks, or has with another type
    scorer, cells = Scorer(model.runner, reading, batch_size), _Cells(reading)
    cores = usable_cpus()
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(
        cores, "tessera-vectors", initializer=torch.set_num_threads, initargs=(1,)
    )
    try:
        waiting: deque[tuple[dict[str, Any], Future[Vectors]]] = deque()
        for unit in units_of(files, reading):
            for chunk in chunks_of(unit, reading):
                waiting.append((cells.of(unit, chunk), pool.submit(_computed, scorer, unit, chunk)))
                if len(waiting) > 2 * cores:
                    kept, vectors = waiting.popleft()
                    yield kept, vectors.result()
        while waiting:
            kept, vectors = waiting.popleft()
            yield kept, vectors.result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)


def _computed(scorer: Scorer, unit: Unit, chunk: Chunk) -> Vectors:
    answers, wrong = scorer.answers(unit, chunk)
    if wrong:
        place = min(wrong)
        raise UserError(
            f"{unit.file.path}:{int(chunk.numbers[place])}: {wrong[place]}; mend the row"
        )
    return answers.values[0]


class _Cells:
    """The columns that are kept, in files of text with the types that they have for the model.

    Those that the model does not take are integers where the first rows say so, otherwise strings.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._columns = {
            one.column or one.name: TextColumn(
                name=one.column or one.name,
                holds="id",
                many=one.many,
                strings=one.strings,
                separator=reading.separators.get(one.column or one.name, one.separator),
            )
            for one in reading.schema.features
        }

    def of(self, unit: Unit, chunk: Chunk) -> dict[str, Any]:
        """By name, the columns of the chunk's rows."""
        found = {name: chunk.kept.column(name) for name in chunk.kept.column_names}
        if unit.file.format not in TEXT_FORMATS:
            return found
        return {
            name: values if name in unit.file.partitions else self._read(name, values, unit)
            for name, values in found.items()
        }

    def _read(self, name: str, values: Any, unit: Unit) -> Any:
        text = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
        text = pa.concat_arrays(text.chunks) if isinstance(text, pa.ChunkedArray) else text
        if name not in self._columns:
            self._columns[name] = TextColumn(name=name, holds="id").settled(text)
        column = self._columns[name]
        if unit.file.format == "jsonl" and column.many:
            rows = [None if cell is None else json.loads(cell) for cell in text.to_pylist()]
            try:
                return pa.array(rows, column.type)
            except (pa.ArrowException, TypeError, OverflowError) as error:
                raise self._wrong(unit, name, str(error).splitlines()[0][:100]) from error
        array, bad = column.read(text)
        if bad is not None and pc.any(bad).as_py():
            raise self._wrong(unit, name, repr(text.filter(bad)[0].as_py()[:60]))
        return array

    def _wrong(self, unit: Unit, name: str, what: str) -> UserError:
        kind = self._columns[name].type
        return UserError(
            f"{unit.file.path}: column {name!r} holds {what}, where the first rows or the model say {kind};"
            " mend the rows"
        )
