"""The bounded queue of one model, owned by the event loop's thread: it needs no lock.

Order: higher priority first, then arrival.  A request that was cancelled, or whose deadline
passed, is dropped when a batch is cut (or when its place is needed), never computed.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Protocol

from tessera.serving.server.errors import QueueFullError, RejectReason
from tessera.serving.server.request.decoded_request import (
    NO_DEADLINE,
    DecodedRequest,
    ended_by_deadline,
)


class PartOwner(Protocol):
    """The request that a part belongs to, as the queue sees it."""

    def is_done(self) -> bool:
        """Whether its scores are no longer wanted: it was cancelled or has failed."""
        ...

    def drop(self, reason: RejectReason) -> bool:
        """A part was dropped for this reason; the request is refused if it still waits.

        Returns:
            Whether the drop is still to be counted: the request was cancelled, so that its own
            call does not count it, and no other part of it was counted before.
        """
        ...


@dataclass(slots=True, eq=False)
class Part:
    """One piece of work: a request, or a part of a request that was too large for a batch.

    Attributes:
        request: what to compute.
        owner: the request that it belongs to.
        part: which part of the owner's request this is.
        last: whether it is the request's last part.
        arrived: the clock when it came (seconds).
        deadline: the clock when it is too late (seconds), or `NO_DEADLINE`.
        priority: higher is served first.
    """

    request: DecodedRequest
    owner: PartOwner
    index: int
    last: bool
    arrived: float
    deadline: float = NO_DEADLINE
    priority: int = 0


@dataclass(slots=True)
class CutBatch:
    """What one cut took out: a batch, and the drops that are to be counted.

    ``shared`` are the features that parts of the batch share, if any does.
    """

    parts: list[Part] = field(default_factory=list)
    dropped: list[RejectReason] = field(default_factory=list)
    samples: int = 0
    ids: int = 0
    shared: tuple[int, ...] | None = None


class RequestQueue:
    """Parts of requests that wait, in the order in which they are to be computed.

    Args:
        max_requests: requests that may wait, in however many parts: one that may be sent at all fits an
            empty queue.
        max_samples: samples that may wait.

    Attributes:
        requests: those whose last part waits.
        samples: of the parts that wait.
        ids: of the parts that wait.
    """

    def __init__(self, *, max_requests: int, max_samples: int) -> None:
        self._max_requests = max_requests
        self._max_samples = max_samples
        self._heap: list[tuple[int, int, Part]] = []
        self._pushed = 0
        self.requests = 0
        self.samples = 0
        self.ids = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, parts: list[Part], now: float) -> list[RejectReason]:
        """Let all of ``parts``, the parts of one request in their order, wait, or none.

        Returns:
            The drops to count, if parts that need not be computed had to make room.

        Raises:
            QueueFullError: there is no room even without parts that need not be computed.
        """
        samples = sum(part.request.samples for part in parts)
        dropped: list[RejectReason] = []
        if not self._fits(samples):
            dropped = self._purge(now)
            if not self._fits(samples):
                raise QueueFullError(
                    f"the queue is full: {self.requests} requests with {self.samples} samples "
                    f"wait (limits {self._max_requests} and {self._max_samples}), this request "
                    f"brings {samples}; try again later"
                )
        for part in parts:
            heapq.heappush(self._heap, (-part.priority, self._pushed, part))
            self._pushed += 1
            self.samples += part.request.samples
            self.ids += part.request.ids
        self.requests += 1
        return dropped

    def cut(self, *, max_samples: int, max_ids: int, now: float) -> CutBatch:
        """Take the first parts that fit together, dropping those that need not be computed.

        The first part to compute is taken whatever its size, so that none waits for ever.  Parts that
        share other features than those before them do not fit: a batch has one set of them.

        Args:
            max_samples: samples of the batch.
            max_ids: ids of the batch.
            now: the clock (seconds).
        """
        cut = CutBatch()
        while self._heap:
            part = self._heap[0][2]
            request = part.request
            reason = _drop_reason(part, now)
            if reason is None and cut.parts:
                fits = (
                    cut.samples + request.samples <= max_samples
                    and cut.ids + request.ids <= max_ids
                    and (request.shared is None or cut.shared in {None, request.shared.features})
                )
                if not fits:
                    break
            heapq.heappop(self._heap)
            self._forget(part)
            if reason is not None:
                if part.owner.drop(reason):
                    cut.dropped.append(reason)
                continue
            cut.parts.append(part)
            cut.samples += request.samples
            cut.ids += request.ids
            if request.shared is not None:
                cut.shared = request.shared.features
        return cut

    def oldest(self) -> float:
        """When the part that waits longest came; `NO_DEADLINE` when none waits."""
        return min((part.arrived for _, _, part in self._heap), default=NO_DEADLINE)

    def earliest_deadline(self) -> float:
        """The next deadline of a waiting part; `NO_DEADLINE` when there is none."""
        return min((part.deadline for _, _, part in self._heap), default=NO_DEADLINE)

    def _fits(self, samples: int) -> bool:
        return self.requests < self._max_requests and self.samples + samples <= self._max_samples

    def _forget(self, part: Part) -> None:
        self.requests -= part.last
        self.samples -= part.request.samples
        self.ids -= part.request.ids

    def _purge(self, now: float) -> list[RejectReason]:
        kept: list[tuple[int, int, Part]] = []
        dropped: list[RejectReason] = []
        for item in self._heap:
            reason = _drop_reason(item[2], now)
            if reason is None:
                kept.append(item)
                continue
            self._forget(item[2])
            if item[2].owner.drop(reason):
                dropped.append(reason)
        heapq.heapify(kept)
        self._heap = kept
        return dropped


def _drop_reason(part: Part, now: float) -> RejectReason | None:
    if now >= part.deadline:
        return RejectReason.DEADLINE
    if not part.owner.is_done():
        return None
    late = ended_by_deadline(now, part.arrived, part.deadline)
    return RejectReason.DEADLINE if late else RejectReason.CANCELLED
