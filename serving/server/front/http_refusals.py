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


def refuse_strange(request: web.Request, *, own_page: bool = False) -> None:
    """Refuse a POST that no client of ours sends.

    Args:
        request: its head.
        own_page: whether the server's own status page may send it.

    Raises:
        RefusedRequestError: with HTTP's status.
    """
    if "Origin" in request.headers and not (own_page and _is_from_own_page(request)):
        # A page in a browser must not change what is served by a form or a script.
        raise RefusedRequestError(
            403, "a request with an Origin comes from a web page, and is not heard"
        )
    if "Transfer-Encoding" in request.headers:
        raise RefusedRequestError(411, "send the body as a whole, with its Content-Length")


def _is_from_own_page(request: web.Request) -> bool:
    """Whether a page that this server has given sent the request: its Origin is where the request went to."""
    host = request.headers.get("Host", "")
    scheme, _, place = request.headers["Origin"].partition("://")
    if not host or place != host:
        return False
    # A rebound name (see below) has no certificate.
    return scheme == "https" or (scheme == "http" and _is_fixed(host))


def _is_fixed(host: str) -> bool:
    """Whether ``host`` is an IP address or localhost.

    A name that whoever wrote a page owns may be made to name this server, so that its page would be taken for the
    server's own (DNS rebinding).
    """
    if host.startswith("["):
        return True
    name = host.partition(":")[0]
    return name == "localhost" or (name != "" and not name.strip("0123456789."))
