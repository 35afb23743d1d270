"""Huge pages for tables on the CPU.

A random row of a table much larger than the caches costs a page walk besides its cache misses;
with 2 MiB pages in place of 4 KiB ones nearly all walks are answered by the processor's own page
cache.  Linux gives such pages to memory that asks for them.
"""

from __future__ import annotations

import ctypes
import sys

from torch import Tensor

_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25  # Linux 6.1: move what is there into huge pages now


_CHUNK_BYTES = 32 << 20  # a chunk that cannot be moved does not stop the others


def use_huge_pages(table: Tensor) -> float:
    """Ask for ``table``'s memory to be held in huge pages, moving what it holds already.

    Args:
        table: a contiguous CPU tensor; only the 2 MiB pages that lie wholly inside are asked for.

    Returns:
        The share of the tensor's bytes that the system moved, 0 to 1.  Less than 1 changes
        nothing but speed: another system, a small tensor, huge pages switched off, or too little
        memory in one piece.
    """
    if not sys.platform.startswith("linux") or table.device.type != "cpu":
        return 0.0
    begin = -(-table.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    end = (table.data_ptr() + table.nbytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if end <= begin or not table.is_contiguous():
        return 0.0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    madvise.restype = ctypes.c_int
    if madvise(begin, end - begin, _MADV_HUGEPAGE) != 0:
        return 0.0
    moved = 0
    for start in range(begin, end, _CHUNK_BYTES):
        size = min(_CHUNK_BYTES, end - start)
        if madvise(start, size, _MADV_COLLAPSE) == 0:
            moved += size
    return moved / table.nbytes
