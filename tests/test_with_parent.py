"""A child that a test starts ends when the test's process does, and is the program itself."""

import os
import subprocess
import sys
import time
from pathlib import Path

from tests import REPOSITORY, with_parent
from tests.patience import PATIENCE_S

_PARENT = """
import os, sys, time
from tests import with_parent
child = with_parent.start([sys.executable, "-c", "import time; time.sleep(1000)"])
print(child.pid, flush=True)
time.sleep(1000)
"""


def is_running(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_a_child_is_killed_with_its_parent():
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    child = int(parent.stdout.readline())
    # Killed sooner, the launcher itself would see that its parent is another.
    until = time.monotonic() + PATIENCE_S
    while b"sleep" not in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[2]:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert is_running(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    while is_running(child):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_child_whose_parent_ended_before_does_not_begin(tmp_path):
    launcher = [sys.executable, "-I", with_parent.__file__, "1"]  # some other process
    subprocess.run([*launcher, "touch", tmp_path / "begun"], check=True)
    assert not (tmp_path / "begun").exists()


def test_a_child_is_the_program_itself():
    child = with_parent.start(
        [sys.executable, "-c", "import os; print(os.getpid())"], stdout=subprocess.PIPE, text=True
    )
    assert int(child.communicate(timeout=PATIENCE_S)[0]) == child.pid
