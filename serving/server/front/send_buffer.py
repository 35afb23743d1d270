"""Bounds what the kernel takes of a connection's answers before its client has acknowledged them.

gRPC's C core reads a connection and writes to it on whichever thread has something to do for it, and that may be the event
loop's, which then holds the interpreter's lock.  A client that sends past its window makes it answer each frame with
a RST_STREAM.  When 10,000 of them wait, the core stops reading until it has something to write, which is what the event
loop brings with the next step of the call.  As long as the kernel takes those 130 KB at once, the loop's thread writes them,
reads the next 10,000 frames, writes again, and so on, and nobody else is answered for as long as the client goes on.
A write that has to wait is completed by a thread of gRPC's own, and the event loop is free again.

A client on the same host may acknowledge so quickly that some of these writes do not wait; then the loop is held for
several rounds of some 20 ms.

The price: a connection has no more than this on its way to a client, so that an answer of more takes a
round trip for each `SEND_BUFFER_BYTES` or less.
"""

from __future__ import annotations

import contextlib
import socket

from tessera.serving.server.front.own_sockets import listens, sockets_of

SEND_BUFFER_BYTES = 32 * 1024
"""As the kernel counts it, with its own records beside the bytes."""


def bound_send_buffers(port: int) -> None:
    """For connections that come in at this process's ``port`` from now on. Without effect where there is no /proc."""
    for one in sockets_of(port):
        with contextlib.suppress(OSError):
            if listens(one):
                # What comes in by it inherits its size; the kernel doubles what it is told.
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES // 2)
