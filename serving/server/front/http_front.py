"""The HTTP port: ``/metrics``, ``/healthz``, ``/readyz``, the status page ``/``, and below ``/v2`` REST.

REST is the KServe protocol's calls (`rest_pages`) and those about repositories.

It stays open while the server drains, so that the last requests are still counted by whoever
scrapes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import math
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib import resources
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMethod, HttpProcessingError
from aiohttp.typedefs import Handler
from jinja2 import Environment, StrictUndefined, select_autoescape

import tessera
from tessera.errors import UserError
from tessera.report_page import page_style
from tessera.serving.server.errors import ServeError
from tessera.serving.server.front.host_rule import HostRule
from tessera.serving.server.front.http_connections import HttpConnections, listen_on
from tessera.serving.server.front.http_refusals import (
    RefusedRequestError,
    asked_wrongly,
    no_such_path,
    refusal,
    refuse_strange,
)
from tessera.serving.server.front.last_hour import POINTS
from tessera.serving.server.front.page_texts import page_policy, page_script, request_form
from tessera.serving.server.front.repository_methods import MAX_BODY_BYTES, RepositoryMethods
from tessera.serving.server.front.rest_handlers import RestHandlers
from tessera.serving.server.front.rest_infer import RestInfer
from tessera.serving.server.front.rest_pages import ROOT as REST
from tessera.serving.server.front.rest_pages import KserveCalls, RestPages
from tessera.serving.server.front.shared_memory_calls import ROOT as SHARED_MEMORY
from tessera.serving.server.front.shared_memory_calls import SharedMemoryCalls
from tessera.serving.server.front.status_page import StatusPage
from tessera.serving.server.front.token_gate import refused_page
from tessera.serving.server.metrics.metrics_page import MetricsPage
from tessera.serving.server.metrics.model_metrics import ModelMetrics
from tessera.serving.server.observe.origin import RestOrigins
from tessera.serving.server.security.security import Security

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PAGES = ("/", "/metrics", "/healthz", "/readyz")
_SNAPSHOT_SECONDS = 1.0
_SOFTWARE = "tessera"
"""What answers say of the server's software; aiohttp would name itself, Python and the versions of both."""


def _nothing() -> None:
    """What most servers do before their figures are looked at."""


class HttpFront:
    """The listening server.

    Args:
        metrics: rendered by ``/metrics``.
        status_page: shown by ``/``.
        refresh: called before either is looked at.
        origins: see `RestHandlers`.
        state: ``ready`` or the word for why it is not.
        calls: answers what REST asks with GET.
        infer: answers what it asks for scores.
        repository: answers ``POST /v2/repository/...``; None: these are not there.
        regions: answers the calls about shared memory; None: these are not there.
        security: who may ask.
        hosts: by which names browsers may.
        max_connections: the most connections at a time.
        log: where trouble with connections goes.
    """

    def __init__(
        self,
        *,
        metrics: MetricsPage,
        status_page: StatusPage,
        state: Callable[[], str],
        calls: KserveCalls,
        infer: RestInfer,
        security: Security,
        hosts: HostRule,
        max_connections: int,
        log: Any,
        repository: RepositoryMethods | None = None,
        regions: SharedMemoryCalls | None = None,
        refresh: Callable[[], None] = _nothing,
        origins: RestOrigins | None = None,
    ) -> None:
        self._repository = repository
        self._regions = regions
        self._rest = RestHandlers(
            RestPages(calls, state, regions),
            infer,
            state,
            self._tell,
            origins=origins,
            own_names=hosts.knows,
        )
        self._hosts = hosts
        self._refresh = refresh
        self._security = security
        self._max_connections = max_connections
        self._log = log
        self._connections: HttpConnections | None = None
        self._metrics = metrics
        self._status_page = status_page
        self._state = state
        self._began = time.monotonic()
        self._runner: web.AppRunner | None = None
        self._ticker: asyncio.Task[None] | None = None
        environment = Environment(
            autoescape=select_autoescape(default=True), undefined=StrictUndefined
        )
        environment.filters["figure"] = _figure
        page = resources.files("tessera.serving.server.front").joinpath("status_page.html")
        environment.globals |= {
            "style": page_style(),
            "form": request_form(),
            "script": page_script(),
        }
        self._template = environment.from_string(page.read_text(encoding="utf-8"))
        self._policy = page_policy()

    async def start(self, host: str, port: int) -> int:
        """Listen.

        Returns:
            The port, which is another than ``port`` only where that is 0.

        Raises:
            UserError: the address cannot be had.
        """
        listeners = open_http_port(host, port)
        await self.start_on(listeners)
        return int(listeners[0].getsockname()[1])

    async def start_on(self, listeners: Sequence[socket.socket]) -> None:
        """Answer on sockets that listen; they are closed by `stop`."""
        app = web.Application(middlewares=[self._tell_request], client_max_size=MAX_BODY_BYTES)
        app.on_response_prepare.append(_name_software)
        app.router.add_get("/metrics", self._get_metrics)
        app.router.add_get("/healthz", self._get_healthz)
        app.router.add_get("/readyz", self._get_readyz)
        app.router.add_get("/", self._get_page)
        if self._repository is not None:
            app.router.add_post("/v2/repository/index", self._post_index)
            model = "/v2/repository/models/{name}"
            app.router.add_post(f"{model}/load", self._post_load)
            app.router.add_post(f"{model}/unload", self._post_unload)
        if self._regions is not None:
            app.router.add_post(SHARED_MEMORY + "{rest:.*}", self._post_region)
        self._rest.add_to(app.router)
        app.router.add_route("*", "/{rest:.*}", self._refuse_path)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_forwarding_logger(self._log),
            shutdown_timeout=1.0,
            # A connection ends rather than have a body read that nobody wants.
            lingering_time=0.0,
            auto_decompress=False,  # which has no bound
            handler_cancellation=True,
        )
        await self._runner.setup()
        assert self._runner.server is not None
        self._connections = HttpConnections(
            functools.partial(_protocol, self._runner.server),
            max_connections=self._max_connections,
            log=self._log,
            tls=self._security.http_tls(),
        )
        self._connections.accept_from(listeners)
        self._ticker = asyncio.get_running_loop().create_task(self._tick())

    def counted(self, model: ModelMetrics) -> ModelMetrics:
        """Give ``model`` back: this process is the whole server."""
        return model

    async def stop(self) -> None:
        """Close the port."""
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        if self._runner is not None:
            await self._runner.cleanup()
        if self._connections is not None:
            await self._connections.stop()
        self._rest.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_SNAPSHOT_SECONDS)
            self._refresh()
            self._status_page.tick()

    @web.middleware
    async def _tell_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        assert self._connections is not None
        if request.method != "POST":
            self._connections.request_came(request.transport)
        refused = self._hosts.refused_page(request)
        refused = refused or refused_page(self._security.authorizer, request)
        return refused or await handler(request)

    def _tell(self, request: web.Request, at_work: bool) -> None:  # noqa: FBT001 - see RestHandlers
        assert self._connections is not None
        self._connections.request_came(request.transport, at_work=at_work)

    async def _get_metrics(self, _request: web.Request) -> web.Response:
        self._refresh()
        return web.Response(body=self._metrics.render(), headers={"Content-Type": _METRICS_TYPE})

    async def _get_healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _get_readyz(self, _request: web.Request) -> web.Response:
        state = self._state()
        return web.Response(text=f"{state}\n", status=200 if state == "ready" else 503)

    async def _refuse_path(self, request: web.Request) -> web.Response:
        path = request.rel_url.raw_path
        if request.method in {"GET", "HEAD"}:
            text = f"there is {', '.join(_PAGES[:-1])}, {_PAGES[-1]} and {REST}\n"
            return web.Response(text=text, status=404)
        if request.method == "POST" and path not in _PAGES:
            return refusal(no_such_path(path))
        return asked_wrongly(request)

    async def _post_index(self, request: web.Request) -> web.Response:
        repository = self._repository
        assert repository is not None
        return await self._answer(request, lambda body: _now(repository.index_json(body)))

    async def _post_load(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        repository = self._repository
        assert repository is not None
        return await self._answer(request, lambda body: repository.load_json(name, body))

    async def _post_unload(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        repository = self._repository
        assert repository is not None
        return await self._answer(request, lambda body: repository.unload_json(name, body))

    async def _post_region(self, request: web.Request) -> web.Response:
        regions = self._regions
        assert regions is not None
        path = request.rel_url.raw_path
        status = 200

        async def call(body: bytes) -> str:
            nonlocal status
            status, told = regions.post(path, body)
            return json.dumps(told)

        response = await self._answer(request, call)
        if response.status == 200:
            response.set_status(status)
        return response

    async def _answer(
        self, request: web.Request, call: Callable[[bytes], Awaitable[str | None]]
    ) -> web.Response:
        assert self._connections is not None
        try:
            body = await _read_body(request)
            self._connections.request_came(request.transport, at_work=True)
            # What has begun goes on when its client has gone.
            text = await asyncio.shield(call(body)) or ""
            return web.Response(text=text, content_type="application/json")
        except (ServeError, RefusedRequestError) as error:
            return refusal(error)
        finally:
            self._connections.request_came(request.transport)

    async def _get_page(self, _request: web.Request) -> web.Response:
        self._refresh()
        page = self._template.render(
            state=self._state(),
            rows=self._status_page.rows(),
            versions=self._status_page.versions(),
            shadows=self._metrics.versions.shadows(),
            hours=self._status_page.hours(),
            points=POINTS,
            freshness=self._status_page.freshness(),
            features=self._status_page.features(),
            version=tessera.__version__,
            uptime=round(time.monotonic() - self._began),
        )
        return web.Response(
            text=page,
            content_type="text/html",
            headers={"Content-Security-Policy": self._policy},
        )


async def _read_body(request: web.Request) -> bytes:
    refuse_strange(request)
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise RefusedRequestError(
            413, f"the body has more than {MAX_BODY_BYTES} bytes, the limit"
        ) from None


async def _name_software(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = _SOFTWARE


async def _now(text: str) -> str:
    return text


def open_http_port(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on the HTTP port.

    Raises:
        UserError: the address cannot be had.
    """
    try:
        return listen_on(host, port)
    except OSError as error:
        raise UserError(
            f"the HTTP address {host}:{port} cannot be listened on ({error.strerror}); "
            "choose another --http-port or --host"
        ) from error


class _Protocol(web.RequestHandler):
    """aiohttp's, but that it does not repeat what cannot be read as HTTP: in it may be a token."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer, which the log has a line of, too.  aiohttp quotes the line of a head in both."""
        if isinstance(exc, HttpProcessingError):
            message = f"this is not an HTTP/1.1 request ({type(exc).__name__})\n"
            known = BadHttpMethod(error="") if isinstance(exc, BadHttpMethod) else None
            exc = known or HttpProcessingError(code=status, message=type(exc).__name__)
        response = super().handle_error(request, status, exc, message)
        response.headers["Server"] = _SOFTWARE  # no signal is sent for it
        return response


def _protocol(server: web.Server) -> asyncio.BaseProtocol:
    """What speaks HTTP on a new connection; aiohttp's server has no way of naming its class."""
    made = server()
    made.__class__ = _Protocol
    return made


class _Forward(logging.Handler):
    """Writes what aiohttp logs, which clients can cause, to the server's log."""

    def __init__(self, log: Any) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.warning(
            "http_error", message=record.getMessage(), exc_info=record.exc_info, limited=True
        )


def _forwarding_logger(log: Any) -> logging.Logger:
    logger = logging.Logger("http")  # noqa: LOG001 - servers in one process do not share it
    logger.addHandler(_Forward(log))
    return logger


def _figure(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"
