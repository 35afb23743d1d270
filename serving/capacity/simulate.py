"""A discrete-event simulation of one server under a load.

A request is sent by the client's thread (where the client shares the CPUs), received by a thread of the network,
waits in the queue, is computed in a batch by a worker or by that thread of the network itself, and is sent and
received again.  `tessera.serving.capacity.policy` says when batches are cut and of what;
`tessera.serving.capacity.processors` which thread has how much of a CPU.  Requests have no deadline and one
priority.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tessera.serving.capacity.model import Costs, Host, Load, QueueLimits
from tessera.serving.capacity.policy import (
    BatchLimits,
    CostModel,
    Cut,
    QueueState,
    WaitUntil,
    decide,
    heavy,
    runs_here,
)
from tessera.serving.capacity.processors import Processors

Array = NDArray[np.float64]
_NETWORK, _WORKER = 0, 1
_WAKES_OF_CALL = 4
"""Times that a thread of the network or of a client may have to be woken for a request."""
_Kind = Literal["client", "loop", "worker", "spare"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What happened to the requests, in the order in which they were due.

    Attributes:
        due_s: ``[N]`` when each was due.
        latency_s: ``[N]`` from then until its answer; NaN where it was refused.
        batch_samples: samples of each batch, in the order in which they were cut.
        used_s: CPU time that server and client used.
        client_used_s: the client's part of it.
        wakes: times that a thread of the server was woken on a CPU that had nothing to do.
        client_wakes: the same of a client's threads.
        cores: CPUs of the host.
        warm_up: requests at the begin that figures leave out.
    """

    due_s: Array
    latency_s: Array
    batch_samples: Array
    used_s: float
    client_used_s: float
    wakes: int
    client_wakes: int
    cores: int
    warm_up: int

    @property
    def server_call_s(self) -> float:
        """CPU time that the server used for a request."""
        return (self.used_s - self.client_used_s) / self.due_s.size

    @property
    def client_call_s(self) -> float:
        """CPU time that a client used for a request."""
        return self.client_used_s / self.due_s.size

    @property
    def measured_s(self) -> Array:
        """Latencies of the answered requests after the warm-up, ``[M]``."""
        latency_s = self.latency_s[self.warm_up :]
        return latency_s[~np.isnan(latency_s)]

    @property
    def refused(self) -> float:
        """Share of the requests after the warm-up that found the queue full."""
        return float(np.isnan(self.latency_s[self.warm_up :]).mean())

    @property
    def throughput(self) -> float:
        """Answers a second, from the first request after the warm-up until the last one was due."""
        begin, end = self.due_s[self.warm_up], self.due_s[-1]
        ends = self.due_s + self.latency_s
        return float(np.count_nonzero((ends >= begin) & (ends < end)) / (end - begin))

    @property
    def offered(self) -> float:
        """Requests a second that came in the time of `throughput`; a few per cent from the load's rate by chance."""
        begin, end = self.due_s[self.warm_up], self.due_s[-1]
        return float((self.due_s.size - self.warm_up - 1) / (end - begin))

    @property
    def utilisation(self) -> float:
        """Share of the CPUs' time that was used, until the last answer."""
        return self.used_s / (self.cores * float(np.nanmax(self.due_s + self.latency_s)))

    def percentile_s(self, percent: float) -> float:
        """The smallest latency that this share of the answers did not exceed; NaN without answers."""
        found = self.measured_s
        if not found.size:
            return math.nan
        return float(np.percentile(found, percent, method="inverted_cdf"))


def simulate(
    host: Host,
    costs: Costs,
    load: Load,
    *,
    limits: BatchLimits | None = None,
    queue_limits: QueueLimits | None = None,
    due_s: Sequence[float] | Array | None = None,
    ratios: Sequence[float] | Array | None = None,
) -> Outcome:
    """Let a server answer ``load``.

    Args:
        host: the server's threads and CPUs.
        costs: what they use.
        load: the requests.
        limits: of batches; ``sharers`` is made of ``host``.
        queue_limits: of the queue.
        due_s: times of the requests, ascending, instead of those drawn from ``load``.
        ratios: for each pass, in turn, by what its usual duration is multiplied; 1 if None.
    """
    random = np.random.default_rng(load.seed)
    if due_s is None:
        due_s = np.cumsum(random.exponential(1 / load.rate, load.requests))
    due = np.asarray(due_s, dtype=np.float64)
    points = np.linspace(0, 1, len(costs.spread_s))
    beyond = np.interp(random.random(due.size + 1), points, costs.spread_s)
    if ratios is None:
        ratios = [1.0]
    late = [0.0]
    costs = costs.at(costs.load_on(host, load.rate, load.samples))
    if costs.late_share > 0 and costs.late_s > 0:
        wakes = _WAKES_OF_CALL * due.size
        is_late = random.random(wakes) < costs.late_share
        late = np.where(is_late, random.exponential(costs.late_s, wakes), 0.0).tolist()
    run = _Run(
        host=host,
        costs=costs,
        samples=load.samples,
        limits=limits or BatchLimits(),
        queue_limits=queue_limits or QueueLimits(),
        due=due.tolist(),
        ratios=np.asarray(ratios, dtype=np.float64).tolist(),
        beyond=beyond.tolist(),
        late=late,
    )
    run.to_the_end()
    return Outcome(
        due_s=due,
        latency_s=np.asarray(run.latency),
        batch_samples=np.asarray(run.batches, dtype=np.float64),
        used_s=run.processors.used_s,
        client_used_s=costs.client_call_s * run.client_items / 2
        + costs.client_wake_s * run.client_wakes,
        wakes=run.wakes,
        client_wakes=run.client_wakes,
        cores=host.cores,
        warm_up=int(load.warm_up * due.size),
    )


class _Thread:
    """A thread: what it is doing, and for one of a client or of the network what it has to do."""

    __slots__ = ("doing", "kind", "queue", "turn", "wait")

    def __init__(self, kind: _Kind) -> None:
        self.kind: _Kind = kind
        self.doing: Any = None  # what it runs; None: it sleeps
        self.queue: deque[tuple[str, int]] = deque()
        self.turn = 0  # of the network: what is left of this turn of the event loop
        self.wait = 0  # of a worker: the number of its wait, for its timer


class _Idle:
    """Workers of one kind that wait: `BatchScheduler::Idle` of the C++ server."""

    def __init__(self) -> None:
        self.threads: list[_Thread] = []  # not notified
        self.waking = 0

    @property
    def count(self) -> int:
        return len(self.threads) + self.waking


class _Run:
    def __init__(
        self,
        *,
        host: Host,
        costs: Costs,
        samples: int,
        limits: BatchLimits,
        queue_limits: QueueLimits,
        due: list[float],
        ratios: list[float],
        beyond: list[float],
        late: list[float],
    ) -> None:
        self.host, self.costs, self.queue_limits = host, costs, queue_limits
        sharers = host.workers + host.spares if host.spares else 1
        self.limits = BatchLimits(
            max_samples=limits.max_samples,
            max_ids=limits.max_ids,
            max_delay_s=limits.max_delay_s,
            sharers=sharers,
        )
        # Each thing that a thread of a client or of the network does is half of a call's.
        self.client_work_s, self.loop_work_s = costs.client_call_s / 2, costs.call_s / 2
        self.samples = samples
        whole, rest = divmod(samples, limits.max_samples)
        self.parts = [limits.max_samples] * whole + [rest] * (rest > 0)
        self.due, self.ratios, self.beyond = due, ratios, beyond
        self.late, self.woken = late, 0
        self.wakes = self.client_wakes = self.client_items = 0
        # When threads of the network and of clients that are late begin, and which.
        self.begins: list[tuple[float, int, _Thread]] = []
        self.latency = [math.nan] * len(due)
        self.missing = [len(self.parts)] * len(due)
        self.batches: list[int] = []
        self.processors: Processors[_Thread] = Processors(host.cores)
        self.clients = [_Thread("client") for _ in range(host.clients)]
        self.loops = [_Thread("loop") for _ in range(host.loops)]
        self.idle = {"worker": _Idle(), "spare": _Idle()}
        self.idle["worker"].threads = [_Thread("worker") for _ in range(host.workers)]
        self.idle["spare"].threads = [_Thread("spare") for _ in range(host.spares)]
        # Request, samples, when it came, whether it is the request's last part.
        self.queue: deque[tuple[int, int, float, bool]] = deque()
        self.queued = QueueState()
        self.queued_requests = 0
        self.model = CostModel()
        self.timers: list[tuple[float, int, _Thread]] = []
        self.waits = 0
        self.usual: dict[int, float] = {}

    def to_the_end(self) -> None:
        """Simulate until every request has been answered or refused."""
        processors, timers, begins = self.processors, self.timers, self.begins
        due = [*self.due, math.inf]
        arrived = 0
        while True:
            arrival_s = due[arrived]
            end_s = processors.next_end_s()
            timer_s = timers[0][0] if timers else math.inf
            begin_s = begins[0][0] if begins else math.inf
            now_s = min(arrival_s, end_s, timer_s, begin_s)
            if now_s == math.inf:
                return
            processors.advance(now_s)
            if end_s == now_s:
                self._ended(processors.finish())
            elif arrival_s == now_s:
                if self.clients:
                    self._give(self.clients[arrived % len(self.clients)], ("send", arrived))
                else:
                    self._give(self._loop(arrived), ("receive", arrived))
                arrived += 1
            elif begin_s == now_s:
                self._begin(heapq.heappop(begins)[2])
            else:
                _, wait, worker = heapq.heappop(timers)
                if worker.wait == wait and worker in self.idle[worker.kind].threads:
                    self._wake(worker)

    def _loop(self, request: int) -> _Thread:
        # A connection stays with its loop.
        own = request % len(self.clients) if self.clients else request
        return self.loops[own % len(self.loops)]

    # Threads of clients and of the network: they do what they are given, in its order.

    def _give(self, thread: _Thread, item: tuple[str, int]) -> None:
        thread.queue.append(item)
        if thread.doing is not None:
            return
        late_s = self.late[self.woken % len(self.late)]
        self.woken += 1
        if late_s > 0:
            thread.doing = ("late", None)
            heapq.heappush(self.begins, (self.processors.now_s + late_s, self.woken, thread))
        else:
            self._begin(thread)

    def _begin(self, thread: _Thread) -> None:
        if not self.processors.idle:
            self._go_on(thread)
        elif thread.kind == "client":
            self.client_wakes += 1
            self._go_on(thread, self.costs.client_wake_s)
        else:
            self.wakes += 1
            self._go_on(thread, self.costs.wake_s)

    def _go_on(self, thread: _Thread, more_s: float = 0.0) -> None:
        """Begin the next item; a turn of an event loop ends when those are done that it began with."""
        queue = thread.queue
        if not queue:
            thread.doing = None
            return
        if thread.kind == "client":
            self.client_items += 1
            work_s = self.client_work_s
        else:
            thread.turn = (thread.turn or len(queue)) - 1
            work_s = self.loop_work_s
        thread.doing = queue.popleft()
        self.processors.start(thread, work_s + more_s, _NETWORK)

    def _ended(self, thread: _Thread) -> None:
        what, content = thread.doing
        if what == "woken":
            self.idle[thread.kind].waking -= 1
            self._next_batch(thread)
            return
        if what == "pass":
            self._deliver(*content)
            if thread.kind == "loop":
                self._go_on(thread)
            else:
                self._next_batch(thread)
            return
        if what == "send":
            self._give(self._loop(content), ("receive", content))
        elif what == "receive":
            self._submit(content)
        elif what == "answer" and self.clients:
            self._give(self.clients[content % len(self.clients)], ("got", content))
        else:
            taken_s = self.processors.now_s - self.due[content] + self.costs.wire_s
            self.latency[content] = taken_s
        if thread.turn == 0 and self.queue and thread.kind == "loop" and self.host.runs_passes:
            if runs_here(self._state(), self.limits):
                self._start_pass(thread, self.limits.max_samples, _NETWORK)
                self._wake_for_queue()
                return
            self._wake_for_queue()
        self._go_on(thread)

    # The queue: BatchScheduler of the C++ server.

    def _state(self, *, spare: bool = False) -> QueueState:
        state = self.queued
        state.parts = len(self.queue)
        state.oldest_s = self.queue[0][2] if self.queue else math.inf
        state.ids = round(state.samples * self.costs.ids_per_sample)
        state.cost = self.model.cost
        state.idle_workers = self.idle["worker"].count
        state.spare = spare
        return state

    def _submit(self, request: int) -> None:
        room = self.queue_limits
        if (
            self.queued_requests >= room.max_requests
            or self.queued.samples + self.samples > room.max_samples
        ):
            return  # refused: no answer, no latency
        now_s, last = self.processors.now_s, len(self.parts) - 1
        self.queue.extend((request, own, now_s, i == last) for i, own in enumerate(self.parts))
        self.queued.samples += self.samples
        self.queued_requests += 1
        if not (self.host.runs_passes and runs_here(self._state(), self.limits)):
            self._wake_for_queue()

    def _wake_for_queue(self) -> None:
        if not self.queue:
            return
        ordinary, spare = self.idle["worker"], self.idle["spare"]
        if ordinary.threads:
            # One at a time is woken, but for heavy work.
            if ordinary.waking == 0 or heavy(self._state()):
                self._wake(ordinary.threads[0])
        elif spare.threads and heavy(self._state()):
            self._wake(spare.threads[0])

    def _wake(self, worker: _Thread) -> None:
        idle = self.idle[worker.kind]
        idle.threads.remove(worker)
        idle.waking += 1
        worker.doing = ("woken", None)
        on_idle = self.processors.idle
        self.wakes += on_idle
        self.processors.start(worker, self.costs.wake_s * on_idle, _WORKER)

    def _next_batch(self, worker: _Thread) -> None:
        decision = decide(
            self._state(spare=worker.kind == "spare"), self.limits, self.processors.now_s
        )
        if isinstance(decision, Cut):
            self._start_pass(worker, decision.samples, _WORKER)
            self._wake_for_queue()
            return
        worker.doing = None
        self.idle[worker.kind].threads.append(worker)
        if isinstance(decision, WaitUntil):
            self.waits += 1
            worker.wait = self.waits
            heapq.heappush(self.timers, (decision.time_s, worker.wait, worker))

    def _start_pass(self, thread: _Thread, max_samples: int, weight: int) -> None:
        requests: list[int] = []
        samples = 0
        while self.queue:
            request, own, _, last = self.queue[0]
            ids = (samples + own) * self.costs.ids_per_sample
            if requests and (samples + own > max_samples or ids > self.limits.max_ids):
                break
            self.queue.popleft()
            samples += own
            requests.append(request)
            self.queued_requests -= last
        self.queued.samples -= samples
        if samples not in self.usual:
            self.usual[samples] = self.costs.pass_s(samples)
        number = len(self.batches)
        took_s = self.usual[samples] * self.ratios[number % len(self.ratios)]
        took_s = max(took_s + self.beyond[number % len(self.beyond)], 0.0)
        self.batches.append(samples)
        thread.doing = ("pass", (requests, samples, took_s))
        self.processors.start(thread, took_s, weight)

    def _deliver(self, requests: list[int], samples: int, took_s: float) -> None:
        self.model.observe(samples, took_s)
        for request in requests:
            # Parts of a large request may be in several batches; the last one to end answers it.
            self.missing[request] -= 1
            if self.missing[request] == 0:
                self._give(self._loop(request), ("answer", request))
