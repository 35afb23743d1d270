"""From float32 tables to buffers of stored rows, with what each table lost on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from tessera.cpus import usable_cpus
from tessera.errors import UserError
from tessera.kernels.libraries import LibraryError, load_libraries
from tessera.kernels.row_types import RowType
from tessera.serving.package.manifest import Placement, ShardingPlan, TableInfo
from tessera.serving.packaging.tables.spill import MappedPages
from tessera.serving.packaging.tables.stored import (
    StoredPiece,
    StoredTable,
    StoredTables,
    lay_out,
    views,
)
from tessera.serving.packaging.tables.taken_over import QuantizedTable

_MOST_THREADS = 8

LARGEST_FLOAT32 = torch.finfo(torch.float32).max

_CHUNK_ELEMENTS = 1 << 20  # 4 MiB of float32 at a time: no second copy, and it stays in the cache


@dataclass(frozen=True, kw_only=True)
class FloatTable:
    """A trained table: its name and its weights ``[rows, dim]`` float32."""

    name: str
    weights: Tensor

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.weights.shape[0])

    @property
    def dim(self) -> int:
        """Columns."""
        return int(self.weights.shape[1])


SourceTable: TypeAlias = FloatTable | QuantizedTable
"""A table to be packaged."""


def quantize_tables(
    tables: Sequence[SourceTable],
    kinds: RowType | Mapping[str, RowType],
    *,
    plan: ShardingPlan | None = None,
    for_gpu: bool = False,
    on_rows: Callable[[int], object] = lambda rows: rows,
    allocate: Callable[[int], Tensor] | None = None,
) -> StoredTables:
    """Store every table's rows and measure the difference.

    Memory: the buffers and one chunk beside the float32 tables.  Of tables and buffers that are
    mapped from files, little more than one table's buffer is resident at a time.

    ``kinds`` has the storage type, of all tables or by a table's name; ``plan`` says which piece of
    which table lies in which shard (None: everything in one).  ``for_gpu`` begins each row at a
    multiple of 16 bytes, and keeps scales behind the rows or apart from them, as `scale_lies_beside`
    says.  ``on_rows`` is called with the number of rows after each piece of work; ``allocate``
    makes a shard's buffer, zeros ``[bytes]`` uint8.

    Raises:
        UserError: a table holds a number that the type cannot (not finite, or too large), or a
            width that it cannot (int4 and an odd dimension).
    """
    by_name = {
        table.name: kinds if isinstance(kinds, RowType) else kinds[table.name] for table in tables
    }
    for table in tables:
        check_width(table, by_name[table.name])
    placements = one_device(tables) if plan is None else plan.placements
    pieces, sizes = lay_out(placements, by_name, for_gpu=for_gpu)
    allocate = allocate or partial(torch.zeros, dtype=torch.uint8)
    buffers = tuple(allocate(size) for size in sizes)
    mapped = [MappedPages(buffer) for buffer in buffers]
    stored = []
    for table in tables:
        own = tuple(piece for piece in pieces if piece.placement.table == table.name)
        kind = _fitted(table, by_name[table.name])
        info = _store(table, kind, own, buffers, on_rows)
        for buffer, pages in zip(buffers, mapped, strict=True):
            pages.release(buffer)
        stored.append(StoredTable(info=info, kind=kind, pieces=own))
    return StoredTables(buffers=buffers, tables=tuple(stored), for_gpu=for_gpu)


def one_device(tables: Sequence[SourceTable], *, device: str = "cpu") -> tuple[Placement, ...]:
    """Every table whole in shard 0."""
    return tuple(
        Placement.of(table.name, 0, device, (0, table.rows), (0, table.dim)) for table in tables
    )


def check_width(table: SourceTable, kind: RowType) -> None:
    """Refuse a table whose rows do not fill whole bytes, by a `UserError`."""
    dim, multiple = table.dim, kind.group_columns
    if dim % multiple:
        needs = "an even one" if multiple == 2 else f"a multiple of {multiple}"
        raise UserError(
            f"table {table.name!r} has dimension {dim}; {kind.name} needs {needs}: "
            f"give it another type, such as --table-dtype {table.name}=int8"
        )


def measure(table: SourceTable, kind: RowType) -> TableInfo:
    """What ``kind`` would cost a table, without keeping it; a `UserError` where it cannot hold it."""
    check_width(table, kind)
    return _store(table, _fitted(table, kind), (), (), lambda rows: rows)


def _fitted(table: SourceTable, kind: RowType) -> RowType:
    """The type with what the table's rows share; reads the table only where they share something."""
    if isinstance(table, QuantizedTable):
        return kind
    step = max(1, _CHUNK_ELEMENTS // table.dim)
    pages = MappedPages(table.weights)

    def chunks() -> Iterator[Tensor]:
        for begin in range(0, table.rows, step):
            yield table.weights[begin : begin + step].detach().float()
            # From the first row on: with the next piece the kernel may have mapped the end of the one before again.
            pages.release(table.weights[: begin + step])

    return kind.fitted(chunks())


def _store(
    table: SourceTable,
    kind: RowType,
    pieces: Sequence[StoredPiece],
    buffers: Sequence[Tensor],
    on_rows: Callable[[int], object],
) -> TableInfo:
    if kind.scaled and kind.fbgemm_code is not None:
        # Faster where it is installed; the rows are the same without it.
        with suppress(LibraryError):
            load_libraries(["fbgemm_gpu_py"])
    if kind.book is not None:
        for piece in pieces:
            book = buffers[piece.placement.shard].narrow(0, piece.scale_offset, kind.book_bytes)
            book.copy_(kind.book.view(torch.uint8))
    rows, dim = table.rows, table.dim
    step = max(1, _CHUNK_ELEMENTS // dim)
    read: _ReadRows
    if isinstance(table, QuantizedTable):
        read = lambda begin, end: (table.stored(begin, end), 0.0, 0.0, 0.0)  # noqa: E731
    else:
        read = _encoded(table, kind)

    def store(begin: int) -> tuple[int, float, float, float]:
        """Some rows: their number, largest error, and sums of squares of errors and elements."""
        encoded, largest, error, all_of_them = read(begin, min(begin + step, rows))
        for piece in pieces:
            _write(buffers[piece.placement.shard], piece, kind, begin, encoded)
        return len(encoded), largest, error, all_of_them

    largest_error, squared_error, squared = 0.0, 0.0, 0.0
    with _threads() as pool:
        for count, largest, error, all_of_them in pool.map(store, range(0, rows, step)):
            largest_error = max(largest_error, largest)
            squared_error += error
            squared += all_of_them
            on_rows(count)
    return TableInfo(
        name=table.name,
        rows=rows,
        dim=dim,
        dtype=kind.name,
        bytes=rows * kind.row_bytes(dim),
        bytes_fp32=rows * dim * 4,
        max_abs_error=largest_error,
        rmse=math.sqrt(squared_error / (rows * dim)),
        relative_rmse=math.sqrt(squared_error / squared) if squared > 0 else 0.0,
    )


_ReadRows: TypeAlias = Callable[[int, int], tuple[Tensor, float, float, float]]
"""From the first row and the one after the last to stored rows, and what they lost: the largest
error, and sums of squares of errors and elements."""


def _encoded(table: FloatTable, kind: RowType) -> _ReadRows:
    pages = MappedPages(table.weights)

    def read(begin: int, end: int) -> tuple[Tensor, float, float, float]:
        chunk = table.weights[begin:end].detach().float()
        check_range(table.name, lambda row: begin + row, chunk, kind)
        encoded = kind.encode(chunk)
        error = kind.decode(encoded, table.dim) - chunk
        low, high = error.aminmax()
        largest = max(-low.item(), high.item())
        found = encoded, largest, _sum_of_squares(error), _sum_of_squares(chunk)
        pages.release(table.weights[:end])  # as in `_fitted`
        return found

    return read


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Threads that work on a chunk each, and within it alone.

    torch's own threads would meet at the end of each small step, and wait there for whichever
    does not get a processor.
    """
    before = torch.get_num_threads()
    count = min(usable_cpus(), _MOST_THREADS)
    pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)


def _sum_of_squares(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def _write(buffer: Tensor, piece: StoredPiece, kind: RowType, begin: int, encoded: Tensor) -> None:
    """Put what the piece has of rows ``[begin, begin + len(encoded))`` into its place."""
    at = piece.placement
    first, last = max(begin, at.row_begin), min(begin + len(encoded), at.row_end)
    if first >= last:
        return
    own = kind.take_columns(encoded[first - begin : last - begin], at.column_begin, at.column_end)
    header, data = views(buffer, piece, kind)
    to = slice(first - at.row_begin, last - at.row_begin)
    if kind.scaled:
        header[to] = own[:, : kind.header_bytes]
    data[to] = own[:, kind.header_bytes :]


def check_range(name: str, row_of: Callable[[int], int], chunk: Tensor, kind: RowType) -> None:
    """Refuse rows with a number that ``kind`` cannot store, by a `UserError`.

    ``row_of`` tells which row of the table stands at a place of ``chunk`` ``[n, D]``.
    """
    low, high = chunk.aminmax()  # NaN where one element is
    limit = min(kind.largest, LARGEST_FLOAT32)  # infinity is beyond it
    if low.item() >= -limit and high.item() <= limit:
        return
    bad = ~(chunk.abs() <= limit).all(dim=1)  # written so that a NaN counts
    row = int(bad.nonzero()[0])
    raise UserError(
        f"table {name!r}, row {row_of(row)} holds a number that {kind.name} cannot store "
        f"(not finite, or larger than {kind.largest:g}); the training diverged, or package "
        "with --dtype fp32"
    )
