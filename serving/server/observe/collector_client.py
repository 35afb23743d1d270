"""POSTs to a collector of spans, over TLS where its address says so.

Each POST has a connection of its own, which ends with it: there is one a second at most while the collector keeps up.
The authorities that a certificate is held against are read once, when the client is made; the file of headers is
read for each POST, so that a token may be exchanged.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from contextlib import suppress
from dataclasses import dataclass

from tessera.errors import UserError
from tessera.serving.server.observe.collector import (
    Collector,
    read_collector,
    read_collector_headers,
)
from tessera.serving.server.security.certificates import client_context

_MOST_RECEIVED = 64 * 1024


class NoAnswerError(Exception):
    """There was no answer that HTTP knows."""


@dataclass(frozen=True, slots=True)
class CollectorAnswer:
    """What a collector says.

    Attributes:
        status: of HTTP.
        retry_after_s: what its Retry-After asks for, in seconds; 0: nothing.
        body: as much of it as is looked at.
    """

    status: int
    retry_after_s: int
    body: bytes


class CollectorClient:
    """Sends requests to a collector, one at a time.

    Args:
        collector: where it is.
        ca: a PEM file with authorities; empty: those of the system.
        headers_file: see `read_collector_headers`; empty: there is none.

    Raises:
        UserError: one of the files has to be changed.
    """

    def __init__(self, collector: Collector, ca: str = "", headers_file: str = "") -> None:
        self.url = collector.url
        self._collector = collector
        self._headers_file = headers_file
        self._tls = client_context(ca) if collector.encrypted else None
        self._headers()

    def post(self, body: bytes, limit_s: float) -> CollectorAnswer:
        """Send ``body``; blocks for ``limit_s`` seconds at most, and for as long as a name takes to be resolved.

        Raises:
            NoAnswerError: there was no answer that HTTP knows, or not in time.
        """
        try:
            return self._ask(body, limit_s)
        except (UserError, OSError, http.client.HTTPException, ValueError) as error:
            raise NoAnswerError(_reason(error)) from None

    def _ask(self, body: bytes, limit_s: float) -> CollectorAnswer:
        collector = self._collector
        headers = self._headers()
        connection = http.client.HTTPConnection(collector.host, collector.port, timeout=limit_s)
        try:
            connection.connect()
            if self._tls is not None:
                connection.sock = self._tls.wrap_socket(
                    connection.sock,
                    server_hostname=collector.host,
                    do_handshake_on_connect=False,
                )
            # The connection's own limit is of each step alone.
            end = threading.Timer(limit_s, _hang_up, (connection.sock,))
            end.daemon = True
            end.start()
            try:
                if isinstance(connection.sock, ssl.SSLSocket):
                    connection.sock.do_handshake()
                connection.request("POST", collector.path, body, headers)
                return _answer(connection.getresponse())
            finally:
                end.cancel()
        finally:
            connection.close()

    def _headers(self) -> dict[str, str]:
        given = read_collector_headers(self._headers_file) if self._headers_file else {}
        return {
            **given,
            "Content-Type": "application/json",
            "Connection": "close",
            "User-Agent": "tessera-serve",
        }


_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (TimeoutError, "it did not answer in time"),
    (ssl.SSLError, "TLS could not be agreed upon"),
    (http.client.RemoteDisconnected, "it closed the connection"),
    (http.client.HTTPException, "what it answered is not HTTP"),
)


def _reason(error: Exception) -> str:
    """Why there was no answer, as the log tells it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message.rstrip('.')}"
    for kind, reason in _REASONS:
        if isinstance(error, kind):
            return reason
    if isinstance(error, OSError):
        return error.strerror or str(error)
    # A ValueError of ssl, or of the codec of names, knows nothing of addresses.
    return str(error) if isinstance(error, UserError) else "its host cannot be a name"


def check_collector(url: str, ca: str, headers_file: str) -> None:
    """Refuse files that `CollectorClient` refuses; an empty ``url`` stands for no collector.

    Raises:
        UserError: one of the files has to be changed.
    """
    if url:
        CollectorClient(read_collector(url), ca, headers_file)


def _answer(response: http.client.HTTPResponse) -> CollectorAnswer:
    wait = response.headers.get("Retry-After", "").strip()
    known = wait.isascii() and wait.isdigit()
    return CollectorAnswer(
        response.status, int(wait[:9]) if known else 0, response.read(_MOST_RECEIVED)
    )


def _hang_up(connected: socket.socket) -> None:
    # Not the method of a connection with TLS, which takes away what another thread is reading with.
    with suppress(OSError):
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
