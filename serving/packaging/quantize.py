"""From float32 tables to one buffer of stored rows, with what each table lost on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.errors import UserError
from tessera.kernels.libraries import load_libraries
from tessera.serving.manifest import TableInfo
from tessera.serving.packaging.weight_types import LARGEST_FLOAT16, WeightType

TABLE_ALIGNMENT_BYTES = 64
"""Every table begins at a multiple of this in the buffer: a cache line."""

_CHUNK_ELEMENTS = 1 << 22  # 16 MiB of float32 at a time, so that no second copy is made


@dataclass(frozen=True, kw_only=True)
class FloatTable:
    """A trained table: its name and its weights ``[rows, dim]`` float32."""

    name: str
    weights: Tensor


@dataclass(frozen=True, kw_only=True)
class StoredTable:
    """Where one table's rows are in the buffer.

    Attributes:
        info: the manifest's entry: name, sizes, type and errors.
        offset: the first row's first byte.
        row_bytes: distance from one row to the next.
    """

    info: TableInfo
    offset: int
    row_bytes: int


@dataclass(frozen=True, kw_only=True)
class StoredTables:
    """All tables of a model in one buffer.

    Attributes:
        data: ``[bytes]`` uint8.
        tables: in the order of the buffer.
        kind: the type of every row.
    """

    data: Tensor
    tables: tuple[StoredTable, ...]
    kind: WeightType

    def table(self, name: str) -> StoredTable:
        """The table called ``name``."""
        return next(table for table in self.tables if table.info.name == name)

    def rows(self, name: str) -> Tensor:
        """The stored rows of a table, ``[rows, row_bytes]`` uint8 (a view)."""
        table = self.table(name)
        stop = table.offset + table.info.bytes
        return self.data[table.offset : stop].view(table.info.rows, table.row_bytes)


def quantize_tables(
    tables: Sequence[FloatTable],
    kind: WeightType,
    *,
    on_rows: Callable[[int], object] = lambda rows: rows,
) -> StoredTables:
    """Store every table's rows as ``kind`` and measure the difference.

    Memory: the buffer and one chunk beside the float32 tables.

    Args:
        tables: the trained tables.
        kind: the storage type.
        on_rows: called with the number of rows after each piece of work.

    Raises:
        UserError: a table holds a number that the type cannot (not finite, or beyond
            float16's range), or a width that it cannot (int4 and an odd dimension).
    """
    if kind.quantized:
        load_libraries(["fbgemm_gpu_py"])
    offsets, total = [], 0
    for table in tables:
        rows, dim = table.weights.shape
        if dim * kind.bits % 8:
            raise UserError(
                f"table {table.name!r} has dimension {dim}; {kind.name} needs an even one: "
                "package with another --dtype"
            )
        offsets.append(total)
        size = rows * kind.row_bytes(dim)
        total += math.ceil(size / TABLE_ALIGNMENT_BYTES) * TABLE_ALIGNMENT_BYTES
    data = torch.zeros(total, dtype=torch.uint8)
    stored = tuple(
        _store(table, kind, data, offset, on_rows)
        for table, offset in zip(tables, offsets, strict=True)
    )
    return StoredTables(data=data, tables=stored, kind=kind)


def _store(
    table: FloatTable,
    kind: WeightType,
    data: Tensor,
    offset: int,
    on_rows: Callable[[int], object],
) -> StoredTable:
    rows, dim = table.weights.shape
    row_bytes = kind.row_bytes(dim)
    target = data[offset : offset + rows * row_bytes].view(rows, row_bytes)
    largest_error, squared_error, squared = 0.0, 0.0, 0.0
    step = max(1, _CHUNK_ELEMENTS // dim)
    for begin in range(0, rows, step):
        chunk = table.weights[begin : begin + step].detach().float()
        _check_range(table.name, begin, chunk, kind)
        encoded = kind.encode(chunk)
        target[begin : begin + step] = encoded
        error = (kind.decode(encoded, dim) - chunk).double()
        largest_error = max(largest_error, error.abs().max().item())
        squared_error += error.square().sum().item()
        squared += chunk.double().square().sum().item()
        on_rows(len(chunk))
    info = TableInfo(
        name=table.name,
        rows=rows,
        dim=dim,
        dtype=kind.name,
        bytes=rows * row_bytes,
        bytes_fp32=rows * dim * 4,
        max_abs_error=largest_error,
        rmse=math.sqrt(squared_error / (rows * dim)),
        relative_rmse=math.sqrt(squared_error / squared) if squared > 0 else 0.0,
    )
    return StoredTable(info=info, offset=offset, row_bytes=row_bytes)


def _check_range(name: str, first_row: int, chunk: Tensor, kind: WeightType) -> None:
    limit = math.inf if kind.name == "fp32" else LARGEST_FLOAT16
    # Written so that a NaN counts; infinity is never below infinity.
    bad = ~((chunk.abs() <= limit) & (chunk.abs() < math.inf)).all(dim=1)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise UserError(
            f"table {name!r}, row {first_row + row} holds a number that {kind.name} cannot store "
            f"(not finite, or larger than {limit:g}); the training diverged, or package with "
            "--dtype fp32"
        )
