from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tessera.errors import UserError
from tessera.training.data.processes import map_in_order
from tests import REPOSITORY
from tests.data import worker_tasks
from tests.patience import PATIENCE_S

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="looks processes up in /proc"
)


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_results_come_in_the_order_of_the_tasks(workers: int) -> None:
    results = map_in_order(worker_tasks.square, range(20), workers=workers)
    assert list(results) == [(number, number * number) for number in range(20)]


def test_the_processes_are_others() -> None:
    pids = {pid for _, pid in map_in_order(worker_tasks.pid_of, range(8), workers=2)}
    assert 1 <= len(pids) <= 2
    assert os.getpid() not in pids


def test_large_tasks_and_results_pass_each_other() -> None:
    # Larger than a pipe, both ways at once.
    tasks = [bytes([number]) * 300_000 for number in range(10)]
    assert [result for _, result in map_in_order(bytes, tasks, workers=2)] == tasks


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_is_raised_in_its_place(workers: int) -> None:
    seen = []
    with pytest.raises(ArithmeticError, match="three"):
        seen.extend(
            number
            for number, _ in map_in_order(worker_tasks.fail_at_three, range(9), workers=workers)
        )
    assert seen == [0, 1, 2]


def test_a_killed_process_is_told_as_such() -> None:
    with pytest.raises(UserError, match=r"workers: process .* ended with status -9"):
        list(map_in_order(worker_tasks.die_at_three, range(9), workers=2))


def test_printing_does_not_get_among_the_results(capfd: pytest.CaptureFixture[str]) -> None:
    results = list(map_in_order(worker_tasks.chatter, range(4), workers=2))
    assert results == [(number, number) for number in range(4)]
    assert capfd.readouterr().out == ""


def test_tasks_are_taken_as_results_are_read() -> None:
    taken = 0

    def tasks() -> Iterator[int]:
        nonlocal taken
        for number in range(100):
            taken += 1
            yield number

    ahead = [taken - read for read, _ in enumerate(map_in_order(abs, tasks(), workers=2), start=1)]
    assert len(ahead) == 100
    assert max(ahead) < 4


@needs_proc
def test_closing_the_iterator_ends_the_processes() -> None:
    results = map_in_order(worker_tasks.pid_of, range(100), workers=2)
    pids = {next(results)[1] for _ in range(10)}
    results.close()
    assert not any(map(runs, pids))


# No `if __name__ == "__main__":` on purpose: a script is not run again by the processes.
_HOLDS_PROCESSES = """
import sys
from tests.data import worker_tasks
from tessera.training.data.processes import map_in_order
results = map_in_order(worker_tasks.pid_of, range(100), workers=2)
print(*{next(results)[1] for _ in range(20)}, flush=True)
sys.stdin.read()
"""


@needs_proc
def test_processes_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "holds_processes.py"
    script.write_text(_HOLDS_PROCESSES)
    with subprocess.Popen(
        [sys.executable, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    ) as parent:
        assert parent.stdout is not None
        pids = {int(pid) for pid in parent.stdout.readline().split()}
        assert pids
        os.kill(parent.pid, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE_S
        while any(map(runs, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(map(runs, pids))


def runs(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
