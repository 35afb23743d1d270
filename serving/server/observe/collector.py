"""A collector of spans over HTTP: where it is, and one POST to it.

Each POST has a connection of its own, which ends with it: there is one a second at most while the collector keeps up.
Without TLS: a collector on the same host, or in the same pod, passes spans on over it.
"""

from __future__ import annotations

import http.client
import re
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass

REMEDY = (
    "give http://HOST:PORT of a collector that takes OTLP over HTTP, such as http://127.0.0.1:4318"
)
"""What to do about an address that is not one."""

_DEFAULT_PORT = 4_318
_MOST_PORT = 65_535
_TRACES_PATH = "/v1/traces"
_MOST_RECEIVED = 64 * 1024

_URL = re.compile(
    r"http://(?:\[(?P<ipv6>[^\[\]/]+)\]|(?P<name>[^\[\]/:]+))(?::(?P<port>[0-9]{1,18}))?(?P<path>/.*)?"
)
_PLAIN = re.compile(r"[!-~]+")


class NoAnswerError(Exception):
    """There was no answer that HTTP knows."""


@dataclass(frozen=True, slots=True)
class Collector:
    """Where spans go.

    Attributes:
        url: as it was given.
        host: without brackets.
        port: of HTTP.
        path: with ``/v1/traces``.
    """

    url: str
    host: str
    port: int
    path: str


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


def read_collector(url: str) -> Collector:
    """The collector of ``--otlp-endpoint``: ``http://HOST[:PORT][/PATH]``, port 4318 where there is none.

    Raises:
        ValueError: ``url`` is not such an address.
    """
    match = _URL.fullmatch(url)
    if match is None or not _PLAIN.fullmatch(url) or set("@?#\\") & set(url):
        raise ValueError(url)
    port = int(match["port"] or _DEFAULT_PORT)
    if not 1 <= port <= _MOST_PORT:
        raise ValueError(url)
    path = (match["path"] or "").rstrip("/") + _TRACES_PATH
    return Collector(url, match["ipv6"] or match["name"], port, path)


def post_json(collector: Collector, body: bytes, limit_s: float) -> CollectorAnswer:
    """Send ``body``; blocks for ``limit_s`` seconds at most, and for as long as a name takes to be resolved.

    Raises:
        NoAnswerError: there was no answer that HTTP knows, or not in time.
    """
    connection = http.client.HTTPConnection(collector.host, collector.port, timeout=limit_s)
    try:
        connection.connect()
        # The connection's own limit is of each step alone.
        end = threading.Timer(limit_s, _hang_up, (connection.sock,))
        end.daemon = True
        end.start()
        try:
            headers = {
                "Content-Type": "application/json",
                "Connection": "close",
                "User-Agent": "tessera-serve",
            }
            connection.request("POST", collector.path, body, headers)
            response = connection.getresponse()
            wait = response.headers.get("Retry-After", "").strip()
            known = wait.isascii() and wait.isdigit()
            return CollectorAnswer(
                response.status, int(wait[:9]) if known else 0, response.read(_MOST_RECEIVED)
            )
        finally:
            end.cancel()
    except TimeoutError:
        raise NoAnswerError("it did not answer in time") from None
    except http.client.HTTPException:
        raise NoAnswerError("what it answered is not HTTP") from None
    except OSError as error:
        raise NoAnswerError(error.strerror or str(error)) from None
    finally:
        connection.close()


def _hang_up(connected: socket.socket) -> None:
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
