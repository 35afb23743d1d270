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
