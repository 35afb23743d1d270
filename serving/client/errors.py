# ruff: noqa: N818 -- these classes are named after the statuses that they stand for
"""The errors of a Predict call: one exception type for each status.

docs/client.md lists them with the server's status codes; `error_for_status` is the one place where a
code becomes a type.  Every exception carries the server's own message.
"""

from __future__ import annotations

import grpc


class PredictError(Exception):
    """A call that was not answered.

    Attributes:
        code: the gRPC status.
        message: what the server (or, when none was reached, the transport) said.
        address: where the call was sent.
    """

    def __init__(self, code: grpc.StatusCode, message: str, address: str) -> None:
        super().__init__(f"{address} answered {code.name}: {message}")
        self.code = code
        self.message = message
        self.address = address


class InvalidRequest(PredictError):
    """The request's own fault; sending it again cannot help.  The message names the field."""


class ModelNotFound(PredictError):
    """The server has no model of that name and version."""


class Overloaded(PredictError):
    """The queue is full, the token has called too often, or the message is larger than the receiver allows."""


class DeadlineExceeded(PredictError):
    """No answer within the call's time limit."""


class Unavailable(PredictError):
    """No server was reached, or it is loading or draining.  Another attempt may succeed."""


class Unauthenticated(PredictError):
    """The call shows no token, or one that the server does not know."""


class ServerBug(PredictError):
    """The server failed.  The message holds the id under which its log has the cause."""


_TYPES: dict[grpc.StatusCode, type[PredictError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.INTERNAL: ServerBug,
    grpc.StatusCode.UNKNOWN: ServerBug,
}


def error_for_status(code: grpc.StatusCode, message: str | None, address: str) -> PredictError:
    """The exception for a call to ``address`` that ended with ``code``; else a `PredictError`."""
    return _TYPES.get(code, PredictError)(code, message or "no message", address)
