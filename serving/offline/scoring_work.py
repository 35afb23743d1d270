"""What is done to one unit of raw rows: read, prepare, score, and written as a part of the output.

A row that the model cannot take has the score null.  Rows are scored in batches, and a package gives a row
the same bits in any batch, so that parts depend on the data and the package alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from tessera.errors import UserError
from tessera.serving.client.assemble import assemble
from tessera.serving.client.rows import rows_to_parts
from tessera.serving.offline.raw_columns import RawColumns
from tessera.serving.offline.raw_text import chunks_of
from tessera.serving.offline.raw_units import Chunk, Reading, Unit
from tessera.serving.package.loading import LoadedPackage, load_package
from tessera.serving.package.runner import HostBatch, Runner
from tessera.serving.package.schema import FeatureSpec, Group, OutputSpec
from tessera.training.data.malformed import MAX_EXAMPLES
from tessera.training.data.table.decode import CellError

_MAX_HEAD_BYTES = 1 << 24
_PLAIN_INTEGER = r"^-?(0|[1-9]\d{0,17})$"


@dataclass(frozen=True, kw_only=True)
class PartHead:
    """What a part says of itself.

    Attributes:
        rows: how many it has.
        malformed: how many of them have no score.
        examples: of these the first, each with its row's number and what is wrong.
        texts: of the columns that were kept as text, those that hold anything but plain integers.
    """

    rows: int
    malformed: int
    examples: tuple[tuple[int, str], ...]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """The scores of one unit: its head, and its rows in Arrow's stream format."""

    head: PartHead
    rows: bytes

    def to_bytes(self) -> bytes:
        """The head as JSON, behind its length, and the rows."""
        head = json.dumps(vars(self.head)).encode()
        return len(head).to_bytes(8, "little") + head + self.rows

    @staticmethod
    def read_head(file: BinaryIO) -> PartHead:
        """Read the head of what `to_bytes` gave; the rows are behind it.

        Raises:
            ValueError, KeyError, TypeError: it is not a part.
        """
        size = int.from_bytes(file.read(8), "little")
        values = json.loads(file.read(min(size, _MAX_HEAD_BYTES)))
        examples = tuple((row, reason) for row, reason in values["examples"])
        return PartHead(**{**values, "examples": examples, "texts": tuple(values["texts"])})


def output_fields(outputs: Sequence[OutputSpec]) -> list[Any]:
    """The output's columns of scores: float32, or lists of so many of them."""
    return [
        pa.field(o.name, pa.float32() if o.width == 1 else pa.list_(pa.float32(), o.width))
        for o in outputs
    ]


@dataclass(kw_only=True)
class ScoringWork:
    """Scores units of raw rows; see `tessera.partitions.Work`.

    Attributes:
        package: the file.
        reading: how units are read.
        batch_rows: how many rows are scored at once.
        load: arguments of `load_package`.
        loaded: the package, where this process has loaded it already; it does not travel.
    """

    package: Path
    reading: Reading
    batch_rows: int
    load: dict[str, Any] = field(default_factory=dict)
    loaded: LoadedPackage | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "loaded": None}

    def start(self) -> Callable[[Unit], Part]:
        """See `tessera.partitions.Work.start`."""
        if self.loaded is None:
            self.loaded = load_package(self.package, **self.load)
        return Scorer(self.loaded.runner, self.reading, self.batch_rows).part


class Scorer:
    """Scores units, and chunks of them, of one reading; several threads may call `answers` at once."""

    def __init__(self, runner: Runner, reading: Reading, batch_rows: int) -> None:
        self._runner = runner
        self._reading = reading
        self._batch_rows = batch_rows
        self._outputs = reading.schema.outputs
        groups: tuple[Group, Group] = ("id_list", "id_score_list")
        self._limits = {group: _limits(reading.schema.group(group)) for group in groups}

    def part(self, unit: Unit) -> Part:
        """The scores of a unit."""
        torch.set_num_threads(1)  # bits, and processes that share the cores
        rows = malformed = 0
        examples: list[tuple[int, str]] = []
        texts: set[str] = set()
        sink = pa.BufferOutputStream()
        writer = None
        for chunk in chunks_of(unit, self._reading):
            table, wrong = self._chunk(unit, chunk)
            writer = writer or pa.ipc.new_stream(sink, table.schema)
            writer.write_table(table)
            rows += chunk.rows
            malformed += len(wrong)
            told = sorted(wrong)[: MAX_EXAMPLES - len(examples)]
            examples += [(int(chunk.numbers[place]), wrong[place]) for place in told]
            for name in chunk.kept.column_names:
                if name not in texts and not _integers(chunk.kept.column(name)):
                    texts.add(name)
        if writer is not None:
            writer.close()
        head = PartHead(
            rows=rows, malformed=malformed, examples=tuple(examples), texts=tuple(sorted(texts))
        )
        return Part(head, bytes(sink.getvalue()))

    def _chunk(self, unit: Unit, chunk: Chunk) -> tuple[Any, dict[int, str]]:
        """The chunk's part of the output, and its rows without a score by place, with the reason."""
        scores, wrong = self.answers(unit, chunk)
        arrays = [*chunk.kept.columns, *scores.arrays()]
        fields = [*chunk.kept.schema, *output_fields(self._outputs)]
        return pa.table(arrays, schema=pa.schema(fields)), wrong

    def answers(self, unit: Unit, chunk: Chunk) -> tuple[Answers, dict[int, str]]:
        """The chunk's scores, and its rows without any by place, with the reason."""
        scores = Answers(self._outputs, chunk.rows)
        wrong: dict[int, str] = {}
        odd: list[tuple[int, dict[str, Any]]] = []
        for place, row in chunk.odd:
            if isinstance(row, str):
                wrong[place] = row
            else:
                odd.append((place, row))
        if chunk.table is not None and chunk.table.num_rows:
            odd += self._typed(unit, chunk, scores, wrong)
        self._singly(odd, scores, wrong)
        return scores, wrong

    def _typed(
        self, unit: Unit, chunk: Chunk, scores: Answers, wrong: dict[int, str]
    ) -> list[tuple[int, dict[str, Any]]]:
        """Score the rows that have the columns' types; returns those that may not be taken."""
        table = chunk.table
        places = np.arange(chunk.rows) if chunk.places is None else chunk.places
        columns = RawColumns(
            self._reading.schema, table.schema, unit.file.path, self._reading.separators
        )
        odd: list[tuple[int, dict[str, Any]]] = []
        suspects = columns.suspects(table)
        if suspects.any():
            odd += _as_rows(table, places, suspects)
            table, places = table.filter(pa.array(~suspects)), places[~suspects]
        for begin in range(0, len(places), self._batch_rows):
            part = table.slice(begin, self._batch_rows)
            own = places[begin : begin + self._batch_rows]
            try:
                batch = columns.host_batch(part)
            except CellError:
                odd += _as_rows(part, own, np.ones(len(own), np.bool_))
                continue
            refused = self._out_of_range(batch)
            if refused:
                wrong.update({int(own[place]): reason for place, reason in refused.items()})
                kept = np.ones(len(own), np.bool_)
                kept[list(refused)] = False
                own = own[kept]
                if not len(own):
                    continue
                batch = columns.host_batch(part.filter(pa.array(kept)))
            scores.put(own, self._runner.forward(batch))
        return odd

    def _singly(
        self, odd: list[tuple[int, dict[str, Any]]], scores: Answers, wrong: dict[int, str]
    ) -> None:
        """Score rows by the rules for rows that a client sends, or tell why they cannot be."""
        schema = self._reading.schema
        for place, row in odd:
            try:
                dense, bags = rows_to_parts([row], schema)
            except UserError as error:
                wrong[place] = str(error).removeprefix("row 0, ")
                continue
            arrays = assemble(dense, bags, schema=schema)
            plain, scored = (
                None if own is None else (own.lengths.ravel(), own.values, own.weights)
                for own in (arrays.id_list, arrays.id_score_list)
            )
            none = (np.empty(0, np.int32), np.empty(0, np.int64), None)
            lengths, ids, _ = plain or none
            batch = HostBatch.of(
                torch.empty(1, 0) if arrays.dense is None else torch.from_numpy(arrays.dense),
                (torch.from_numpy(lengths), torch.from_numpy(ids)),
                None if scored is None else tuple(torch.from_numpy(own) for own in scored),  # type: ignore[arg-type] # three of them
            )
            refused = self._out_of_range(batch)
            if refused:
                wrong[place] = refused[0]
            else:
                scores.put(np.array([place]), self._runner.forward(batch))

    def _out_of_range(self, batch: HostBatch) -> dict[int, str]:
        """Rows with an id that a server would refuse, and why."""
        found: dict[int, str] = {}
        groups: tuple[tuple[Group, Any, Any], ...] = (
            ("id_list", batch.id_list_features_lengths, batch.id_list_features_values),
            (
                "id_score_list",
                batch.id_score_list_features_lengths,
                batch.id_score_list_features_values,
            ),
        )
        for group, lengths, values in groups:
            last = self._limits[group]
            if last is None or not len(values):
                continue
            rows = batch.batch_size
            of_value = np.repeat(np.repeat(last, rows), lengths.numpy())
            bad = values.numpy().astype(np.int64, copy=False).view(np.uint64) > of_value
            if not bad.any():
                continue
            bags = np.repeat(np.arange(len(lengths)), lengths.numpy())
            for place in np.flatnonzero(bad).tolist():
                feature = self._reading.schema.group(group)[bags[place] // rows]
                name = feature.column or feature.name
                reason = f"column {name!r}: id {int(values[place])} is outside [0, {feature.rows})"
                found.setdefault(int(bags[place] % rows), reason)
        return found


def _limits(features: Iterable[FeatureSpec]) -> npt.NDArray[np.uint64] | None:
    """The last id of each feature that servers take; None where they take any."""
    most = np.iinfo(np.uint64).max
    last = [
        f.rows - 1 if f.hashing == "none" and f.out_of_range == "reject" else most for f in features
    ]
    return None if all(own == most for own in last) else np.array(last, np.uint64)


def _as_rows(
    table: Any, places: npt.NDArray[np.int64], chosen: npt.NDArray[np.bool_]
) -> list[tuple[int, dict[str, Any]]]:
    rows = table.filter(pa.array(chosen)).to_pylist()
    return list(zip(places[chosen].tolist(), rows, strict=True))


def _integers(column: Any) -> bool:
    """Whether a column of text holds plain integers alone, which read back as the same text."""
    if not pa.types.is_string(column.type):
        return False
    return pc.all(pc.match_substring_regex(column, _PLAIN_INTEGER)).as_py() is not False


class Answers:
    """The outputs of some rows, null until they are put.

    Attributes:
        values: by output ``[rows, width]`` float32; 0 of rows that have none.

    Args:
        outputs: the model's.
        rows: how many rows there are.
    """

    def __init__(self, outputs: Sequence[OutputSpec], rows: int) -> None:
        self.values = [np.zeros((rows, output.width), np.float32) for output in outputs]
        self._outputs = outputs
        self._missing = np.ones(rows, np.bool_)

    def put(self, places: npt.NDArray[np.int64], scores: dict[str, torch.Tensor]) -> None:
        """Take the scores of the rows at ``places``: by output, ``[n]`` or ``[n, width]`` float32."""
        for values, output in zip(self.values, self._outputs, strict=True):
            values[places] = scores[output.name].view(len(places), -1).numpy()
        self._missing[places] = False

    def arrays(self) -> list[Any]:
        """The columns of `output_fields`."""
        mask = pa.array(self._missing) if self._missing.any() else None
        made = []
        for values, output in zip(self.values, self._outputs, strict=True):
            if output.width == 1:
                array = pa.array(values[:, 0])
                none = pa.scalar(None, pa.float32())
                made.append(array if mask is None else pc.if_else(mask, none, array))
            else:
                flat = pa.array(values.ravel())
                made.append(pa.FixedSizeListArray.from_arrays(flat, output.width, mask=mask))
        return made
