import math

import pytest

from tessera.serving.server.batching.policy import (
    BatchLimits,
    CutNow,
    CutReason,
    LonePass,
    QueueState,
    WaitForRequest,
    WaitUntil,
    decide,
    runs_here,
)

AT_ONCE = BatchLimits(max_samples=8, max_ids=100, max_delay_s=0.0)
WITH_DELAY = BatchLimits(max_samples=8, max_ids=100, max_delay_s=0.5)


def state(**changes):
    fields = {
        "parts": 1,
        "samples": 1,
        "ids": 1,
        "free_workers": 1,
        "oldest": 10.0,
        "earliest_deadline": math.inf,
        "expected_forward_s": 0.125,
        "draining": False,
    }
    return QueueState(**(fields | changes))


@pytest.mark.parametrize(
    ("policy", "changes", "now", "expected"),
    [
        (AT_ONCE, {"parts": 0, "samples": 0, "ids": 0}, 10.0, WaitForRequest()),
        (AT_ONCE, {"free_workers": 0, "samples": 99}, 10.0, WaitForRequest()),
        (AT_ONCE, {}, 10.0, CutNow(CutReason.IDLE)),
        (AT_ONCE, {"samples": 8}, 10.0, CutNow(CutReason.FULL)),
        (AT_ONCE, {"ids": 100}, 10.0, CutNow(CutReason.FULL)),
        (AT_ONCE, {"draining": True}, 10.0, CutNow(CutReason.DRAIN)),
        (AT_ONCE, {"draining": True, "samples": 9}, 10.0, CutNow(CutReason.FULL)),
        (WITH_DELAY, {}, 10.0, WaitUntil(10.5)),
        (WITH_DELAY, {}, 10.4999, WaitUntil(10.5)),
        (WITH_DELAY, {}, 10.5, CutNow(CutReason.DELAY)),
        (WITH_DELAY, {"samples": 7}, 10.1, WaitUntil(10.5)),
        (WITH_DELAY, {"samples": 8}, 10.1, CutNow(CutReason.FULL)),
        (WITH_DELAY, {"draining": True}, 10.1, CutNow(CutReason.DRAIN)),
        # Two passes of 0.125 s must fit before the deadline.
        (WITH_DELAY, {"earliest_deadline": 10.375}, 10.0, WaitUntil(10.125)),
        (WITH_DELAY, {"earliest_deadline": 10.375}, 10.125, CutNow(CutReason.DEADLINE)),
        (WITH_DELAY, {"earliest_deadline": 20.0}, 10.2, WaitUntil(10.5)),
        (WITH_DELAY, {"earliest_deadline": 10.1}, 10.0, CutNow(CutReason.DEADLINE)),
    ],
)
def test_decision(policy, changes, now, expected):
    assert decide(state(**changes), policy, now) == expected


ROOMY = BatchLimits(max_samples=512, max_ids=100_000, max_delay_s=0.0)


@pytest.mark.parametrize(
    ("changes", "here"),
    [
        ({}, True),
        ({"samples": 16, "ids": 1_024, "work_s": 0.0005, "took_s": 0.005, "gap_s": 0.0015}, True),
        ({"samples": 17}, False),
        ({"ids": 1_025}, False),
        ({"work_s": 0.0}, False),  # nothing is known yet
        ({"work_s": 0.0006}, False),
        ({"took_s": 0.006}, False),  # it waits for something
        ({"gap_s": 0.0014}, False),  # others come meanwhile
    ],
)
def test_the_event_loop_computes_short_passes_that_come_one_by_one(changes, here):
    usual = {"samples": 1, "ids": 26, "work_s": 0.0002, "took_s": 0.001, "gap_s": 0.01}
    lone = LonePass(**(usual | changes))
    assert runs_here(lone, ROOMY, draining=False) is here
    assert not runs_here(lone, ROOMY, draining=True)
    assert not runs_here(lone, WITH_DELAY, draining=False)
