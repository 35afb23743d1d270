"""A limit on CPUs' time: what others use of them does not count, and a process that does not come back ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from tessera.serving.package import time_limit
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


_TWO_BLOCKS = """
import time
from pathlib import Path
from tessera.serving.package import time_limit

limit = time_limit.TimeLimit(seconds=1.5, prefix="", status=7)
limited = time_limit.limited(limit, Path("model.pt"))
with limited:
    time.sleep({first})
time.sleep({between})
with limited:
    time.sleep({second})
print("through")
"""


def ran(block: str, *, of_cpu: bool) -> subprocess.CompletedProcess[str]:
    return ran_program(_PROGRAM.format(block=block, of_cpu=of_cpu))


def ran_program(program: str) -> subprocess.CompletedProcess[str]:
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


def test_what_passes_between_two_blocks_does_not_count():
    done = ran_program(_TWO_BLOCKS.format(first=0.01, between=2, second=0.01))
    assert (done.returncode, done.stdout) == (0, "through\n"), done.stderr


def test_the_times_of_two_blocks_are_added_up():
    done = ran_program(_TWO_BLOCKS.format(first=1, between=0, second=1))
    assert (done.returncode, done.stdout) == (7, "")
    assert "its model ran longer than --load-timeout-s 1.5 while" in done.stderr


def test_an_error_leaves_a_block_as_it_is():
    limited = time_limit.limited(
        time_limit.TimeLimit(seconds=PATIENCE_S, prefix="", status=7), Path("model.pt")
    )
    for _ in range(2):
        with pytest.raises(ValueError, match="of the block"), limited:
            raise ValueError("of the block")


def test_the_system_ends_a_block_that_lets_no_other_thread_run():
    assert ran(_HOLD, of_cpu=True).returncode == -24  # SIGXCPU
    assert ran(_HOLD, of_cpu=False).returncode == 1  # faulthandler's
