"""Every refusal of the server, and the one table that maps refusals to metrics.

The gRPC status of a `Code` has the same name; `grpc_service` is the only place that knows it.
"""

from __future__ import annotations

from enum import Enum


class Code(Enum):
    """How a call ended.  The value is the ``code`` label of ``tessera_requests_total``."""

    OK = "OK"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    UNAVAILABLE = "UNAVAILABLE"
    INTERNAL = "INTERNAL"
    # Of calls about repositories and shared memory alone.
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    UNAUTHENTICATED = "UNAUTHENTICATED"  # before it is known what is called


HTTP_STATUS = {
    Code.OK: 200,
    Code.INVALID_ARGUMENT: 400,
    Code.UNAUTHENTICATED: 401,
    Code.NOT_FOUND: 404,
    Code.FAILED_PRECONDITION: 400,
    Code.ALREADY_EXISTS: 409,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.CANCELLED: 499,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}
"""What stands for each over HTTP, `TooLargeError` aside."""

REQUEST_CODES = tuple(
    code
    for code in Code
    if code not in {Code.FAILED_PRECONDITION, Code.ALREADY_EXISTS, Code.UNAUTHENTICATED}
)
"""How a request for scores may end."""


class RejectReason(Enum):
    """Why a request was refused: the ``reason`` label of ``tessera_rejected_total``."""

    QUEUE_FULL = "queue_full"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    INVALID = "invalid"
    DRAINING = "draining"


class ServeError(Exception):
    """The refusal or failure of a request.

    Attributes:
        code: what the client is told.
        message: the sentence that it is told with; it names the field and the numbers.
        reason: the label under which the refusal is counted; None where the contract counts
            it by its code alone.
    """

    def __init__(self, code: Code, message: str, reason: RejectReason | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason


class InvalidRequestError(ServeError):
    """The request itself is wrong; sending it again cannot help."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.INVALID_ARGUMENT, message, RejectReason.INVALID)


class QueueFullError(ServeError):
    """More work is waiting than the server was told to hold."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.RESOURCE_EXHAUSTED, message, RejectReason.QUEUE_FULL)


class TooLargeError(InvalidRequestError):
    """A body over HTTP that has more bytes than a message may have."""


def http_status_of(error: ServeError) -> int:
    """HTTP's status for ``error``."""
    return 413 if isinstance(error, TooLargeError) else HTTP_STATUS[error.code]


class DeadlineError(ServeError):
    """The client's deadline passed before the work began; the work was not done."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.DEADLINE_EXCEEDED, message, RejectReason.DEADLINE)
