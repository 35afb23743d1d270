"""The KServe protocol's calls from the process that has the HTTP port to those that have the models.

With ``--processes`` the workers listen on the gRPC port alone, so REST asks them there, over connections of this machine;
where that port is encrypted, on sockets of their own in a folder that nobody else can enter.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.server.config import ServerConfig
from tessera.serving.server.errors import Code, ServeError, http_status_of
from tessera.serving.server.front.rest_infer import Receive, RestCall
from tessera.serving.server.observe.call_observer import CallObserver
from tessera.serving.server.observe.call_record import refused_unread
from tessera.serving.server.observe.origin import CallOrigin, forwarding
from tessera.serving.server.security.security import Shared

_SERVICE = "/inference.GRPCInferenceService/"
_EVERY_INTERFACE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - not listened on
Metadata = tuple[tuple[str, str], ...]
_CODES = {code.value: code for code in Code}


class WorkerCalls:
    """Asks a worker; used on the event loop's thread alone.

    Args:
        config: of the whole server, with the ports that were found.
        shared: what this process and the workers have in common.
        observer: of this process, for calls of which no worker hears.
    """

    def __init__(self, config: ServerConfig, shared: Shared, observer: CallObserver) -> None:
        self._observer = observer
        self._origin_secret = shared.origin_secret
        # Whoever asks this process has shown a token of its own.
        self._authorization: Metadata = (
            (("authorization", f"Bearer {shared.own_token}"),) if shared.own_token else ()
        )
        host = f"[{config.host}]" if ":" in config.host else config.host
        self._addresses = (
            [shared.address_of(worker) for worker in range(config.processes)]
            if shared.folder
            else [f"{_EVERY_INTERFACE.get(config.host, host)}:{config.port}"]
        )
        self._most_bytes = config.max_message_bytes
        self._channels: Iterator[grpc.aio.Channel] | None = None

    async def tell(self, request: Message) -> Any:
        """The response to ``request``.

        Raises:
            ServeError: what the worker answers, or UNAVAILABLE where there is none.
        """
        method = request.DESCRIPTOR.name.removesuffix("Request")
        content = await self._ask(method, request.SerializeToString())
        return getattr(ipb, f"{method}Response").FromString(content)

    @asynccontextmanager
    async def infer(self, receive: Receive, call: RestCall) -> AsyncIterator[bytes]:
        """See `ScoringCalls.infer`."""
        key = call.key.decode("latin-1")
        # The worker would take this process for who has called.
        metadata: Metadata = (("x-request-id", key),) if key.isascii() and key.isprintable() else ()
        if call.origin is not None:
            metadata += forwarding(call.origin, self._origin_secret)
        try:
            content = await receive()
        except ServeError as error:
            self._tell(call.origin, error)
            raise
        yield await self._ask("ModelInfer", content, metadata)

    def _tell(self, origin: CallOrigin | None, error: ServeError) -> None:
        """The worker tells of the calls that it hears of."""
        if origin is None:
            return
        self._observer.tell(
            refused_unread(
                self._observer.sampled(origin), "ModelInfer", error.code, http_status_of(error)
            )
        )

    async def _ask(self, method: str, content: bytes, metadata: Metadata = ()) -> bytes:
        # Made when it is needed: inside the event loop, and never before a fork.
        if self._channels is None:
            options = [
                (f"grpc.max_{way}_message_length", self._most_bytes) for way in ("receive", "send")
            ]
            self._channels = itertools.cycle(
                [grpc.aio.insecure_channel(address, options) for address in self._addresses]
            )
        call: Any = next(self._channels).unary_unary  # without serializers, which its stubs ask for
        try:
            answer: bytes = await call(_SERVICE + method)(
                content, metadata=(*metadata, *self._authorization)
            )
        except grpc.aio.AioRpcError as error:
            code = _CODES.get(error.code().name, Code.INTERNAL)
            raise ServeError(code, error.details() or code.value) from None
        return answer
