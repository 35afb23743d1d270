"""Memory of its own for each large table, which is the system's again when the last user lets go of it.

What malloc gives may lie in an arena that keeps it.  Tables with equal contents can share their memory.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

_RELEASE_BYTES = 4 << 20
"""What is given back at once: about 0.2 ms of work for the kernel."""
_RELEASE_PAUSE_S = 0.0002

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
_MADV_HUGEPAGE = 14


def give_back_mapping(begin: int, size: int) -> None:
    """Give the mapping of ``size`` bytes at ``begin`` back to the system, with pauses."""
    # munmap of all of it would hold the address space's lock while every page is freed, and threads that map
    # memory would wait.  MADV_DONTNEED frees pages with the lock shared, and leaves munmap the page tables alone.
    for at in range(0, size, _RELEASE_BYTES):
        _LIBC.madvise(begin + at, min(_RELEASE_BYTES, size - at), _MADV_DONTNEED)
        time.sleep(_RELEASE_PAUSE_S)
    _LIBC.munmap(begin, size)


class Spare(Protocol):
    """Mappings that nobody uses, for those who need one of their size; any thread."""

    def take(self, size: int) -> int | None:
        """The address of a mapping of ``size`` bytes with any content; None: there is none."""
        ...

    def keep(self, begin: int, size: int) -> None:
        """Keep a mapping that nobody uses any more."""
        ...


class _Mapping:
    """A private mapping at address ``begin`` that ends with the last array over it."""

    def __init__(self, size: int, spare: Spare | None) -> None:
        self._size, self._spare = size, spare
        taken = None if spare is None else spare.take(size)
        self.begin = _map(size) if taken is None else taken

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
            self._spare.keep(self.begin, self._size)


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
        mapping = _Mapping(size, self._spare)
        with self._lock:
            self._at[mapping.begin] = mapping
        return _tensor(mapping)

    def find(self, hashes: tuple[str, ...]) -> Tensor | None:
        """The table with these contents that somebody still uses; nobody writes to it."""
        with self._lock:
            mapping = self._known.get(hashes)
        return None if mapping is None else _tensor(mapping)

    def tell(self, hashes: tuple[str, ...], table: Tensor) -> None:
        """``table``, of `new`, has its contents, and `find` may give it from now on."""
        with self._lock:
            self._known[hashes] = self._at[table.data_ptr()]


def _tensor(mapping: _Mapping) -> Tensor:
    return torch.from_numpy(np.asarray(mapping))
