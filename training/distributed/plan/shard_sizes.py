"""Where a table is cut, for every sharding type."""

from __future__ import annotations

import itertools

from tessera.training.distributed.plan.plan_types import ShardingType

Pieces = tuple[list[list[int]], list[list[int]]]
"""Sizes ``[rows, columns]`` and offsets ``[first row, first column]``, one a shard."""


def row_pieces(rows: int, columns: int, pieces: int, first_column: int = 0) -> Pieces:
    """Blocks of ``ceil(rows / pieces)`` rows; the last ones are smaller or empty."""
    block = -(-rows // pieces)
    starts = [min(index * block, rows) for index in range(pieces + 1)]
    sizes = [[stop - start, columns] for start, stop in itertools.pairwise(starts)]
    return sizes, [[start, first_column] for start in starts[:-1]]


def column_widths(columns: int, min_partition: int, max_pieces: int) -> list[int]:
    """At most ``max_pieces`` widths that differ as little as multiples of 4 allow.

    Fused tables want rows of a multiple of 4 numbers, so only the last piece may be another one.
    """
    pieces = max(1, min(columns // min_partition, max_pieces, -(-columns // 4)))
    width = -(-columns // pieces)
    width = -(-width // 4) * 4
    full, rest = divmod(columns, width)
    return [width] * full + ([rest] if rest else [])


def calculate_shard_sizes_and_offsets(
    rows: int,
    columns: int,
    *,
    world_size: int,
    local_world_size: int,
    sharding_type: str,
    min_partition: int,
) -> Pieces:
    """The shards of a table of ``rows`` x ``columns``.

    Table-row-wise and grid shards come host by host: ``local_world_size`` row blocks of one
    column shard one after the other.

    Raises:
        ValueError: an unknown sharding type.
    """
    if sharding_type == ShardingType.TABLE_WISE.value:
        return [[rows, columns]], [[0, 0]]
    if sharding_type == ShardingType.DATA_PARALLEL.value:
        return [[rows, columns]] * world_size, [[0, 0]] * world_size
    if sharding_type == ShardingType.ROW_WISE.value:
        return row_pieces(rows, columns, world_size)
    if sharding_type == ShardingType.TABLE_ROW_WISE.value:
        return row_pieces(rows, columns, local_world_size)
    hosts = world_size // local_world_size
    limit = {
        ShardingType.COLUMN_WISE.value: world_size,
        ShardingType.TABLE_COLUMN_WISE.value: local_world_size,
        ShardingType.GRID_SHARD.value: hosts,
    }.get(sharding_type)
    if limit is None:
        raise ValueError(f"sharding_type is {sharding_type!r}; see ShardingType")
    sizes: list[list[int]] = []
    offsets: list[list[int]] = []
    column = 0
    for width in column_widths(columns, min_partition, limit):
        if sharding_type == ShardingType.GRID_SHARD.value:
            more_sizes, more_offsets = row_pieces(rows, width, local_world_size, column)
        else:
            more_sizes, more_offsets = [[rows, width]], [[0, column]]
        sizes += more_sizes
        offsets += more_offsets
        column += width
    return sizes, offsets
