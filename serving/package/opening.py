"""From a package's file to its module: every byte is read once, hashed on the way, and kept.

The record that names the tensors is read, and compared with its hash, before the others, so that nothing is
parsed that the manifest does not vouch for.  What would run while torch opens the archive is looked at before
(`tessera.serving.package.scripted_source`), and the graph's operators before it is called.

What torch opens is not the file but an archive in memory made of the very bytes that were compared with
the manifest, so nothing that happens to the file meanwhile matters.  In that archive the large tables
are stand-ins of a few bytes; the tables themselves are read straight to where they stay.

Tables for the host are read with everything else.  Those for GPUs are read once the module is open, as only its
stand-ins say to which shard, and so to which GPU, each belongs (`tessera.serving.package.device_tables`): they go
there piece by piece, and the host never holds one.  Nothing of the module is called before they have been compared.
"""

from __future__ import annotations

import functools
import io
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.serving.package.archive import FileIdentity
from tessera.serving.package.device_tables import DeviceTables
from tessera.serving.package.devices import place, shard_of
from tessera.serving.package.layout import ArchiveWriter, Entry
from tessera.serving.package.operators import refusal, refused_operator
from tessera.serving.package.pace import no_rest
from tessera.serving.package.records import PackageError, Records
from tessera.serving.package.scripted_source import check_source
from tessera.serving.package.signed_record import RecordInfo
from tessera.serving.package.storages import (
    CONSTANTS_RECORD,
    DATA_RECORD,
    MAX_PICKLE_BYTES,
    byte_storages,
    resized,
    storage_bytes,
)
from tessera.serving.package.table_memory import TableMemory
from tessera.serving.package.torchscript import expected_deprecation, put_tensor

LARGE_BYTES = 1 << 20
"""Smaller tables take torch's way."""

_RECORDS = re.compile(
    r"(data|constants)(\.pkl|/\d+)|code/[\w./]+\.py|version|byteorder|\.[\w/]+|extra/tessera/(golden\.bin|manifest\.json)"
)
_TOKEN_BYTES = 24


class Memory(Protocol):
    """Where large tables of the host go; see `TableMemory`."""

    def new(self, size: int) -> Tensor:
        """``[size]`` uint8."""
        ...

    def find(self, hashes: tuple[str, ...], file: FileIdentity) -> Tensor | None:
        """A table with these contents, if somebody has one, or had one of this file."""
        ...

    def tell(self, hashes: tuple[str, ...], table: Tensor, file: FileIdentity) -> None:
        """``table``, of `new` and read from ``file``, has these contents."""
        ...


class Opening:
    """What is kept of a package while its records are read, and the module made of that.

    The steps, in their order: `Records.check_some` of `listed_first`, or `Records.check` of all records, reads ``into``
    this object; then come `open`, `read_tables` and `module`.

    Args:
        records: the package; not checked yet.
        on_host: whether the tables stay in the host's memory.
        allow_ops: operators that its graph may call beside those that every package may.
        memory: where large tables go, and where those that are there already are found; None: a memory of
            its own.

    Raises:
        PackageError: names, sizes or checksums of the records are not those of the manifest, or the
            record that names the tensors is missing, was changed, or is not as torch writes it.
    """

    def __init__(
        self,
        records: Records,
        *,
        on_host: bool,
        allow_ops: Collection[str] = (),
        memory: Memory | None = None,
    ) -> None:
        self._memory = memory or TableMemory()
        self._records = records
        self._on_host = on_host
        self._allow_ops = allow_ops
        self._kept: dict[str, bytearray] = {}
        self._tables: dict[str, Tensor | None] = {}
        self._opened: Any = None
        self._places: list[tuple[str, str]] = []  # path in the module and record of each table
        records.check_headers(records.manifest().records)
        for name in sorted(records.names):
            if not _RECORDS.fullmatch(name):
                raise PackageError(records.path, f"record {name!r} is not one that packages have")
        self._data = records.read_checked(DATA_RECORD, max_bytes=MAX_PICKLE_BYTES)
        try:
            self._tables = dict.fromkeys(self._find_large_tables())
            self._check_storages(DATA_RECORD, self._data)
        except ValueError as error:
            raise PackageError(records.path, str(error)) from error

    def _check_storages(self, record: str, content: bytes) -> None:
        """Whether each storage has the bytes that a pickle says; torch believes the pickle.

        Raises:
            ValueError: see `storage_bytes`; or one has others.
        """
        folder = record.removesuffix(".pkl")
        sizes = {entry.name: entry.bytes for entry in self._records.entries}
        for key, expected in storage_bytes(content, record).items():
            found = sizes.get(f"{folder}/{key}")
            if found != expected:
                raise ValueError(
                    f"{record} describes a storage {key!r} of {expected} bytes, and record "
                    f"'{folder}/{key}' {'is missing' if found is None else f'has {found}'}"
                )

    def _check_kept(self) -> None:
        """Refuse what torch would run while it opens the archive, or read past a storage's end."""
        checks: dict[str, Callable[[bytes], None]] = {
            name: functools.partial(check_source, more=self._allow_ops)
            for name in self._kept
            if name.startswith("code/")
        }
        if CONSTANTS_RECORD in self._kept:
            checks[CONSTANTS_RECORD] = functools.partial(self._check_storages, CONSTANTS_RECORD)
        name = ""
        try:
            for name, check in checks.items():
                check(bytes(self._kept[name]))
        except ValueError as error:
            raise PackageError(self._records.path, f"record {name!r}: {error}") from error

    def _find_large_tables(self) -> list[str]:
        keys = byte_storages(self._data)
        large = {entry.name for entry in self._records.entries if entry.bytes >= LARGE_BYTES}
        return sorted(large & {f"data/{key}" for key in keys})

    def into(self, entry: Entry) -> memoryview | None:
        """Where the content of a record is to go; None: it is needed later, from the file."""
        if entry.name not in self._tables:
            content = bytearray(entry.bytes)
            self._kept[entry.name] = content
            return memoryview(content)
        if not self._on_host:
            return None
        table = self._memory.new(entry.bytes)
        self._tables[entry.name] = table
        return table.numpy().data

    def listed_first(self) -> dict[str, RecordInfo]:
        """What the manifest says of the records that `open` needs: all but tables that `read_tables` reads."""
        listed = self._records.manifest().records
        later = () if self._on_host else self._tables
        return {name: info for name, info in listed.items() if name not in later}

    def large_tables(self) -> list[str]:
        """The records that are large tables, in the order of the file."""
        return [entry.name for entry in self._records.entries if entry.name in self._tables]

    def share(self) -> None:
        """Take the large tables from others that have equal ones, or had this file's; `into` is not called for these."""
        listed = self._records.manifest().records
        for name in self._tables if self._on_host else ():
            hashes = listed[name].compared()
            self._tables[name] = self._memory.find(hashes, self._records.identity)

    def tables(self) -> tuple[Tensor, ...]:
        """The large tables that are there."""
        return tuple(table for table in self._tables.values() if table is not None)

    def is_shared(self, name: str) -> bool:
        """Whether the record is a table that `share` has found."""
        return self._tables.get(name) is not None

    def shares_all(self) -> bool:
        """Whether there is no large table, or `share` has found each."""
        return None not in self._tables.values()

    def offer(self) -> None:
        """Let others take the large tables, whose contents have been compared."""
        listed = self._records.manifest().records
        for name, table in self._tables.items():
            if table is not None:
                self._memory.tell(listed[name].compared(), table, self._records.identity)

    def content(self, name: str) -> bytes:
        """A record that was kept."""
        return bytes(self._kept[name])

    def contents(self) -> dict[str, memoryview]:
        """All that is kept, by name; to be asked for before `open`, which lets go of it."""
        kept = {name: memoryview(content) for name, content in self._kept.items()}
        tables = self._tables.items()
        return kept | {name: table.numpy().data for name, table in tables if table is not None}

    def open(self, rest: Callable[[], None] = no_rest) -> None:
        """Let torch open the module, with stand-ins for its large tables; every record of `listed_first` has been compared.

        Args:
            rest: called between steps of some milliseconds, most of which hold the interpreter's lock.

        Raises:
            PackageError: torch cannot open it, or the file was changed meanwhile.
        """
        tokens = {name: secrets.token_bytes(_TOKEN_BYTES) for name in self._tables}
        self._opened = self._open(tokens, rest)
        self._kept.clear()
        self._places = list(_stand_ins(self._opened, tokens))

    def read_tables(
        self, devices: Sequence[str], progress: Callable[[int], None] = lambda _: None
    ) -> None:
        """Read the large tables that are not there yet to their devices, and compare them; `open` has returned.

        Args:
            devices: those of shard 0, 1, ...
            progress: called with the bytes of each part that has been compared, from several threads.

        Raises:
            PackageError: see `DeviceTables.read`.
        """
        missing = {name for name, table in self._tables.items() if table is None}
        if not missing:
            return
        target: dict[str, str] = {}
        for path, name in self._places:
            if name in missing:
                target.setdefault(name, devices[shard_of(path)])
        # A file is whole or not served, also where the module has no place for a table.
        listed = self._records.manifest().records
        unused = missing - target.keys()
        self._records.check_some(
            {name: listed[name] for name in unused}, into=lambda _: None, progress=progress
        )
        self._tables.update(DeviceTables(self._records, target).read(progress))
        for name in unused:
            del self._tables[name]

    def module(self, devices: Sequence[str]) -> Any:
        """The scripted module on its devices; takes `open` and `read_tables` where they have not been taken.

        Args:
            devices: those of shard 0, 1, ...

        Raises:
            PackageError: see `open` and `read_tables`.
        """
        if self._opened is None:
            self.open()
        self.read_tables(devices)
        module, self._opened = self._opened, None
        for path, name in self._places:
            table = self._tables[name]
            assert table is not None, "it was read"
            put_tensor(module, path, table)
        place(module, devices)
        return module

    def without_tables(self) -> tuple[Any, dict[str, int]]:
        """The module for looking at: its large tables are stand-ins.

        Returns:
            The module, and the bytes of each tensor that is not what it seems, by its name.

        Raises:
            PackageError: see `open`.
        """
        tokens = {name: secrets.token_bytes(_TOKEN_BYTES) for name in self._tables}
        module = self._open(tokens)
        bytes_of = {entry.name: entry.bytes for entry in self._records.entries}
        return module, {path: bytes_of[name] for path, name in _stand_ins(module, tokens)}

    def tensor_records(self) -> dict[str, str]:
        """The record of each parameter and buffer of the module, by its name; before `open`.

        It opens the archive once more, with other bytes in the place of the tensors' own, by which each is
        known again.  Left out are tensors without elements, and what is neither a parameter nor a buffer.

        Raises:
            PackageError: see `open`.
        """
        tokens = {name: secrets.token_bytes(_TOKEN_BYTES) for name in self._tables}
        marks: dict[bytes, str] = {token: name for name, token in tokens.items()}
        kept = dict(self._kept)
        try:
            for number, (name, content) in enumerate(kept.items()):
                if name.startswith("data/") and content:
                    mark = (number.to_bytes(8, "little") * -(-len(content) // 8))[: len(content)]
                    # Of one byte there are 256: a package has no more flags than that.
                    marks[mark] = "" if mark in marks else name
                    self._kept[name] = bytearray(mark)
            module = self._open(tokens)
        finally:
            self._kept = kept
        tensors = [*module.named_parameters(), *module.named_buffers(remove_duplicate=False)]
        found = {path: marks.get(storage_memory(tensor).tobytes(), "") for path, tensor in tensors}
        return {path: name for path, name in found.items() if name}

    def _open(self, tokens: dict[str, bytes], rest: Callable[[], None] = no_rest) -> Any:
        if self._tables and self._kept[DATA_RECORD] != self._data:
            raise PackageError(
                self._records.path, "was changed while it was being loaded; load it again"
            )
        self._check_kept()
        rest()
        archive = self._small_archive(tokens)
        rest()
        try:
            with expected_deprecation():
                module = torch.jit.load(archive, map_location="cpu")  # type: ignore[no-untyped-call] # torch's own has no types
        except (RuntimeError, ValueError) as error:
            reason = next(filter(None, map(str.strip, str(error).splitlines())), "no reason given")
            raise PackageError(self._records.path, f"torch cannot open it: {reason}") from error
        rest()
        name = refused_operator(module, self._allow_ops)
        if name is not None:
            raise PackageError(self._records.path, refusal(name))
        return module

    def _small_archive(self, tokens: dict[str, bytes]) -> io.BytesIO:
        """The package with ``tokens`` instead of its large tables, and without extra files."""
        sizes = {name.removeprefix("data/"): len(token) for name, token in tokens.items()}
        archive = io.BytesIO()
        writer = ArchiveWriter(archive)
        for entry in self._records.entries:
            if entry.name.startswith("extra/"):
                continue
            content = tokens.get(entry.name) or bytes(self._kept[entry.name])
            if entry.name == DATA_RECORD and sizes:
                content = resized(content, sizes)
            writer.add(entry.name, [content], len(content))
        writer.finish()
        archive.seek(0)
        return archive


def storage_memory(tensor: Tensor) -> NDArray[np.uint8]:
    """All bytes of the storage of a tensor on the CPU ``[bytes]``, in their place."""
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    found: NDArray[np.uint8] = whole.numpy()
    return found


def _stand_ins(module: Any, tokens: dict[str, bytes]) -> Iterator[tuple[str, str]]:
    """Name in the module and record of every table."""
    names = {token: name for name, token in tokens.items()}
    for path, buffer in module.named_buffers(remove_duplicate=False):
        if buffer.dtype == torch.uint8 and buffer.shape == (_TOKEN_BYTES,):
            name = names.get(buffer.numpy().tobytes())
            if name is not None:
                yield path, name
