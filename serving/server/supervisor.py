"""``tessera serve --processes N``: one server of several processes.

The supervisor, the process that was started, holds the ports and loads the packages; then it forks the
workers, which share its memory as long as nobody writes to it, as nobody writes to tables.  Each
worker is a `Server` of its own that listens on the same gRPC port.  One more process, forked before
anything is loaded, shows the HTTP port's pages: the sums of what the workers tell in `SharedSlots`.

The supervisor runs no event loop and no gRPC, so that it can fork at any time: a process that ends is
replaced, and its successor's counters go on from what it told last.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import tessera
from tessera.errors import UserError
from tessera.serving.package.records import Records
from tessera.serving.server.config import ModelSource, ServerConfig
from tessera.serving.server.forked import fork
from tessera.serving.server.front.http_connections import bind_all
from tessera.serving.server.front.http_front import open_http_port
from tessera.serving.server.metrics.process_report import is_ready, report_capacity
from tessera.serving.server.metrics.security_metrics import SecurityMetrics
from tessera.serving.server.model.loader import (
    LoadedBefore,
    LoadedModel,
    ModelLoader,
    PackageLoader,
    identify_all,
)
from tessera.serving.server.named_thread import NamedThread
from tessera.serving.server.observe.access_log import STANDARD_OUTPUT, check_access_log
from tessera.serving.server.observe.collector_client import check_collector
from tessera.serving.server.observe.record_files import check_record_folder
from tessera.serving.server.security.security import Security, Shared
from tessera.serving.server.shared_slots import SharedSlots
from tessera.serving.server.signals import SignalMeaning, SignalReader
from tessera.serving.server.worker_process import Process, run_pages, run_worker

EXIT_USER_ERROR = 2

_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
_LOOK_S = 0.05
_RESTART_S = 1.0
"""A process that ends at once is begun again no sooner than this after it was begun."""
_END_S = 5.0
"""What a worker may take to end beyond its own drain limit before it is killed."""


class State(IntEnum):
    """The server's state in `SharedSlots`; the names are those that /readyz tells."""

    LOADING = 0
    READY = 1
    DRAINING = 2


@dataclasses.dataclass
class _Child:
    """A process that the supervisor keeps running: what it does, and since when it does."""

    name: str
    body: Callable[[], int]
    at_our_end: signal.Signals
    pid: int = 0
    began: float = -_RESTART_S
    status: int | None = None


class Supervisor:
    """Starts the processes, keeps them running, and ends them in order.

    Args:
        config: with more than one process.
        log: a logger as `make_logger` makes it; the processes make their own.
        loader: where models come from; package files if None.

    Raises:
        UserError: a package cannot be read or is for GPUs, or a port cannot be had.
    """

    def __init__(self, config: ServerConfig, log: Any, loader: ModelLoader | None = None) -> None:
        self._log = log
        self._config = config
        _refuse_gpus(config.models)
        self._loader = loader or PackageLoader(
            verify_golden=config.verify_golden, public_keys=config.public_keys
        )
        self._models = identify_all(config.models, self._loader)
        self._loaded: dict[str, LoadedModel] = {}
        self._slots = SharedSlots(
            config.processes, report_capacity([identity.counted for _, identity in self._models])
        )
        self._signals = SignalReader()
        check_access_log(config.access_log)
        check_collector(config.otlp_endpoint, config.otlp_ca, config.otlp_headers_file)
        check_record_folder(config.record)
        self._shared = Shared(
            own_token=secrets.token_urlsafe(32) if config.auth_token_file else "",
            origin_secret=secrets.token_urlsafe(32)
            if config.access_log or config.otlp_endpoint or config.record
            else "",
        )
        # Its files are read by every process; here they are read so that what is wrong is told at once.
        secret_files = Security(config, SecurityMetrics(), log, self._shared).has_files
        self._has_files = secret_files or config.access_log not in {"", STANDARD_OUTPUT}
        if config.tls_cert:
            folder = tempfile.mkdtemp(prefix="tessera-")
            self._shared = dataclasses.replace(self._shared, folder=folder)
        self._listeners = open_http_port(config.host, config.http_port)
        self._held = _hold_port(config.host, config.port)
        self._config = dataclasses.replace(
            config,
            port=_port_of(self._held),
            http_port=_port_of(self._listeners),
        )
        self._children: list[_Child] = []

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT, then drain.

        Returns:
            The exit status: 0 when every accepted request was answered.

        Raises:
            UserError: a package cannot be served.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self._log.info(
            "start",
            tessera=tessera.__version__,
            models=[source.path for source in self._config.models],
            processes=self._config.processes,
        )
        process = Process(self._config, self._slots, self._listeners, self._held, self._shared)
        pages = _Child(
            "pages",
            lambda: run_pages(process, self._models, _state_of(self._slots)),
            signal.SIGKILL,
        )
        self._start(pages)
        try:
            if not self._load():
                return self._drain()
            # A collection writes to the objects that it looks at, which would then be shared no longer.
            gc.collect()
            gc.freeze()
            loader = LoadedBefore(dict(self._models), self._loaded)
            for number in range(self._config.processes):
                self._start(_worker(process, number, loader))
            return self._keep_running()
        finally:
            for child in self._children:
                if child.status is None:
                    os.kill(child.pid, signal.SIGKILL)
                    os.waitpid(child.pid, 0)
            if self._shared.folder:
                shutil.rmtree(self._shared.folder, ignore_errors=True)

    # Its life, in order.

    def _load(self) -> bool:
        """Load every model; returns whether that was before a signal to end."""
        failures: list[BaseException] = []
        thread = NamedThread(target=self._load_all, args=(failures,), name="loader", daemon=True)
        thread.start()
        while thread.is_alive():
            if self._wait() is SignalMeaning.DRAIN:
                return False
        thread.join()
        if failures:
            raise failures[0]
        return True

    def _load_all(self, failures: list[BaseException]) -> None:
        try:
            for source, identity in self._models:
                log = self._log.bind(model=identity.name, version=identity.version)
                log.info("load", path=source.path)
                model = self._loaded[identity.name] = self._loader.load(source)
                # Its thread would not be there in the workers.
                log.info("file_hash", sha256=model.file_hash.wait())
                log.info("loaded", seconds=round(model.load_seconds, 3))
        except BaseException as failure:  # noqa: BLE001 - raised again by _load
            failures.append(failure)

    def _keep_running(self) -> int:
        while self._slots.state == State.LOADING:
            if self._wait() is SignalMeaning.DRAIN:
                return self._drain()
            if all(is_ready(self._slots.read(slot)) for slot in range(self._slots.count)):
                self._slots.state = State.READY
                config = self._config
                self._log.info(
                    "ready", host=config.host, port=config.port, http_port=config.http_port
                )
        while self._wait() is not SignalMeaning.DRAIN:
            pass
        return self._drain()

    def _drain(self) -> int:
        self._slots.state = State.DRAINING
        self._log.info("drain", limit_s=self._config.drain_limit_s)
        pages, *workers = self._children
        until = time.monotonic() + self._config.drain_limit_s + _END_S
        _signal_all(workers, signal.SIGTERM)
        while any(worker.status is None for worker in workers) and time.monotonic() < until:
            if self._wait() is SignalMeaning.END:
                self._log.error("forced")
                _signal_all(workers, signal.SIGKILL)
        _signal_all([*workers, pages], signal.SIGKILL)
        self._log.info("stop")
        return 0 if all(worker.status == 0 for worker in workers) else 1

    # What every part of it does.

    def _wait(self) -> SignalMeaning | None:
        """Wait for a signal for a short time, and do what can be done at once."""
        info = signal.sigtimedwait(_SIGNALS, _LOOK_S)
        if info is None or info.si_signo == signal.SIGCHLD:
            self._reap()
            return None
        meaning = self._signals.read(info.si_signo, time.monotonic())
        if meaning is SignalMeaning.RELOAD and self._has_files:
            self._log.info("reload", number=info.si_signo)
            _signal_all(self._children, signal.SIGHUP)
        elif meaning is SignalMeaning.RELOAD:
            self._log.info("nothing_to_reload", number=info.si_signo)
        elif meaning is SignalMeaning.REPEAT:
            self._log.info("signal_repeated", number=info.si_signo)
        else:
            self._log.info("signal", number=info.si_signo)
        return meaning

    def _reap(self) -> None:
        for child in self._children:
            if child.status is None:
                pid, wait_status = os.waitpid(child.pid, os.WNOHANG)
                if pid:
                    child.status = os.waitstatus_to_exitcode(wait_status)
                    self._ended(child)
            elif self._slots.state != State.DRAINING:
                self._restart(child)

    def _ended(self, child: _Child) -> None:
        if self._slots.state == State.DRAINING:
            return
        if child.status == EXIT_USER_ERROR:
            raise UserError(f"process {child.name!r} could not start; its line above says why")
        self._log.warning("process_ended", process=child.name, pid=child.pid, status=child.status)

    def _restart(self, child: _Child) -> None:
        if time.monotonic() - child.began >= _RESTART_S:
            self._slots.restarts += 1
            self._start(child)

    def _start(self, child: _Child) -> None:
        child.began, child.status = time.monotonic(), None
        child.pid = fork(child.body, at_parents_end=child.at_our_end)
        if child not in self._children:
            self._children.append(child)
        self._log.info("process_started", process=child.name, pid=child.pid)


def _worker(process: Process, number: int, loader: ModelLoader) -> _Child:
    return _Child(f"worker-{number}", lambda: run_worker(process, number, loader), signal.SIGTERM)


def _signal_all(children: list[_Child], number: int) -> None:
    for child in children:
        if child.status is None:
            os.kill(child.pid, number)


def _state_of(slots: SharedSlots) -> Callable[[], str]:
    def state() -> str:
        return State(slots.state).name.lower()

    return state


def _refuse_gpus(models: tuple[ModelSource, ...]) -> None:
    for source in models:
        if Records(Path(source.path)).manifest().device != "cpu":
            raise UserError(
                f"--processes: {source.path} is a package for GPUs, whose memory processes do not share; "
                "leave --processes out (--gpus puts copies on several GPUs)"
            )


def _hold_port(host: str, port: int) -> list[socket.socket]:
    """Take the gRPC port for this server's workers, which may listen on it beside one another.

    Raises:
        UserError: somebody else has it.
    """
    try:
        held = bind_all(host, port)
    except OSError as error:
        raise UserError(
            f"the gRPC address {host}:{port} cannot be listened on ({error.strerror}); choose another "
            "--port or --host"
        ) from error
    for each in held:
        # Only now: with it, another server's port could have been shared.
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return held


def _port_of(sockets: list[socket.socket]) -> int:
    return int(sockets[0].getsockname()[1])
