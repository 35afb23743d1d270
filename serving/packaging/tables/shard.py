"""Say which device holds which rows and columns.

=============== ============================================================================
table_wise      a table is whole in one shard; large tables first, each to the emptiest shard
row_wise        every shard has an equal run of the table's rows
column_wise     every shard has an equal run of the table's columns
auto            table_wise; a table larger than a shard's equal part of all tables: row_wise
=============== ============================================================================

Or a file says it, in the form of a manifest's ``plan`` (`read_plan`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tessera.errors import UserError
from tessera.kernels.row_types import RowType
from tessera.serving.package.manifest import Placement, ShardingPlan
from tessera.serving.packaging.tables.choose_types import check_patterns, fitting
from tessera.serving.packaging.tables.quantize import SourceTable

SHARDINGS = ("auto", "table_wise", "row_wise", "column_wise")


def plan_shards(
    tables: Sequence[SourceTable],
    kinds: Mapping[str, RowType],
    *,
    shards: int,
    device: str = "cpu",
    sharding: str = "auto",
    by_pattern: Mapping[str, str] | None = None,
) -> ShardingPlan:
    """Spread the tables.

    ``kinds`` has each table's type by its name.  Of the ``device`` ``cuda``, shard ``k`` is on
    ``cuda:k``.  ``sharding`` is one of `SHARDINGS`, and ``by_pattern`` gives another by a pattern of
    table names, the first that fits.

    Raises:
        UserError: a pattern that fits no table, a table too small to be cut that often, or a
            shard that would hold nothing.
    """
    by_pattern = by_pattern or {}
    check_patterns("table-sharding", by_pattern, tables)
    sizes = {t.name: t.rows * kinds[t.name].row_bytes(t.dim) for t in tables}
    ways = {table.name: _way(table, sizes, shards, sharding, by_pattern) for table in tables}
    filled = [0] * shards
    placements: dict[str, list[Placement]] = {}
    # What is cut fills all shards alike; then the rest, the largest first.
    for table in sorted(tables, key=lambda t: (ways[t.name] == "table_wise", -sizes[t.name])):
        way = ways[table.name]
        if way == "table_wise":
            shard = filled.index(min(filled))
            pieces = [(shard, (0, table.rows), (0, table.dim))]
        else:
            pieces = _cut(table, kinds[table.name], shards, rows=way == "row_wise")
        placements[table.name] = [
            Placement.of(table.name, shard, _on_device(device, shard), rows, columns)
            for shard, rows, columns in pieces
        ]
        for shard, rows, columns in pieces:
            filled[shard] += (rows[1] - rows[0]) * kinds[table.name].row_bytes(
                columns[1] - columns[0]
            )
    if 0 in filled:
        raise UserError(
            f"--shards {shards}: shard {filled.index(0)} would hold nothing; give fewer shards, "
            "or cut tables with --sharding row_wise or column_wise"
        )
    ordered = tuple(placement for table in tables for placement in placements[table.name])
    return ShardingPlan(num_shards=shards, placements=ordered)


def read_plan(path: Path) -> ShardingPlan:
    """A plan from a JSON file: ``{"num_shards": N, "placements": [...]}``, as in a manifest.

    A file that cannot be read, or is not a plan, is a `UserError`.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        placements = tuple(Placement(**one) for one in data["placements"])
        plan = ShardingPlan(num_shards=data["num_shards"], placements=placements)
    except OSError as error:
        raise UserError(f"--plan {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--plan {path} is not a plan ({error}); 'tessera inspect --json' of a package with "
            "shards shows one"
        ) from error
    numbers = [plan.num_shards]
    for one in placements:
        numbers += [one.shard, one.row_begin, one.row_end, one.column_begin, one.column_end]
    if not all(type(number) is int for number in numbers):
        raise UserError(f"--plan {path}: shards, rows and columns are whole numbers")
    return plan


def check_plan(
    plan: ShardingPlan,
    tables: Sequence[SourceTable],
    kinds: Mapping[str, RowType],
    *,
    device: str = "cpu",
) -> ShardingPlan:
    """A plan of the user's own, with this package's devices, if it fits the tables.

    Raises:
        UserError: a table that is missing, unknown, not covered exactly once, cut both ways or
            twice in one shard; or a shard that holds nothing.
    """
    sizes = {table.name: (table.rows, table.dim) for table in tables}
    unknown = sorted({one.table for one in plan.placements} - sizes.keys())
    if unknown:
        raise UserError(
            f"the plan places table {unknown[0]!r}, which the model has not; it has "
            f"{', '.join(sizes)}"
        )
    if {one.shard for one in plan.placements} != set(range(plan.num_shards)):
        raise UserError(
            f"the plan has num_shards {plan.num_shards}; its placements must use each of shards 0 "
            f"to {plan.num_shards - 1} and no other"
        )
    ordered = []
    for name, (rows, dim) in sizes.items():
        own = [one for one in plan.placements if one.table == name]
        own.sort(key=lambda one: (one.row_begin, one.column_begin))
        _check_pieces(name, own, rows, dim, kinds[name])
        ordered += [replace(one, device=_on_device(device, one.shard)) for one in own]
    return ShardingPlan(num_shards=plan.num_shards, placements=tuple(ordered))


def _check_pieces(
    name: str, pieces: Sequence[Placement], rows: int, dim: int, kind: RowType
) -> None:
    by_rows = _follow(0, rows, [(p.row_begin, p.row_end) for p in pieces])
    by_columns = _follow(0, dim, [(p.column_begin, p.column_end) for p in pieces])
    all_rows = all((p.row_begin, p.row_end) == (0, rows) for p in pieces)
    all_columns = all((p.column_begin, p.column_end) == (0, dim) for p in pieces)
    if not ((by_rows and all_columns) or (by_columns and all_rows)):
        raise UserError(
            f"the plan's pieces of table {name!r} must be all columns of runs of its {rows} rows, "
            f"or all rows of runs of its {dim} columns, each row or column once"
        )
    if len({piece.shard for piece in pieces}) < len(pieces):
        raise UserError(f"the plan has table {name!r} twice in one shard; join the pieces")
    if any(piece.column_begin % kind.group_columns for piece in pieces):
        raise UserError(
            f"the plan cuts table {name!r} within a byte; {kind.name} is cut at multiples of "
            f"{kind.group_columns} columns"
        )


def _follow(begin: int, end: int, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether the spans, in order and none of them empty, fill ``[begin, end)`` exactly."""
    at = begin
    for first, last in spans:
        if first != at or last <= first:
            return False
        at = last
    return at == end


def _way(
    table: SourceTable,
    sizes: Mapping[str, int],
    shards: int,
    sharding: str,
    by_pattern: Mapping[str, str],
) -> str:
    chosen = next(fitting(by_pattern, table), sharding)
    if chosen != "auto":
        return chosen
    too_large = sizes[table.name] > sum(sizes.values()) / shards
    return "row_wise" if too_large and shards > 1 else "table_wise"


def _cut(
    table: SourceTable, kind: RowType, shards: int, *, rows: bool
) -> list[tuple[int, tuple[int, int], tuple[int, int]]]:
    """Shard, rows and columns of each piece."""
    count, dim = table.rows, table.dim
    unit = 1 if rows else kind.group_columns
    size = count if rows else dim // unit
    if size < shards:
        raise UserError(
            f"table {table.name!r} has {count} rows and {dim} columns, too few to be cut "
            f"{'by rows' if rows else 'by columns'} for {shards} shards; give it another way, "
            f"such as --table-sharding {table.name}=table_wise"
        )
    bounds = [unit * (size * shard // shards) for shard in range(shards + 1)]
    spans = [(bounds[shard], bounds[shard + 1]) for shard in range(shards)]
    return [
        (shard, span, (0, dim)) if rows else (shard, (0, count), span)
        for shard, span in enumerate(spans)
    ]


def _on_device(device: str, shard: int) -> str:
    """The device that a shard is meant for: ``cpu``, or the GPU of its number."""
    return device if device == "cpu" else f"{device}:{shard}"
