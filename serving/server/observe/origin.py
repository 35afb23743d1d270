"""Where a call for scores comes from: its peer, its request id and its trace, from a call's headers.

With ``--processes`` REST reaches a worker as a gRPC call of the process that has the HTTP port.  That one forwards where
the call has come from, under a secret that these processes alone know: nobody else can name a peer that it is not.
"""

from __future__ import annotations

import hmac
import os
import random
import re
from collections.abc import Callable, Iterable, Mapping
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
        trace_id: of the trace that gets spans of it; empty: it is not traced.
        route: of REST, the path's form, as docs/openapi.yaml has it.
    """

    protocol: Literal["grpc", "rest"]
    peer: str
    request_id: str
    parent: TraceParent | None
    trace_id: str = ""
    route: str = ""


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


class Sampler:
    """Decides which calls are traced.

    Args:
        share: of the calls without a traceparent, 0 to 1.
    """

    def __init__(self, share: float) -> None:
        self._share = share

    def trace_id(self, parent: TraceParent | None) -> str:
        """The trace of a call with this traceparent, as 32 hexadecimal digits; empty: it is not traced."""
        if parent is not None:
            return parent.trace_id if parent.sampled else ""
        return os.urandom(16).hex() if random.random() < self._share else ""  # noqa: S311 - not a secret


class _Origins:
    """What the origins of both protocols have in common.

    Args:
        sampler: decides which calls are traced; None: none is.
        logged: whether each call gets a line of the access log.
        recorded: whether requests are recorded, so that every origin is asked for.

    Attributes:
        logged: whether each call gets a line; the answers then say under which id.
    """

    def __init__(self, *, sampler: Sampler | None, logged: bool, recorded: bool = False) -> None:
        self._sampler = sampler
        self.logged = logged
        self._all = logged or recorded

    def _trace_id(self, parent: TraceParent | None) -> str:
        return "" if self._sampler is None else self._sampler.trace_id(parent)


class RestOrigins(_Origins):
    """Reads the origins of requests over HTTP/1.1.

    Args:
        sampler: see `_Origins`.
        logged: see `_Origins`, too.
        recorded: whether requests are recorded.
        forwards: each call is told of to the process that computes it, which decides whether it is traced.
    """

    def __init__(
        self,
        *,
        sampler: Sampler | None,
        logged: bool,
        recorded: bool = False,
        forwards: bool = False,
    ) -> None:
        super().__init__(sampler=None if forwards else sampler, logged=logged, recorded=recorded)
        self._forwards = forwards

    def of(self, headers: Mapping[str, str], peer: str, route: str) -> CallOrigin | None:
        """The origin of a request; None: it is not told of.

        Args:
            headers: the request's, whose names are not told apart by case.
            peer: the IP address that it has come from.
            route: the form of its path.
        """
        parent = read_traceparent(headers.get(_TRACEPARENT, ""))
        trace_id = self._trace_id(parent)
        if not (self._all or self._forwards or trace_id):
            return None
        request_id = request_id_of(headers.get(REQUEST_ID, ""))
        return CallOrigin("rest", _plain_address(peer), request_id, parent, trace_id, route)


class GrpcOrigins(_Origins):
    """Reads the origins of gRPC calls.

    Args:
        secret: shown by another process of this server that forwards a call; empty: there is none.
        sampler: see `_Origins`.
        logged: see `_Origins`, too.
        recorded: whether requests are recorded.
    """

    def __init__(
        self, secret: str, *, sampler: Sampler | None, logged: bool, recorded: bool = False
    ) -> None:
        super().__init__(sampler=sampler, logged=logged, recorded=recorded)
        self._secret = secret

    def of(
        self, metadata: Iterable[tuple[str, Any]] | None, peer: Callable[[], str]
    ) -> CallOrigin | None:
        """The origin of the call with this metadata; None: it is not told of.

        Args:
            metadata: of the call.
            peer: gives the IP address that it has come from.
        """
        given: dict[str, str] = {}
        for name, value in metadata or ():
            if name in {REQUEST_ID, _TRACEPARENT, _FORWARDED} and isinstance(value, str):
                given[name] = given.get(name) or value
        parent = read_traceparent(given.get(_TRACEPARENT, ""))
        trace_id = self._trace_id(parent)
        if not (self._all or trace_id):
            return None
        forwarded = self._forwarded(given.get(_FORWARDED, ""))
        if forwarded is not None:
            peer_there, route, request_id = forwarded
            return CallOrigin("rest", peer_there, request_id, parent, trace_id, route)
        request_id = request_id_of(given.get(REQUEST_ID, ""))
        return CallOrigin("grpc", _plain_address(peer()), request_id, parent, trace_id)

    def _forwarded(self, text: str) -> tuple[str, str, str] | None:
        """Peer, route and request id; None: the call was not forwarded."""
        secret, _, rest = text.partition(" ")
        if not self._secret or not hmac.compare_digest(secret.encode(), self._secret.encode()):
            return None
        peer, _, rest = rest.partition(" ")
        route, _, request_id = rest.partition(" ")
        return peer, route, request_id


def forwarding(origin: CallOrigin, secret: str) -> tuple[tuple[str, str], ...]:
    """The metadata by which `GrpcOrigins` of another process reads ``origin``."""
    told = ((_FORWARDED, f"{secret} {origin.peer} {origin.route} {origin.request_id}"),)
    if origin.parent is None:
        return told
    parent = origin.parent
    flags = "01" if parent.sampled else "00"
    return (*told, (_TRACEPARENT, f"00-{parent.trace_id}-{parent.span_id}-{flags}"))


def _plain_address(peer: str) -> str:
    """``peer``; an IPv4 address inside an IPv6 one is an IPv4 address."""
    inside = peer.removeprefix("::ffff:")
    return inside if "." in inside else peer
