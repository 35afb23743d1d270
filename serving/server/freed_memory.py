"""Keeps what a pass has freed for the next one.

A pass over long bags frees some megabytes more than the few hundred kB that glibc keeps at the end of an arena, so that each
pass had thousands of page faults, a fifth of its CPU time.  ``cpp_server/src/server/heap_trimmer.h`` has the same setting.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT_BYTES = 32 * 1024 * 1024
_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory() -> None:
    """Keep up to 32 MiB of each arena, and map no block below 32 MiB for itself, in this process and those that it forks.

    glibc's own thresholds grow to that where a block of that size was once freed.  What the environment says of malloc is
    left as it is.
    """
    if any(name in os.environ for name in _SETTINGS):
        return
    with contextlib.suppress(AttributeError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
