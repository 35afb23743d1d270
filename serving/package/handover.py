"""The contents of a package that one process has compared with their hashes, handed to another.

They travel in memory that both see, not through the file, which may be replaced meanwhile.  Whoever receives
them takes them piece by piece and gives the room of each piece back at once, so that the contents are there
once at any time.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.kernels.ops import is_built_for
from tessera.serving.package.archive import FileIdentity
from tessera.serving.package.opening import Opening
from tessera.serving.package.pace import Pace
from tessera.serving.package.records import PackageError, Records

_PIECE_BYTES = (
    256 << 10
)  # is copied at once: whoever waits for the CPU waits for no longer than that
_GIVEN_BACK_BYTES = 16 << 20
_PAGE_BYTES = 4096
_PUNCH_HOLE_KEEP_SIZE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, <linux/falloc.h>
_LIBC = ctypes.CDLL(None)
_LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def take_others(
    records: Records, opening: Opening, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Give ``opening`` every record of the file but large tables, compared.

    Raises:
        PackageError: one was changed.
    """
    tables = set(opening.large_tables())
    others = {name: info for name, info in records.manifest().records.items() if name not in tables}
    records.check_some(others, into=opening.into, progress=progress)


class SharedContents:
    """Memory for a package's tables in a file without a name; the `Memory` of the process that checks.

    Args:
        size: bytes of all of them, each rounded up to a page.

    Attributes:
        descriptor: the file's.
        offsets: where each table begins, in the order in which they were asked for.
    """

    def __init__(self, size: int) -> None:
        self.descriptor = os.memfd_create("tessera-package", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, max(size, 1))
        self._memory = mmap.mmap(self.descriptor, max(size, 1))
        self._used = 0
        self.offsets: list[int] = []

    @staticmethod
    def room(size: int) -> int:
        """What a table of ``size`` bytes takes."""
        return -(-size // _PAGE_BYTES) * _PAGE_BYTES

    def new(self, size: int) -> Tensor:
        """``[size]`` uint8 zeros."""
        begin = self._used
        self._used += self.room(size)
        self.offsets.append(begin)
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=begin)

    def find(self, _hashes: tuple[str, ...], _file: FileIdentity) -> Tensor | None:
        """None: every table is checked."""
        return None

    def tell(self, _hashes: tuple[str, ...], _table: Tensor, _file: FileIdentity) -> None:
        """Do nothing: nobody else asks."""


@dataclass(frozen=True, kw_only=True)
class CheckedContents:
    """Large tables that were compared with the hashes of a manifest.

    Attributes:
        descriptor: the file of `SharedContents`; closed by whoever made this object.
        offsets: where each record begins in it, by the record's name.
        manifest_sha256: of the manifest's bytes.
    """

    descriptor: int
    offsets: Mapping[str, int]
    manifest_sha256: str

    def take(
        self,
        records: Records,
        opening: Opening,
        progress: Callable[[int], None] = lambda _: None,
        pace: Pace | None = None,
    ) -> None:
        """Give ``opening`` every record: large tables from here, the others, compared, from the file.

        Args:
            records: the file's.
            opening: where the contents go.
            progress: told the bytes that were taken.
            pace: that of the work; None: it goes on at once.

        Raises:
            PackageError: the file's manifest is another one by now, or a record of it was changed.
        """
        if hashlib.sha256(records.manifest_bytes()).hexdigest() != self.manifest_sha256:
            raise PackageError(records.path, "was changed while it was being loaded; load it again")
        opening.share()
        take_others(records, opening, progress)
        for entry in records.entries:
            begin = self.offsets.get(entry.name)
            if begin is None:
                continue
            if opening.is_shared(entry.name):
                progress(entry.bytes)
                continue
            place = opening.into(entry)
            if place is not None:
                self._copy(begin, place, progress, pace)

    def _copy(
        self, begin: int, place: memoryview, progress: Callable[[int], None], pace: Pace | None
    ) -> None:
        for at in range(0, len(place), _GIVEN_BACK_BYTES):
            piece = place[at : at + _GIVEN_BACK_BYTES]
            self._read(piece, begin + at, pace)
            _LIBC.fallocate(
                self.descriptor, _PUNCH_HOLE_KEEP_SIZE, begin + at, SharedContents.room(len(piece))
            )
            progress(len(piece))

    def _read(self, piece: memoryview, offset: int, pace: Pace | None) -> None:
        if pace is not None and is_built_for("read_aside", "cpu"):
            into = torch.frombuffer(piece, dtype=torch.uint8)
            torch.ops.tessera.read_aside(into, self.descriptor, offset, pace.share)
            return
        done = 0
        while done < len(piece):
            some = piece[done : done + _PIECE_BYTES]
            done += os.preadv(self.descriptor, [some], offset + done)
            if pace is not None:
                pace.rest()
