"""A program started by `with_parent` is the process that was started, and ends with its parent."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import REPOSITORY, with_parent
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux's kernel does so")

# Starts a program that would run for as long as the tests wait, says its number, and waits.
PARENT = """
import subprocess, sys
from tests import with_parent
child = with_parent.start([sys.executable, "-c", "import time; time.sleep(9999)"])
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_the_process_is_the_program():
    code = "import os, sys; print(os.getpid(), sys.argv[1:]); sys.exit(3)"
    process = with_parent.start(
        [sys.executable, "-c", code, "one", "two words"], stdout=subprocess.PIPE, text=True
    )
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert out == f"{process.pid} ['one', 'two words']\n"
    assert process.returncode == 3


def test_it_is_killed_with_its_parent():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    ) as parent:
        stat = Path(f"/proc/{int(parent.stdout.readline())}/stat")
        assert stat.exists()
        parent.kill()
    deadline = time.monotonic() + PATIENCE_S
    # A process that nobody has waited for yet is in state Z.
    while stat.exists() and ") Z" not in stat.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not stat.exists() or ") Z" in stat.read_text()
