"""Publish what is trained while it is trained: which rows, when, and from which rank.

Every rank notes the rows that its steps touch (`DeltaTracker`).  When a commit is due, rank 0 is given the
values of the rows that any rank has touched, and the dense part, and hands them to a `StateWriter`, which
knows what a commit is.  The first commit of a process compares all rows: whatever was published before, by
this run or another, the log ends in the state that is trained here.

The order around a checkpoint is: the commit of its step, then the checkpoint's file, then the commit that
describes it, which `tessera compact` needs.  Servers have the state before the checkpoint takes its time.  A
process may be ended between any two of them.  Before the file is there, nothing is missing: the run goes on
from the checkpoint before, and so does the log.  Behind it the description is missing, and a run that is resumed
from that file writes it before it trains (`Publishing.after_resume`).

Legend: D columns of a table, n rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from tessera.errors import UserError
from tessera.training.data.columns import FeatureColumns
from tessera.training.distributed.tables.caches import tell_caches
from tessera.training.distributed.tables.delta_tracker import DeltaTracker
from tessera.training.models.ranking import RankingModel
from tessera.training.trainer.assembly import Assembly
from tessera.training.trainer.files import find_checkpoint, latest_checkpoint

_CHUNK_ELEMENTS = 1 << 22
"""Numbers of a table that are gathered at a time."""


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """What is trained, without its weights.

    Attributes:
        make: a new one, on torch's meta device.
        columns: what the data's batches hold.
    """

    make: Callable[[], RankingModel]
    columns: FeatureColumns


class StateWriter(Protocol):
    """Takes what was trained and writes commits; on rank 0."""

    @property
    def whole_tables(self) -> frozenset[str]:
        """Tables of which a commit is given every row, as their rows share something."""
        ...

    def begin(self, tables: Mapping[str, tuple[int, int]], model: PublishedModel) -> None:
        """Told once what is trained, and by their names the rows and columns of its tables.

        Raises:
            UserError: they are not those of the version.
        """
        ...

    def move(self) -> bool:
        """Go on with the log of a newer version, if there is one that can have it; whether it did.

        Called before the first `put_rows` of a commit.  After a move that commit is given all rows.
        """
        ...

    def put_rows(self, table: str, rows: NDArray[np.int64], values: Tensor) -> None:
        """The present ``values [n, D]`` float32 of some ``rows [n]``, ascending; several calls a commit.

        Of a table of `whole_tables` the calls of a commit have all rows, in order.
        """
        ...

    def commit(
        self, dense: Mapping[str, Tensor], *, step: int, newest_example_s: float | None
    ) -> None:
        """Write what `put_rows` was given, and the ``dense`` part by its names in checkpoints.

        Raises:
            UserError: it cannot be written.
        """
        ...

    def describes(self, path: Path) -> bool:
        """Whether `checkpoint` was called last with this one, by this process or one before it."""
        ...

    def checkpoint(self, path: Path, *, newest_example_s: float | None) -> None:
        """The state that is published is to be that of a checkpoint, and to be described as its package.

        Raises:
            UserError: it cannot be packaged or written.
        """
        ...

    def close(self) -> None:
        """Nothing more is written."""
        ...


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """Where and when to publish.

    Attributes:
        open: opens the writer, on rank 0.
        every_s: seconds between commits; None: they are counted in steps.
        every_steps: steps between commits; None: they are counted in seconds.
        clock: seconds.
    """

    open: Callable[[], StateWriter]
    every_s: float | None = None
    every_steps: int | None = None
    clock: Callable[[], float] = time.monotonic


class Publishing:
    """The publishing of one run; every rank has one, and calls each method.

    Args:
        options: where and when.
        model: what is trained.
        assembly: the same, with its weights.

    Raises:
        UserError: the version cannot be published to, or the run's weights are averaged.
    """

    def __init__(self, options: PublishOptions, model: PublishedModel, assembly: Assembly) -> None:
        if assembly.averages is not None:
            raise UserError(
                "--publish: train.average changes every row with every step; publish checkpoints: "
                "tessera publish"
            )
        self._options, self._assembly, self._ranks = options, assembly, assembly.ranks
        self._writer: StateWriter | None = None
        self._tracker = DeltaTracker.of(assembly.model)
        self._sizes = self._all_sizes()

        def open_writer() -> frozenset[str]:
            self._writer = options.open()
            self._writer.begin(self._sizes, model)
            return self._writer.whole_tables

        self._whole_tables = self._ranks.on_first(open_writer)
        self._synced = False
        self._last, self._last_step = options.clock(), 0

    def close(self) -> None:
        """Let go of the log."""
        if self._writer is not None:
            self._writer.close()

    def after_step(self, step: int, newest_example_s: Callable[[], float | None]) -> None:
        """Publish where a commit is due behind ``step``."""
        options = self._options
        if options.every_steps is not None:
            due = step % options.every_steps == 0
        else:
            assert options.every_s is not None
            due = self._ranks.any(
                self._ranks.first and options.clock() - self._last >= options.every_s
            )
        if due:
            self._commit(step, newest_example_s())

    def after_save(self, folder: Path, step: int, newest_example_s: float | None) -> None:
        """Publish the state of the checkpoint of ``step`` in ``folder``, which was just written."""
        if self._last_step != step or not self._synced:
            self._commit(step, newest_example_s)
        self._ranks.on_first(
            lambda: self._describe(find_checkpoint(folder, step), newest_example_s)
        )

    def after_resume(self, folder: Path, newest_example_s: float | None) -> None:
        """Publish the checkpoint that was resumed from, where a process before this one was ended before it had."""

        def complete() -> None:
            path = latest_checkpoint(folder)
            if path is not None and self._writer is not None and not self._writer.describes(path):
                self._describe(path, newest_example_s)

        self._ranks.on_first(complete)

    def _describe(self, path: Path, newest_example_s: float | None) -> None:
        assert self._writer is not None
        with torch.random.fork_rng(devices=[]):
            self._writer.checkpoint(path, newest_example_s=newest_example_s)

    def _commit(self, step: int, newest_example_s: float | None) -> None:
        if self._synced and self._ranks.on_first(
            lambda: self._writer is not None and self._writer.move()
        ):
            self._synced = False
        tell_caches(self._assembly.model, "flush")
        touched = self._tracker.take()
        for table in sorted(self._sizes):
            everything = not self._synced or table in self._whole_tables
            for rows, values in self._gathered(
                table, None if everything else touched.get(table, [])
            ):
                assert self._writer is not None
                self._writer.put_rows(table, rows, values)
        dense = self._dense()

        def write() -> None:
            if self._writer is not None:
                with torch.random.fork_rng(devices=[]):
                    self._writer.commit(dense, step=step, newest_example_s=newest_example_s)

        self._ranks.on_first(write)
        self._synced = True
        self._last, self._last_step = self._options.clock(), step

    def _all_sizes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of every table of the model, also of those with no shard here."""
        own = {
            table.name: (table.num_embeddings, table.embedding_dim)
            for table, _ in self._tracker.shards()
        }
        return {name: size for part in self._all_gather(own) for name, size in part.items()}

    def _all_gather(self, own: dict[str, tuple[int, int]]) -> list[dict[str, tuple[int, int]]]:
        if self._ranks.alone:
            return [own]
        found: list[dict[str, tuple[int, int]]] = [{}] * self._ranks.world_size
        dist.all_gather_object(found, own)
        return found

    def _dense(self) -> dict[str, Tensor]:
        """Everything of the model's state but its tables, by name, on the CPU."""
        tables = tuple(f".{name}.weight" for name in self._sizes)
        state = self._assembly.model.state_dict()
        return {
            name: value.detach().to("cpu", copy=True)
            for name, value in state.items()
            if not isinstance(value, ShardedTensor) and not name.endswith(tables)
        }

    def _gathered(
        self, table: str, touched: list[Tensor] | None
    ) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
        """On rank 0 the values of rows ``[n, D]``, some at a time; on the others nothing.

        ``touched`` are the rows that this rank has touched; None: all rows.
        """
        rows_of, dim = self._sizes[table]
        rows = torch.arange(rows_of) if touched is None else self._union(touched)
        for chunk in torch.split(rows, max(1, _CHUNK_ELEMENTS // dim)):
            if not len(chunk):
                continue
            parts = self._gather([*self._parts(table, chunk)])
            if not self._ranks.first:
                continue
            values = torch.empty(len(chunk), dim)
            for places, column, part in parts:
                values[places, column : column + part.shape[1]] = part
            yield chunk.numpy(), values

    def _union(self, touched: list[Tensor]) -> Tensor:
        """The rows that any rank has touched, ascending, on every rank."""
        own = _distinct(touched)
        if self._ranks.alone:
            return own
        found: list[Tensor] = [own] * self._ranks.world_size
        dist.all_gather_object(found, own)
        return _distinct(found)

    def _parts(self, table: str, rows: Tensor) -> Iterator[tuple[Tensor, int, Tensor]]:
        """What this rank has of some rows of a table: places in ``rows``, first column, values."""
        for shard, weights in self._tracker.shards():
            if shard.name != table:
                continue
            place = shard.local_metadata
            begin, column = (0, 0) if place is None else place.shard_offsets
            own = ((rows >= begin) & (rows < begin + shard.local_rows)).nonzero().flatten()
            local = (rows[own] - begin).to(weights.device)
            yield own, column, weights.detach()[local].float().cpu()

    def _gather(self, own: list[tuple[Tensor, int, Tensor]]) -> list[tuple[Tensor, int, Tensor]]:
        if self._ranks.alone:
            return own
        found: list[list[tuple[Tensor, int, Tensor]]] | None = (
            [[]] * self._ranks.world_size if self._ranks.first else None
        )
        dist.gather_object(own, found, dst=0)
        return [part for parts in found or [] for part in parts]


def _distinct(rows: list[Tensor]) -> Tensor:
    """The numbers in several tensors, ascending, each once."""
    found: Tensor = torch.unique(torch.cat([torch.empty(0, dtype=torch.int64), *rows]))
    return found
