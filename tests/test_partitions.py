"""Engines of partitions: order, bounds, lost processes and errors."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tessera.engines import open_engine
from tessera.errors import UserError
from tessera.partitions import MAX_TRIES, LocalEngine
from tests import REPOSITORY
from tests.patience import PATIENCE_S


@dataclass
class Squares:
    """Squares numbers, ``big`` times; says in a folder what it began, and does what numbers are told to."""

    folder: Path
    deeds: dict
    big: int = 1

    def start(self):
        (self.folder / f"started-{os.getpid()}").touch()
        return self.run

    def run(self, number):
        tries = len(list(self.folder.glob(f"begun-{number}-*")))
        (self.folder / f"begun-{number}-{tries}").touch()
        deed, times = self.deeds.get(number, ("", 0))
        if tries < times:
            if deed == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            raise {"user": UserError("mend it"), "bug": KeyError(number)}[deed]
        return [number * number] * self.big


def squares(engine, folder, numbers, deeds=None, big=1):
    return list(engine.map(Squares(folder, deeds or {}, big), numbers))


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_results_come_in_the_order_of_tasks(tmp_path, processes):
    found = squares(LocalEngine(processes=processes), tmp_path, range(20), big=100_000)
    assert [(task, result[0], len(result)) for task, result in found] == [
        (n, n * n, 100_000) for n in range(20)
    ]
    # Once, before the processes are forked.
    assert [p.name for p in tmp_path.glob("started-*")] == [f"started-{os.getpid()}"]


def test_nothing_is_started_for_nothing_and_no_process_for_one_task(tmp_path):
    assert squares(LocalEngine(processes=2), tmp_path, []) == []
    assert not list(tmp_path.iterdir())
    assert squares(LocalEngine(processes=2), tmp_path, [3]) == [(3, [9])]


def test_a_task_whose_process_was_killed_is_done_again(tmp_path):
    deeds = {3: ("die", MAX_TRIES - 1), 7: ("die", 1)}
    found = squares(LocalEngine(processes=2), tmp_path, range(10), deeds)
    assert found == [(n, [n * n]) for n in range(10)]
    assert len(list(tmp_path.glob("begun-3-*"))) == MAX_TRIES


def test_a_task_that_ends_every_process_is_told_in_one_line(tmp_path):
    with pytest.raises(UserError) as caught:
        squares(LocalEngine(processes=2), tmp_path, range(10), {3: ("die", 9)})
    assert str(caught.value) == (
        "the process that worked on 3 ended 3 times (SIGKILL); if memory was short, ask for fewer"
        " processes or smaller batches"
    )


def test_errors_of_the_work_are_raised_here(tmp_path):
    engine = LocalEngine(processes=2)
    with pytest.raises(UserError, match=r"^mend it$"):
        squares(engine, tmp_path, range(10), {3: ("user", 9)})
    with pytest.raises(RuntimeError, match=r"a process failed at 5:(.|\n)*KeyError: 5"):
        squares(engine, tmp_path, range(10), {5: ("bug", 9)})


def children():
    """The numbers of this process's own, those of earlier tests included."""
    texts = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    return {int(number) for text in texts for number in text.split()}


def test_few_tasks_are_drawn_ahead_and_no_process_is_left(tmp_path):
    drawn = []
    earlier = children()

    def numbers():
        for number in range(1000):
            drawn.append(number)
            yield number

    results = LocalEngine(processes=2).map(Squares(tmp_path, {}), numbers())
    before = threading.active_count()
    for _ in range(5):
        next(results)
    assert len(drawn) <= 5 + 4
    assert threading.active_count() == before
    assert children() > earlier
    results.close()
    assert children() <= earlier


# No `if __name__ == "__main__":` on purpose: a script is not run again by the processes.
_HOLDS_PROCESSES = """
import os
import sys
from tessera.partitions import EachTask, LocalEngine
results = LocalEngine(processes=2).map(EachTask(lambda task: os.getpid()), range(100))
print(*{next(results)[1] for _ in range(20)}, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
def test_processes_end_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "holds_processes.py"
    script.write_text(_HOLDS_PROCESSES)
    with subprocess.Popen(
        [sys.executable, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    ) as parent:
        pids = {int(pid) for pid in parent.stdout.readline().split()}
        assert pids
        assert parent.pid not in pids
        os.kill(parent.pid, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE_S
        while any(map(runs, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(map(runs, pids))


def runs(pid):
    """Whether the process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_wrong_engines_are_refused():
    with pytest.raises(
        UserError, match="engine is 'rai'; give one of local, ray; did you mean ray"
    ):
        open_engine("rai")
    with pytest.raises(UserError, match="the local engine has none"):
        open_engine("local", ray_address="a:1")
