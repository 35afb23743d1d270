"""What runs in the processes that the supervisor forks: a worker, or the HTTP port's pages."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tessera
from tessera.errors import UserError
from tessera.serving.server.config import ModelSource, ServerConfig
from tessera.serving.server.event_loop import run_loop
from tessera.serving.server.front.host_rule import HostRule
from tessera.serving.server.front.http_front import HttpFront
from tessera.serving.server.front.pages import Pages
from tessera.serving.server.front.rest_infer import RestInfer
from tessera.serving.server.front.status_page import StatusPage
from tessera.serving.server.front.worker_calls import WorkerCalls
from tessera.serving.server.log import make_logger
from tessera.serving.server.log_writer import LogWriter
from tessera.serving.server.metrics.metrics_page import MetricsPage
from tessera.serving.server.metrics.model_metrics import ModelMetrics
from tessera.serving.server.metrics.process_report import (
    ProcessReporter,
    ProcessTotals,
    counted_of,
)
from tessera.serving.server.model.loader import ModelIdentity, ModelLoader
from tessera.serving.server.observe.call_observer import CallObserver
from tessera.serving.server.security.security import Security, Shared
from tessera.serving.server.server import Server
from tessera.serving.server.shared_slots import SharedSlots
from tessera.serving.server.signals import HANDLED_SIGNALS

_REPORT_S = 0.1
"""How often a worker tells what it has counted; so much is lost when it is killed."""


@dataclass(frozen=True, kw_only=False)
class Process:
    """What the processes have from the supervisor.

    Attributes:
        config: of the whole server, with the ports that were found.
        slots: where workers tell what they have counted.
        listeners: listen on the HTTP port.
        held: are bound to the gRPC port and keep it for this server.
        shared: what guards them all.
    """

    config: ServerConfig
    slots: SharedSlots
    listeners: Sequence[socket.socket]
    held: Sequence[socket.socket]
    shared: Shared


def run_worker(process: Process, slot: int, loader: ModelLoader) -> int:
    """Serve until SIGTERM; returns the exit status."""
    config = process.config.of_one_process()
    # What a worker does otherwise the supervisor tells.
    level = "warning" if config.log_level == "info" else config.log_level
    before = process.slots.read(slot)
    for each in (*process.listeners, *process.held):
        each.close()

    async def serve(log: Any, writer: LogWriter) -> int:
        def make_pages(metrics: MetricsPage, _state: Callable[[], str]) -> Pages:
            return _Reporting(process.slots, slot, ProcessReporter(metrics, before))

        server = Server(
            config,
            log=log.bind(worker=slot),
            dropped_log_lines=lambda: writer.dropped,
            loader=loader,
            make_pages=make_pages,
            shares_port=True,
            shared=process.shared,
            own_address=process.shared.address_of(slot) if process.shared.folder else "",
        )
        # One that came before the server can hear of it asks for what has just been done.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
        return await server.run()

    return _run(replace(config, log_level=level), serve)


def run_pages(
    process: Process,
    models: Sequence[tuple[ModelSource, ModelIdentity]],
    state: Callable[[], str],
) -> int:
    """Show the pages until the supervisor ends this process."""
    config, slots = process.config, process.slots
    for each in process.held:
        each.close()

    async def show(log: Any, writer: LogWriter) -> int:
        totals = ProcessTotals()
        observer = CallObserver(config, log)
        page = MetricsPage(
            tessera.__version__, lambda: totals.dropped_lines["server"] + writer.dropped, totals
        )
        page.show_calls(
            lambda: totals.dropped_lines["access"] + observer.dropped_lines(),
            lambda: {
                result: totals.spans[result] + count for result, count in observer.spans().items()
            },
        )
        page.show_records(lambda: totals.records)
        for _, identity in models:
            page.add(ModelMetrics(identity.name, identity.version, identity.counted))

        def refresh() -> None:
            contents = [slots.read(slot) for slot in range(slots.count)]
            totals.take([*page.models, page.unresolved], page.security, contents, slots.restarts)

        security = Security(config, page.security, log, process.shared)
        workers = WorkerCalls(config, process.shared, observer)
        front = HttpFront(
            metrics=page,
            status_page=StatusPage(page.models, time.monotonic),
            state=state,
            calls=workers,
            infer=RestInfer(
                workers,
                max_inflight_bytes=config.max_inflight_bytes,
                max_message_bytes=config.max_message_bytes,
            ),
            security=security,
            hosts=HostRule.of(config),
            max_connections=config.max_http_connections,
            log=log,
            refresh=refresh,
            origins=observer.rest_origins(forwards=True),
        )
        refresh()
        await front.start_on(process.listeners)
        security.start()
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        # Until the workers have drained; then the supervisor kills it.
        for number in HANDLED_SIGNALS:
            loop.add_signal_handler(number, lambda: None)

        def read_again() -> None:
            observer.reopen(log)
            security.read_again()

        loop.add_signal_handler(signal.SIGHUP, read_again)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
        await ended.wait()
        return 0

    return _run(config, show)


def _run(config: ServerConfig, serve: Callable[[Any, LogWriter], Any]) -> int:
    with LogWriter.of_stderr() as writer, contextlib.redirect_stderr(writer):
        log = make_logger(config.log_level, config.log_format, writer)
        try:
            return int(run_loop(serve(log, writer)))
        except UserError as error:
            print(f"tessera serve: error: {error}", file=sys.stderr)
            return 2


class _Reporting:
    """Tells what a worker has counted, in place of an HTTP port of its own."""

    def __init__(self, slots: SharedSlots, slot: int, reporter: ProcessReporter) -> None:
        self._slots = slots
        self._slot = slot
        self._reporter = reporter
        self._task: asyncio.Task[None] | None = None

    async def start(self, _host: str, port: int) -> int:
        """Begin to report; returns ``port``, where the supervisor's pages are."""
        self._task = asyncio.get_running_loop().create_task(self._report())
        return port

    def counted(self, model: ModelMetrics) -> ModelMetrics:
        """Add what the other workers have told of ``model``."""
        whole = ModelMetrics(model.model, model.version, model.names)
        whole.add(model.counted())
        for slot in set(range(self._slots.count)) - {self._slot}:
            if report := self._slots.read(slot):
                whole.add(counted_of(report, model.model))
        return whole

    async def stop(self) -> None:
        """Report for the last time."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._tell()

    def _tell(self) -> None:
        self._slots.write(self._slot, self._reporter.report())

    async def _report(self) -> None:
        while True:
            self._tell()
            await asyncio.sleep(_REPORT_S)
