"""What the HTTP port refuses: how a refusal is told, and what a POST may not be."""

from __future__ import annotations

from aiohttp import web

from tessera.serving.server.errors import ServeError, http_status_of


class RefusedRequestError(Exception):
    """A request over HTTP that is refused before it is looked at; ``status`` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def refusal(error: ServeError | RefusedRequestError) -> web.Response:
    """The answer that tells ``error``."""
    if isinstance(error, RefusedRequestError):
        return web.json_response({"error": str(error)}, status=error.status)
    return web.json_response({"error": error.message}, status=http_status_of(error))


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
