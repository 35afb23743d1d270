"""What the HTTP port refuses: which status stands for which refusal, and what a POST may not be."""

from __future__ import annotations

from aiohttp import web

from tessera.serving.server.errors import Code, ServeError, TooLargeError

_HTTP_STATUS = {
    Code.INVALID_ARGUMENT: 400,
    Code.UNAUTHENTICATED: 401,
    Code.NOT_FOUND: 404,
    Code.FAILED_PRECONDITION: 400,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.CANCELLED: 499,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}


class RefusedRequestError(Exception):
    """A request over HTTP that is refused before it is looked at; ``status`` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def refusal(error: ServeError | RefusedRequestError) -> web.Response:
    """The answer that tells ``error``."""
    if isinstance(error, RefusedRequestError):
        return web.json_response({"error": str(error)}, status=error.status)
    status = _HTTP_STATUS.get(error.code, 500)
    if isinstance(error, TooLargeError):
        status = 413
    return web.json_response({"error": error.message}, status=status)


def refuse_strange(request: web.Request) -> None:
    """Refuse a POST that no client of ours sends.

    Raises:
        RefusedRequestError: with HTTP's status.
    """
    if "Origin" in request.headers:
        # A page in a browser must not change what is served by a form or a script.
        raise RefusedRequestError(
            403, "a request with an Origin comes from a web page, and is not heard"
        )
    if "Transfer-Encoding" in request.headers:
        raise RefusedRequestError(411, "send the body as a whole, with its Content-Length")
