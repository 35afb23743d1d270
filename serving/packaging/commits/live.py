"""Commits of a model that is being trained: `StateWriter` for the log of a version in a repository."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.errors import UserError
from tessera.kernels.row_types import RowType
from tessera.serving.commits.fence import read_fence
from tessera.serving.commits.file import Bytes
from tessera.serving.commits.patching import strided
from tessera.serving.commits.replay import next_number
from tessera.serving.commits.writer import Change, Facts, write_next
from tessera.serving.package.records import PackageError, Records
from tessera.serving.packaging.commits.dense_places import DensePlaces, find_places
from tessera.serving.packaging.commits.difference import book_change, check_same_graph
from tessera.serving.packaging.commits.places import TablePiece
from tessera.serving.packaging.commits.publish import Publisher, options_of, version_folder
from tessera.serving.packaging.dense_types import DENSE_TYPES
from tessera.serving.packaging.ranking import ranking_source
from tessera.serving.packaging.servable import make_servable
from tessera.serving.packaging.tables.quantize import check_range
from tessera.serving.packaging.tables.stored import StoredTable, StoredTables
from tessera.serving.repository.folder import PACKAGE_NAME
from tessera.training.trainer.publishing import PublishedModel, PublishOptions

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


@dataclass
class _Rows:
    """What a commit was given of one table so far."""

    rows: list[NDArray[np.int64]] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class LiveWriter:
    """See `StateWriter`.

    Args:
        folder: ``DIR/MODEL/VERSION``.
        key: to sign with; None: commits are not signed.

    Raises:
        UserError: see `Publisher`; or the version was not made of a run of `tessera train`.
    """

    def __init__(self, folder: Path, key: Ed25519PrivateKey | None = None) -> None:
        self._publisher = Publisher(folder, key)
        self._key = key
        self._state = self._publisher.state
        self._name = f"{self._state.log.model} {self._state.log.version}"
        self._changes: list[Change] = []
        self._whole: dict[str, _Rows] = {}
        self._kinds: dict[str, RowType] = {
            piece.table: piece.kind for piece in self._publisher.pieces
        }
        self._model: PublishedModel | None = None
        self._places: DensePlaces | None = None
        self._looked = False
        self._stopped = False
        self._passed_over = 0
        if self._publisher.broken is not None:
            self._say(f"the log was broken ({self._publisher.broken.words}); fenced off the rest")

    @property
    def whole_tables(self) -> frozenset[str]:
        """See `StateWriter`: the rows of blocks share a book."""
        return frozenset(name for name, kind in self._kinds.items() if kind.blocks)

    def begin(self, tables: Mapping[str, tuple[int, int]], model: PublishedModel) -> None:
        """See `StateWriter`."""
        dense = self._state.manifest.dense_dtype
        if DENSE_TYPES[dense].calibrated:
            raise UserError(
                f"--publish: {self._name} has dense layers in {dense}, whose scales are measured when it is "
                "packaged and are part of its graph; publish to a version with --dense-dtype bf16 or fp32"
            )
        self._model = model
        own = {table.name: (table.rows, table.dim) for table in self._state.manifest.tables}
        for name in sorted(tables.keys() | own.keys()):
            if tables.get(name) != own.get(name):
                raise self._of_another_model(f"table {name!r}")

    def _of_another_model(self, what: str) -> UserError:
        return UserError(
            f"--publish: {self._name} is of another model, as {what} shows; package a checkpoint of this run as "
            "a new version first"
        )

    def move(self) -> bool:
        """See `StateWriter`: to a version that `tessera compact` makes of this one, or another with its graph."""
        folder = self._publisher.log.parent
        try:
            newest = version_folder(folder.parent.parent, folder.parent.name, None)
        except UserError:
            return False  # it cannot be looked at now; the log goes on
        number = int(newest.name)
        if self._stopped or number <= max(int(folder.name), self._passed_over):
            return False
        try:
            check_same_graph(self._state, Records(newest / PACKAGE_NAME))
            publisher = Publisher(newest, self._key)
        except (UserError, PackageError) as error:
            self._passed_over = number
            self._say(f"version {number} is passed over ({error}); {self._name} goes on")
            return False
        if publisher.broken is not None:
            self._say(f"the log was broken ({publisher.broken.words}); fenced off the rest")
        self._publisher.close()
        self._publisher, self._state = publisher, publisher.state
        self._name = f"{self._state.log.model} {self._state.log.version}"
        self._say(f"goes on with the log of {self._name}")
        return True

    def put_rows(self, table: str, rows: NDArray[np.int64], values: Tensor) -> None:
        """See `StateWriter`."""
        kind = self._kinds[table]
        if kind.blocks:
            held = self._whole.setdefault(table, _Rows())
            held.rows.append(rows)
            held.values.append(values)
        else:
            self._put(table, kind, rows, values)

    def _put(self, table: str, kind: RowType, rows: NDArray[np.int64], values: Tensor) -> None:
        check_range(table, lambda place: int(rows[place]), values, kind)
        encoded = kind.encode(values)
        for piece in self._publisher.pieces:
            if piece.table == table:
                self._changes += self._changed(piece, kind, rows, encoded)

    def _changed(
        self, piece: TablePiece, kind: RowType, rows: NDArray[np.int64], encoded: Tensor
    ) -> list[Change]:
        """The changes of a piece of a table to encoded rows, without rows that are as they were."""
        at = piece.piece.placement
        here = (rows >= at.row_begin) & (rows < at.row_end)
        own = kind.take_columns(encoded[torch.from_numpy(here)], at.column_begin, at.column_end)
        places = rows[here] - at.row_begin
        if not len(places):
            return []
        header, data = own[:, : kind.header_bytes].numpy(), own[:, kind.header_bytes :].numpy()
        new = self._by_span(piece, header, data)
        old = [
            strided(
                self._state.tensors[span.record], span.offset, span.stride, span.width, span.rows
            )[places]
            for span in piece.spans
        ]
        differs = np.zeros(len(places), bool)
        for before, after in zip(old, new, strict=True):
            differs |= (before != after).any(axis=1)
        if not differs.any():
            return []
        changed = places[differs]
        return [
            Change(
                record=span.record,
                table=span.table,
                offset=span.offset,
                stride=span.stride,
                rows=changed,
                new=after[differs],
            )
            for span, after in zip(piece.spans, new, strict=True)
        ]

    @staticmethod
    def _by_span(piece: TablePiece, header: Bytes, data: Bytes) -> list[Bytes]:
        """The stored bytes of rows by the spans of their piece."""
        if len(piece.spans) == 2:
            return [data, header]
        (span,) = piece.spans
        stored = np.zeros((len(data), span.width), np.uint8)
        if span.offset == piece.piece.data_offset:  # the scale behind the row, or none
            stored[:, : data.shape[1]] = data
            if header.shape[1]:
                stored[:, span.width - header.shape[1] :] = header
        else:
            stored[:, : header.shape[1]] = header
            stored[:, header.shape[1] :] = data
        return [stored]

    def commit(
        self, dense: Mapping[str, Tensor], *, step: int, newest_example_s: float | None
    ) -> None:
        """See `StateWriter`."""
        for table, held in self._whole.items():
            values = torch.cat(held.values)
            kind = self._kinds[table].fitted(iter(held.values))
            for piece in self._publisher.pieces:
                if piece.table == table and piece.book is not None:
                    book = kind.book
                    assert book is not None
                    begin, end = piece.book
                    new = book.view(torch.uint8).numpy()
                    if not np.array_equal(self._state.tensors[piece.record][begin:end], new):
                        self._changes.append(book_change(piece, new))
            self._put(table, kind, np.concatenate(held.rows), values)
        changes, self._changes, self._whole = self._changes, [], {}
        if self._rolled_back():
            return
        changes += self._dense_changes(dense)
        facts = Facts(newest_example_s=newest_example_s, step=step)
        log = self._publisher.log
        write_next(self._state, log, changes, facts, self._key, number=next_number(log))

    def _rolled_back(self) -> bool:
        """Whether the state that the trainer builds on was fenced off meanwhile."""
        if not self._stopped:
            fenced = read_fence(self._publisher.log).commits
            self._stopped = self._state.log.number in fenced
            if self._stopped:
                self._say(
                    f"commit {self._state.log.number} was rolled back; nothing more is published: stop this run "
                    "and resume it, or go on from an earlier checkpoint"
                )
        return self._stopped

    def _dense_changes(self, dense: Mapping[str, Tensor]) -> list[Change]:
        """The records of the dense part that differ."""
        records = None if self._places is None else self._places.filled(dense)
        if records is None:
            records = self._dense_records(dense)
            if not self._looked:
                self._looked, self._places = True, find_places(self._dense_records, dense, records)
        changes = []
        for record, tensor in records.items():
            new, old = tensor.view(torch.uint8).numpy(), self._state.tensors[record]
            if not np.array_equal(old, new):
                changes.append(Change.whole(record, new.copy()))
        return changes

    def _dense_records(self, dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The flat content of each record of the dense part, as `package-model` makes it: it is traced."""
        assert self._model is not None
        model = self._model.make()
        tables = tuple(f".{name}.weight" for name in self._kinds)
        state = {
            name: _stand_in(value) if name.endswith(tables) else dense[name]
            for name, value in model.state_dict().items()
        }
        model.load_state_dict(state, assign=True)
        servable = make_servable(
            ranking_source(model.eval(), self._model.columns),
            options_of(self._state.manifest, self._state.log.version),
            stored=(self._stored(), self._state.manifest.plan),
        )
        ours, theirs = (
            replace(schema, dense_ranges=(), other_columns=())
            for schema in (servable.schema, self._state.manifest.schema)
        )
        if ours != theirs:
            raise self._of_another_model("its schema")
        tables_records = {piece.record for piece in self._publisher.pieces}
        found = {}
        named = [*servable.scripted.named_parameters(), *servable.scripted.named_buffers()]
        for name, tensor in named:
            if not tensor.numel():
                continue
            record = self._state.tensor_records.get(name)
            if record is None:
                raise self._of_another_model(f"{name!r}")
            if record in tables_records:
                continue
            content = tensor.detach().contiguous().view(-1)
            if content.numel() * content.element_size() != len(self._state.tensors[record]):
                raise self._of_another_model(f"the size of {name!r}")
            found[record] = content
        return found

    def _stored(self) -> StoredTables:
        """The tables of the version, where they are."""
        pieces, manifest = self._publisher.pieces, self._state.manifest
        records = {piece.piece.placement.shard: piece.record for piece in pieces}
        return StoredTables(
            buffers=tuple(
                torch.from_numpy(self._state.tensors[records[shard]]) for shard in sorted(records)
            ),
            tables=tuple(
                StoredTable(
                    info=info,
                    kind=self._kinds[info.name],
                    pieces=tuple(one.piece for one in pieces if one.table == info.name),
                )
                for info in manifest.tables
            ),
            for_gpu=manifest.device == "cuda",
        )

    def describes(self, path: Path) -> bool:
        """See `StateWriter`."""
        return self._publisher.describes(path)

    def checkpoint(self, path: Path, *, newest_example_s: float | None) -> None:
        """See `StateWriter`."""
        if self._rolled_back():
            return
        facts = Facts(newest_example_s=newest_example_s)
        self._publisher.publish_checkpoint(path, facts, skip_evaluation=True, progress=False)

    def close(self) -> None:
        """See `StateWriter`."""
        self._publisher.close()

    def _say(self, words: str) -> None:
        print(f"--publish: {words}", file=sys.stderr, flush=True)


def _stand_in(value: Tensor) -> Tensor:
    """A table of this shape that takes no memory; its values are read by nobody."""
    return torch.zeros(1, dtype=value.dtype).expand(value.shape)


def live_options(
    model_folder: Path,
    key: Ed25519PrivateKey | None,
    *,
    every_s: float | None,
    every_steps: int | None,
) -> PublishOptions:
    """How a training publishes to the highest version of ``DIR/MODEL``.

    Args:
        model_folder: the model's.
        key: to sign with; None: commits are not signed.
        every_s: seconds between commits; None: they are counted in steps.
        every_steps: steps between commits; None: they are counted in seconds.

    Raises:
        UserError: there is no version.
    """
    folder = version_folder(model_folder.parent, model_folder.name, None)
    return PublishOptions(
        open=lambda: LiveWriter(folder, key), every_s=every_s, every_steps=every_steps
    )
