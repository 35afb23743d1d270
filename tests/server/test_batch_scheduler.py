"""Queue, policy, workers and answers together, without gRPC; the clock is the test's."""

import asyncio
import io
import json
import math
import threading
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from tessera.serving.server.batching import policy
from tessera.serving.server.batching.batch_scheduler import BatchScheduler
from tessera.serving.server.batching.policy import CutReason
from tessera.serving.server.config import ModelLimits
from tessera.serving.server.errors import (
    Code,
    DeadlineError,
    QueueFullError,
    RejectReason,
    ServeError,
)
from tessera.serving.server.log import make_logger
from tessera.serving.server.metrics.model_metrics import ModelMetrics
from tessera.serving.server.request.decoded_request import NO_DEADLINE
from tessera.serving.server.request.decoder import RequestDecoder
from tests.server.server_harness import FakeRunner, make_schema, random_request, request, scores_of


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Bench:
    """A batch scheduler with a model that can be held."""

    def __init__(self, *, short_passes=False, **limits):
        limits = ModelLimits(**({"workers": 1} | limits))
        self.schema = make_schema()
        self.runner = FakeRunner(self.schema)
        self.metrics = ModelMetrics("m", "1")
        self.clock = Clock()
        self.log = io.StringIO()
        self.decoder = RequestDecoder(self.schema, limits)
        self.scheduler = BatchScheduler(
            schema=self.schema,
            runner=self.runner,
            limits=limits,
            metrics=self.metrics,
            loop=asyncio.get_running_loop(),
            log=make_logger("info", "json", self.log),
            clock=self.clock,
            short_passes=short_passes,
        )

    def submit(self, message, *, priority=0, deadline=NO_DEADLINE):
        decoded = self.decoder.decode(message)
        return self.scheduler.submit(decoded, priority=priority, deadline=deadline)

    async def hold(self):
        """Keep the only worker busy; returns the future of what it works on."""
        self.runner.open.clear()
        held = self.submit(request())
        await asyncio.get_running_loop().run_in_executor(None, self.runner.entered.acquire)
        return held

    def release(self):
        self.runner.open.set()


@asynccontextmanager
async def bench(*, short_passes=False, **limits):
    made = Bench(short_passes=short_passes, **limits)
    try:
        yield made
    finally:
        made.release()
        made.scheduler.close(10)


def run(body):
    asyncio.run(asyncio.wait_for(body(), 60))


def scores(answer):
    return np.frombuffer(answer.outputs["default"], "<f4")


def test_waiting_requests_share_a_batch_and_get_their_own_scores():
    async def body():
        async with bench() as b:
            held = await b.hold()
            rng = np.random.default_rng(0)
            messages = [random_request(rng, B, wide=B % 2 == 0) for B in (1, 3, 1, 4, 2)]
            futures = [b.submit(message) for message in messages]
            assert b.metrics.queue_requests() == 5
            assert b.metrics.queue_samples() == 11
            assert b.metrics.inflight_batches() == 1
            b.release()
            for message, future in zip(messages, futures, strict=True):
                answer = await future
                np.testing.assert_array_equal(scores(answer), scores_of(message))
                pair = np.frombuffer(answer.outputs["pair"], "<f4").reshape(-1, 2)
                np.testing.assert_array_equal(pair[:, 1], -scores_of(message))
                assert answer.timings.requests == 5
                assert answer.timings.samples == 11
            await held
            assert b.runner.batch_sizes == [1, 11]
            assert b.metrics.batches[CutReason.IDLE] == 2
            assert b.metrics.batch_samples.sum == 12
            assert b.metrics.queue_requests() == b.metrics.inflight_batches() == 0

    run(body)


def test_workers_set_their_own_thread_count():
    async def body():
        async with bench(workers=2, threads_per_worker=1) as b:
            await asyncio.gather(*[b.submit(request()) for _ in range(4)])
            assert {count for _, count in b.runner.threads} == {1}
            assert all(name.startswith("worker-") for name, _ in b.runner.threads)

    run(body)


LOOP = threading.current_thread().name


async def one_by_one(b, messages):
    """The answers to ``messages``, each of which comes 20 ms of the clock after the one before."""
    answers = []
    for message in messages:
        b.clock.now += 0.02
        answers.append(await b.submit(message))
    return answers


def places(b):
    """Which threads have computed since this was last asked."""
    names = {name for name, _ in b.runner.threads}
    b.runner.threads.clear()
    return names


def test_short_passes_run_on_the_event_loop_where_requests_come_one_by_one(monkeypatch):
    # However busy the machine is, each of these passes is short.
    monkeypatch.setattr(policy, "SHORT_PASS_S", 60.0)
    monkeypatch.setattr(policy, "WAITING_PASS_S", 60.0)

    async def body():
        async with bench(short_passes=True) as b:
            rng = np.random.default_rng(0)
            messages = [random_request(rng, B, wide=B % 2 == 0) for B in (1, 2, 3, 1, 4) * 4]
            for message, answer in zip(messages, await one_by_one(b, messages), strict=True):
                np.testing.assert_array_equal(scores(answer), scores_of(message))
                assert answer.timings.requests == 1
            assert LOOP in places(b)
            await one_by_one(b, messages[:2])
            assert places(b) == {LOOP}
            assert b.metrics.batches[CutReason.IDLE] == len(messages) + 2
            assert b.metrics.inflight_batches() == 0
            # A large one is a worker's, and so are those that come faster than a worker takes them over.
            await one_by_one(b, [random_request(rng, 17)])
            assert places(b) == {"worker-0"}
            for _ in range(20):
                await b.submit(request())
            places(b)
            await b.submit(request())
            assert places(b) == {"worker-0"}
            await one_by_one(b, messages)
            assert LOOP in places(b)
            b.scheduler.start_draining()
            await one_by_one(b, messages[:1])
            assert places(b) == {"worker-0"}

    run(body)


def test_passes_that_are_not_short_stay_with_the_workers(monkeypatch):
    monkeypatch.setattr(policy, "SHORT_PASS_S", 0.0)

    async def body():
        async with bench(short_passes=True) as b:
            await one_by_one(b, [request()] * 8)
            assert places(b) == {"worker-0"}

    run(body)


def test_a_request_that_fails_on_the_event_loop_fails_alone(monkeypatch):
    monkeypatch.setattr(policy, "SHORT_PASS_S", 60.0)
    monkeypatch.setattr(policy, "WAITING_PASS_S", 60.0)

    async def body():
        async with bench(short_passes=True) as b:
            await one_by_one(b, [request()] * 8)
            places(b)
            b.runner.fails_on = {9}
            b.clock.now += 0.02
            good, bad = b.submit(request()), b.submit(request(first_id=7))
            assert scores(await good).size == 1
            with pytest.raises(ServeError) as caught:
                await bad
            assert caught.value.code is Code.INTERNAL
            assert places(b) == {LOOP}
            assert b.metrics.inflight_batches() == 0

    run(body)


@pytest.mark.parametrize(
    ("limits", "batches"),
    [({"max_batch_samples": 4}, [1, 4, 4, 2]), ({"max_batch_ids": 12}, [1, 3, 3, 3, 1])],
)
def test_batches_keep_their_limits(limits, batches):
    async def body():
        async with bench(**limits) as b:
            held = await b.hold()
            futures = [b.submit(request()) for _ in range(10)]  # 4 ids each
            b.release()
            await asyncio.gather(held, *futures)
            assert b.runner.batch_sizes == batches
            assert b.metrics.batches[CutReason.FULL] == len(batches) - 2

    run(body)


def test_a_large_request_is_cut_and_put_together():
    async def body():
        async with bench(max_batch_samples=8) as b:
            message = random_request(np.random.default_rng(1), 45)
            answer = await b.submit(message)
            np.testing.assert_array_equal(scores(answer), scores_of(message))
            assert b.runner.batch_sizes == [8] * 5 + [5]
            assert len(answer.outputs["pair"]) == 45 * 2 * 4

    run(body)


def test_priority_is_served_first():
    async def body():
        async with bench(max_batch_samples=1) as b:
            held = await b.hold()
            order = []
            futures = []
            for priority in (0, 7, 0, 7):
                future = b.submit(request(), priority=priority)
                future.add_done_callback(lambda _, p=priority: order.append(p))
                futures.append(future)
            b.release()
            await asyncio.gather(held, *futures)
            assert order == [7, 7, 0, 0]

    run(body)


def test_queue_full():
    async def body():
        async with bench(max_queue_requests=2) as b:
            held = await b.hold()
            futures = [b.submit(request()), b.submit(request())]
            with pytest.raises(QueueFullError, match="the queue is full: 2 requests"):
                b.submit(request())
            b.release()
            await asyncio.gather(held, *futures)
            await b.submit(request())

    run(body)


def test_too_late_on_arrival():
    async def body():
        async with bench() as b:
            with pytest.raises(DeadlineError):
                b.submit(request(), deadline=b.clock.now)
            assert b.runner.batch_sizes == []

    run(body)


def test_what_expires_in_the_queue_is_not_computed():
    async def body():
        async with bench() as b:
            held = await b.hold()
            late = b.submit(request(3), deadline=b.clock.now + 1)
            on_time = b.submit(request(5), deadline=b.clock.now + 9)
            b.clock.now += 2
            b.release()
            with pytest.raises(DeadlineError, match="while the request waited"):
                await late
            await asyncio.gather(held, on_time)
            assert b.runner.batch_sizes == [1, 5]

    run(body)


@pytest.mark.parametrize(
    ("deadline", "reason"), [(math.inf, RejectReason.CANCELLED), (101.0, RejectReason.DEADLINE)]
)
def test_what_is_cancelled_in_the_queue_is_not_computed_and_counted_once(deadline, reason):
    async def body():
        async with bench(max_batch_samples=4) as b:
            held = await b.hold()
            gone = b.submit(request(12), deadline=deadline)  # three parts, one count
            stays = b.submit(request(2))
            gone.cancel()
            b.clock.now += 1
            b.release()
            await asyncio.gather(held, stays)
            assert b.runner.batch_sizes == [1, 2]
            assert b.metrics.rejected == dict.fromkeys(RejectReason, 0) | {reason: 1}

    run(body)


def test_a_cancelled_request_in_work_does_not_disturb_its_neighbours():
    async def body():
        async with bench() as b:
            held = await b.hold()
            held.cancel()
            b.release()
            message = request(4)
            np.testing.assert_array_equal(scores(await b.submit(message)), scores_of(message))
            assert (
                b.metrics.rejected[RejectReason.CANCELLED] == 0
            )  # it was not dropped: it had begun

    run(body)


def test_one_bad_request_does_not_fail_its_neighbours():
    async def body():
        async with bench() as b:
            held = await b.hold()
            b.runner.fails_on = {9}
            good = [request(B) for B in (1, 2)]  # ids 0 to 5
            futures = [b.submit(good[0]), b.submit(request(first_id=9)), b.submit(good[1])]
            b.release()
            await held
            results = await asyncio.gather(*futures, return_exceptions=True)
            np.testing.assert_array_equal(scores(results[0]), scores_of(good[0]))
            np.testing.assert_array_equal(scores(results[2]), scores_of(good[1]))
            error = results[1]
            assert isinstance(error, ServeError)
            assert error.code is Code.INTERNAL
            assert b.runner.batch_sizes == [1, 4, 1, 1, 2]
            lines = [json.loads(line) for line in b.log.getvalue().splitlines()]
            bug = next(line for line in lines if line["event"] == "internal_error")
            assert bug["error_id"] in error.message
            assert "a table is on fire" in json.dumps(bug["exception"])
            # Only what was computed is counted as a pass: the first, and the two good ones.
            assert b.metrics.batch_requests.count() == 3

    run(body)


def test_a_lone_bad_request_is_run_once_and_its_other_parts_are_dropped():
    async def body():
        async with bench(max_batch_samples=2) as b:
            b.runner.fails_on = {0}
            with pytest.raises(ServeError, match="internal error, id"):
                await b.submit(request(6))
            b.runner.fails_on = set()
            await b.submit(request(1))
            assert len(b.runner.batch_sizes) <= 4
            assert b.metrics.rejected == dict.fromkeys(RejectReason, 0)

    run(body)


def test_a_model_that_breaks_its_promise_is_a_bug_not_a_wrong_answer():
    async def body():
        async with bench() as b:
            b.runner.forward = lambda batch: {
                "default": torch.zeros(batch.batch_size + 1),
                "pair": torch.zeros(batch.batch_size, 2),
            }
            with pytest.raises(ServeError) as caught:
                await b.submit(request(2))
            assert caught.value.code is Code.INTERNAL
            assert "the schema promises float32 of 2 samples" in b.log.getvalue()

    run(body)


def test_delay_waits_for_company_until_the_clock_says_so():
    async def body():
        async with bench(max_delay_us=1_000_000) as b:
            first = b.submit(request())
            for _ in range(5):
                await asyncio.sleep(0)
            assert b.runner.batch_sizes == []
            b.clock.now += 1.5
            second = b.submit(request())
            await asyncio.gather(first, second)
            assert b.runner.batch_sizes == [2]
            assert b.metrics.batches[CutReason.DELAY] == 1

    run(body)


def test_delay_is_cut_short_by_a_deadline():
    async def body():
        async with bench(max_delay_us=60_000_000) as b:
            b.scheduler._expected_forward = 1.0  # so 2 s are kept free before a deadline
            first = b.submit(request(), deadline=b.clock.now + 5)
            for _ in range(5):
                await asyncio.sleep(0)
            assert b.runner.batch_sizes == []
            b.clock.now += 3
            await asyncio.gather(first, b.submit(request()))
            assert b.runner.batch_sizes == [2]
            assert b.metrics.batches[CutReason.DEADLINE] == 1

    run(body)


def test_draining_does_not_wait_for_company():
    async def body():
        async with bench(max_delay_us=60_000_000) as b:
            waiting = b.submit(request())
            b.scheduler.start_draining()
            await waiting
            assert b.metrics.batches[CutReason.DRAIN] == 1

    run(body)
