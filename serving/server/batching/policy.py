"""When a batch is cut: a pure function of (state, now).

A free worker takes whatever is queued.  With ``max_delay_us`` above 0 it first waits that long for
more requests, but never so long that a waiting request would miss its deadline.
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
class BatchLimits:
    """The limits that the decision knows; units are in the names."""

    max_samples: int
    max_ids: int
    max_delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """What the decision looks at.

    Attributes:
        parts: requests that wait, or parts of those that are larger than a batch.
        samples: their samples.
        ids: their ids.
        free_workers: workers without a batch.
        oldest: the clock when the part that waits longest came (seconds).
        earliest_deadline: the clock of the next deadline (seconds).
        expected_forward_s: how long a forward pass took lately (seconds).
        draining: no more requests will come.
    """

    parts: int
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
class WaitForRequest:
    """Nothing to do before a request comes or a worker becomes free."""


Decision = CutNow | WaitUntil | WaitForRequest

_WAIT_FOR_REQUEST = WaitForRequest()


def decide(state: QueueState, limits: BatchLimits, now: float) -> Decision:
    """What to do with the queue at ``now`` (seconds of the clock that filled ``state``)."""
    if state.parts == 0 or state.free_workers == 0:
        return _WAIT_FOR_REQUEST
    if state.samples >= limits.max_samples or state.ids >= limits.max_ids:
        return CutNow(CutReason.FULL)
    if state.draining:
        return CutNow(CutReason.DRAIN)
    if limits.max_delay_s == 0:
        return CutNow(CutReason.IDLE)
    return _wait_for_requests(state, limits, now)


def _wait_for_requests(state: QueueState, limits: BatchLimits, now: float) -> Decision:
    delay_ends = state.oldest + limits.max_delay_s
    if now >= delay_ends:
        return CutNow(CutReason.DELAY)
    # Twice the usual pass: the answer has to travel, and the pass may be slower than usual.
    latest_start = state.earliest_deadline - 2 * state.expected_forward_s
    if now >= latest_start:
        return CutNow(CutReason.DEADLINE)
    return WaitUntil(min(delay_ends, latest_start))
