"""Parquet files cut into units: neighbouring row groups that are read at once.

A unit has at least one row group, and more as long as they are small.  Files with row groups too
large to be held are converted before (see `tessera.training.data.table.convert`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tessera.training.data.remote import Location, RemoteFile, arrow_source
from tessera.training.data.string_columns import is_string_type
from tessera.training.data.table.common import DAMAGED, unreadable

UNIT_ROWS = 1 << 16
UNIT_BYTES = 64 << 20
READ_BYTES = 8 << 20
"""Row groups with fewer bytes, encoded but not compressed, are read together with their neighbours."""
GROUP_ROWS = 1 << 20
GROUP_BYTES = 256 << 20
"""A row group with more rows or decoded bytes than this is too large to be held."""

_BYTES_PER_VALUE = 12  # an id of 8 bytes, and a share of what says where its bag ends


@dataclass(frozen=True)
class TableFile:
    """One Parquet file of a table.

    Attributes:
        path: the file that is read.
        source: the file of the user's that it was made of, for messages.
        partitions: the columns that its folders name, with the value that all its rows have.
        metadata: its footer.
        schema: the Arrow types of its columns, those of ``partitions`` too.
    """

    path: Location
    source: Location
    partitions: dict[str, Any]
    metadata: Any = field(compare=False)
    schema: Any = field(compare=False)

    @classmethod
    def open(cls, path: Location, source: Location, partitions: dict[str, Any]) -> TableFile:
        """Read the footer.

        Raises:
            UserError: the file is not a whole Parquet file.
        """
        try:
            with pq.ParquetFile(arrow_source(path)) as found:
                metadata, schema = found.metadata, found.schema_arrow
        except DAMAGED as error:
            raise unreadable(source, error) from error
        for name, value in partitions.items():
            if name in schema.names:
                schema = schema.remove(schema.get_field_index(name))
            schema = schema.append(pa.field(name, _partition_type(value)))
        return cls(path, source, partitions, metadata, schema)

    def decoded_bytes(self, names: Sequence[str]) -> list[int]:
        """About how many bytes the columns take once decoded, for each row group."""
        wanted = set(names)
        places = [
            place
            for place in range(self.metadata.num_columns)
            if self.metadata.schema.column(place).path.split(".", 1)[0] in wanted
            or self.metadata.schema.column(place).path in wanted
        ]
        sizes = []
        for number in range(self.metadata.num_row_groups):
            group = self.metadata.row_group(number)
            sizes.append(_BYTES_PER_VALUE * sum(group.column(p).num_values for p in places))
        return sizes

    def largest_group(self, names: Sequence[str]) -> tuple[int, int]:
        """The rows and the decoded bytes of the largest row groups."""
        groups = range(self.metadata.num_row_groups)
        rows = max((self.metadata.row_group(number).num_rows for number in groups), default=0)
        return rows, max(self.decoded_bytes(names), default=0)

    def groups_of(
        self, groups: Sequence[int], first: int, end: int
    ) -> tuple[Sequence[int], int, int]:
        """Find which of these row groups hold rows ``first`` to ``end - 1``, counted in all of them.

        Returns:
            the numbers of those groups, the number of rows before them, and their number of rows.
        """
        ends = np.cumsum([self.metadata.row_group(number).num_rows for number in groups])
        begin = int(np.searchsorted(ends, first, side="right"))
        last = int(np.searchsorted(ends, end, side="left"))
        before = int(ends[begin - 1]) if begin else 0
        return groups[begin : last + 1], before, int(ends[last]) - before

    def read(self, groups: Sequence[int], names: Sequence[str]) -> Any:
        """The columns ``names`` of these row groups, as an Arrow table; strings as dictionaries.

        Of a local file, row groups of `READ_BYTES` and more are chunks of their own.

        Raises:
            UserError: the file is damaged.
        """
        stored = [name for name in names if name not in self.partitions]
        strings = [name for name in stored if is_string_type(self.schema.field(name).type)]
        try:
            with pq.ParquetFile(
                arrow_source(self.path),
                metadata=self.metadata,
                read_dictionary=strings,
                # Of a remote file neighbouring columns come with one request.
                pre_buffer=isinstance(self.path, RemoteFile),
            ) as found:
                table = _table(found, groups, stored, remote=isinstance(self.path, RemoteFile))
        except DAMAGED as error:
            raise unreadable(self.source, error) from error
        rows = sum(self.metadata.row_group(number).num_rows for number in groups)
        for name in names:
            if name in self.partitions:
                value = self.partitions[name]
                column = pa.repeat(pa.scalar(value, _partition_type(value)), rows)
                if isinstance(value, str):
                    column = column.dictionary_encode()
                table = table.append_column(name, column)
        return table


def _table(file: Any, groups: Sequence[int], names: list[str], *, remote: bool) -> Any:
    if remote:  # which reads all groups with a few requests
        return file.read_row_groups(list(groups), columns=names, use_threads=False)
    # Not all at once: reading large groups into one array, which grows, took up to twice as long.
    return pa.concat_tables(
        [
            file.read_row_groups(some, columns=names, use_threads=False)
            for some in _some_at_once(groups, file.metadata)
        ]
    )


def _some_at_once(groups: Sequence[int], metadata: Any) -> Iterator[list[int]]:
    """Neighbouring groups of at least `READ_BYTES` together."""
    some: list[int] = []
    size = 0
    for group in groups:
        some.append(group)
        size += metadata.row_group(group).total_byte_size
        if size >= READ_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def _partition_type(value: int | str | None) -> Any:
    return pa.string() if isinstance(value, str) else pa.int64()


@dataclass(frozen=True)
class Unit:
    """Row groups that are read at once.

    Attributes:
        file: the number of the file.
        groups: the row groups' numbers in it.
        rows: how many they have.
        first_row: the number of the first of them in the dataset.
        first_in_file: its number in the file.
        decoded_bytes: about what the features of the unit take in memory.
    """

    file: int
    groups: tuple[int, ...]
    rows: int
    first_row: int
    first_in_file: int
    decoded_bytes: int


def cut_units(files: Sequence[TableFile], names: Sequence[str]) -> list[Unit]:
    """The units of all files, in their order; ``names`` are the columns that batches need."""
    units: list[Unit] = []
    first_row = 0
    for number, file in enumerate(files):
        sizes = file.decoded_bytes(names)
        groups: list[int] = []
        rows = in_file = held = 0
        for group, size in enumerate(sizes):
            groups.append(group)
            rows += file.metadata.row_group(group).num_rows
            held += size
            last = group == len(sizes) - 1
            if last or rows >= UNIT_ROWS or held >= UNIT_BYTES:
                if rows:
                    units.append(Unit(number, tuple(groups), rows, first_row, in_file, held))
                first_row += rows
                in_file += rows
                groups, rows, held = [], 0, 0
    return units
