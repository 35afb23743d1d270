"""Tokens on the two ports: what refuses a call before anything of it is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from aiohttp import web
from grpc_health.v1 import health_pb2

from tessera.serving.server.errors import Code, ServeError
from tessera.serving.server.front.host_rule import PROBES
from tessera.serving.server.front.http_refusals import refusal
from tessera.serving.server.security.authorizer import Authorizer

_PROBES = f"/{health_pb2.DESCRIPTOR.services_by_name['Health'].full_name}/"
_STATUS = {
    Code.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Code.RESOURCE_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class TokenGate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # generic in the stubs alone
    """Refuses calls of the gRPC port, health checks aside.

    Args:
        authorizer: admits calls.
    """

    def __init__(self, authorizer: Authorizer) -> None:
        self._authorizer = authorizer

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        """The handler of the call, or one that refuses it; gRPC calls this."""
        if not details.method.startswith(_PROBES):
            try:
                self._authorizer.admit(_authorization(details.invocation_metadata))
            except ServeError as error:
                return _refusing(error.code, error.message)
        return await continuation(details)


def _authorization(metadata: Any) -> str | None:
    for name, value in metadata or ():
        if name == "authorization":
            return value if isinstance(value, str) else None
    return None


def _refusing(code: Code, message: str) -> Any:
    async def answer(_messages: Any, context: Any) -> bytes:
        await context.abort(_STATUS[code], message)
        raise AssertionError("abort does not return")

    # A stream, so that no message is read.
    return grpc.stream_unary_rpc_method_handler(answer)


def refused_page(authorizer: Authorizer | None, request: web.Request) -> web.Response | None:
    """What a request to the HTTP port is refused with, and its connection ends with; None: it may go on."""
    if authorizer is None or request.rel_url.raw_path in PROBES:
        return None
    try:
        authorizer.admit(request.headers.get("Authorization"))
    except ServeError as error:
        response = refusal(error)
        if response.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        response.force_close()
        return response
    return None
