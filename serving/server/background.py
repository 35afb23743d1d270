"""A server beside the caller's own code: on a thread, or in a process of its own.

For tests, benchmarks and notebooks.  Both are context managers that are ready inside the block
and have drained after it.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from tessera.errors import UserError
from tessera.serving.server.config import ServerConfig
from tessera.serving.server.log import make_logger
from tessera.serving.server.log_writer import LogWriter
from tessera.serving.server.model.loader import ModelLoader
from tessera.serving.server.server import Server

_STOP_SECONDS = 60.0
"""What a server may take to end beyond its own drain limit before it is killed."""


class ServerThread:
    """A `Server` on an event loop of its own.

    Args:
        config: see `ServerConfig`.
        loader: see `Server`.
        log: see `Server`; to stderr if None.

    Attributes:
        port: the gRPC port.
        http_port: the HTTP port.
        loop: the server's event loop.
        server: the server, from before it is ready; to be touched on ``loop`` only.
    """

    def __init__(
        self, config: ServerConfig, *, loader: ModelLoader | None = None, log: Any = None
    ) -> None:
        self.port = 0
        self.http_port = 0
        self.loop = asyncio.new_event_loop()
        self.server: Server | None = None
        self._config = config
        self._loader = loader
        self._writer = LogWriter.of_stderr()
        self._log = log or make_logger(config.log_level, config.log_format, self._writer)
        self._stop: asyncio.Event | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._serve())
        except BaseException as error:  # noqa: BLE001 - raised again by __enter__
            self._failure = error
        finally:
            self.loop.close()
            self._writer.end()
            self._ready.set()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self.server = server = Server(
            self._config,
            loader=self._loader,
            log=self._log,
            dropped_log_lines=lambda: self._writer.dropped,
        )
        async with server:
            self.port, self.http_port = server.port, server.http_port
            self._ready.set()
            await self._stop.wait()

    @property
    def address(self) -> str:
        """``HOST:PORT`` of the gRPC port."""
        return f"{self._config.host}:{self.port}"

    def __enter__(self) -> ServerThread:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._stop is not None and self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(self._config.drain_limit_s + _STOP_SECONDS)


class ServerProcess:
    """A server in a process of its own, on free ports of 127.0.0.1.

    Args:
        arguments: flags besides ``--host``, ``--port`` and ``--http-port``.
        program: ``tessera serve``, or ``tessera-server``.

    Attributes:
        port: the gRPC port.
        http_port: the HTTP port.
        process: the process; its stderr is being read.
        log: the log lines so far, parsed.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        program: Sequence[str] = (sys.executable, "-m", "tessera", "serve"),
    ) -> None:
        self.port = 0
        self.http_port = 0
        self.log: list[dict[str, Any]] = []
        command = [*program, *arguments]
        command += ["--host", "127.0.0.1", "--port", "0", "--http-port", "0"]
        self.process = self._begun(command)
        self._ready = threading.Event()
        self._rest: list[str] = []
        self._reader = threading.Thread(target=self._read, name="server-log", daemon=True)

    @staticmethod
    def _begun(command: Sequence[str]) -> subprocess.Popen[str]:
        """The process of ``command``, which a subclass may start in another way."""
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                entry = json.loads(line)
            except ValueError:
                self._rest.append(line)
                continue
            self.log.append(entry)
            if entry.get("event") == "ready":
                self.port, self.http_port = entry["port"], entry["http_port"]
                self._ready.set()
        self._ready.set()

    @property
    def address(self) -> str:
        """``HOST:PORT`` of the gRPC port."""
        return f"127.0.0.1:{self.port}"

    def terminate(self) -> int:
        """Send SIGTERM and wait; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(_STOP_SECONDS)

    def __enter__(self) -> ServerProcess:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        self._reader.start()
        self._ready.wait()
        if self.port == 0:
            self.process.wait()
            raise UserError(f"the server did not start: {''.join(self._rest).strip()}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            try:
                self.terminate()
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join()
        if self.process.stderr is not None:
            self.process.stderr.close()
