"""Calls whose message is being received: how many are asked for it, and which are refused."""

import asyncio

import pytest

from tessera.serving.server.errors import QueueFullError
from tessera.serving.server.front import message_receiver
from tessera.serving.server.front.message_receiver import MessageReceiver


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(message_receiver, "_SLOW_S", 0.02)
    monkeypatch.setattr(message_receiver, "_LOOK_S", 0.01)


def make(patience_s=60.0, prompt=("one", "other", "third")):
    """Four are asked for at once, of which two may be slow; three wait.  Connections in ``prompt`` were quick."""
    max_bytes = 2 * 3 * (message_receiver.WINDOW_BYTES + message_receiver._CALL_BYTES)
    into = MessageReceiver(
        max_bytes=max_bytes, max_message_bytes=max_bytes // 4, patience_s=patience_s
    )
    for connection in prompt:
        into._standing.tell(connection, prompt=True)
    return into


class Call:
    """A call that begins at once; ``bring`` is what its client sends."""

    def __init__(self, into, connection="one"):
        self.message = asyncio.get_running_loop().create_future()
        self.asked = False
        self.task = asyncio.ensure_future(into.receive(self._read, connection))

    async def _read(self):
        self.asked = True
        return await self.message

    def bring(self, message=b"m"):
        self.message.set_result(message)


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("did not become true")


def test_messages_come_in_turn():
    async def body():
        into = make()
        calls = [Call(into) for _ in range(7)]
        await asyncio.sleep(0)
        assert [call.asked for call in calls] == [True] * 4 + [False] * 3
        for call in calls:
            call.bring()
        assert await asyncio.gather(*(call.task for call in calls)) == [b"m"] * 7
        assert into._free == 4

    asyncio.run(body())


def test_only_so_many_wait():
    async def body():
        into = make()
        calls = [Call(into) for _ in range(8)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="3 messages wait to be read"):
            await calls[-1].task
        for call in calls[:-1]:
            call.bring()
        await asyncio.gather(*(call.task for call in calls[:-1]))

    asyncio.run(body())


def test_who_has_most_waiting_makes_room_for_other_connections():
    async def body():
        into = make()
        calls = [Call(into) for _ in range(7)]
        other = Call(into, "other")
        await asyncio.sleep(0)
        refused, third = calls[-1], Call(into, "third")
        with pytest.raises(QueueFullError, match="3 of them on this connection"):
            await refused.task
        with pytest.raises(QueueFullError, match="2 of them on this connection"):
            await calls[-2].task
        # One of each connection waits: nobody has more than a fourth would, and each is full.
        with pytest.raises(QueueFullError, match="1 of them on this connection"):
            await Call(into, "other").task
        for call in [*calls[:5], other, third]:
            call.bring()
            assert await call.task == b"m"
        assert into._free == 4

    asyncio.run(body())


def test_connections_take_turns():
    async def body():
        into = make()
        asked = [Call(into) for _ in range(4)]
        waiting = [Call(into), Call(into), Call(into, "other")]
        await asyncio.sleep(0)
        for call, expected in zip(asked, ([0], [0, 2], [0, 1, 2]), strict=False):
            call.bring()
            await call.task
            await asyncio.sleep(0)
            assert [at for at, each in enumerate(waiting) if each.asked] == expected
        for call in [asked[3], *waiting]:
            call.bring()
            assert await call.task == b"m"
        assert into._free == 4

    asyncio.run(body())


def test_a_call_that_ends_when_it_is_refused_passes_nothing_on():
    async def body():
        into = make()
        calls = [Call(into) for _ in range(7)]
        await asyncio.sleep(0)
        other = Call(into, "other")
        await asyncio.sleep(0)
        calls[6].task.cancel()  # its turn has been refused just now
        with pytest.raises(asyncio.CancelledError):
            await calls[6].task
        assert not any(call.asked for call in calls[4:])
        for call in [*calls[:6], other]:
            call.bring()
            assert await call.task == b"m"
        assert into._free == 4

    asyncio.run(body())


def test_of_too_many_slow_ones_the_last_are_refused():
    async def body():
        into = make()
        calls = [Call(into) for _ in range(4)]
        await until(lambda: sum(call.task.done() for call in calls) == 2)
        for call in calls[2:]:
            with pytest.raises(QueueFullError, match="has not come whole"):
                await call.task
        for call in calls[:2]:
            call.bring()
            assert await call.task == b"m"
        assert into._free == 4

    asyncio.run(body())


def test_who_stalls_makes_room_in_the_end():
    async def body():
        into = make(patience_s=0.2)
        stalled = [Call(into) for _ in range(2)]
        await asyncio.sleep(0.3)
        assert not any(call.task.done() for call in stalled)  # nobody else is slow
        later = Call(into)
        await until(stalled[0].task.done)
        assert isinstance(stalled[0].task.exception(), QueueFullError)
        later.bring()
        assert await later.task == b"m"
        stalled[1].bring()
        assert await stalled[1].task == b"m"

    asyncio.run(body())


def test_calls_that_their_clients_end_leave_their_places():
    async def body():
        into = make()
        calls = [Call(into) for _ in range(7)]
        await asyncio.sleep(0)
        calls[5].task.cancel()  # waits
        calls[0].task.cancel()  # is asked
        calls[1].bring()
        calls[4].task.cancel()  # waits, and may have got its turn just now
        await asyncio.gather(*(call.task for call in calls[:2]), return_exceptions=True)
        assert calls[0].task.cancelled()
        await until(lambda: calls[6].asked)
        for call in (calls[2], calls[3], calls[6]):
            call.bring()
            assert await call.task == b"m"
        assert calls[4].task.cancelled()
        assert calls[5].task.cancelled()
        assert into._free == 4

    asyncio.run(body())


def test_a_place_is_kept_for_prompt_connections():
    async def body():
        into = make(prompt=["good"])
        stalled = [Call(into, f"bad-{number}") for number in range(6)]
        await asyncio.sleep(0)
        assert [call.asked for call in stalled] == [True] * 3 + [False] * 3
        good = Call(into, "good")
        await asyncio.sleep(0)
        assert good.asked
        good.bring()
        assert await good.task == b"m"
        assert not any(call.asked for call in stalled[3:])
        for call in stalled:
            call.task.cancel()
        await asyncio.gather(*(call.task for call in stalled), return_exceptions=True)
        assert (into._free, into._for_others) == (4, 3)

    asyncio.run(body())


def test_who_was_quick_is_prompt_and_who_was_refused_is_not():
    async def body():
        into = make(prompt=["was good"])
        good, bad = Call(into, "good"), [Call(into, "was good") for _ in range(3)]
        good.bring()
        await good.task
        await until(bad[2].task.done)
        assert isinstance(bad[2].task.exception(), QueueFullError)
        assert into._standing.is_prompt("good")
        assert not into._standing.is_prompt("was good")
        for call in bad[:2]:
            call.bring()
            await call.task

    asyncio.run(body())


def test_a_prompt_connection_takes_the_place_of_another_that_waits():
    async def body():
        into = make(prompt=["good"])
        first = [Call(into, "good") for _ in range(4)]
        others = [Call(into, f"other-{number}") for number in range(3)]
        await asyncio.sleep(0)
        late = Call(into, "good")
        with pytest.raises(QueueFullError, match="3 messages wait to be read, 1 of them on this"):
            await others[0].task
        for call in [*first, *others[1:], late]:
            call.bring()
            assert await call.task == b"m"
        assert (into._free, into._for_others) == (4, 3)

    asyncio.run(body())


def test_one_turn_of_four_is_not_a_prompt_connections():
    async def body():
        into = make(prompt=["good"])
        into._max_waiting = 100
        first = [Call(into, "good") for _ in range(4)]
        waiting = [*(Call(into, "good") for _ in range(6)), Call(into, "other")]
        await asyncio.sleep(0)
        for call in first:
            call.bring()
            await call.task
        await asyncio.sleep(0)
        assert [call.asked for call in waiting] == [True] * 3 + [False] * 3 + [True]
        for call in waiting:
            call.bring()
            assert await call.task == b"m"

    asyncio.run(body())
