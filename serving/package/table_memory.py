"""Memory of its own for each large table, which is the system's again when the last user lets go of it.

What malloc gives may lie in an arena that keeps it.  Tables with equal contents can share their memory.

Versions that follow each other have tables of the same sizes, and pages that are new to a process are cleared by the
kernel; a virtual machine's host may have to find them first, which takes up to 4.5 ms a huge page, in one piece.
So a server keeps the memory of a table that nobody uses any more for a while, for the next one of its size.  Its pages
are marked with MADV_FREE: the kernel counts them as available and takes them as soon as anybody needs memory, and until then they
count as resident.  What is kept never adds to what is in use: memory that is not taken from it is made only once as much of it,
or all of it, has gone back.  ``cpp_server/src/package/spare_memory.h`` is the same for the other server.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.serving.package.pace import stand_aside

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
_MADV_FREE = 8
_MADV_HUGEPAGE = 14

SPARE_S = 120.0
"""How long a server keeps memory that nobody uses."""


def _give_back(
    begin: int,
    size: int,
    madvise: Callable[[int, int, int], int] = _LIBC.madvise,
    munmap: Callable[[int, int], int] = _LIBC.munmap,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Give a mapping back to the system."""
    # munmap of all of it would hold the address space's lock while every page is freed, and threads that map
    # memory would wait.  MADV_DONTNEED frees pages with the lock shared, and leaves munmap the page tables alone.
    for at in range(0, size, _RELEASE_BYTES):
        madvise(begin + at, min(_RELEASE_BYTES, size - at), _MADV_DONTNEED)
        sleep(_RELEASE_PAUSE_S)
    munmap(begin, size)


class SpareMemory:
    """Mappings that nobody uses, for those who need one of their size; any thread.

    Args:
        keep_s: seconds after which what nobody has taken goes back to the system.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        # A collection of garbage may end a mapping in the midst of `take`, on the same thread.
        self._lock = threading.RLock()
        self._kept: list[tuple[int, int, float]] = []  # where, bytes, until when; the oldest first
        self._giving_back = False

    def take(self, size: int) -> int | None:
        """The address of a mapping of ``size`` bytes with any content.

        None: there is none, and then as many bytes of what was kept have gone back to the system.
        """
        room: list[tuple[int, int]] = []
        with self._lock:
            found = next((kept for kept in self._kept if kept[1] == size), None)
            if found is not None:
                self._kept.remove(found)
                return found[0]
            gone = 0
            while gone < size and self._kept:
                begin, bytes_, _ = self._kept.pop(0)
                room.append((begin, bytes_))
                gone += bytes_
        for begin, bytes_ in room:
            _give_back(begin, bytes_)
        return None

    def keep(self, begin: int, size: int) -> None:
        """Keep a mapping that nobody uses any more."""
        if _LIBC.madvise(begin, size, _MADV_FREE) != 0:  # Linux 4.5
            _give_back(begin, size)
            return
        with self._lock:
            self._kept.append((begin, size, time.monotonic() + self._keep_s))
            if self._giving_back:
                return
            self._giving_back = True
        with contextlib.suppress(RuntimeError):  # the interpreter ends, and so does what is kept
            threading.Thread(target=self._run, name="spare-memory", daemon=True).start()

    def _run(self) -> None:
        """Give back what has been kept for long enough, until nothing is kept."""
        stand_aside()
        while True:
            with self._lock:
                if not self._kept:
                    self._giving_back = False
                    return
                begin, size, until = self._kept[0]
                wait_s = until - time.monotonic()
                if wait_s <= 0:
                    self._kept.pop(0)
            if wait_s > 0:
                time.sleep(wait_s)
            else:
                _give_back(begin, size)


class _Mapping:
    """A private mapping at address ``begin`` that ends with the last array over it."""

    def __init__(self, size: int, spare: SpareMemory | None) -> None:
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

    def __del__(
        self,
        is_finalizing: Callable[[], bool] = sys.is_finalizing,
        give_back: Callable[[int, int], None] = _give_back,
    ) -> None:
        # Without a beginning, its construction has failed; the process's end gives all of it back at once.
        if not getattr(self, "begin", 0) or is_finalizing():
            return
        if self._spare is None:
            give_back(self.begin, self._size)
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

    def __init__(self, spare: SpareMemory | None = None) -> None:
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
