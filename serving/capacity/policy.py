"""The rule by which both servers cut batches, for the simulation: a pure function of (state, now).

cpp_server/src/batching/policy.h gives the reasons; its names and constants are kept.  With one sharer and
ordinary workers alone it is the rule of serving/server/batching/policy.py.  Times are in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NETWORK_PER_REQUEST_S = 50e-6
SPARE_BACKLOG_S = 300e-6
SHARE_OVER_FIXED = 4
SHORT_PASS_S = 40e-6
SHORT_PASS_IDS = 1024
_DECAY = 2 ** (-1 / 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """When a batch is full, how long it waits, and between how many workers heavy work is divided."""

    max_samples: int = 512
    max_ids: int = 262_144
    max_delay_s: float = 0.0
    sharers: int = 1


@dataclass(frozen=True, slots=True)
class PassCost:
    """What a pass of ``n`` samples takes: ``fixed_s + n * per_sample_s``, and never less than 0."""

    fixed_s: float = 0.0
    per_sample_s: float = 0.0

    def of(self, samples: int) -> float:
        """The seconds of a pass of ``samples`` samples."""
        return max(self.fixed_s + samples * self.per_sample_s, 0.0)


class CostModel:
    """The line through the passes lately; a pass has lost half of its weight after 64 others."""

    def __init__(self) -> None:
        self._weight = self._n = self._t = self._nn = self._nt = 0.0
        self.cost = PassCost()

    def observe(self, samples: int, took_s: float) -> None:
        """Take a pass of ``samples`` samples into the line."""
        self._weight = self._weight * _DECAY + 1
        self._n = self._n * _DECAY + samples
        self._t = self._t * _DECAY + took_s
        self._nn = self._nn * _DECAY + samples * samples
        self._nt = self._nt * _DECAY + samples * took_s
        mean_n, mean_t = self._n / self._weight, self._t / self._weight
        variance = self._nn / self._weight - mean_n * mean_n
        slope = 0.0
        if variance > 1e-9 * max(mean_n * mean_n, 1.0):
            slope = max((self._nt / self._weight - mean_n * mean_t) / variance, 0.0)
        self.cost = PassCost(mean_t - slope * mean_n, slope)


@dataclass(slots=True, kw_only=True)
class QueueState:
    """What the decision looks at when a worker is free.

    Attributes:
        parts: requests that wait, or parts of those that are larger than a batch.
        samples: their samples.
        ids: their ids.
        oldest_s: the clock when the part that waits longest came.
        cost: of passes lately.
        idle_workers: ordinary workers that wait for requests.
        spare: whether the worker that asks is a spare one.
    """

    parts: int = 0
    samples: int = 0
    ids: int = 0
    oldest_s: float = math.inf
    cost: PassCost = PassCost()
    idle_workers: int = 0
    spare: bool = False


@dataclass(frozen=True, slots=True)
class Cut:
    """Cut a batch of at most ``samples`` samples, but of one part in any case."""

    samples: int


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Ask again at this time of the clock."""

    time_s: float


def heavy(state: QueueState) -> bool:
    """Whether what is queued is worth a spare worker."""
    work_s = state.cost.of(state.samples)
    return work_s >= SPARE_BACKLOG_S and work_s > state.parts * NETWORK_PER_REQUEST_S


def decide(state: QueueState, limits: BatchLimits, now_s: float) -> Cut | WaitUntil | None:
    """What a free worker does with the queue at ``now_s``; None: it waits for a request."""
    if state.parts == 0 or (state.spare and not heavy(state)):
        return None
    full = state.samples >= limits.max_samples or state.ids >= limits.max_ids
    if full or limits.max_delay_s == 0 or now_s >= state.oldest_s + limits.max_delay_s:
        return Cut(_share(state, limits))
    return WaitUntil(state.oldest_s + limits.max_delay_s)


def runs_here(state: QueueState, limits: BatchLimits) -> bool:
    """Whether the event loop that brought the queued requests computes them itself."""
    if state.parts == 0 or state.idle_workers == 0 or limits.max_delay_s > 0:
        return False
    if state.samples > limits.max_samples or state.ids > min(SHORT_PASS_IDS, limits.max_ids):
        return False
    return 0 < state.cost.of(state.samples) <= SHORT_PASS_S


def _share(state: QueueState, limits: BatchLimits) -> int:
    if limits.sharers == 1 or not heavy(state):
        return limits.max_samples
    fixed_s = SHARE_OVER_FIXED * max(state.cost.fixed_s, 0.0)
    # Where passes of one size alone were seen, nothing is known of a smaller one.
    if fixed_s >= state.cost.per_sample_s * limits.max_samples:
        return limits.max_samples
    even = -(-state.samples // limits.sharers)
    return min(max(even, math.ceil(fixed_s / state.cost.per_sample_s)), limits.max_samples)
