"""Memory of its own for each large table, which is the system's again when the last user lets go of it.

What malloc gives may lie in an arena that keeps it.  Tables with equal contents can share their memory, and one that nobody
uses any more can be found again (`Spare`).  Who has tables and does not use them for a while can leave them to the system and
take them back (`TableMemory.lend`).
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tessera.kernels.ops import is_built_for
from tessera.serving.package.archive import FileIdentity

_GIVEN_BYTES = 4 << 20
"""What is given back at once: 0.2 ms of work for the kernel at most."""
_LEFT_BYTES = 32 << 20
"""What is left to the system at once, which takes it less: behind each piece the thread asks for the interpreter's lock."""
_ADVISED_PAUSE_S = 0.0002

_FAILED = ctypes.c_void_p(-1).value
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MADV_DONTNEED = 4  # <asm-generic/mman-common.h>
_MADV_FREE = 8
_MADV_HUGEPAGE = 14


def give_back_mapping(begin: int, size: int) -> None:
    """Give the mapping of ``size`` bytes at ``begin`` back to the system, with pauses."""
    # munmap of all of it would hold the address space's lock while every page is freed, and threads that map
    # memory would wait.  MADV_DONTNEED frees pages with the lock shared, and leaves munmap the page tables alone.
    _advise(begin, size, _MADV_DONTNEED, _GIVEN_BYTES)
    _LIBC.munmap(begin, size)


def leave_to_system(begin: int, size: int) -> bool:
    """Let the system take the mapping's pages whenever it needs memory, with pauses; False: this one does not do that."""
    return _advise(begin, size, _MADV_FREE, _LEFT_BYTES)


def _advise(begin: int, size: int, advice: int, at_once: int) -> bool:
    """Give the kernel advice, ``at_once`` bytes at a time; returns whether it takes it.

    Pieces end where huge pages do: the kernel cuts one that is only partly meant into small pages.
    """
    at, end = begin, begin + size
    while at < end:
        if at > begin:
            time.sleep(_ADVISED_PAUSE_S)
        until = min(at - at % at_once + at_once, end)
        if _LIBC.madvise(at, until - at, advice) != 0:
            return False
        at = until
    return True


@dataclass(frozen=True, kw_only=True)
class KeptContent:
    """What a table had when nobody used it any more.

    Attributes:
        file: the identity of the file that it was read from.
        hashes: those of `RecordInfo.compared`.
        marks: of its mapping's pages, see ``page_marks`` of `tessera.kernels.ops`.
    """

    file: FileIdentity
    hashes: tuple[str, ...]
    marks: Tensor

    def is_of(self, file: FileIdentity, hashes: tuple[str, ...]) -> bool:
        """Whether it is this content of this file."""
        return (self.file, self.hashes) == (file, hashes)


class Spare(Protocol):
    """Mappings that nobody uses, for those who need one of their size, or with its content; any thread."""

    def take(self, size: int) -> int | None:
        """The address of a mapping of ``size`` bytes with any content; None: there is none."""
        ...

    def find(
        self, file: FileIdentity, hashes: tuple[str, ...]
    ) -> tuple[int, int, KeptContent] | None:
        """The address, bytes and content of the mapping that was kept with this content; None: there is none.

        It is the caller's, who looks whether all of the content is still there.
        """
        ...

    def keep(self, begin: int, size: int, content: KeptContent | None) -> None:
        """Keep a mapping that nobody uses any more; ``content`` None: nothing of use."""
        ...


class _Mapping:
    """A private mapping of ``size`` bytes at address ``begin`` that ends with the last array over it.

    Attributes:
        begin: its address.
        size: its bytes.
        users: those that have a table over it.
    """

    def __init__(self, begin: int, size: int, spare: Spare | None) -> None:
        self.size, self._spare = size, spare
        self._told: tuple[FileIdentity, tuple[str, ...]] | None = None
        self._content: KeptContent | None = None  # from the first time on that it was kept
        self.begin = begin
        self.users: weakref.WeakSet[_User] = weakref.WeakSet()

    def table(self) -> Tensor:
        """A table over all of it, of another user."""
        user = _User(self)
        self.users.add(user)
        return torch.from_numpy(np.asarray(user))

    @property
    def hashes(self) -> tuple[str, ...] | None:
        """The hashes of its content, where that was told."""
        return None if self._told is None else self._told[1]

    def tell(self, file: FileIdentity, hashes: tuple[str, ...]) -> None:
        """It has its content from now on, and nobody writes to it."""
        self._told = self._told or (file, hashes)

    def _find_content(self) -> KeptContent | None:
        """What is kept with its memory; None: nothing of use."""
        if self._content is None and self._told is not None and is_built_for("page_marks", "cpu"):
            file, hashes = self._told
            try:
                marks = torch.ops.tessera.page_marks(self._memory())
            except (MemoryError, RuntimeError):  # There is no memory for them.
                return None
            return KeptContent(file=file, hashes=hashes, marks=marks)
        return self._content

    def _memory(self) -> Tensor:
        """All of it; no user, and so it can be had while this object ends."""
        memory = (ctypes.c_uint8 * self.size).from_address(self.begin)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def note(self) -> bool:
        """Find what `take_back` compares; returns whether that could be done."""
        self._content = self._find_content()
        return self._content is not None

    def leave(self) -> bool:
        """Let the system take its pages, behind `note`; False: this system does not do that."""
        return leave_to_system(self.begin, self.size)

    def take_back(self, content: KeptContent | None = None) -> bool:
        """Take back from the system what was kept with ``content``, None: what was noted; returns whether all of it is there."""
        content = content or self._content
        self._content = None
        if content is None or not torch.ops.tessera.take_back_pages(self._memory(), content.marks):
            self._told = None
            return False
        self._content, self._told = content, (content.file, content.hashes)
        return True

    def keep_no_more(self) -> None:
        """Its memory goes back to the system when it ends."""
        self._spare = None

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Without a beginning, its construction has failed; the process's end gives all of it back at once.
        if not getattr(self, "begin", 0) or is_finalizing():
            return
        if self._spare is None:
            give_back_mapping(self.begin, self.size)
        else:
            self._spare.keep(self.begin, self.size, self._find_content())


class _User:
    """What the arrays of one user refer to."""

    def __init__(self, mapping: _Mapping) -> None:
        self._mapping = mapping

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self._mapping.size,),
            "typestr": "|u1",
            "data": (self._mapping.begin, False),
            "version": 3,
        }


def _map(size: int) -> int:
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    begin = _LIBC.mmap(None, size, protection, flags, -1, 0)
    if begin == _FAILED:
        raise MemoryError(f"no memory left for a table of {size} bytes")
    # Fewer page faults now, fewer misses of the TLB in every lookup; the kernel may decline.
    _LIBC.madvise(begin, size, _MADV_HUGEPAGE)
    return int(begin)


class TableMemory:
    """Gives memory for tables; any thread.

    Contents are told apart by hashes: those of `RecordInfo.compared`.

    Args:
        spare: where the memory of tables goes that nobody uses; None: back to the system at once.
    """

    def __init__(self, spare: Spare | None = None) -> None:
        self._spare = spare
        self._lock = threading.Lock()
        self._known: weakref.WeakValueDictionary[tuple[str, ...], _Mapping] = (
            weakref.WeakValueDictionary()
        )
        self._at: weakref.WeakValueDictionary[int, _Mapping] = weakref.WeakValueDictionary()

    def new(self, size: int) -> Tensor:
        """``[size]`` uint8 of any content, in a mapping of its own.

        Raises:
            MemoryError: the system has none left.
        """
        taken = None if self._spare is None else self._spare.take(size)
        mapping = _Mapping(_map(size) if taken is None else taken, size, self._spare)
        with self._lock:
            self._at[mapping.begin] = mapping
            return mapping.table()

    def find(self, hashes: tuple[str, ...], file: FileIdentity) -> Tensor | None:
        """The table with these contents that somebody still uses, or that was kept; nobody writes to it.

        Args:
            hashes: see `TableMemory`.
            file: the identity of the file that it would be read from.  A table that nobody uses any more is found only for
                the file that it was read from: one that was written to, or replaced, since then is read again.
        """
        with self._lock:
            if (mapping := self._known.get(hashes)) is not None:
                return mapping.table()
        return self._find_kept(hashes, file)

    def _find_kept(self, hashes: tuple[str, ...], file: FileIdentity) -> Tensor | None:
        kept = None if self._spare is None else self._spare.find(file, hashes)
        if kept is None:
            return None
        begin, size, content = kept
        mapping = _Mapping(begin, size, self._spare)
        if not mapping.take_back(content):
            return None  # the memory is the next table's all the same
        with self._lock:
            self._at[begin] = self._known[hashes] = mapping
            return mapping.table()

    def tell(self, hashes: tuple[str, ...], table: Tensor, file: FileIdentity) -> None:
        """``table``, of `new`, was read from ``file``, has its contents, and `find` may give it from now on."""
        with self._lock:
            mapping = self._at[table.data_ptr()]
            self._known[hashes] = mapping
        mapping.tell(file, hashes)

    def lend(self, tables: Sequence[Tensor]) -> bool:
        """Let the system take the pages of ``tables``, of `new` or `find`, for as long as nobody needs what they have.

        The caller alone refers to them, nobody reads them before `take_back` has returned True, and `find` gives none of
        them meanwhile.  False: others use one of them too, one has not been told, or this system does not do that; they are as
        they were.
        """
        with self._lock:
            mappings = [self._at[table.data_ptr()] for table in tables]
            if any(len(each.users) != 1 or each.hashes is None for each in mappings):
                return False
            for mapping in mappings:
                if mapping.hashes is not None:
                    self._known.pop(mapping.hashes, None)
        return all(each.note() for each in mappings) and all(each.leave() for each in mappings)

    def take_back(self, tables: Sequence[Tensor]) -> bool:
        """Take back what was lent; False: the system has taken a page, and nobody may use any of ``tables``."""
        mappings = self._lent(tables)
        whole = [each.take_back() for each in mappings]
        if not all(whole):
            return False
        with self._lock:
            for mapping in mappings:
                if mapping.hashes is not None:
                    self._known[mapping.hashes] = mapping
        return True

    def give_up(self, tables: Sequence[Tensor]) -> None:
        """The memory of what was lent is the system's for good once the caller refers to it no more."""
        for mapping in self._lent(tables):
            mapping.keep_no_more()

    def _lent(self, tables: Sequence[Tensor]) -> list[_Mapping]:
        with self._lock:
            return [self._at[table.data_ptr()] for table in tables]
