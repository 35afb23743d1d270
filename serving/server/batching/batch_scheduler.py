"""The batch scheduler of one model: from a checked request to its scores by queue and workers.

Everything here runs on the event loop's thread; only `WorkerPool` has threads of its own.  Short passes run here as
well, where `runs_here` of the policy says so.
The clock is handed in, so that tests own the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from tessera.serving.package.runner import Runner
from tessera.serving.package.schema import InputSchema
from tessera.serving.server.batching.commit_lock import CommitLock
from tessera.serving.server.batching.parts import cut_request, join_outputs
from tessera.serving.server.batching.policy import (
    BatchLimits,
    CutNow,
    CutReason,
    LonePass,
    QueueState,
    WaitUntil,
    decide,
    is_small,
    runs_here,
)
from tessera.serving.server.batching.request_queue import CutBatch, Part, RequestQueue
from tessera.serving.server.batching.workers import BatchOutcome, OwnExecutor, WorkerPool
from tessera.serving.server.config import ModelLimits
from tessera.serving.server.errors import DeadlineError, RejectReason, ServeError
from tessera.serving.server.metrics.model_metrics import ModelMetrics
from tessera.serving.server.request.decoded_request import (
    NO_DEADLINE,
    Answer,
    DecodedRequest,
    PassTimings,
)

_KEEP = 0.8
"""Weight of the past in running means."""
_LONG_GAP_S = 0.01
"""Longer times between requests count as this, so that a burst is soon seen as one."""


class PendingRequest:
    """Collects the parts of one request; its future is what the caller waits for.

    Attributes:
        future: the scores.
        begun: whether a worker has taken a part of the request.
        request: the whole of it.
        parts: all that it was cut into, where commits may come between them.
    """

    __slots__ = (
        "_answers",
        "_dropped",
        "_missing",
        "_queue_seconds",
        "_timings",
        "begun",
        "future",
        "parts",
        "request",
    )

    def __init__(self, future: asyncio.Future[Answer], parts: int, request: DecodedRequest) -> None:
        self.future = future
        self.request = request
        self.parts: list[Part] = []
        self._begin(parts)
        self._queue_seconds = 0.0
        self._dropped = False
        self.begun = False

    def _begin(self, parts: int) -> None:
        self._answers: list[Mapping[str, bytes] | None] = [None] * parts
        self._timings: list[PassTimings] = []
        self._missing = parts

    def is_done(self) -> bool:
        """Whether the request has been answered, refused or cancelled."""
        return self.future.done()

    def drop(self, reason: RejectReason) -> bool:
        """Refuse the request if it still waits; returns whether the scheduler counts the drop."""
        if self._dropped:
            return False
        self._dropped = True
        if not self.future.done():
            assert reason is RejectReason.DEADLINE, reason
            self._refuse_late()
            return False
        return self.future.cancelled()

    def time_out(self) -> None:
        """Refuse the request at its deadline unless a worker has begun to compute it."""
        if not self.begun and not self.future.done():
            self._refuse_late()

    def _refuse_late(self) -> None:
        self.future.set_exception(
            DeadlineError("the deadline passed while the request waited for a worker")
        )

    def add(
        self, index: int, outputs: Mapping[str, bytes], timings: PassTimings, queued: float
    ) -> bool:
        """Take one part's scores; the last one answers the request.

        Returns:
            Whether all parts are to be computed again, together: they have seen different commits.
        """
        self._answers[index] = outputs
        self._timings.append(timings)
        self._queue_seconds = max(self._queue_seconds, queued)
        self._missing -= 1
        if self._missing:
            return False
        if any(one.commit != timings.commit for one in self._timings):
            self._begin(len(self._answers))
            return True
        answers = [answer for answer in self._answers if answer is not None]
        self.future.set_result(
            Answer(join_outputs(answers), self._queue_seconds, _total(self._timings))
        )
        return False


class BatchScheduler:
    """Queues one model's requests, cuts batches and hands them to the workers.

    Args:
        schema: what the model takes and gives.
        runner: the model.
        limits: of the queue, the batches and the workers.
        metrics: where everything is counted.
        loop: the event loop that owns this object.
        log: where failures go.
        clock: seconds, monotonic; the one that deadlines are measured with.
        lock: what passes hold while commits change the model; None: nothing changes it.
        short_passes: whether this thread may run short passes itself.
    """

    def __init__(
        self,
        *,
        schema: InputSchema,
        runner: Runner,
        limits: ModelLimits,
        metrics: ModelMetrics,
        loop: asyncio.AbstractEventLoop,
        log: Any,
        clock: Callable[[], float],
        lock: CommitLock | None = None,
        short_passes: bool = False,
    ) -> None:
        self._schema = schema
        self._metrics = metrics
        self._loop = loop
        self._clock = clock
        self._changes = lock is not None
        self._limits = BatchLimits(
            max_samples=limits.max_batch_samples,
            max_ids=limits.max_batch_ids,
            max_delay_s=limits.max_delay_us / 1e6,
        )
        self._queue = RequestQueue(
            max_requests=limits.max_queue_requests, max_samples=limits.max_queue_samples
        )
        self._free_workers = limits.workers
        self._workers = limits.workers
        self._expected_forward = 0.0
        self._short_work = 0.0
        self._gap = 0.0
        self._last_came = clock()
        self._draining = False
        self._pump_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._pool = WorkerPool(
            schema=schema,
            runner=runner,
            workers=limits.workers,
            threads_per_worker=limits.threads_per_worker,
            niceness=limits.worker_niceness,
            loop=loop,
            deliver=self._deliver,
            log=log,
            lock=lock,
        )
        self._own = OwnExecutor(schema, runner, log) if short_passes else None
        metrics.queue_requests = lambda: self._queue.requests
        metrics.queue_samples = lambda: self._queue.samples
        metrics.inflight_batches = lambda: self._workers - self._free_workers
        metrics.memory_bytes["cpu", "buffers"] = self._buffer_bytes

    def submit(
        self,
        request: DecodedRequest,
        *,
        priority: int,
        deadline: float,
        timeout: float = NO_DEADLINE,
    ) -> asyncio.Future[Answer]:
        """Queue ``request``; cancelling the future takes it out again.

        Args:
            request: checked by `RequestDecoder`.
            priority: higher is served first.
            deadline: seconds of the clock, or `NO_DEADLINE`; the caller cancels the future then.
            timeout: a deadline in the same unit that the scheduler itself enforces.

        Raises:
            DeadlineError: it is too late already.
            QueueFullError: no room.
        """
        now = self._clock()
        gap, self._last_came = min(now - self._last_came, _LONG_GAP_S), now
        self._gap = _KEEP * self._gap + (1 - _KEEP) * gap
        left_to_us = timeout < deadline
        deadline = min(deadline, timeout)
        if now >= deadline:
            raise DeadlineError("the deadline passed before the request was queued")
        requests = cut_request(
            request,
            self._schema,
            max_samples=self._limits.max_samples,
            max_ids=self._limits.max_ids,
        )
        pending = PendingRequest(self._loop.create_future(), len(requests), request)
        parts = [
            Part(each, pending, index, index == len(requests) - 1, now, deadline, priority)
            for index, each in enumerate(requests)
        ]
        if self._changes and len(parts) > 1:
            pending.parts = parts
            pending.future.add_done_callback(lambda _: pending.parts.clear())  # they refer to it
        self._count_dropped(self._queue.push(parts, now))
        self._schedule_pump()
        if left_to_us:
            timer = self._loop.call_later(timeout - now, pending.time_out)
            pending.future.add_done_callback(lambda _: timer.cancel())
        return pending.future

    def is_idle(self) -> bool:
        """Whether a worker is free and nothing waits."""
        return self._free_workers > 0 and not self._draining and len(self._queue) == 0

    def start_draining(self) -> None:
        """Cut batches at once from now on, because no more requests will come."""
        self._draining = True
        self._schedule_pump()

    def close(self, timeout_s: float) -> bool:
        """End the workers after the batches that they hold; blocks for ``timeout_s`` at most; returns whether all have ended."""
        if self._timer is not None:
            self._timer.cancel()
        return self._pool.close(timeout_s)

    def forget(self) -> None:
        """Let go of the model, after `close`; nothing is computed any more."""
        del self._pool, self._own

    def _buffer_bytes(self) -> int:
        own = 0 if self._own is None else self._own.buffer_bytes()
        return own + self._pool.buffer_bytes()

    def _schedule_pump(self) -> None:
        # Not at once: requests that are still received in this turn of the loop can share the batch.
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_scheduled = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while True:
            now = self._clock()
            decision = decide(self._state(), self._limits, now)
            if isinstance(decision, CutNow):
                self._cut(decision.reason, now)
                continue
            if isinstance(decision, WaitUntil):
                self._timer = self._loop.call_later(decision.time - now, self._schedule_pump)
            return

    def _state(self) -> QueueState:
        queue = self._queue
        waits = self._limits.max_delay_s > 0
        return QueueState(
            parts=len(queue),
            samples=queue.samples,
            ids=queue.ids,
            free_workers=max(0, self._free_workers),
            oldest=queue.oldest() if waits else 0.0,
            earliest_deadline=queue.earliest_deadline() if waits else NO_DEADLINE,
            expected_forward_s=self._expected_forward,
            draining=self._draining,
        )

    def _cut(self, reason: CutReason, now: float) -> None:
        cut = self._queue.cut(
            max_samples=self._limits.max_samples, max_ids=self._limits.max_ids, now=now
        )
        self._count_dropped(cut.dropped)
        if cut.parts:
            self._metrics.batches[reason] += 1
            self._free_workers -= 1
            for part in cut.parts:
                _pending(part).begun = True
            if self._own is not None and self._runs_here(cut):
                # Told of as workers tell of theirs, for that may cut the next batch.
                self._loop.call_soon(self._deliver, self._own.execute(cut.parts))
            else:
                self._pool.start_batch(cut.parts)

    def _runs_here(self, cut: CutBatch) -> bool:
        lone = LonePass(
            samples=cut.samples,
            ids=cut.ids,
            work_s=self._short_work,
            took_s=self._expected_forward,
            gap_s=self._gap,
        )
        return runs_here(lone, self._limits, draining=self._draining)

    def _count_dropped(self, dropped: list[RejectReason]) -> None:
        for reason in dropped:
            self._metrics.rejected[reason] += 1

    def _deliver(self, outcome: BatchOutcome) -> None:
        self._free_workers += 1
        # The next batch first: a worker is idle while the answers below are handed out.
        self._pump()
        metrics = self._metrics
        for timings in outcome.passes:
            metrics.observe_pass(timings)
            spent = timings.assemble + timings.forward + timings.split
            self._expected_forward = _mean(self._expected_forward, spent)
        if len(outcome.passes) == 1 and is_small(outcome.passes[0].samples, outcome.passes[0].ids):
            self._short_work = _mean(self._short_work, outcome.work_s)
        metrics.out_of_range_ids += outcome.out_of_range_ids
        waited = metrics.stages["queue"].observe
        rows = zip(outcome.parts, outcome.outcomes, outcome.timings, strict=True)
        for part, result, timings in rows:
            queued = outcome.started - part.arrived
            pending = _pending(part)
            if not outcome.together:
                waited(queued)
            if part.index == 0 and not outcome.together and metrics.feature_counter is not None:
                metrics.feature_counter.take(pending.request)
            if not isinstance(result, ServeError):
                metrics.scores.take(result)
            if pending.future.done():
                continue
            if isinstance(result, ServeError):
                pending.future.set_exception(result)
            elif pending.add(part.index, result, timings, queued):
                # It waits for a worker as a batch does, before what is in the queue.
                self._free_workers -= 1
                self._pool.compute_together(list(pending.parts))


def _mean(past: float, new: float) -> float:
    """A running mean with one more value; nothing was known before where ``past`` is 0."""
    return _KEEP * (past or new) + (1 - _KEEP) * new


def _pending(part: Part) -> PendingRequest:
    assert isinstance(part.owner, PendingRequest)
    return part.owner


def _total(timings: list[PassTimings]) -> PassTimings:
    if len(timings) == 1:
        return timings[0]
    return PassTimings(
        assemble=sum(t.assemble for t in timings),
        transfer=sum(t.transfer for t in timings),
        forward=sum(t.forward for t in timings),
        split=sum(t.split for t in timings),
        requests=max(t.requests for t in timings),
        samples=max(t.samples for t in timings),
        ids=sum(t.ids for t in timings),
        commit=timings[0].commit,
    )
