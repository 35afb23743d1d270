import numpy as np
import pytest

from tessera.serving.server.batching.request_queue import Part, RequestQueue
from tessera.serving.server.errors import QueueFullError, RejectReason
from tessera.serving.server.request.decoded_request import (
    NO_DEADLINE,
    DecodedRequest,
    JaggedGroup,
    ended_by_deadline,
)

EMPTY = JaggedGroup(np.empty(0, np.int32), np.empty(0, np.int64), None)


class Waiter:
    def __init__(self):
        self.done = False
        self.dropped = []

    def is_done(self):
        return self.done

    def drop(self, reason):
        self.dropped.append(reason)
        return self.done


def make_part(*, samples=1, ids=0, last=True, arrived=0.0, deadline=NO_DEADLINE, priority=0):
    request = DecodedRequest(samples, ids, np.empty(0, np.float32), EMPTY, EMPTY)
    return Part(request, Waiter(), 0, last, arrived, deadline, priority)


def queue(max_requests=100, max_samples=1000):
    return RequestQueue(max_requests=max_requests, max_samples=max_samples)


def cut(q, *, max_samples=1000, max_ids=1000, now=0.0):
    return q.cut(max_samples=max_samples, max_ids=max_ids, now=now)


def test_higher_priority_first_then_arrival():
    q = queue()
    parts = [make_part(priority=p) for p in (0, 5, 0, 5, -1)]
    for e in parts:
        q.push([e], 0.0)
    assert cut(q).parts == [parts[i] for i in (1, 3, 0, 2, 4)]


@pytest.mark.parametrize(
    ("sizes", "max_samples", "max_ids", "taken"),
    [
        ([(3, 0), (3, 0), (3, 0)], 6, 100, 2),
        ([(3, 0), (4, 0), (1, 0)], 6, 100, 1),  # order holds: the third does not overtake
        ([(1, 60), (1, 60)], 100, 100, 1),
        ([(9, 0), (1, 0)], 6, 100, 1),  # the first is taken however large
        ([(1, 0)] * 6, 6, 100, 6),
    ],
)
def test_cut_takes_what_fits(sizes, max_samples, max_ids, taken):
    q = queue()
    for samples, ids in sizes:
        q.push([make_part(samples=samples, ids=ids)], 0.0)
    batch = cut(q, max_samples=max_samples, max_ids=max_ids)
    assert len(batch.parts) == taken
    assert batch.samples == sum(s for s, _ in sizes[:taken])
    assert batch.ids == sum(i for _, i in sizes[:taken])
    assert len(q) == len(sizes) - taken
    assert q.samples == sum(s for s, _ in sizes[taken:])
    assert q.ids == sum(i for _, i in sizes[taken:])


def test_cancelled_entries_are_dropped_and_counted():
    q = queue()
    abandoned, alive = make_part(), make_part()
    q.push([abandoned], 0.0)
    q.push([alive], 0.0)
    abandoned.owner.done = True
    batch = cut(q)
    assert batch.parts == [alive]
    assert batch.dropped == [RejectReason.CANCELLED]
    assert q.samples == 0


def test_a_call_that_grpc_ended_just_before_its_deadline_counts_as_late():
    q = queue()
    ended, cancelled = make_part(deadline=5.0), make_part(deadline=9.0)
    q.push([ended], 0.0)
    q.push([cancelled], 0.0)
    ended.owner.done = cancelled.owner.done = True
    assert cut(q, now=4.999).dropped == [RejectReason.DEADLINE, RejectReason.CANCELLED]


@pytest.mark.parametrize(
    ("now", "began", "deadline", "late"),
    [
        (0.996, 0.0, 1.0, True),  # our clock and gRPC's
        (0.96, 0.0, 1.0, False),
        (11.234, 10.0, 11.24, True),  # gRPC tells of a timeout of 1.234 s as 1.24 s
        (11.2, 10.0, 11.24, False),
        (1e9, 0.0, NO_DEADLINE, False),
    ],
)
def test_a_call_ended_by_its_client_was_late_within_what_grpc_rounds(now, began, deadline, late):
    assert ended_by_deadline(now, began, deadline) is late


def test_expired_entries_are_dropped_and_their_owner_is_told():
    q = queue()
    late, on_time = make_part(deadline=5.0), make_part(deadline=5.1)
    q.push([late], 0.0)
    q.push([on_time], 0.0)
    batch = cut(q, now=5.0)
    assert batch.parts == [on_time]
    assert late.owner.dropped == [RejectReason.DEADLINE]
    assert batch.dropped == []  # the owner still waits, and counts it when it is told


def test_full_by_requests_and_by_samples():
    q = queue(max_requests=2, max_samples=10)
    q.push([make_part(samples=4)], 0.0)
    with pytest.raises(QueueFullError, match=r"1 requests with 4 samples .* 10\), .* brings 7"):
        q.push([make_part(samples=7)], 0.0)
    q.push([make_part(samples=6)], 0.0)
    with pytest.raises(QueueFullError, match="2 requests with 10 samples"):
        q.push([make_part(samples=0)], 0.0)
    assert len(q) == 2


def test_all_parts_of_a_request_wait_or_none():
    q = queue(max_samples=2)
    with pytest.raises(QueueFullError):
        q.push([make_part(last=False), make_part(last=False), make_part()], 0.0)
    assert len(q) == q.requests == q.samples == 0


def test_a_request_counts_once_until_its_last_part_is_taken():
    q = queue(max_requests=1)
    q.push(
        [make_part(samples=2, last=False), make_part(samples=2, last=False), make_part(samples=2)],
        0.0,
    )
    assert (q.requests, len(q), q.samples) == (1, 3, 6)
    for requests_left in (1, 1, 0):
        with pytest.raises(QueueFullError, match="1 requests"):
            q.push([make_part()], 0.0)
        assert len(cut(q, max_samples=2).parts) == 1
        assert q.requests == requests_left
    q.push([make_part()], 0.0)


def test_the_parts_of_a_dead_request_make_room_for_one():
    q = queue(max_requests=1)
    parts = [make_part(last=False), make_part()]
    q.push(parts, 0.0)
    for part in parts:
        part.owner.done = True
    wanted = make_part()
    assert q.push([wanted], 0.0) == [RejectReason.CANCELLED] * 2
    assert (q.requests, cut(q).parts) == (1, [wanted])


def test_the_dead_make_room():
    q = queue(max_requests=2)
    abandoned, late = make_part(), make_part(deadline=1.0)
    q.push([abandoned], 0.0)
    q.push([late], 0.0)
    abandoned.owner.done = True
    wanted = make_part()
    assert q.push([wanted], 1.0) == [RejectReason.CANCELLED]
    assert late.owner.dropped == [RejectReason.DEADLINE]
    assert cut(q, now=1.0).parts == [wanted]


def test_oldest_and_earliest_deadline():
    q = queue()
    assert q.oldest() == q.earliest_deadline() == NO_DEADLINE
    q.push([make_part(arrived=3.0, deadline=9.0, priority=1)], 3.0)
    q.push([make_part(arrived=2.0)], 3.0)
    assert q.oldest() == 2.0
    assert q.earliest_deadline() == 9.0
