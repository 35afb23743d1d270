"""REST's paths as handlers of HTTP requests: heads, statuses and headers; what they do is in `rest_pages` and `rest_infer`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from aiohttp import web

from tessera.serving.repository.choice import MAX_TRAFFIC_KEY_BYTES
from tessera.serving.server.errors import InvalidRequestError, ServeError
from tessera.serving.server.front.http_refusals import (
    RefusedRequestError,
    asked_wrongly,
    no_such_path,
    refusal,
    refuse_strange,
)
from tessera.serving.server.front.rest_infer import RestCall, RestInfer
from tessera.serving.server.front.rest_pages import REPOSITORY, ROOT, RestPages, read_model_path
from tessera.serving.server.front.rest_response import RestAnswer
from tessera.serving.server.observe.origin import RestOrigins

_MOST_DIGITS = 18  # of a size that fits 64 bits

_MODEL_ROUTE = "/v2/models/{name}/infer"
_VERSION_ROUTE = "/v2/models/{name}/versions/{version}/infer"


class RestHandlers:
    """Answers requests below ``/v2``, but for those about repositories.

    Args:
        pages: answers GET.
        infer: answers POST.
        state: ``ready`` or the word for why the server is not.
        tell: told that a request has come whole, and whether its answer is still to be made.
        origins: tells where calls for scores come from; None: nobody asks.
        own_names: whether a Host is a name of this server.
    """

    def __init__(
        self,
        pages: RestPages,
        infer: RestInfer,
        state: Callable[[], str],
        tell: Callable[[web.Request, bool], None],
        *,
        origins: RestOrigins | None,
        own_names: Callable[[str], bool],
    ) -> None:
        self._own_names = own_names
        self._origins = origins
        self._pages = pages
        self._infer = infer
        self._state = state
        self._tell = tell

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Take the paths that ``router`` does not know yet."""
        for route in (_MODEL_ROUTE, _VERSION_ROUTE):
            router.add_post(route, self._post_infer)
        router.add_route("*", ROOT, self._get_rest)
        router.add_route("*", ROOT + "/{rest:.*}", self._get_rest)

    def close(self) -> None:
        """Answer nothing any more."""
        self._infer.close()

    async def _get_rest(self, request: web.Request) -> web.Response:
        path = request.rel_url.raw_path
        if request.method not in {"GET", "HEAD"}:
            if request.method == "POST" and path.startswith(REPOSITORY):
                return refusal(no_such_path(path))
            return asked_wrongly(request)
        try:
            status, told = await self._pages.get(path)
            return web.json_response(told, status=status)
        except ServeError as error:
            return refusal(error)

    async def _post_infer(self, request: web.Request) -> web.StreamResponse:
        call = None
        try:
            call = self._head_of(request)
            if call is None:
                return await self._get_rest(request)
            pieces = request.content.iter_any()
            async with self._infer.infer(call, pieces, lambda: self._tell(request, True)) as answer:
                self._tell(request, False)
                response = web.Response(body=answer.content, headers=_headers_of(answer))
                return await self._sent(request, response, call)
        except (ServeError, RefusedRequestError) as error:
            return await self._sent(request, refusal(error), call)
        finally:
            self._tell(request, False)

    def _head_of(self, request: web.Request) -> RestCall | None:
        refuse_strange(request, self._own_names)
        call = _head_of(request, self._infer.max_body_bytes)
        if call is None or self._origins is None:
            return call
        route = _VERSION_ROUTE if call.asked.version else _MODEL_ROUTE
        origin = self._origins.of(request.headers, request.remote or "", route)
        return replace(call, origin=origin)

    async def _sent(
        self, request: web.Request, response: web.Response, call: RestCall | None
    ) -> web.Response:
        """``response``, which has left; the last one of its connection where the server drains."""
        named = self._origins is not None and self._origins.logged
        if named and call is not None and call.origin is not None:
            response.headers["X-Request-Id"] = call.origin.request_id
        if self._state() == "draining" or not request.content.is_eof():
            response.force_close()
        await response.prepare(request)
        await response.write_eof()
        return response


def _head_of(request: web.Request, max_body_bytes: int) -> RestCall | None:
    """What the head of a POST for scores says; None: its path names no model.

    Raises:
        ServeError: a header or the path has a value that it cannot have.
        RefusedRequestError: it is refused with a status of HTTP's own.
    """
    if (request.content_length or 0) > max_body_bytes:
        raise RefusedRequestError(413, f"the body has more than {max_body_bytes} bytes, the limit")
    asked = read_model_path(request.rel_url.raw_path)
    if asked is None:
        return None
    json_bytes = request.headers.get("Inference-Header-Content-Length", "")
    if json_bytes and not (
        json_bytes.isascii() and json_bytes.isdigit() and len(json_bytes) <= _MOST_DIGITS
    ):
        raise InvalidRequestError("Inference-Header-Content-Length is not a number")
    encoding = request.headers.get("Content-Encoding", "").replace("identity", "")
    if encoding not in {"", "gzip", "deflate"}:
        raise InvalidRequestError(f"Content-Encoding is '{encoding}', expected gzip or deflate")
    key = request.headers.get("X-Request-Id") or request.remote or ""
    return RestCall(
        asked,
        int(json_bytes) if json_bytes else None,
        encoding,
        f"http:{id(request.transport)}",
        key.encode(errors="surrogateescape")[:MAX_TRAFFIC_KEY_BYTES],
    )


def _headers_of(answer: RestAnswer) -> dict[str, str]:
    if answer.json_bytes is None:
        return {"Content-Type": "application/json"}
    return {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(answer.json_bytes),
    }
