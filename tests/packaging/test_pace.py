"""How long work beside answering pauses."""

import os
import threading
import time

import pytest

from tessera.serving.package.pace import (
    ASIDE_NICENESS,
    Pace,
    aside_share,
    load_pace,
    load_share,
    pause_behind,
    stand_aside,
)


def test_a_pause_leaves_the_work_its_share_of_a_cpu():
    assert pause_behind(0.001, 0.001, 0.25) == 0.003
    assert pause_behind(0.001, 0.002, 0.25) == 0.002  # it has waited for something meanwhile
    assert pause_behind(0.00002, 0.00002, 0.25) == 0  # not worth a sleep
    assert pause_behind(1, 1, 0.25) == 0.05


def test_a_piece_that_has_waited_for_a_cpu_is_followed_by_a_pause():
    assert pause_behind(0.001, 0.01, 0.25) == 0.0001
    assert pause_behind(0.0001, 1, 0.25) == 0.0001
    assert pause_behind(0.00009, 1, 0.25) == 0
    assert pause_behind(0.001, 0.00106, 1) == 0.0001
    assert pause_behind(0.001, 0.00104, 1) == 0


def test_the_share_is_a_tenth_of_all_cpus_and_no_more_than_a_third_of_one():
    assert [aside_share(cpus) for cpus in (1, 2, 4, 64)] == pytest.approx([0.1, 0.2, 1 / 3, 1 / 3])


def test_a_load_for_gpus_may_use_more_where_there_are_many_cpus():
    cpus = (1, 2, 4, 7, 8, 10, 64)
    for_cpus = [0.05, 0.1, 1 / 6, 1 / 6, 1 / 6, 1 / 6, 1 / 6]
    assert [load_share("cpu", count) for count in cpus] == pytest.approx(for_cpus)
    for_gpus = [*for_cpus[:4], 0.8, 1.0, 1.0]
    assert [load_share("cuda", count) for count in cpus] == pytest.approx(for_gpus)


def test_the_pace_of_a_load_has_its_share(monkeypatch):
    monkeypatch.setattr("tessera.serving.package.pace._cpus", lambda: 16)
    monkeypatch.setattr("tessera.serving.package.pace._share", lambda: aside_share(16))
    assert load_pace("cpu").share == pytest.approx(1 / 6)
    assert load_pace("cuda").share == pytest.approx(1.0)


def test_a_part_of_the_share(monkeypatch):
    monkeypatch.setattr("tessera.serving.package.pace._share", lambda: 0.2)
    assert (Pace().share, Pace(part=0.25).share) == (0.2, pytest.approx(0.05))


def test_work_pauses(monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    pace = Pace()
    piece = time.thread_time() + 0.001
    while time.thread_time() < piece:
        pass
    pace.rest()
    assert len(pauses) == 1
    assert 0 < pauses[0] <= 0.05


def test_pauses_have_an_end(monkeypatch):
    pauses, seconds = [], [100.0]
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    used = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: used[0])
    pace = Pace(0.5)
    for at in (100.1, 100.49, 100.5, 200.0):
        used[0] += 1.0
        seconds[0] = at
        pace.rest()
    assert len(pauses) == 2


def test_a_thread_stands_aside_and_no_other_does():
    found = []

    def body():
        stand_aside()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found[0] >= ASIDE_NICENESS
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
