"""Ends a port and its connections below gRPC, which has no call for it.

When gRPC stops a server, it tells every call that still comes in CANCELLED, as if its client had wanted
that.  A client whose connection ends is told UNAVAILABLE instead, and knows that it may ask elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

_INTERNET = {socket.AF_INET, socket.AF_INET6}


def hang_up(port: int) -> None:
    """Let no more connections in at this process's ``port``, and end those that are there.

    What has been written to a connection is still sent.  Without effect where there is no /proc.
    """
    with contextlib.suppress(FileNotFoundError):
        for entry in list(Path("/proc/self/fd").iterdir()):
            # A descriptor may be closed by gRPC's threads at any time, and most are not sockets.
            with contextlib.suppress(OSError):
                _hang_up(os.dup(int(entry.name)), port)


def _hang_up(descriptor: int, port: int) -> None:
    """End the socket that ``descriptor`` is, if it is one of ``port``'s; closes ``descriptor``."""
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise
    with connection:
        if connection.family in _INTERNET and connection.getsockname()[1] == port:
            listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            connection.shutdown(socket.SHUT_RD if listens else socket.SHUT_WR)
