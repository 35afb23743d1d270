"""A call for scores, from the request's bytes to the response's, without gRPC.

Every call ends in exactly one count of ``tessera_requests_total`` and, when it was refused,
one of ``tessera_rejected_total``; each of these counts is told to the observer, where there is one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tessera.serving.server.batching.workers import refusal_of
from tessera.serving.server.errors import (
    HTTP_STATUS,
    Code,
    InvalidRequestError,
    QueueFullError,
    RejectReason,
    ServeError,
    http_status_of,
)
from tessera.serving.server.front.admission import Admission
from tessera.serving.server.front.byte_budget import CALL_BYTES, HeldBytes
from tessera.serving.server.front.recent_requests import RecentRequests
from tessera.serving.server.front.shadowing import Shadowing
from tessera.serving.server.front.wire_protocol import DecodedCall, WireProtocol
from tessera.serving.server.metrics.metrics_page import MetricsPage
from tessera.serving.server.metrics.model_metrics import ModelMetrics
from tessera.serving.server.model.registry import Key, Registry, no_key
from tessera.serving.server.model.served_model import ServedModel
from tessera.serving.server.observe.call_observer import CallObserver
from tessera.serving.server.observe.call_record import CallRecord, CallStages
from tessera.serving.server.observe.origin import CallOrigin
from tessera.serving.server.request.decoded_request import Answer, ended_by_deadline


class PredictService:
    """Answers calls for scores.

    Args:
        registry: the models.
        metrics: counts calls that name no known model.
        admission: counts the calls inside, and refuses new ones in a drain.
        shadowing: computes a share of the calls once more.
        recent: keeps some requests for the warm-up of versions that come; None: none will.
        log: where bugs go, and the line per call.
        log_requests: write a line per call, at level debug.
        observer: tells of single calls; None: nobody does.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        metrics: MetricsPage,
        admission: Admission,
        shadowing: Shadowing,
        recent: RecentRequests | None,
        log: Any,
        log_requests: bool,
        observer: CallObserver | None = None,
    ) -> None:
        self._observer = observer
        self._log_requests = log_requests
        self._registry = registry
        self._unresolved = metrics.unresolved
        self._admission = admission
        self._shadowing = shadowing
        self._recent = recent
        self._log = log

    async def predict(
        self,
        protocol: WireProtocol,
        receive: Callable[[], Awaitable[bytes]],
        deadline: float,
        held: HeldBytes,
        key: Key = no_key,
        *,
        origin: CallOrigin | None = None,
    ) -> bytes:
        """Score one request.

        A call begins when its message has come: one that is cancelled before is not counted, and one
        that is refused before belongs to no model.

        Args:
            protocol: the call's protocol.
            receive: gives its serialised request, or raises `QueueFullError` or
                `InvalidRequestError`; called once.
            deadline: seconds of ``time.monotonic``, or `NO_DEADLINE`.
            held: takes what the request holds; to be given back once the answer has left.
            key: gives what decides between versions where the request does not say.
            origin: where it comes from; None: it is not told of.

        Returns:
            Its serialised response.

        Raises:
            ServeError: the status to answer with.
        """
        try:
            content = await receive()
        except (QueueFullError, InvalidRequestError, MemoryError) as failure:
            refusal = failure if isinstance(failure, ServeError) else refusal_of(self._log, failure)
            self._unresolved.requests[refusal.code] += 1
            self._unresolved.rejected[refusal.reason or RejectReason.QUEUE_FULL] += 1
            unread = _Call(self._unresolved, time.monotonic(), protocol.method, origin)
            self._tell(unread, refusal.code, 0.0, http_status_of(refusal))
            if refusal is failure:
                raise
            raise refusal from failure
        began = time.monotonic()
        call = _Call(self._unresolved, began, protocol.method, origin)
        code = Code.INTERNAL
        try:
            # The message goes as soon as its arrays are there, not when its answer is.
            opened = self._open(protocol, content, call, held, key)
            del content
            response = await self._score(opened, deadline, began, call, held)
            code = Code.OK
        except ServeError as error:
            code = error.code
            if error.reason is not None:
                call.metrics.rejected[error.reason] += 1
            raise
        except asyncio.CancelledError:
            # The client went away, or its deadline passed: the queue drops what is left.
            late = ended_by_deadline(time.monotonic(), began, deadline)
            code = Code.DEADLINE_EXCEEDED if late else Code.CANCELLED
            raise
        except Exception as failure:
            refusal = refusal_of(self._log, failure)
            code = refusal.code
            if refusal.reason is not None:
                call.metrics.rejected[refusal.reason] += 1
            raise refusal from failure
        finally:
            call.end(self._admission)
            seconds = time.monotonic() - began
            call.metrics.observe_call(code, seconds, call.samples)
            self._tell(call, code, seconds, HTTP_STATUS[code])
            if self._log_requests:
                self._log.debug(
                    "request",
                    model=call.metrics.model,
                    code=code.value,
                    duration_us=round(seconds * 1e6),
                )
        return response

    def _tell(
        self,
        call: _Call,
        code: Code,
        seconds: float,
        http_status: int,
    ) -> None:
        if self._observer is None or call.origin is None:
            return
        self._observer.tell(
            CallRecord(
                origin=call.origin,
                method=call.method,
                model=call.metrics.model,
                version=call.metrics.version,
                samples=call.samples,
                ids=call.ids,
                code=code,
                http_status=http_status,
                seconds=seconds,
                stages=call.stages,
            )
        )

    def _open(
        self, protocol: WireProtocol, content: bytes, call: _Call, held: HeldBytes, key: Key
    ) -> _Opened:
        model, read = protocol.open(content, self._registry, key)
        call.goes_to(model)
        self._admission.enter()
        call.inside = True
        decoded = read()
        call.samples, call.ids = decoded.request.samples, decoded.request.ids
        if self._observer is not None and call.origin is not None:
            named = (call.metrics.model, call.metrics.version)
            self._observer.record(call.origin, call.method, named, call.began, content)
        held.take(
            CALL_BYTES
            + len(content)
            + decoded.copied_bytes
            + decoded.request.samples * model.sample_bytes
        )
        if self._recent is not None:
            self._recent.note(model.name, decoded.decode_for, len(content) + decoded.copied_bytes)
        decode_seconds = time.monotonic() - call.began
        model.metrics.stages["decode"].observe(decode_seconds)
        return _Opened(model, decoded, decode_seconds)

    async def _score(
        self, opened: _Opened, deadline: float, began: float, call: _Call, held: HeldBytes
    ) -> bytes:
        decoded = opened.decoded
        answer = await opened.model.scheduler.submit(
            decoded.request,
            priority=decoded.priority,
            deadline=deadline,
            timeout=began + decoded.timeout_s,
        )
        encoding = time.monotonic()
        response = decoded.encode(answer, opened.decode_seconds)
        encode_seconds = time.monotonic() - encoding
        if call.origin is not None:
            call.stages = _stages_of(answer, opened.decode_seconds, encode_seconds)
        call.metrics.stages["encode"].observe(encode_seconds)
        held.keep(CALL_BYTES + len(response))
        shadow = self._registry.shadow(opened.model, decoded.key)
        if shadow is not None:
            self._shadowing.begin(shadow, opened.model, decoded, answer.outputs)
        return response


class _Call:
    """Which model's counters a call belongs to, known once its name is read; whether it is inside.

    Its samples and ids, too, once they are counted, and its stages, once it is answered.
    """

    __slots__ = (
        *("began", "ids", "inside", "method", "metrics"),
        *("model", "origin", "samples", "stages"),
    )

    def __init__(
        self, metrics: ModelMetrics, began: float, method: str, origin: CallOrigin | None
    ) -> None:
        self.metrics = metrics
        self.began = began
        self.method = method
        self.origin = origin
        self.model: ServedModel | None = None
        self.inside = False
        self.samples = 0
        self.ids = 0
        self.stages: CallStages | None = None

    def goes_to(self, model: ServedModel) -> None:
        """``model`` answers, or refuses, and stays until then."""
        self.metrics = model.metrics
        self.model = model
        model.calls.enter()

    def end(self, admission: Admission) -> None:
        """The call has its answer."""
        if self.inside:
            admission.leave()
        if self.model is not None:
            self.model.calls.leave()


@dataclass(slots=True, eq=False)
class _Opened:
    """A request that has been read and let in."""

    model: ServedModel
    decoded: DecodedCall
    decode_seconds: float


def _stages_of(answer: Answer, decode_seconds: float, encode_seconds: float) -> CallStages:
    timings = answer.timings
    return CallStages(
        decode=decode_seconds,
        queue=answer.queue_seconds,
        assemble=timings.assemble,
        transfer=timings.transfer,
        forward=timings.forward,
        encode=encode_seconds,
        batch_requests=timings.requests,
        batch_samples=timings.samples,
    )
