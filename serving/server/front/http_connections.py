"""Who may hold the HTTP port: so many connections, each for so long.

A connection that has no complete request (it is idle, or slow) can be closed at any time in favour of a
new one, so a probe is answered however many others hold connections open.

What a connection says costs nothing before its first byte: only then is it given a protocol.  With TLS its handshake is
part of that, and counts among the connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import select
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

_BACKLOG = 1_024
_RETRY_S = 0.1
_SWEEP_S = 0.25
_READ_BYTES = 4 * 1024
"""What is read of a connection before others have their turn: a body in chunks of a byte each takes over a
millisecond a kilobyte."""
_NO_DESCRIPTOR = {errno.EMFILE, errno.ENFILE}
_NO_ROOM = {*_NO_DESCRIPTOR, errno.ENOBUFS, errno.ENOMEM}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpTimes:
    """How long a connection may take, in seconds.

    Attributes:
        first_byte_s: from its beginning to its first byte.
        request_s: from a request's first byte to its last.
        answer_s: from a request's last byte until the client has taken the answer.
        idle_s: from one request's answer to the next request.
    """

    first_byte_s: float = 5.0
    request_s: float = 10.0
    answer_s: float = 10.0
    idle_s: float = 75.0


class _State(Enum):
    NEW = "no byte has come"
    RECEIVING = "a part of a request has come"
    AT_WORK = "a request has come whole, and takes as long as it takes"
    ANSWERING = "a request has come whole, and its answer has not left"
    IDLE = "every request has its answer"


def bind_all(host: str, port: int) -> list[socket.socket]:
    """A socket on each address of ``host``, all of the same port; they do not listen yet.

    Raises:
        OSError: an address cannot be had.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((family, address) for family, *_, address in found):
            each = socket.socket(family, socket.SOCK_STREAM)
            bound.append(each)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # Where any port will do, every address has the first one's.
            each.bind((address[0], port, *address[2:]))
            port = int(each.getsockname()[1])
    except OSError:
        for each in bound:
            each.close()
        raise
    return bound


def _someone_waits(listener: socket.socket) -> bool:
    ready = select.poll()
    ready.register(listener, select.POLLIN)
    return bool(ready.poll(0))


async def _client_waited(listener: socket.socket) -> bool:
    """Whether a client waits for ``listener``; where none does, return when one does.

    Without a descriptor accept fails also where no client waits.
    """
    if _someone_waits(listener):
        return True
    loop = asyncio.get_running_loop()
    came = asyncio.Event()
    loop.add_reader(listener, came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(listener)
    return False


def listen_on(host: str, port: int) -> list[socket.socket]:
    """A listening socket on each address of ``host``, all of the same port.

    Raises:
        OSError: an address cannot be had.
    """
    listeners = bind_all(host, port)
    for listener in listeners:
        listener.listen(_BACKLOG)
    return listeners


class HttpConnections:
    """Accepts connections and hands them to a protocol of HTTP.

    Args:
        make_protocol: makes what speaks HTTP on a connection.
        max_connections: the most at a time.
        log: told when no connection can be accepted.
        times: see `HttpTimes`.
        tls: gives what a new connection encrypts with; None: it does not.

    Attributes:
        read_buffer: what has been read of the connection that is being looked at.
    """

    def __init__(
        self,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        *,
        max_connections: int,
        log: Any,
        times: HttpTimes | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._tls = tls
        self._handshakes: dict[asyncio.Task[None], float] = {}  # since when, the oldest first
        self._make_protocol = make_protocol
        self._max_connections = max_connections
        self._log = log
        self._times = times or HttpTimes()
        self._held: dict[asyncio.Transport, _Connection] = {}  # the oldest first
        self._starved = False
        self._tasks: list[asyncio.Task[None]] = []
        self._listeners: list[socket.socket] = []
        self._spare: int | None = None  # a descriptor for where the system has no other
        # Filled and taken within one step of the loop, so one does for all connections.
        self.read_buffer = bytearray(_READ_BYTES)

    def accept_from(self, listeners: Sequence[socket.socket]) -> None:
        """Accept connections from now on; ``listeners``, which listen, are closed by `stop`."""
        loop = asyncio.get_running_loop()
        self._listeners = list(listeners)
        self._keep_spare()
        for listener in listeners:
            listener.setblocking(False)
            self._tasks.append(loop.create_task(self._accept(listener)))
        self._tasks.append(loop.create_task(self._sweep()))

    async def stop(self) -> None:
        """Close the port and every connection."""
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for shaking in list(self._handshakes):
            shaking.cancel()
        for listener in self._listeners:
            listener.close()
        self._give_spare()
        for transport in list(self._held):
            transport.abort()

    def request_came(
        self, transport: asyncio.BaseTransport | None, *, at_work: bool = False
    ) -> None:
        """A request has come whole on ``transport`` and is being answered; ``at_work``: not yet."""
        connection = self._held.get(cast("asyncio.Transport", transport))
        if connection is not None:
            connection.enter(_State.AT_WORK if at_work else _State.ANSWERING)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno in _NO_ROOM:
                    if not await _client_waited(listener):
                        continue
                    if self._count() == 0 and error.errno in _NO_DESCRIPTOR and self._give_spare():
                        continue
                    self._tell_starved(error)
                    self._make_room()
                    await asyncio.sleep(_RETRY_S)
                continue
            self._starved = False
            if self._tls is None:
                with contextlib.suppress(OSError):  # it has gone again
                    await loop.connect_accepted_socket(lambda: _Connection(self), client)
                continue
            while self._handshakes and self._count() >= self._max_connections:
                self._make_room()
            shaking = loop.create_task(self._shake_hands(client, self._tls()))
            self._handshakes[shaking] = time.monotonic()
            shaking.add_done_callback(lambda task: self._handshakes.pop(task, None))

    async def _shake_hands(self, client: socket.socket, tls: ssl.SSLContext) -> None:
        with contextlib.suppress(OSError):  # it has gone again, or TLS was not agreed upon
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Connection(self),
                client,
                ssl=tls,
                ssl_handshake_timeout=self._times.first_byte_s,
            )

    def _count(self) -> int:
        return len(self._held) + len(self._handshakes)

    def _keep_spare(self) -> None:
        if self._spare is None:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)

    def _give_spare(self) -> bool:
        """Whether there was a spare descriptor, which is free now."""
        if self._spare is None:
            return False
        os.close(self._spare)
        self._spare = None
        return True

    def _tell_starved(self, error: OSError) -> None:
        if not self._starved:
            self._log.warning("http_accept_failed", error=error.strerror, limited=True)
        self._starved = True

    def _make_room(self) -> None:
        """Close the oldest connection without a complete request, or the oldest at all."""
        unfinished = (
            transport
            for transport, connection in self._held.items()
            if connection.state not in {_State.ANSWERING, _State.AT_WORK}
        )
        victim = next(unfinished, None)
        shaking, since = next(iter(self._handshakes.items()), (None, math.inf))
        if shaking is not None and (victim is None or since < self._held[victim].began):
            del self._handshakes[shaking]
            shaking.cancel()
            return
        victim = victim or next(iter(self._held), None)
        if victim is not None:
            self._close(victim)

    def _close(self, transport: asyncio.Transport) -> None:
        del self._held[transport]
        transport.abort()

    async def _sweep(self) -> None:
        """Close connections whose time is over."""
        times = self._times
        limits = {
            _State.NEW: times.first_byte_s,
            _State.RECEIVING: times.request_s,
            _State.AT_WORK: math.inf,
            _State.ANSWERING: times.answer_s,
            _State.IDLE: times.idle_s,
        }
        while True:
            await asyncio.sleep(_SWEEP_S)
            self._keep_spare()
            now = time.monotonic()
            for transport, connection in list(self._held.items()):
                if now - connection.since > limits[connection.state]:
                    self._close(transport)
                elif (
                    connection.state is _State.ANSWERING and transport.get_write_buffer_size() == 0
                ):
                    connection.enter(_State.IDLE)

    # What a connection tells.

    def admit(self, transport: asyncio.Transport, connection: _Connection) -> None:
        """A new connection is there."""
        if len(self._held) >= self._max_connections:
            self._make_room()
        self._held[transport] = connection

    def forget(self, transport: asyncio.Transport) -> None:
        """A connection has ended."""
        self._held.pop(transport, None)

    def make_protocol(self) -> asyncio.Protocol:
        """What speaks HTTP on a connection whose first byte has come."""
        return cast("asyncio.Protocol", self._make_protocol())


class _Connection(asyncio.BufferedProtocol):
    """Stands before the protocol that speaks HTTP and knows what state the connection is in."""

    __slots__ = ("_inner", "_owner", "_transport", "began", "since", "state")

    def __init__(self, owner: HttpConnections) -> None:
        self._owner = owner
        self._inner: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self.enter(_State.NEW)
        self.began = self.since

    def enter(self, state: _State) -> None:
        """Be in ``state`` from now on."""
        self.state = state
        self.since = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._owner.admit(self._transport, self)

    def get_buffer(self, _sizehint: int) -> memoryview:
        # TLS fills slices of it.
        return memoryview(self._owner.read_buffer)

    def buffer_updated(self, count: int) -> None:
        assert self._transport is not None
        if self._inner is None:
            self._inner = self._owner.make_protocol()
            self._inner.connection_made(self._transport)
        answered = self.state is _State.ANSWERING and not self._transport.get_write_buffer_size()
        if answered or self.state in {_State.NEW, _State.IDLE}:
            self.enter(_State.RECEIVING)
        self._inner.data_received(bytes(self._owner.read_buffer[:count]))

    def eof_received(self) -> bool | None:
        return None if self._inner is None else self._inner.eof_received()

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        assert self._transport is not None
        self._owner.forget(self._transport)
        if self._inner is not None:
            self._inner.connection_lost(error)
