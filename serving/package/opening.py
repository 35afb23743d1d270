"""From a package's file to its module: every byte is read once, hashed on the way, and kept.

What torch opens is not the file but an archive in memory made of the very bytes that were compared with
the manifest, so nothing that happens to the file meanwhile matters.  In that archive the large tables
are stand-ins of a few bytes; the tables themselves are read straight to where they stay.  On a GPU
they go there piece by piece, and the host never holds one.
"""

from __future__ import annotations

import ctypes
import io
import os
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tessera.serving.package.devices import place, shard_of
from tessera.serving.package.layout import ArchiveWriter, Entry
from tessera.serving.package.records import PackageError, Records
from tessera.serving.package.storages import DATA_RECORD, byte_storages, resized
from tessera.serving.package.torchscript import expected_deprecation

LARGE_BYTES = 1 << 20
"""Smaller tables take torch's way."""

_MAX_DATA_BYTES = 64 << 20
_TOKEN_BYTES = 24
_MADV_HUGEPAGE = 14  # <asm-generic/mman-common.h>
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


class Opening:
    """What is kept of a package while `Records.check` reads it, and the module made of that.

    Args:
        records: the package; not checked yet.
        on_host: whether the tables stay in the host's memory.

    Raises:
        PackageError: the record that names the tensors cannot be read.
    """

    def __init__(self, records: Records, *, on_host: bool) -> None:
        self._records = records
        self._on_host = on_host
        self._data = b""
        self._kept: dict[str, bytearray] = {}
        self._tables: dict[str, Tensor | None] = {}
        if DATA_RECORD in records.names:
            self._data = records.read(DATA_RECORD, max_bytes=_MAX_DATA_BYTES)
            self._tables = dict.fromkeys(self._large_tables())

    def _large_tables(self) -> list[str]:
        try:
            keys = byte_storages(self._data)
        except ValueError:
            return []  # torch says what it thinks of it
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
        table = torch.empty(entry.bytes, dtype=torch.uint8)
        _ask_for_huge_pages(table)
        self._tables[entry.name] = table
        return table.numpy().data

    def content(self, name: str) -> bytes:
        """A record that was kept."""
        return bytes(self._kept[name])

    def contents(self) -> dict[str, memoryview]:
        """All that is kept, by name; to be asked for before `module`, which lets go of it."""
        kept = {name: memoryview(content) for name, content in self._kept.items()}
        tables = self._tables.items()
        return kept | {name: table.numpy().data for name, table in tables if table is not None}

    def module(self, devices: Sequence[str]) -> Any:
        """The scripted module on its devices; `Records.check` must have passed.

        Args:
            devices: of shard 0, 1, ...

        Raises:
            PackageError: torch cannot open it, or the file was changed meanwhile.
        """
        tokens = {name: secrets.token_bytes(_TOKEN_BYTES) for name in self._tables}
        module = self._open(tokens)
        self._kept.clear()
        self._put_tables(module, tokens, devices)
        place(module, devices)
        return module

    def without_tables(self) -> tuple[Any, dict[str, int]]:
        """The module for looking at: its large tables are stand-ins.

        Returns:
            The module, and the bytes of each tensor that is not what it seems, by its name.

        Raises:
            PackageError: see `module`.
        """
        tokens = {name: secrets.token_bytes(_TOKEN_BYTES) for name in self._tables}
        module = self._open(tokens)
        bytes_of = {entry.name: entry.bytes for entry in self._records.entries}
        return module, {path: bytes_of[name] for path, name in _stand_ins(module, tokens)}

    def _open(self, tokens: dict[str, bytes]) -> Any:
        if self._tables and self._kept[DATA_RECORD] != self._data:
            raise PackageError(
                self._records.path, "was changed while it was being loaded; load it again"
            )
        try:
            with expected_deprecation():
                return torch.jit.load(  # type: ignore[no-untyped-call] # torch's own has no types
                    self._small_archive(tokens), map_location="cpu"
                )
        except RuntimeError as error:
            raise PackageError(self._records.path, f"torch cannot open it: {error}") from error

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

    def _put_tables(self, module: Any, tokens: dict[str, bytes], devices: Sequence[str]) -> None:
        """Replace each stand-in by its table, wherever the module has it."""
        for path, name in list(_stand_ins(module, tokens)):
            table = self._tables[name]
            if table is None:
                table = self._tables[name] = self._to_device(name, devices[shard_of(path)])
            *parents, last = path.split(".")
            owner = module
            for parent in parents:
                owner = getattr(owner, parent)
            setattr(owner, last, table)

    def _to_device(self, name: str, device: str) -> Tensor:
        entry = next(entry for entry in self._records.entries if entry.name == name)
        table = torch.empty(entry.bytes, dtype=torch.uint8, device=device)
        done = 0
        for piece in self._records.pieces_again(entry):
            part = torch.frombuffer(piece, dtype=torch.uint8)
            table[done : done + len(piece)].copy_(part)
            done += len(piece)
        return table


def _stand_ins(module: Any, tokens: dict[str, bytes]) -> Iterator[tuple[str, str]]:
    """Name in the module and record of every table."""
    names = {token: name for name, token in tokens.items()}
    for path, buffer in module.named_buffers(remove_duplicate=False):
        if buffer.dtype == torch.uint8 and buffer.shape == (_TOKEN_BYTES,):
            name = names.get(buffer.numpy().tobytes())
            if name is not None:
                yield path, name


def _ask_for_huge_pages(table: Tensor) -> None:
    """Fewer page faults now, fewer misses of the TLB in every lookup; the kernel may decline."""
    begin = -(-table.data_ptr() // _PAGE_BYTES) * _PAGE_BYTES
    size = (table.data_ptr() + table.nbytes - begin) // _PAGE_BYTES * _PAGE_BYTES
    if size > 0:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), _MADV_HUGEPAGE)
