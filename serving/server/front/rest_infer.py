"""POST /v2/models/NAME[/versions/VERSION]/infer: from a body to a body, by way of ModelInfer's messages.

Bodies of more than a few kilobytes are read and answers of more are written on a thread, one at a time, which bounds what
that takes.  The event loop does the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tessera.serving.server.front.body_room import Body, BodyRoom
from tessera.serving.server.front.byte_budget import ByteBudget, HeldBytes
from tessera.serving.server.front.predict_service import PredictService
from tessera.serving.server.front.rest_pages import ModelPath
from tessera.serving.server.front.rest_request import Encodings, RestRequest, read_request
from tessera.serving.server.front.rest_response import RestAnswer, write_answer
from tessera.serving.server.front.unpacking import unpack_body
from tessera.serving.server.front.wire_protocol import InferProtocol
from tessera.serving.server.named_thread import name_this_thread
from tessera.serving.server.observe.origin import CallOrigin
from tessera.serving.server.request.decoded_request import NO_DEADLINE
from tessera.serving.server.request.shared_memory import SharedMemory

_QUICK_BYTES = 8 * 1024
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class RestCall:
    """A request's head.

    Attributes:
        asked: the model.
        json_bytes: what Inference-Header-Content-Length says.
        encoding: what Content-Encoding says: ``gzip``, ``deflate``, or empty.
        connection: names the client's connection.
        key: decides between versions where the request does not say: its id, else who has called.
        origin: where it comes from; None: nobody asks.
    """

    asked: ModelPath
    json_bytes: int | None
    encoding: str
    connection: str
    key: bytes
    origin: CallOrigin | None = None


Receive = Callable[[], Awaitable[bytes]]


class ScoringCalls(Protocol):
    """Answers ModelInfer."""

    def infer(self, receive: Receive, call: RestCall) -> AbstractAsyncContextManager[bytes]:
        """A context in which the serialised ModelInferResponse is there; its end says that the answer has left.

        Args:
            receive: gives the serialised ModelInferRequest; called once.
            call: the request's head.

        Raises:
            ServeError: the status to answer with.
        """
        ...


class OwnScores:
    """Answers ModelInfer in this process.

    Args:
        predict_service: computes scores.
        budget: of the bytes that calls hold.
        memory: see `InferProtocol`.
    """

    def __init__(
        self,
        predict_service: PredictService,
        budget: ByteBudget,
        memory: SharedMemory | None = None,
    ) -> None:
        self._protocol = InferProtocol(memory)
        self._predict_service = predict_service
        self._budget = budget

    @asynccontextmanager
    async def infer(self, receive: Receive, call: RestCall) -> AsyncIterator[bytes]:
        """See `ScoringCalls.infer`."""
        held = HeldBytes(self._budget, call.connection)
        try:
            yield await self._predict_service.predict(
                self._protocol, receive, NO_DEADLINE, held, lambda: call.key, origin=call.origin
            )
        finally:
            held.keep(0)


class RestInfer:
    """Answers infer.

    Args:
        scores: answers the messages.
        max_inflight_bytes: see `BodyRoom`.
        max_message_bytes: the largest body, before and after it was unpacked.
    """

    def __init__(
        self, scores: ScoringCalls, *, max_inflight_bytes: int, max_message_bytes: int
    ) -> None:
        self._scores = scores
        self._room = BodyRoom(max_inflight_bytes, max_message_bytes)
        self.max_body_bytes = max_message_bytes
        self._thread = ThreadPoolExecutor(1, "rest", name_this_thread, ("rest",))

    def close(self) -> None:
        """End the thread; no call is answered any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def infer(
        self, call: RestCall, pieces: AsyncIterator[bytes], came: Callable[[], None]
    ) -> AsyncIterator[RestAnswer]:
        """A context in which the answer is there; its end says that the answer has left.

        Args:
            call: the request's head.
            pieces: the body.
            came: called when it has come whole.

        Raises:
            ServeError: the status to answer with.
        """
        encodings = Encodings()

        async def receive() -> bytes:
            nonlocal encodings
            with Body(self._room) as body:
                async for piece in pieces:
                    body.add(piece)
                came()
                content = body.whole()
                # Few bytes may unpack to many.
                size = self.max_body_bytes if call.encoding else len(content)
                read = await self._run(size, lambda: self._read(call, content))
            encodings = read.encodings
            return read.message

        async with self._scores.infer(receive, call) as message:
            yield await self._run(len(message), lambda: write_answer(message, encodings))

    def _read(self, call: RestCall, content: bytes) -> RestRequest:
        if call.encoding:
            content = unpack_body(call.encoding, content, self.max_body_bytes)
        return read_request(content, call.json_bytes, call.asked.name, call.asked.version)

    async def _run(self, size: int, make: Callable[[], _Made]) -> _Made:
        """What ``make`` gives, here or on the thread: ``size`` bytes are read for it."""
        if size <= _QUICK_BYTES:
            return make()
        loop = asyncio.get_running_loop()
        made: Any = await loop.run_in_executor(self._thread, make)
        return made  # type: ignore[no-any-return]
