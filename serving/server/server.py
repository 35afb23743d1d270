"""The server's life: open the ports, load, answer, drain, stop.

``async with Server(config) as server:`` is ready inside the block and drained after it.
`Server.run` does the same for a program, with signals and an exit status.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import tessera
from tessera.errors import UserError
from tessera.serving.server.collection import keep_what_is_loaded
from tessera.serving.server.config import ModelSource, ServerConfig
from tessera.serving.server.daemon_thread import in_thread
from tessera.serving.server.front.admission import Admission
from tessera.serving.server.front.byte_budget import ByteBudget
from tessera.serving.server.front.connection_limits import (
    ConnectionLimits,
    connections_to_be_had,
)
from tessera.serving.server.front.grpc_front import GrpcFront
from tessera.serving.server.front.health_service import HealthService, Serving
from tessera.serving.server.front.host_rule import HostRule
from tessera.serving.server.front.http_front import HttpFront
from tessera.serving.server.front.kserve_metadata import KserveMetadata
from tessera.serving.server.front.message_receiver import MessageReceiver
from tessera.serving.server.front.pages import MakePages, Pages
from tessera.serving.server.front.predict_service import PredictService
from tessera.serving.server.front.recent_requests import RecentRequests
from tessera.serving.server.front.repository_methods import RepositoryMethods
from tessera.serving.server.front.rest_infer import OwnScores, RestInfer
from tessera.serving.server.front.shadowing import Shadowing
from tessera.serving.server.front.status_page import StatusPage
from tessera.serving.server.log import log_unhandled
from tessera.serving.server.metrics.metrics_page import MetricsPage
from tessera.serving.server.metrics.model_metrics import ModelMetrics
from tessera.serving.server.model.loader import (
    LoadedModel,
    ModelIdentity,
    ModelLoader,
    PackageLoader,
    identify_all,
    log_file_hash,
)
from tessera.serving.server.model.registry import Registry
from tessera.serving.server.model.serving import serve_model
from tessera.serving.server.observe.call_observer import CallObserver
from tessera.serving.server.repository.calls import RepositoryCalls
from tessera.serving.server.repository.manager import RepositoryManager
from tessera.serving.server.repository.model_versions import IndexRow, fixed_rows
from tessera.serving.server.repository.version_loader import PackageVersionLoader, VersionLoader
from tessera.serving.server.request.shared_memory import shared_memory_of
from tessera.serving.server.security.security import Security, Shared
from tessera.serving.server.signals import HANDLED_SIGNALS, SignalMeaning, SignalReader

EXIT_NOT_DRAINED = 1
_FLUSH_SECONDS = 1.0
"""How long the last answers may take from the handler to the socket."""

_QUIET_SECONDS = 0.05
"""When no call has come for so long, every client has seen that the server drains."""
_QUIET_TRIES = 20


class Server:
    """A server of one or more models.

    Must be made inside a running event loop, which then owns it.

    Args:
        config: see `ServerConfig`.
        loader: where models come from; package files if None.
        version_loader: where versions of repositories come from; package files, checked in this process, if
            None.
        log: a logger as `make_logger` makes it.
        dropped_log_lines: how many lines ``log`` has lost so far.
        make_pages: makes what shows the metrics and the state; the HTTP port if None.
        shares_port: whether other processes of the same server listen on the same gRPC port.
        shared: what these have in common; None: there are none.
        own_address: see `GrpcFront`.

    Attributes:
        port: the gRPC port, once the server has started.
        http_port: the HTTP port, once the server has started.

    Raises:
        UserError: a package, a certificate, a file of tokens, the access log or the folder of recorded requests cannot be used, or two models have the
            same name.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        log: Any,
        dropped_log_lines: Callable[[], int],
        loader: ModelLoader | None = None,
        version_loader: VersionLoader | None = None,
        make_pages: MakePages | None = None,
        shares_port: bool = False,
        shared: Shared | None = None,
        own_address: str = "",
    ) -> None:
        self.port = 0
        self.http_port = 0
        self._config = config
        self._log = log
        self._loader = loader or PackageLoader.of(config)
        self._models = identify_all(config.models, self._loader)
        names = [identity.name for _, identity in self._models]
        self._registry = Registry(names)
        self._metrics = MetricsPage(tessera.__version__, dropped_log_lines)
        self._security = Security(config, self._metrics.security, log, shared)
        self._observer = CallObserver(config, log)
        self._metrics.show_calls(self._observer.dropped_lines, self._observer.spans)
        self._metrics.show_records(self._observer.records)
        self._counters = {
            identity.name: ModelMetrics(identity.name, identity.version, identity.counted)
            for _, identity in self._models
        }
        for counters in self._counters.values():
            self._metrics.add(counters)
        self._health = HealthService(names)
        self._admission = Admission()
        self._budget = ByteBudget(config.max_inflight_bytes)
        self._draining = False
        self._loaded = False
        self._recent = RecentRequests()
        self._manager = self._make_manager(version_loader) if config.model_repositories else None
        self._metrics.versions.index = self._shown_versions
        self._metrics.versions.follow.index = self._shown_versions
        changes = RepositoryCalls(self._manager, config.model_control, frozenset(names))
        self._repository = RepositoryMethods(changes, self._index, log)
        self._memory = shared_memory_of(config)
        self._kserve = KserveMetadata(
            registry=self._registry,
            version=tessera.__version__,
            state=self.state,
            counted=lambda model: self._http.counted(model),  # noqa: PLW0108 - it is made below
            log=log,
            memory=self._memory,
        )
        self._predict_service = PredictService(
            registry=self._registry,
            metrics=self._metrics,
            admission=self._admission,
            shadowing=Shadowing(self._budget, self._metrics.versions, log),
            recent=self._recent if self._manager is not None else None,
            log=self._log,
            log_requests=config.log_level == "debug",
            observer=self._observer,
        )
        self._http = (make_pages or self._make_http_front)(self._metrics, self.state)
        self._grpc = GrpcFront(
            predict_service=self._predict_service,
            metadata=self._kserve,
            repository=self._repository,
            health=self._health,
            budget=self._budget,
            receiver=MessageReceiver(
                max_bytes=config.max_inflight_bytes, max_message_bytes=config.max_message_bytes
            ),
            security=self._security,
            max_message_bytes=config.max_message_bytes,
            connections=self._connection_limits(),
            shares_port=shares_port,
            own_address=own_address,
            origins=self._observer.grpc_origins(shared.origin_secret if shared else ""),
            memory=self._memory,
        )

    def _connection_limits(self) -> ConnectionLimits:
        of_regions = 0 if self._memory is None else self._memory.limits.descriptors
        return ConnectionLimits(
            most=connections_to_be_had(self._config.max_connections, of_regions),
            max_age_s=self._config.max_connection_age_s,
            idle_s=self._config.idle_timeout_s,
        )

    def _index(self) -> list[IndexRow]:
        """Every version of every model, those of ``--model`` first."""
        rows = fixed_rows(self._registry.fixed())
        return rows if self._manager is None else rows + self._manager.index()

    def _shown_versions(self) -> list[IndexRow]:
        return [] if self._manager is None else self._index()

    def _make_manager(self, loader: VersionLoader | None) -> RepositoryManager:
        return RepositoryManager(
            config=self._config,
            registry=self._registry,
            metrics=self._metrics,
            health=self._health,
            loader=loader or PackageVersionLoader(self._config, None),
            recent=self._recent,
            log=self._log,
        )

    def _make_http_front(self, metrics: MetricsPage, state: Callable[[], str]) -> Pages:
        return HttpFront(
            metrics=metrics,
            status_page=StatusPage(metrics.models, time.monotonic, self._shown_versions),
            state=state,
            calls=self._kserve,
            infer=RestInfer(
                OwnScores(self._predict_service, self._budget, self._memory),
                max_inflight_bytes=self._config.max_inflight_bytes,
                max_message_bytes=self._config.max_message_bytes,
            ),
            repository=self._repository,
            regions=self._kserve.regions,
            security=self._security,
            hosts=HostRule.of(self._config),
            max_connections=self._config.max_http_connections,
            log=self._log,
            origins=self._observer.rest_origins(),
        )

    def state(self) -> str:
        """``loading``, ``ready`` or ``draining``."""
        if self._draining:
            return "draining"
        return "ready" if self._loaded else "loading"

    async def open(self) -> None:
        """Open the ports; until `load` is done, calls are answered with UNAVAILABLE.

        Raises:
            UserError: a port cannot be had.
        """
        config = self._config
        self._log.info(
            "start", tessera=tessera.__version__, models=[source.path for source in config.models]
        )
        # HTTP first: it fails without leaving anything behind that has to be closed in order.
        self.http_port = await self._http.start(config.host, config.http_port)
        self.port = await self._grpc.start(config.host, config.port)
        self._security.start()

    async def load(self) -> None:
        """Load every model, one after the other.

        Raises:
            UserError: a package of ``--model`` cannot be served, or a repository cannot be read.
        """
        for source, identity in self._models:
            self._log.info("load", model=identity.name, version=identity.version, path=source.path)
            model = await in_thread(lambda source=source: self._loader.load(source))  # type: ignore[misc] # mypy cannot infer a lambda with a default
            self._serve(source, identity, model)
            self._log.info(
                "loaded",
                model=identity.name,
                version=identity.version,
                seconds=round(model.load_seconds, 3),
            )
            log_file_hash(self._log, identity, model)
        if self._manager is not None:
            await self._manager.start()
        self._loaded = True
        self._health.set("", Serving.SERVING)
        self._log.info("ready", host=self._config.host, port=self.port, http_port=self.http_port)

    def _serve(self, source: ModelSource, identity: ModelIdentity, model: LoadedModel) -> None:
        counters = self._counters[identity.name]
        served = serve_model(model, source.path, counters, self._config.limits, self._log)
        self._registry.add(served)
        counters.ready = True
        self._health.set(identity.name, Serving.SERVING)

    async def drain(self) -> bool:
        """Turn new calls away, answer those that were accepted, then close.

        Returns:
            Whether every accepted call was answered within the drain limit.
        """
        limit = time.monotonic() + self._config.drain_limit_s
        self._draining = True
        self._health.stop_serving()
        if self._manager is not None:
            await self._manager.close()
        for counters in self._metrics.models:
            counters.ready = False
        self._log.info("drain", active=self._admission.active, limit_s=self._config.drain_limit_s)
        await self._wait_for_propagation()
        self._admission.shut()
        for model in self._registry.loaded():
            model.scheduler.start_draining()
        try:
            await asyncio.wait_for(self._admission.wait_empty(), limit - time.monotonic())
        except asyncio.TimeoutError:  # another class than TimeoutError before Python 3.11
            self._log.error("drain_limit_passed", unanswered=self._admission.active)
            await self.close(0.0)
            return False
        self._health.close()
        await self._wait_for_quiet()
        await self.close(_FLUSH_SECONDS)
        return True

    async def _wait_for_quiet(self) -> None:
        # What has been answered must have left when the connections end, and calls that gRPC has
        # read but not yet handed over should hear "draining", too.
        for _ in range(_QUIET_TRIES):
            refused = self._admission.refused
            await asyncio.sleep(_QUIET_SECONDS)
            if self._admission.refused == refused and not self._budget.held:
                return

    async def _wait_for_propagation(self) -> None:
        await asyncio.sleep(self._config.drain_propagation_ms / 1e3)

    async def close(self, grace_s: float) -> None:
        """Close the ports and end the workers; calls that run get ``grace_s`` seconds."""
        self._health.close()
        if self._manager is not None:
            await self._manager.close()
        await self._grpc.stop(grace_s)
        for model in self._registry.loaded():
            model.scheduler.close(grace_s)
        await self._http.stop()
        await self._security.stop()
        self._observer.close()
        self._log.info("stop")

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT, then drain; another one a second later ends at once.

        SIGHUP reads certificates, tokens and repositories again, and opens the access log anew.  The loop goes on handling the signals until it is
        closed, so that a repeat that comes late does not end the process another way.

        Returns:
            The exit status: 0 when every accepted request was answered.

        Raises:
            UserError: a port cannot be had or a package cannot be served.
        """
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: log_unhandled(self._log, context))
        stops: asyncio.Queue[int] = asyncio.Queue()
        reader = SignalReader()

        def handle(number: int) -> None:
            meaning = reader.read(number, time.monotonic())
            if meaning is SignalMeaning.RELOAD:
                self._reload(number)
            elif meaning is SignalMeaning.REPEAT:
                self._log.info("signal_repeated", number=number)
            else:
                stops.put_nowait(number)

        for number in HANDLED_SIGNALS:
            loop.add_signal_handler(number, handle, number)
        await self._serve_until_signal(stops)
        return await self._drain_until_signal(stops)

    def _reload(self, number: int) -> None:
        files = self._security.has_files or self._observer.has_file
        anything = self._manager is not None or files
        self._log.info("reload" if anything else "nothing_to_reload", number=number)
        self._observer.reopen(self._log)
        self._security.read_again()
        if self._manager is not None:
            self._manager.rescan()

    async def _serve_until_signal(self, signals: asyncio.Queue[int]) -> None:
        signalled = asyncio.ensure_future(signals.get())
        try:
            await self.open()
            loading = asyncio.ensure_future(self.load())
            await asyncio.wait({loading, signalled}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                await loading
                keep_what_is_loaded()
            self._log.info("signal", number=await signalled)
            loading.cancel()
        except UserError:
            signalled.cancel()
            await self.close(0.0)
            raise

    async def _drain_until_signal(self, signals: asyncio.Queue[int]) -> int:
        draining = asyncio.ensure_future(self.drain())
        signalled = asyncio.ensure_future(signals.get())
        await asyncio.wait({draining, signalled}, return_when=asyncio.FIRST_COMPLETED)
        if draining.done():
            signalled.cancel()
            return 0 if draining.result() else EXIT_NOT_DRAINED
        self._log.error("forced", unanswered=self._admission.active)
        draining.cancel()
        return EXIT_NOT_DRAINED

    async def __aenter__(self) -> Server:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        try:
            await self.open()
            await self.load()
        except BaseException:
            await self.close(0.0)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.drain()
