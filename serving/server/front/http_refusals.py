"""What the HTTP port refuses: how a refusal is told, and what a POST may not be."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from tessera.serving.server.errors import Code, ServeError, http_status_of


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


def no_such_path(path: str) -> ServeError:
    """The error of a path that does not exist."""
    return ServeError(Code.NOT_FOUND, f"there is no {path}; docs/rest.md has the paths")


def asked_wrongly(request: web.Request) -> web.Response:
    """The answer to a request for a page by another method than GET and HEAD."""
    posted = request.method == "POST"
    path = request.rel_url.raw_path
    text = f"{path} is asked with GET" if posted else "only GET, HEAD and POST"
    return web.json_response({"error": text}, status=405)


def refuse_strange(request: web.Request, own_names: Callable[[str], bool] | None = None) -> None:
    """Refuse a POST that no client of ours sends.

    Args:
        request: its head.
        own_names: whether a Host is a name of this server, where its own status page may send it; None: it may not.

    Raises:
        RefusedRequestError: with HTTP's status.
    """
    if "Origin" in request.headers and not (own_names and _is_from_own_page(request, own_names)):
        # A page in a browser must not change what is served by a form or a script.
        raise RefusedRequestError(
            403, "a request with an Origin comes from a web page, and is not heard"
        )
    if "Transfer-Encoding" in request.headers:
        raise RefusedRequestError(411, "send the body as a whole, with its Content-Length")


def _is_from_own_page(request: web.Request, own_names: Callable[[str], bool]) -> bool:
    """Whether a page that this server has given sent the request: its Origin is where the request went to."""
    host = request.headers.get("Host", "")
    scheme, _, place = request.headers["Origin"].partition("://")
    if not host or place != host:
        return False
    # A name that whoever wrote a page has made to stand for this server has no certificate.
    return scheme == "https" or (scheme == "http" and own_names(host))
