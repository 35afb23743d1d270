"""The gRPC front: with `token_gate` and `worker_calls` the only file that knows gRPC.

Handlers take and give bytes, so that a message that cannot be parsed gets our status rather
than gRPC's, and so that parsing and writing are measured as stages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn
from urllib.parse import unquote

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from tessera.errors import UserError
from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.serving.protocol.pool import POOL
from tessera.serving.repository.choice import MAX_TRAFFIC_KEY_BYTES
from tessera.serving.server.errors import Code, ServeError
from tessera.serving.server.front.byte_budget import ByteBudget, HeldBytes
from tessera.serving.server.front.connection_limits import ConnectionLimits
from tessera.serving.server.front.hang_up import hang_up
from tessera.serving.server.front.health_service import HealthService, Serving
from tessera.serving.server.front.kserve_metadata import KserveMetadata
from tessera.serving.server.front.message_receiver import WINDOW_BYTES, MessageReceiver
from tessera.serving.server.front.predict_service import PredictService
from tessera.serving.server.front.repository_methods import RepositoryMethods
from tessera.serving.server.front.send_buffer import bound_send_buffers
from tessera.serving.server.front.token_gate import TokenGate
from tessera.serving.server.front.unpacking import unpack, unpacked
from tessera.serving.server.front.wire_protocol import InferProtocol, PredictProtocol, WireProtocol
from tessera.serving.server.observe.origin import REQUEST_ID, CallOrigin, GrpcOrigins
from tessera.serving.server.request.decoded_request import NO_DEADLINE
from tessera.serving.server.request.shared_memory import SharedMemory
from tessera.serving.server.security.security import Security

_STATUS = {
    Code.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    Code.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.RESOURCE_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    Code.CANCELLED: grpc.StatusCode.CANCELLED,
    Code.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Code.INTERNAL: grpc.StatusCode.INTERNAL,
    Code.FAILED_PRECONDITION: grpc.StatusCode.FAILED_PRECONDITION,
    Code.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Code.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
}

_PREDICTOR = pb.DESCRIPTOR.services_by_name["Predictor"].full_name
_INFERENCE = ipb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_CALLS_PER_CONNECTION = 64
"""Calls that a connection may have at a time; its client waits with more.

Calls that gRPC has read wait in one queue for the event loop, which takes a few thousand a second: a connection
delays the others for as long as its calls take there.
"""

_UNTAKEN_CALLS = 8_000
"""Calls of all connections together that may wait for the event loop.

gRPC ends those above as CANCELLED, whichever connection they are of.  Without this limit it begins to do so
at 1,000.
"""

_ENCODINGS = 1 << 0 | 1 << 1 | 1 << 2
"""The algorithms "identity", "deflate" and "gzip"."""

_MAX_TOLD_BYTES = 64 * 1024
"""What messages of health checks, watches and reflection may unpack to."""

_SETTINGS_MS = 5_000
"""What a new client may take to acknowledge the server's settings before its connection ends."""

_HANDSHAKE_MS = 10_000
"""What a new connection may take until TLS is agreed upon."""

_KEEPALIVE_MS = 5_000
"""A connection that has been silent so long is pinged, and ends 20 s later if there is no answer."""

_MAX_MESSAGE = 1_000
"""Characters of a status message: it travels in a header, and may quote the client's text."""


class GrpcFront:
    """The listening server.

    Args:
        predict_service: answers Predict and ModelInfer.
        metadata: answers what else the KServe protocol has.
        repository: answers its calls about repositories.
        health: answers Check and Watch.
        budget: of the bytes that calls hold.
        receiver: bounds the messages that are being received.
        security: who may call.
        max_message_bytes: largest request or response.
        connections: how many of them there may be, and how long.
        shares_port: whether other processes of the same server listen on the same port.
        own_address: where this server's own processes ask, without TLS, as gRPC writes it; empty: nowhere else.
        origins: tells where calls for scores come from; None: nobody asks.
        memory: see `InferProtocol`.
    """

    def __init__(
        self,
        *,
        predict_service: PredictService,
        metadata: KserveMetadata,
        repository: RepositoryMethods,
        health: HealthService,
        budget: ByteBudget,
        receiver: MessageReceiver,
        security: Security,
        max_message_bytes: int,
        connections: ConnectionLimits,
        shares_port: bool,
        own_address: str = "",
        origins: GrpcOrigins | None = None,
        memory: SharedMemory | None = None,
    ) -> None:
        self._origins = origins
        self._certificates = security.certificates
        self._own_address = own_address
        self._predict_service = predict_service
        self._metadata = metadata
        self._repository = repository
        self._budget = budget
        self._receiver = receiver
        self._max_message_bytes = max_message_bytes
        self._health = health
        self._port = 0
        gates = [] if security.authorizer is None else [TokenGate(security.authorizer)]
        self._server = grpc.aio.server(
            interceptors=gates,
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
                ("grpc.max_concurrent_streams", _CALLS_PER_CONNECTION),
                # The protection counts calls that have ended until the event loop lets go of them, and so
                # refuses calls of clients that keep to the limit.
                ("grpc.http.overload_protection", 0),
                ("grpc.server.max_pending_requests", _UNTAKEN_CALLS),
                ("grpc.server.max_pending_requests_hard_limit", _UNTAKEN_CALLS),
                # Of a message that nobody has asked for, only a window is taken; see `MessageReceiver`.
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
                # gRPC would unpack a message before it looks at its size; `unpacking` has a bound.
                ("grpc.per_message_decompression", 0),
                ("grpc.compression_enabled_algorithms_bitset", _ENCODINGS),
                # Until a client has acknowledged our limits, gRPC lets it send headers of 16 MiB a call.
                ("grpc.http2.settings_timeout", _SETTINGS_MS),
                ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
                *connections.grpc_options(),
                # gRPC may stop reading a connection until it has something to write to it, and does not
                # see that it was aborted meanwhile; a ping is something to write.
                ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
                # A second server on the port must fail, not share its calls.
                ("grpc.so_reuseport", int(shares_port)),
                # Clients may ping as often as they like, also between calls: the defaults
                # send GOAWAY to a client that pings more often than every five minutes.
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
                ("grpc.http2.max_ping_strikes", 0),
            ],
        )
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    _PREDICTOR, {"Predict": self._scoring(PredictProtocol())}
                ),
                grpc.method_handlers_generic_handler(
                    _INFERENCE,
                    {
                        "ModelInfer": self._scoring(InferProtocol(memory)),
                        **{method: self._telling(method) for method in metadata.methods()},
                        **{method: self._changing(method) for method in repository.methods()},
                    },
                ),
                grpc.method_handlers_generic_handler(
                    _HEALTH,
                    {
                        "Check": grpc.unary_unary_rpc_method_handler(
                            self._check,
                            request_deserializer=_reader(health_pb2.HealthCheckRequest),
                            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
                        ),
                        "Watch": grpc.unary_stream_rpc_method_handler(
                            self._watch,
                            request_deserializer=_reader(health_pb2.HealthCheckRequest),
                            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
                        ),
                    },
                ),
                grpc.method_handlers_generic_handler(
                    reflection.SERVICE_NAME, {"ServerReflectionInfo": _reflection()}
                ),
            )
        )

    async def start(self, host: str, port: int) -> int:
        """Listen.

        Returns:
            The port, which is another than ``port`` only where that is 0.

        Raises:
            UserError: the address cannot be had.
        """
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._certificates is None:
                bound = self._server.add_insecure_port(address)
            else:
                credentials = self._certificates.grpc_credentials()
                bound = self._server.add_secure_port(address, credentials)
        except RuntimeError:
            bound = 0
        if bound == 0:
            raise UserError(
                f"the gRPC address {address} cannot be listened on: another program has the port "
                "or the host is not this machine's; choose another --port or --host"
            )
        if self._own_address:
            self._server.add_insecure_port(self._own_address)
        bound_send_buffers(bound)
        await self._server.start()
        self._port = bound
        return bound

    async def stop(self, grace_s: float) -> None:
        """End every connection and the server; handlers that run have ``grace_s`` seconds.

        Calls that have no answer yet are told UNAVAILABLE.
        """
        if self._port:
            # Twice: the first closes the port, and connections may have come in meanwhile.
            hang_up(self._port)
            hang_up(self._port)
        await self._server.stop(grace_s)

    def _scoring(self, protocol: WireProtocol) -> grpc.RpcMethodHandler[bytes, bytes]:
        """The call of ``protocol`` that asks for scores."""

        async def answer(_messages: Any, context: Any) -> bytes:
            held = HeldBytes(self._budget, context.peer())
            # The task ends when the answer has left.  The context's own callbacks would make a cycle of it
            # and its call, which then lives, with its memory, until the next search for cycles.
            _own_task().add_done_callback(lambda _: held.keep(0))
            remaining = context.time_remaining()
            deadline = NO_DEADLINE if remaining is None else time.monotonic() + remaining
            origin = self._origin_of(context)
            try:
                return await self._predict_service.predict(
                    protocol,
                    lambda: self._receive(context),
                    deadline,
                    held,
                    lambda: _key_of(context),
                    origin=origin,
                )
            except ServeError as error:
                refusal = error.code, error.message
            # Out here, for gRPC keeps what it raises, and with it would keep the refusal, its frames
            # and the request in them.
            return await _abort(context, *refusal)

        return grpc.stream_unary_rpc_method_handler(answer)

    def _origin_of(self, context: Any) -> CallOrigin | None:
        if self._origins is None:
            return None
        origins = self._origins
        origin = origins.of(context.invocation_metadata(), lambda: peer_address(context.peer()))
        if origins.logged and origin is not None:
            # Trailers are there whether the call is answered or refused.
            context.set_trailing_metadata(((REQUEST_ID, origin.request_id),))
        return origin

    def _telling(self, method: str) -> grpc.RpcMethodHandler[bytes, bytes]:
        """A call that `KserveMetadata` answers."""

        async def answer(_messages: Any, context: Any) -> bytes:
            try:
                return self._metadata.answer(method, await self._receive(context))
            except ServeError as error:
                refusal = error.code, error.message
            return await _abort(context, *refusal)

        return grpc.stream_unary_rpc_method_handler(answer)

    def _changing(self, method: str) -> grpc.RpcMethodHandler[bytes, bytes]:
        """A call that `RepositoryMethods` answers."""

        async def answer(_messages: Any, context: Any) -> bytes:
            try:
                return await self._repository.answer(method, await self._receive(context))
            except ServeError as error:
                refusal = error.code, error.message
            return await _abort(context, *refusal)

        return grpc.stream_unary_rpc_method_handler(answer)

    async def _receive(self, context: Any) -> bytes:
        # On the wire the calls are unary; as a stream of one message it is read when there is room for
        # it.
        async def read() -> bytes:
            content = await context.read()
            if not isinstance(content, bytes):
                return b""  # the client sent none
            return await unpacked(content, self._max_message_bytes)

        return await self._receiver.receive(read, context.peer())

    async def _check(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        state = self._health.check(request.service)
        if state is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"service {request.service!r}"[:_MAX_MESSAGE]
            )
            raise AssertionError("abort does not return")
        return _health_response(state)

    async def _watch(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        del context  # gRPC's signature
        async for state in self._health.watch(request.service):
            yield _health_response(state)


def _own_task() -> asyncio.Task[Any]:
    """The task in which gRPC runs a call: the handler, and then the sending of what it returns."""
    task = asyncio.current_task()
    assert task is not None
    return task


def _key_of(context: Any) -> bytes:
    """What decides between versions for a call that does not say: its request id, else who has called."""
    for name, value in context.invocation_metadata() or ():
        if name == "x-request-id" and value:
            key = value if isinstance(value, bytes) else str(value).encode()
            return key[:MAX_TRAFFIC_KEY_BYTES]
    return peer_address(context.peer()).encode()


def peer_address(peer: str) -> str:
    """The IP address in what gRPC calls the other end, such as ``ipv4:127.0.0.1:5000`` and ``ipv6:%5B::1%5D:5000``."""
    host = unquote(peer.partition(":")[2].rpartition(":")[0])
    return host.removeprefix("[").removesuffix("]")


def _reader(message: Any) -> Callable[[bytes], Any]:
    """What makes a ``message`` of bytes that may be compressed."""
    return lambda content: message.FromString(unpack(content, _MAX_TOLD_BYTES))


def _reflection() -> grpc.RpcMethodHandler[Any, Any]:
    services = (_PREDICTOR, _INFERENCE, _HEALTH, reflection.SERVICE_NAME)
    for theirs in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        POOL.AddSerializedFile(theirs.serialized_pb)
    return grpc.stream_stream_rpc_method_handler(
        ReflectionServicer(services, pool=POOL).ServerReflectionInfo,
        request_deserializer=_reader(reflection_pb2.ServerReflectionRequest),
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )


async def _abort(context: Any, code: Code, message: str) -> NoReturn:
    await context.abort(_STATUS[code], message[:_MAX_MESSAGE])
    raise AssertionError("abort does not return")


def _health_response(state: Serving) -> health_pb2.HealthCheckResponse:
    return health_pb2.HealthCheckResponse(
        status=health_pb2.HealthCheckResponse.ServingStatus.Value(state.value)
    )
