"""Where a call for scores comes from: its peer, its request id and its trace, from a call's headers.

With ``--processes`` REST reaches a worker as a gRPC call of the process that has the HTTP port.  That one forwards where
the call has come from, under a secret that these processes alone know: nobody else can name a peer that it is not.
"""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

MAX_REQUEST_ID_BYTES = 1_024
"""A longer request id is cut."""

REQUEST_ID = "x-request-id"
_TRACEPARENT = "traceparent"
_FORWARDED = "tessera-origin"

_PRINTABLE = re.compile(r"[ -~]+")
# https://www.w3.org/TR/trace-context/; a later version may say more behind what this one has.
_PARENT = re.compile(
    r"(?:00-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})"
    r"|(?!00|ff)[0-9a-f]{2}-(?P<trace2>[0-9a-f]{32})-(?P<span2>[0-9a-f]{16})-(?P<flags2>[0-9a-f]{2})(?:-.*)?)"
)


@dataclass(frozen=True, slots=True)
class TraceParent:
    """What a traceparent header says: the trace and its span, as hexadecimal digits, and whether they are sampled."""

    trace_id: str
    span_id: str
    sampled: bool


@dataclass(frozen=True, slots=True)
class CallOrigin:
    """Where a call comes from.

    Attributes:
        protocol: by which the client speaks.
        peer: the client's IP address; empty where it is not known.
        request_id: the client's, or one that was made.
        parent: what its traceparent says; None: it gave none.
    """

    protocol: Literal["grpc", "rest"]
    peer: str
    request_id: str
    parent: TraceParent | None


def request_id_of(given: str) -> str:
    """``given``, where it has nothing but printable ASCII; where it does not, or is empty, 32 new hexadecimal digits."""
    given = given[:MAX_REQUEST_ID_BYTES]
    return given if _PRINTABLE.fullmatch(given) else os.urandom(16).hex()


def read_traceparent(header: str) -> TraceParent | None:
    """What ``header`` says; None where it is not as W3C's Trace Context has it."""
    match = _PARENT.fullmatch(header)
    if match is None:
        return None
    trace, span, flags = (match[name] or match[f"{name}2"] for name in ("trace", "span", "flags"))
    if not trace.strip("0") or not span.strip("0"):
        return None
    return TraceParent(trace, span, bool(int(flags, 16) & 1))


def rest_origin(headers: Mapping[str, str], peer: str) -> CallOrigin:
    """The origin of a request over HTTP/1.1 with these headers, whose names are not told apart by case."""
    return CallOrigin(
        "rest",
        _plain_address(peer),
        request_id_of(headers.get(REQUEST_ID, "")),
        read_traceparent(headers.get(_TRACEPARENT, "")),
    )


class GrpcOrigins:
    """Reads the origins of gRPC calls.

    Args:
        secret: shown by another process of this server that forwards a call; empty: there is none.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def of(self, metadata: Iterable[tuple[str, Any]] | None, peer: str) -> CallOrigin:
        """The origin of the call with this metadata, which has come from the IP address ``peer``."""
        given: dict[str, str] = {}
        for name, value in metadata or ():
            if name in {REQUEST_ID, _TRACEPARENT, _FORWARDED} and isinstance(value, str):
                given[name] = given.get(name) or value
        parent = read_traceparent(given.get(_TRACEPARENT, ""))
        forwarded = self._forwarded(given.get(_FORWARDED, ""))
        if forwarded is not None:
            return CallOrigin("rest", *forwarded, parent)
        request_id = request_id_of(given.get(REQUEST_ID, ""))
        return CallOrigin("grpc", _plain_address(peer), request_id, parent)

    def _forwarded(self, text: str) -> tuple[str, str] | None:
        secret, _, rest = text.partition(" ")
        if not self._secret or not hmac.compare_digest(secret.encode(), self._secret.encode()):
            return None
        peer, _, request_id = rest.partition(" ")
        return peer, request_id


def forwarding(origin: CallOrigin, secret: str) -> tuple[tuple[str, str], ...]:
    """The metadata by which `GrpcOrigins` of another process reads ``origin``."""
    told = ((_FORWARDED, f"{secret} {origin.peer} {origin.request_id}"),)
    if origin.parent is None:
        return told
    parent = origin.parent
    flags = "01" if parent.sampled else "00"
    return (*told, (_TRACEPARENT, f"00-{parent.trace_id}-{parent.span_id}-{flags}"))


def _plain_address(peer: str) -> str:
    """``peer``; an IPv4 address inside an IPv6 one is an IPv4 address."""
    inside = peer.removeprefix("::ffff:")
    return inside if "." in inside else peer
