"""Collectives that are on their way when a program ends."""

import multiprocessing
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tessera.training.distributed.comm import in_flight
from tessera.training.distributed.comm.transport import start_all_to_all
from tests.patience import PATIENCE_S

WORKS = 150


class FakeWork:
    """A work that is over when it is said to be, or when it was waited for."""

    def __init__(self, error=None):
        self.over, self.waited, self.error = False, [], error

    def is_completed(self):
        return self.over

    def wait(self, timeout):
        self.waited.append(timeout)
        if self.error:
            raise self.error
        self.over = True


@pytest.fixture
def works(monkeypatch):
    kept = []
    monkeypatch.setattr(in_flight, "_works", kept)
    return kept


def test_a_work_is_kept_until_it_is_over_and_the_next_begins(works):
    first, second, third = FakeWork(), FakeWork(), FakeWork()
    assert in_flight.kept(first, torch.zeros(1)) is first
    in_flight.kept(second, torch.zeros(1))
    assert works == [first, second]
    first.over = True
    assert works == [first, second]
    in_flight.kept(third, torch.zeros(1))
    assert works == [second, third]


def test_works_of_other_devices_are_left_alone(works):
    in_flight.kept(FakeWork(), torch.zeros(1, device="meta"))
    assert not works


def test_works_that_are_not_over_are_waited_for_and_errors_do_not_matter(works):
    over, broken, last = FakeWork(), FakeWork(RuntimeError("connection closed")), FakeWork()
    for work in (over, broken, last):
        in_flight.kept(work, torch.zeros(1))
    over.over = True
    in_flight.wait_for_works()
    assert not over.waited
    assert len(broken.waited) == len(last.waited) == 1
    assert timedelta() < last.waited[0] <= timedelta(seconds=in_flight.AT_EXIT_S)


def test_there_is_one_limit_for_all(works):
    in_flight.kept(FakeWork(), torch.zeros(1))
    in_flight.wait_for_works(0.0)
    assert not works[0].waited


AT_THE_END = """
import torch
from tessera.training.distributed.comm import in_flight

class Work:
    def is_completed(self):
        return False

    def wait(self, timeout):
        print("waited for", timeout.total_seconds() <= in_flight.AT_EXIT_S)

in_flight.kept(Work(), torch.zeros(1))
"""


def test_a_program_that_just_ends_waits():
    ended = subprocess.run(
        [sys.executable, "-c", AT_THE_END], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "waited for True\n"


ENDS_WITH_A_THREAD_THAT_WAITS_FOR_THE_LOCK = """
import sys
import time

import torch
import torch.distributed as dist

from tessera.training.distributed.comm import in_flight

in_flight.AT_EXIT_S = 30
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
sys.setswitchinterval(60)  # no thread is given the lock until the main thread gives it up
ones = torch.ones(4)
work = dist.all_reduce(ones, async_op=True)
del work
until = time.monotonic() + 0.2
while time.monotonic() < until:
    pass
"""


def test_a_process_ends_well_when_a_thread_of_gloo_still_wants_the_lock(tmp_path):
    """A process aborts each time without `wait_for_threads`, as the collectives of a program itself are not kept."""
    command = [sys.executable, "-c", ENDS_WITH_A_THREAD_THAT_WAITS_FOR_THE_LOCK, tmp_path / "store"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def thread_of_gloo(folder, number, state):
    file = folder / f"{number}"
    file.write_text(f"{number} (a name) with ) {state} 1 1 1")
    return file


def test_the_lock_is_given_up_until_all_threads_are_idle(tmp_path, monkeypatch):
    threads = [thread_of_gloo(tmp_path, 1, "S"), thread_of_gloo(tmp_path, 2, "R")]
    threads.append(tmp_path / "a thread that has ended")
    monkeypatch.setattr(in_flight, "_threads_of_gloo", lambda: threads)
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        states = {3: "S", 4: "D", 6: "S"}
        if len(pauses) in states:
            thread_of_gloo(tmp_path, 2, states[len(pauses)])

    monkeypatch.setattr(in_flight.time, "sleep", pause)
    in_flight.wait_for_threads(PATIENCE_S)
    assert len(pauses) == 7  # idle in the pauses 3, then 6 and 7
    in_flight.wait_for_threads(0.0)
    assert len(pauses) == 7


def test_a_process_without_threads_of_gloo_does_not_pause(monkeypatch):
    monkeypatch.setattr(in_flight, "_threads_of_gloo", list)
    monkeypatch.setattr(in_flight.time, "sleep", lambda _: pytest.fail("it paused"))
    in_flight.wait_for_threads()


def _end_before_the_other(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for _ in range(WORKS):
        start_all_to_all(dist.group.WORLD, torch.ones(4), [2, 2], [2, 2])
        if rank == 1:
            time.sleep(0.003)  # they are over one by one while the other process ends
    in_flight.wait_for_works(PATIENCE_S)


def test_a_process_ends_well_with_collectives_on_their_way(tmp_path):
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_end_before_the_other, args=(rank, str(tmp_path / "store")))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(PATIENCE_S)
    assert [rank.exitcode for rank in ranks] == [0, 0]
