"""A limit on CPUs' time: what others use of them does not count, and a process that does not come back ends."""

import subprocess
import sys

import pytest

from tests.patience import PATIENCE_S

_PROGRAM = """
import time
from pathlib import Path
from tessera.serving.package import time_limit

def block():
    {block}

time_limit._GRACE_S = 1.0
limit = time_limit.TimeLimit(seconds=0.5, prefix="", status=7, of_cpu={of_cpu})
with time_limit.limited(limit, Path("model.pt")):
    block()
print("through")
"""
_SLEEP = "time.sleep(1.5)"
_LOOP = "while True:\n        pass"
# Runs for far longer than the limit in one call, during which no other thread of Python runs.
_HOLD = "pow(3, 10**9)"


def ran(block: str, *, of_cpu: bool) -> subprocess.CompletedProcess[str]:
    program = _PROGRAM.format(block=block, of_cpu=of_cpu)
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


def test_a_block_that_waits_for_a_cpu_is_left_alone():
    done = ran(_SLEEP, of_cpu=True)
    assert (done.returncode, done.stdout) == (0, "through\n"), done.stderr


@pytest.mark.parametrize(("block", "of_cpu"), [(_SLEEP, False), (_LOOP, False), (_LOOP, True)])
def test_a_block_that_runs_longer_ends_the_process(block, of_cpu):
    done = ran(block, of_cpu=of_cpu)
    assert (done.returncode, done.stdout) == (7, "")
    assert done.stderr.startswith("package model.pt: its model ran longer than --load-timeout-s")


def test_the_system_ends_a_block_that_lets_no_other_thread_run():
    assert ran(_HOLD, of_cpu=True).returncode == -24  # SIGXCPU
    assert ran(_HOLD, of_cpu=False).returncode == 1  # faulthandler's
