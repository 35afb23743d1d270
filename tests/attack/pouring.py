"""Sends floods from a process of its own, so that the polite client beside it measures the server and not us.

``python -m tests.attack.pouring NAME... --grpc HOST:PORT --http HOST:PORT --request FILE --seconds S`` sends all that are
named at once and prints what was sent of each as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import json
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

RECONNECT_S = 0.01
"""How long a place waits after its connection ended: the hundred thousandth connection proves no more than the
first thousand, and the machine's ports run out."""
DRIP_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """``request`` is a valid PredictionRequest of the model that is served."""

    address: str
    request: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Flood:
    """What one connection sends, and how.

    Attributes:
        connections: how many there are at once; one that ends is opened again.
        reads: whether the client reads what comes back; otherwise its receive buffer is as small as may be.
        holds: a connection stays open when all was sent; otherwise it is aborted and the next begins.
        drips: a piece a second instead of as fast as it goes.
        port: ``grpc`` or ``http``.
    """

    name: str
    what: str
    send: Callable[[Target], Iterator[bytes]]
    connections: int = 1
    reads: bool = True
    holds: bool = False
    drips: bool = False
    port: str = "grpc"


class Registry(dict[str, Flood]):
    def __init__(self, port: str = "grpc") -> None:
        super().__init__()
        self._port = port

    def add(self, **how):
        def register(send):
            what = " ".join(send.__doc__.split())
            self[send.__name__] = Flood(send.__name__, what, send, port=self._port, **how)
            return send

        return register


@dataclasses.dataclass(slots=True)
class Sent:
    """What became of a flood."""

    bytes: int = 0
    connections: int = 0
    refused: int = 0
    closed_by_server: int = 0


class Place:
    """One of a flood's connections, opened again when it has ended."""

    def __init__(self, flood, target, sent, selector):
        self._flood, self._target, self._sent, self._selector = flood, target, sent, selector
        self._socket = None
        self._again = 0.0

    def turn(self, now):
        """Opens the connection, or sends the next drop, where it is time."""
        if now < self._again:
            return
        if self._socket is None:
            self._open(now)
        elif self._flood.drips and self._waiting:
            self._waiting = False
            self._selector.modify(self._socket, self._events(), self)

    def _events(self):
        sends = not self._done and not self._waiting
        return (selectors.EVENT_WRITE if sends else 0) | (
            selectors.EVENT_READ if self._flood.reads or self._flood.holds else 0
        )

    def _open(self, now):
        host, _, port = self._target.address.rpartition(":")
        made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        if not self._flood.reads:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        # Aborted, not closed: no port of this machine waits for a minute.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        made.setblocking(False)
        self._again = now + RECONNECT_S
        if made.connect_ex((host.strip("[]"), int(port))) not in {0, errno.EINPROGRESS}:
            self._sent.refused += 1
            made.close()
            return
        self._socket, self._rest, self._done, self._waiting = made, memoryview(b""), False, False
        self._pieces = self._flood.send(self._target)
        self._sent.connections += 1
        self._selector.register(made, selectors.EVENT_WRITE, self)

    def _end(self, *, by_server):
        self._selector.unregister(self._socket)
        self._socket.close()
        self._socket = None
        self._sent.closed_by_server += by_server
        self._again = time.monotonic() + RECONNECT_S

    def handle(self, events):
        if self._socket is None:
            return
        try:
            if events & selectors.EVENT_READ and not self._socket.recv(1 << 18):
                self._end(by_server=True)
                return
            if events & selectors.EVENT_WRITE:
                self._send()
        except BlockingIOError:
            pass
        except OSError:
            self._end(by_server=True)

    def _send(self):
        if not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                self._done = True
                if not self._flood.holds:
                    self._end(by_server=False)
                    return
                if not self._events():
                    self._end(by_server=False)
                    return
            else:
                self._rest = memoryview(piece)
                if self._flood.drips:
                    self._waiting = True
                    self._again = time.monotonic() + DRIP_S
            self._selector.modify(self._socket, self._events() or selectors.EVENT_READ, self)
        if self._rest:
            count = self._socket.send(self._rest)
            self._sent.bytes += count
            self._rest = self._rest[count:]


def pour(floods: Mapping[Flood, Target], seconds: float) -> dict[str, Sent]:
    """Sends each of ``floods`` to its target for ``seconds``, all at once, then aborts every connection."""
    sent = {flood.name: Sent() for flood in floods}
    selector = selectors.DefaultSelector()
    places = [
        Place(flood, target, sent[flood.name], selector)
        for flood, target in floods.items()
        for _ in range(flood.connections)
    ]
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        for place in places:
            place.turn(now)
        for key, events in selector.select(0.01):
            key.data.handle(events)
    for key in list(selector.get_map().values()):
        key.fileobj.close()
    return sent


def main() -> int:
    from tests.attack import grpc_floods, http_floods

    floods = {**grpc_floods.FLOODS, **http_floods.FLOODS}
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("names", nargs="+", choices=sorted(floods), metavar="NAME")
    parser.add_argument("--grpc", required=True, help="HOST:PORT of the gRPC port")
    parser.add_argument("--http", required=True, help="HOST:PORT of the HTTP port")
    parser.add_argument("--request", type=Path, required=True, help="a PredictionRequest's bytes")
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    request = given.request.read_bytes()
    targets = {"grpc": Target(given.grpc, request), "http": Target(given.http, request)}
    named = [floods[name] for name in given.names]
    sent = pour({flood: targets[flood.port] for flood in named}, given.seconds)
    print(json.dumps({name: dataclasses.asdict(one) for name, one in sent.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
