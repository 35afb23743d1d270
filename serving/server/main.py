"""The program behind ``tessera serve``."""

from __future__ import annotations

import contextlib
import signal
from typing import Any

from tessera.serving.server.config import ServerConfig
from tessera.serving.server.event_loop import run_loop
from tessera.serving.server.log import make_logger
from tessera.serving.server.log_writer import LogWriter
from tessera.serving.server.repository.checker import PackageChecker
from tessera.serving.server.repository.version_loader import PackageVersionLoader, check_options
from tessera.serving.server.server import Server
from tessera.serving.server.signals import HANDLED_SIGNALS
from tessera.serving.server.supervisor import Supervisor


def serve_until_signal(config: ServerConfig) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status.

    Raises:
        UserError: a package or a port has to be changed.
    """
    checker = None
    if config.model_repositories:
        # Before this process has any other thread.
        checker = PackageChecker(check_options(config))
    # Whatever else writes to sys.stderr (warnings, tracebacks of threads) may not wait, either.
    with LogWriter.of_stderr() as writer, contextlib.redirect_stderr(writer):
        log = make_logger(config.log_level, config.log_format, writer)
        if config.processes > 1:
            return Supervisor(config, log).run()
        try:
            return run_loop(_serve(config, log, writer, checker))
        finally:
            if checker is not None:
                checker.close()


async def _serve(
    config: ServerConfig, log: Any, writer: LogWriter, checker: PackageChecker | None
) -> int:
    server = Server(
        config,
        log=log,
        dropped_log_lines=lambda: writer.dropped,
        version_loader=PackageVersionLoader(config, checker),
    )
    status = await server.run()
    # The loop's end takes its handlers away; a repeat that comes later changes nothing.
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    return status
