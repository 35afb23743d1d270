"""The memory benchmark reads what the kernel says."""

import subprocess
import sys
from pathlib import Path

import pytest

from tessera.serving.bench.memory import Memory

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="/proc/PID/smaps_rollup is Linux's"
)


SIZE = 64 << 20
TOUCHES = f"""
import mmap, sys
print("ready", flush=True)
sys.stdin.readline()
pages = mmap.mmap(-1, {SIZE}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for page in range(0, {SIZE}, mmap.PAGESIZE):
    pages[page] = 1
print("touched", flush=True)
sys.stdin.readline()
"""


def test_touched_pages_are_seen():
    # In a process of its own: one that has run other tests may give memory back meanwhile.
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", TOUCHES], stdin=pipe, stdout=pipe, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        before = Memory.of(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "touched\n"
        after = Memory.of(process.pid)
        process.stdin.close()
    assert SIZE * 0.9 <= after.rss - before.rss <= SIZE * 1.2
    assert SIZE * 0.9 <= after.anonymous - before.anonymous <= SIZE * 1.2
    assert after.peak_rss >= after.rss * 0.99  # the kernel counts per thread and folds in later
    assert 0 < after.pss <= after.rss


def test_an_ended_process_is_said():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        with pytest.raises(ProcessLookupError):
            Memory.of(process.pid)
