"""When a batch is cut, and which thread computes it: pure functions.

A free worker takes whatever is queued.  With ``max_delay_us`` above 0 it first waits that long for
more requests, but never so long that a waiting request would miss its deadline.

A short pass of a model whose requests come one by one is computed by the event loop itself (`runs_here`), as
tessera-server does (cpp_server/src/batching/policy.h).  To hand a batch over and its scores back, two threads
wake each other and pass the interpreter's lock four times or more, which takes longer than such a pass.  Where requests
of one model come faster than that, a worker is better: they gather while it computes, and the next pass serves all of
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

SHORT_PASS_S = 0.0005
"""CPU seconds of a pass that the event loop may compute; other calls wait for it as long as for another thread's
turn of the interpreter (`event_loop.SWITCH_INTERVAL_S`)."""
SHORT_PASS_IDS = 1_024
SHORT_PASS_SAMPLES = 16
"""A batch of more ids or samples is not short, whatever smaller ones took."""
WAITING_PASS_S = 0.005
"""A pass that takes so long waits for something else than the interpreter, which the event loop must not do."""
HANDOVER_S = 0.0015
"""What handing a batch to a worker and its scores back takes under load: requests of a model that come faster than this
share batches there."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LonePass:
    """A batch that has just been cut while a worker was free, as `runs_here` looks at it.

    Attributes:
        samples: of the batch.
        ids: of the batch.
        work_s: CPU seconds of passes that were as small, lately; 0: there was none.
        took_s: seconds that passes took lately.
        gap_s: seconds between requests of the model, lately.
    """

    samples: int
    ids: int
    work_s: float
    took_s: float
    gap_s: float


def is_small(samples: int, ids: int) -> bool:
    """Whether a batch may be a short pass."""
    return samples <= SHORT_PASS_SAMPLES and ids <= SHORT_PASS_IDS


def runs_here(lone: LonePass, limits: BatchLimits, *, draining: bool) -> bool:
    """Whether the event loop computes the batch itself, instead of handing it to a worker."""
    if draining or limits.max_delay_s > 0:  # larger batches are wanted
        return False
    if not is_small(lone.samples, lone.ids) or lone.gap_s < HANDOVER_S:
        return False
    return 0 < lone.work_s <= SHORT_PASS_S and lone.took_s <= WAITING_PASS_S
