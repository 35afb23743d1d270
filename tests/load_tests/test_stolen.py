"""What a host takes of a virtual machine's CPUs is read from the kernel's counters."""

import os
from pathlib import Path

import pytest

from tessera.serving.bench.stolen import Stolen


def _stat(path: Path, steal: int, idle: int, other_steal: int) -> None:
    lines = ["cpu  1 1 1 1 1 1 1 99999 5 5"]
    own = os.sched_getaffinity(0)
    lines += [f"cpu{cpu} 10 0 10 {idle} 0 0 0 {steal} 7 0" for cpu in sorted(own)]
    lines += [f"cpu{max(own) + 1} 10 0 10 {idle} 0 0 0 {other_steal} 7 0", "intr 1 2 3"]
    path.write_text("\n".join(lines), encoding="ascii")


def test_the_share_is_that_of_the_cpus_of_this_process_since_the_beginning(tmp_path: Path) -> None:
    path = tmp_path / "stat"
    _stat(path, steal=1000, idle=5000, other_steal=0)
    stolen = Stolen(path)
    assert stolen.share() == 0
    _stat(path, steal=1025, idle=5075, other_steal=900)
    assert stolen.share() == pytest.approx(0.25)


def test_the_kernels_own_counters_are_read() -> None:
    assert 0 <= Stolen().share() <= 1
