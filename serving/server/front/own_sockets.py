"""The sockets of a port of this process, below gRPC, which does not give them to its user."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_INTERNET = {socket.AF_INET, socket.AF_INET6}


def sockets_of(port: int) -> Iterator[socket.socket]:
    """Each socket of this process that listens at ``port`` or is a connection to it, closed here when the next is asked for.

    What is set on one holds for gRPC's descriptor of it, too.  None where there is no /proc.
    """
    with contextlib.suppress(FileNotFoundError):
        for entry in list(Path("/proc/self/fd").iterdir()):
            # A descriptor may be closed by gRPC's threads at any time, and most are not sockets.
            with contextlib.suppress(OSError), _socket_of(int(entry.name)) as one:
                if one.family in _INTERNET and one.getsockname()[1] == port:
                    yield one


def listens(one: socket.socket) -> bool:
    """Whether it is not a connection but what they come in by."""
    return one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) != 0


def _socket_of(descriptor: int) -> socket.socket:
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
