"""The simulation's rule of batching: the servers' own, and the C++ server's workers beyond it."""

import math
import random

import pytest

from tessera.serving.capacity.policy import (
    BatchLimits,
    CostModel,
    Cut,
    PassCost,
    QueueState,
    WaitUntil,
    decide,
    heavy,
    runs_here,
)
from tessera.serving.server.batching import policy as served

US = 1e-6


def test_the_rule_is_that_of_tessera_serve():
    draw = random.Random(4)
    seen = set()
    for _ in range(3000):
        parts = draw.choice([0, 1, 3])
        facts = {
            "parts": parts,
            "samples": parts * draw.choice([1, 40]),
            "ids": parts * draw.choice([1, 90]),
        }
        limits = {"max_samples": 100, "max_ids": 200, "max_delay_s": draw.choice([0.0, 0.01])}
        oldest, now = 1.0, draw.choice([1.0, 1.005, 1.01, 1.02])
        ours = decide(QueueState(oldest_s=oldest, **facts), BatchLimits(**limits), now)
        theirs = served.decide(
            served.QueueState(
                free_workers=1,
                oldest=oldest,
                earliest_deadline=math.inf,
                expected_forward_s=0.001,
                draining=False,
                **facts,
            ),
            served.BatchLimits(**limits),
            now,
        )
        seen.add(type(theirs))
        match theirs:
            case served.CutNow():
                assert ours == Cut(100)
            case served.WaitUntil(time):
                assert ours == WaitUntil(time)
            case served.WaitForRequest():
                assert ours is None
    assert len(seen) == 3


# 20 us and 10 us a sample.
COST = PassCost(20 * US, 10 * US)


@pytest.mark.parametrize(
    ("parts", "samples", "expected"),
    [
        (1, 27, False),  # 290 us
        (1, 28, True),  # 300 us
        (6, 29, True),  # 310 us of the CPU, 300 us of the network
        (7, 29, False),  # the network's part is larger
    ],
)
def test_heavy_work(parts, samples, expected):
    assert heavy(QueueState(parts=parts, samples=samples, cost=COST)) is expected


@pytest.mark.parametrize(
    ("samples", "cost", "expected"),
    [
        (100, COST, 50),  # half for each
        (30, COST, 15),
        (28, PassCost(50 * US, 10 * US), 20),  # four times the fixed part
        (100, PassCost(1000 * US, 1 * US), 512),  # the fixed part is nearly all of it
        (1600, COST, 512),  # no more than a batch
        (20, COST, 512),  # not heavy: all of it
    ],
)
def test_shares_of_heavy_work(samples, cost, expected):
    state = QueueState(parts=1, samples=samples, cost=cost)
    assert decide(state, BatchLimits(sharers=2), 0.0) == Cut(expected)
    assert decide(state, BatchLimits(), 0.0) == Cut(512)


def test_spare_workers_take_heavy_work_alone():
    assert decide(QueueState(parts=1, samples=20, cost=COST, spare=True), BatchLimits(), 0) is None
    assert decide(QueueState(parts=1, samples=28, cost=COST, spare=True), BatchLimits(), 0) == Cut(
        512
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),  # 40 us
        ({"samples": 3}, False),
        ({"ids": 1025}, False),
        ({"idle_workers": 0}, False),
        ({"parts": 0}, False),
        ({"cost": PassCost()}, False),
    ],
)
def test_short_passes_run_in_the_loop(change, expected):
    facts = {"parts": 2, "samples": 2, "ids": 1024, "cost": COST, "idle_workers": 1, **change}
    assert runs_here(QueueState(**facts), BatchLimits()) is expected
    assert not runs_here(QueueState(**facts), BatchLimits(max_delay_s=US))


def test_the_cost_model_finds_a_line_and_follows_it():
    model = CostModel()
    for samples in (1, 5, 9, 2):
        model.observe(samples, COST.of(samples))
    assert model.cost.fixed_s == pytest.approx(COST.fixed_s)
    assert model.cost.per_sample_s == pytest.approx(COST.per_sample_s)
    for _ in range(64 * 8):
        model.observe(1, 60 * US)
        model.observe(3, 100 * US)
    assert model.cost.of(2) == pytest.approx(80 * US, rel=0.02)


def test_passes_of_one_size_say_nothing_of_the_slope():
    model = CostModel()
    for _ in range(3):
        model.observe(4, 50 * US)
    assert model.cost.per_sample_s == 0
    assert model.cost.fixed_s == pytest.approx(50 * US)
