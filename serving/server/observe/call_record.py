"""What is told of one call for scores when it has ended: who asked, for what, and how it went."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.serving.server.errors import Code
from tessera.serving.server.observe.origin import CallOrigin


@dataclass(frozen=True, slots=True)
class CallStages:
    """How long the stages of an answered call took, in seconds, and who shared its batch.

    Where the request was computed in several parts, ``queue`` is the longest wait and the three behind it are sums.
    """

    decode: float
    queue: float
    assemble: float
    transfer: float
    forward: float
    encode: float
    batch_requests: int
    batch_samples: int


@dataclass(slots=True)
class CallRecord:
    """How a call for scores went.

    Attributes:
        origin: where it comes from.
        method: ``Predict`` or ``ModelInfer``.
        model: that answered or refused; empty: the call names none.
        version: of that model.
        samples: of a request that was read; else 0.
        ids: of such a request, as they are looked up.
        code: how it ended.
        http_status: what REST's answer says; used of REST alone.
        seconds: from when the message was there to the end.
        stages: of a call that was answered; else None.
    """

    origin: CallOrigin
    method: str
    model: str
    version: str
    samples: int
    ids: int
    code: Code
    http_status: int
    seconds: float
    stages: CallStages | None


def refused_unread(origin: CallOrigin, method: str, code: Code, http_status: int) -> CallRecord:
    """The record of a call that was refused before its message had come."""
    return CallRecord(
        origin=origin,
        method=method,
        model="",
        version="",
        samples=0,
        ids=0,
        code=code,
        http_status=http_status,
        seconds=0.0,
        stages=None,
    )
