"""The program behind ``tessera serve``."""

from __future__ import annotations

import asyncio
import signal

from tessera.serving.server.config import ServerConfig
from tessera.serving.server.server import Server
from tessera.serving.server.signals import HANDLED_SIGNALS


def serve_until_signal(config: ServerConfig) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status.

    Raises:
        UserError: a package or a port has to be changed.
    """

    async def serve() -> int:
        status = await Server(config).run()
        # The loop's end takes its handlers away; a repeat that comes later changes nothing.
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
        return status

    return asyncio.run(serve())
