"""The program behind ``tessera serve``."""

from __future__ import annotations

import asyncio

from tessera.serving.server.config import ServerConfig
from tessera.serving.server.server import Server


def serve_until_signal(config: ServerConfig) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status.

    Raises:
        UserError: a package or a port has to be changed.
    """

    async def serve() -> int:
        return await Server(config).run()

    return asyncio.run(serve())
