"""When a batch is cut: a pure function of (state, now).

A free worker takes whatever is queued.  With ``max_delay_us`` above 0 it first waits that
long for company, but never so long that a waiting request would miss its deadline.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class CutReason(Enum):
    """Why a batch was cut: the ``reason`` label of ``tessera_batches_total``."""

    FULL = "full"
    DELAY = "delay"
    IDLE = "idle"
    DEADLINE = "deadline"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPolicy:
    """The limits that the decision knows; units are in the names."""

    max_samples: int
    max_ids: int
    max_delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """What the decision looks at.

    Attributes:
        requests: entries that wait.
        samples: their samples.
        ids: their ids.
        free_workers: workers without a batch.
        oldest: the clock when the longest-waiting entry came (seconds).
        earliest_deadline: the clock of the next deadline (seconds).
        expected_forward_s: how long a forward pass took lately (seconds).
        draining: no company will come any more.
    """

    requests: int
    samples: int
    ids: int
    free_workers: int
    oldest: float
    earliest_deadline: float
    expected_forward_s: float
    draining: bool


@dataclass(frozen=True, slots=True)
class CutNow:
    """Cut a batch for this reason."""

    reason: CutReason


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Ask again at this time of the clock (seconds)."""

    time: float


@dataclass(frozen=True, slots=True)
class WaitForEvent:
    """Nothing to do before a request comes or a worker becomes free."""


Decision = CutNow | WaitUntil | WaitForEvent

_FOR_EVENT = WaitForEvent()


def decide(state: QueueState, policy: BatchPolicy, now: float) -> Decision:
    """What to do with the queue at ``now`` (seconds of the clock that filled ``state``)."""
    if state.requests == 0 or state.free_workers == 0:
        return _FOR_EVENT
    if state.samples >= policy.max_samples or state.ids >= policy.max_ids:
        return CutNow(CutReason.FULL)
    if state.draining:
        return CutNow(CutReason.DRAIN)
    if policy.max_delay_s == 0:
        return CutNow(CutReason.IDLE)
    return _wait_for_company(state, policy, now)


def _wait_for_company(state: QueueState, policy: BatchPolicy, now: float) -> Decision:
    company_ends = state.oldest + policy.max_delay_s
    if now >= company_ends:
        return CutNow(CutReason.DELAY)
    # Twice the usual pass: the answer has to travel, and the pass may be slower than usual.
    latest_start = state.earliest_deadline - 2 * state.expected_forward_s
    if now >= latest_start:
        return CutNow(CutReason.DEADLINE)
    return WaitUntil(min(company_ends, latest_start))
