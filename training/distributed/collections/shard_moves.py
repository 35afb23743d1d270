"""Moves tables and their optimizers' states from the shards of one plan into those of another.

Every rank knows who holds what before and after.  So a rank knows which parts of its shards which rank
needs, and what it gets itself: the overlaps of old and new shards, sent in one all-to-all of bytes, in an
order that both sides work out alike.

A state of one number per row and column shard is special, since a new shard may cover the columns of
several old ones, or a part of one.  It gets the mean of their numbers, weighted by how many of its columns
each covered; where they are equal, exactly that number.  Checkpoints that are loaded under another plan do
the same (`tessera.training.distributed.checkpoint.layout`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.training.distributed.tables.table_shards import ShardedEmbeddingTable

Key = tuple[str, int, int]
"""A shard that is not empty: its table, its first row and its first column."""


@dataclass(frozen=True)
class LiveShard:
    """The memory of a shard on this rank.

    Attributes:
        weight: ``[rows, columns]``.
        states: of its optimizer, ``[rows, columns]`` each, or ``[rows]``.
    """

    weight: Tensor
    states: Sequence[Tensor]

    def parts(self) -> list[Tensor]:
        """All of its tensors."""
        return [self.weight, *self.states]


@dataclass(frozen=True)
class Block:
    """The place of a shard in its table."""

    name: str
    row: int
    column: int
    rows: int
    columns: int

    @property
    def key(self) -> Key:
        """Says which shard it is."""
        return self.name, self.row, self.column


@dataclass(frozen=True)
class Overlap:
    """What an old and a new shard of a table have in common: a block of it."""

    old: Block
    new: Block
    row: int
    column: int
    rows: int
    columns: int

    def of(self, part: Tensor, shard: Block) -> Tensor:
        """The common block of a tensor of the old or the new shard; of one number per row, its rows."""
        first = self.row - shard.row
        rows = part[first : first + self.rows]
        if part.dim() == 1:
            return rows
        left = self.column - shard.column
        return rows[:, left : left + self.columns]

    def size(self, part: Tensor) -> int:
        """How many numbers of a tensor are common."""
        return self.rows * (1 if part.dim() == 1 else self.columns)


def blocks_of(tables: Sequence[ShardedEmbeddingTable]) -> list[Block]:
    """The places of a rank's shards, without empty ones."""
    found = []
    for table in tables:
        place = table.local_metadata
        row, column = (0, 0) if place is None else place.shard_offsets
        if table.local_rows and table.local_cols:
            found.append(Block(table.name, row, column, table.local_rows, table.local_cols))
    return found


def overlaps(old: Sequence[Block], new: Sequence[Block]) -> Iterator[Overlap]:
    """What a rank's old shards and a rank's new ones have in common, in a fixed order."""
    for before in old:
        for after in new:
            if before.name != after.name:
                continue
            row, column = max(before.row, after.row), max(before.column, after.column)
            rows = min(before.row + before.rows, after.row + after.rows) - row
            columns = min(before.column + before.columns, after.column + after.columns) - column
            if rows > 0 and columns > 0:
                yield Overlap(before, after, row, column, rows, columns)


class _RowwiseMeans:
    """The numbers per row of a new shard, as they come from old shards."""

    def __init__(self, target: Tensor) -> None:
        self._target, self._columns = target, 0
        self._sum = torch.zeros_like(target, dtype=torch.float64)
        self._lowest = torch.full_like(target, float("inf"))
        self._highest = torch.full_like(target, float("-inf"))

    def add(self, overlap: Overlap, values: Tensor) -> None:
        first = overlap.row - overlap.new.row
        rows = slice(first, first + overlap.rows)
        self._sum[rows] += values.double() * overlap.columns
        self._lowest[rows] = torch.minimum(self._lowest[rows], values)
        self._highest[rows] = torch.maximum(self._highest[rows], values)
        self._columns = overlap.new.columns

    def finish(self) -> None:
        mean = (self._sum / self._columns).to(self._target.dtype)
        self._target.copy_(torch.where(self._lowest == self._highest, self._lowest, mean))


class _Targets:
    """The new shards on this rank, as they are filled."""

    def __init__(self, shards: Mapping[Key, LiveShard]) -> None:
        self._shards = shards
        self._means: dict[tuple[Key, int], _RowwiseMeans] = {}

    def take(self, overlap: Overlap, number: int, values: Tensor) -> None:
        """Put the common block of tensor ``number`` of a shard into its place."""
        target = self._shards[overlap.new.key].parts()[number]
        if target.dim() == 2:
            overlap.of(target, overlap.new).copy_(values)
            return
        means = self._means.setdefault((overlap.new.key, number), _RowwiseMeans(target))
        means.add(overlap, values)

    def finish(self) -> None:
        """Fill what could not be filled before all had come."""
        for means in self._means.values():
            means.finish()


@torch.no_grad()
def move_shards(
    old: Sequence[Sequence[ShardedEmbeddingTable]],
    new: Sequence[Sequence[ShardedEmbeddingTable]],
    *,
    sources: Mapping[Key, LiveShard],
    targets: Mapping[Key, LiveShard],
    rank: int,
    pg: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Fill this rank's new shards; every rank of ``pg`` calls it.

    Args:
        old: the shards of each rank, before.
        new: the shards of each rank, from now on, of the same tables.
        sources: the old shards that are here.
        targets: the new shards that are here; filled.
        rank: this rank's place in ``pg``.
        pg: the ranks; None: all tables are here.
        device: where they are.

    Memory: beside both, what is sent and what is received, once each.
    """
    before, after = [blocks_of(tables) for tables in old], [blocks_of(tables) for tables in new]
    filled = _Targets(targets)
    for overlap in overlaps(before[rank], after[rank]):
        for number, part in enumerate(sources[overlap.old.key].parts()):
            filled.take(overlap, number, overlap.of(part, overlap.old))
    if pg is not None and pg.size() > 1:
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        sent = [
            torch.cat(
                [
                    nothing,
                    *(
                        _bytes(overlap.of(part, overlap.old))
                        for overlap in overlaps(before[rank], own if peer != rank else [])
                        for part in sources[overlap.old.key].parts()
                    ),
                ]
            )
            for peer, own in enumerate(after)
        ]
        expected = [
            [
                (overlap, number, part)
                for overlap in overlaps(own if peer != rank else [], after[rank])
                for number, part in enumerate(targets[overlap.new.key].parts())
            ]
            for peer, own in enumerate(before)
        ]
        sizes = [
            sum(overlap.size(part) * part.element_size() for overlap, _, part in own)
            for own in expected
        ]
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        dist.all_to_all_single(
            received, torch.cat(sent), sizes, [own.numel() for own in sent], group=pg
        )
        del sent
        start = 0
        for overlap, number, part in (piece for own in expected for piece in own):
            end = start + overlap.size(part) * part.element_size()
            # A copy begins where numbers of any type may begin.
            values = received[start:end].clone().view(part.dtype)
            shape = (overlap.rows,) if part.dim() == 1 else (overlap.rows, overlap.columns)
            filled.take(overlap, number, values.view(shape))
            start = end
    filled.finish()


def _bytes(part: Tensor) -> Tensor:
    return part.contiguous().flatten().view(torch.uint8)
