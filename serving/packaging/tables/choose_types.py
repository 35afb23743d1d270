"""Which weight type each table is stored as: by name, and by what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from tessera.errors import UserError
from tessera.kernels.row_types import ROW_TYPES, RowType, row_type
from tessera.serving.packaging.tables.quantize import SourceTable, measure
from tessera.serving.packaging.tables.taken_over import QuantizedTable

WIDER = ("int2", "int4", "int8", "fp16", "fp32")
"""The types that a table too inaccurate for one of them may take instead, the narrowest first."""


@dataclass(frozen=True, kw_only=True)
class TypeChoice:
    """How the tables' types are chosen, among those that are ``usable`` by the backend.

    Attributes:
        by_pattern: by a pattern of table names (``*`` and ``?``); the first that fits counts, and
            ``default`` where none does.
        max_error: the largest relative RMSE that a table may have: ``rmse`` over the root mean
            square of its float32 elements.  A table that loses more takes the next wider type of
            `WIDER` that does not.  None: there is no bound.

    Raises:
        UserError: an unknown type, or a bound that is not above 0.
    """

    default: str = "int8"
    by_pattern: Mapping[str, str] = field(default_factory=dict)
    max_error: float | None = None
    usable: Sequence[str] = tuple(ROW_TYPES)

    def __post_init__(self) -> None:
        for kind in self.kinds():
            row_type(kind)
        if self.max_error is not None and not self.max_error > 0:
            raise UserError(
                f"max_table_error is {self.max_error}; give a share of the table's root mean "
                "square above 0, such as 0.01"
            )

    def kinds(self) -> tuple[str, ...]:
        """The types that it names."""
        return (self.default, *self.by_pattern.values())


def choose_types(tables: Sequence[SourceTable], choice: TypeChoice) -> dict[str, RowType]:
    """The type of each table by its name.

    Raises:
        UserError: a pattern that fits no table, a table that its type cannot hold, or a quantized
            table that is asked for in another type or that the backend cannot look up.
    """
    check_patterns("table-dtype", choice.by_pattern, tables)
    return {table.name: _choose(table, choice) for table in tables}


def check_patterns(flag: str, by_pattern: Mapping[str, str], tables: Sequence[SourceTable]) -> None:
    """Refuse a pattern, given by ``flag``, that fits no table."""
    names = [table.name for table in tables]
    for pattern in by_pattern:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(f"{flag} {pattern!r} fits no table; the tables are {', '.join(names)}")


def fitting(by_pattern: Mapping[str, str], table: SourceTable) -> Iterator[str]:
    """What the patterns that fit a table's name stand for, in their order."""
    return (value for pattern, value in by_pattern.items() if fnmatchcase(table.name, pattern))


def _choose(table: SourceTable, choice: TypeChoice) -> RowType:
    if isinstance(table, QuantizedTable):
        return _given(table, choice)
    kind = row_type(next(fitting(choice.by_pattern, table), choice.default))
    if choice.max_error is None:
        return kind
    wider = [
        row_type(name)
        for name in WIDER
        if name in choice.usable and row_type(name).bits > kind.bits
    ]
    for candidate in (kind, *wider):
        if table.dim % candidate.group_columns and candidate is not kind:
            continue
        if measure(table, candidate).relative_rmse <= choice.max_error:
            return candidate
    return row_type("fp32")


def _given(table: QuantizedTable, choice: TypeChoice) -> RowType:
    """The type that a quantized table has, which nothing else may name."""
    kind = table.kind
    others = [name for name in fitting(choice.by_pattern, table) if name != kind.name]
    if others:
        raise UserError(
            f"table {table.name!r} is quantized to {kind.name} already, and table-dtype asks for "
            f"{others[0]}; leave it out, or quantize the table to that"
        )
    if kind.name not in choice.usable:
        raise UserError(
            f"table {table.name!r} is quantized to {kind.name}, which this backend cannot look up; "
            f"quantize it to one of {', '.join(choice.usable)}, or give another --backend"
        )
    return kind
