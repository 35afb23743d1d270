"""Ends a port and its connections below gRPC, which has no call for it.

When gRPC stops a server, it tells every call that still comes in CANCELLED, as if its client had wanted
that.  A client whose connection ends is told UNAVAILABLE instead, and knows that it may ask elsewhere.
"""

from __future__ import annotations

import contextlib
import socket

from tessera.serving.server.front.own_sockets import listens, sockets_of


def hang_up(port: int) -> None:
    """Let no more connections in at this process's ``port``, and end those that are there.

    What has been written to a connection is still sent.  Without effect where there is no /proc.
    """
    for one in sockets_of(port):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RD if listens(one) else socket.SHUT_WR)
