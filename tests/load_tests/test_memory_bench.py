"""The memory benchmark reads what the kernel says."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.serving.bench.memory import Memory

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="/proc/PID/smaps_rollup is Linux's"
)


def test_touched_pages_are_seen():
    before = Memory.of(os.getpid())
    size = 64 << 20
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages.write(b"x" * size)
        after = Memory.of(os.getpid())
    # The bytes written come from a temporary of the same size, which may still be resident.
    assert size * 0.9 <= after.rss - before.rss <= size * 2.2
    assert size * 0.9 <= after.anonymous - before.anonymous <= size * 2.2
    assert after.peak_rss >= after.rss * 0.99  # the kernel counts per thread and folds in later
    assert 0 < after.pss <= after.rss


def test_an_ended_process_is_said():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        with pytest.raises(ProcessLookupError):
            Memory.of(process.pid)
