"""Memory of its own for each large table, which is the system's again when the last user lets go of it.

What malloc gives may lie in an arena that keeps it.  Tables with equal contents can share their memory, and one that nobody
uses any more can be found again (`Spare`).
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tessera.kernels.ops import is_built_for
from tessera.serving.package.archive import FileIdentity

_ADVISED_BYTES = 4 << 20
"""What is given back, or left to the system, at once: 0.2 ms of work for the kernel at most."""
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
    _advise(begin, size, _MADV_DONTNEED)
    _LIBC.munmap(begin, size)


def leave_to_system(begin: int, size: int) -> bool:
    """Let the system take the mapping's pages whenever it needs memory, with pauses; False: this one does not do that."""
    return _advise(begin, size, _MADV_FREE)


def _advise(begin: int, size: int, advice: int) -> bool:
    """Give the kernel advice piece by piece; returns whether it takes it.

    Pieces end where huge pages do: the kernel cuts one that is only partly meant into small pages.
    """
    at, end = begin, begin + size
    while at < end:
        if at > begin:
            time.sleep(_ADVISED_PAUSE_S)
        until = min(at - at % _ADVISED_BYTES + _ADVISED_BYTES, end)
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
    """A private mapping of ``size`` bytes at address ``begin`` that ends with the last array over it."""

    def __init__(self, begin: int, size: int, spare: Spare | None) -> None:
        self._size, self._spare = size, spare
        self._told: tuple[FileIdentity, tuple[str, ...]] | None = None
        self._content: KeptContent | None = None  # from the first time on that it was kept
        self.begin = begin

    def tell(self, file: FileIdentity, hashes: tuple[str, ...]) -> None:
        """It has its content from now on, and nobody writes to it."""
        self._told = self._told or (file, hashes)

    def _find_content(self) -> KeptContent | None:
        """What is kept with its memory; None: nothing of use."""
        if self._content is None and self._told is not None and is_built_for("page_marks", "cpu"):
            file, hashes = self._told
            # A tensor over this object would bring it back while it ends.
            memory = (ctypes.c_uint8 * self._size).from_address(self.begin)
            try:
                marks = torch.ops.tessera.page_marks(torch.frombuffer(memory, dtype=torch.uint8))
            except (MemoryError, RuntimeError):  # There is no memory for them.
                return None
            return KeptContent(file=file, hashes=hashes, marks=marks)
        return self._content

    def take_back(self, content: KeptContent) -> bool:
        """Take back from the system what was kept with ``content``; returns whether all of it is there."""
        if not torch.ops.tessera.take_back_pages(_tensor(self), content.marks):
            return False
        self._content = content
        return True

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self._size,),
            "typestr": "|u1",
            "data": (self.begin, False),
            "version": 3,
        }

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Without a beginning, its construction has failed; the process's end gives all of it back at once.
        if not getattr(self, "begin", 0) or is_finalizing():
            return
        if self._spare is None:
            give_back_mapping(self.begin, self._size)
        else:
            self._spare.keep(self.begin, self._size, self._find_content())


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
        return _tensor(mapping)

    def find(self, hashes: tuple[str, ...], file: FileIdentity) -> Tensor | None:
        """The table with these contents that somebody still uses, or that was kept; nobody writes to it.

        Args:
            hashes: see `TableMemory`.
            file: the identity of the file that it would be read from.  A table that nobody uses any more is found only for
                the file that it was read from: one that was written to, or replaced, since then is read again.
        """
        with self._lock:
            mapping = self._known.get(hashes)
        if mapping is None:
            mapping = self._find_kept(hashes, file)
        return None if mapping is None else _tensor(mapping)

    def _find_kept(self, hashes: tuple[str, ...], file: FileIdentity) -> _Mapping | None:
        kept = None if self._spare is None else self._spare.find(file, hashes)
        if kept is None:
            return None
        begin, size, content = kept
        mapping = _Mapping(begin, size, self._spare)
        if not mapping.take_back(content):
            return None  # the memory is the next table's all the same
        with self._lock:
            self._at[begin] = self._known[hashes] = mapping
        return mapping

    def tell(self, hashes: tuple[str, ...], table: Tensor, file: FileIdentity) -> None:
        """``table``, of `new`, was read from ``file``, has its contents, and `find` may give it from now on."""
        with self._lock:
            mapping = self._at[table.data_ptr()]
            self._known[hashes] = mapping
        mapping.tell(file, hashes)


def _tensor(mapping: _Mapping) -> Tensor:
    return torch.from_numpy(np.asarray(mapping))
