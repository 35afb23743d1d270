"""Computes a share of the calls with a shadow version, too, and compares; nothing of it reaches a client.

The shadow begins when the call has its answer, at the lowest priority, and only where the shadow's version has
nothing else to do; otherwise that call is dropped, and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from tessera.serving.server.errors import ServeError
from tessera.serving.server.front.byte_budget import ByteBudget, HeldBytes
from tessera.serving.server.front.wire_protocol import DecodedCall
from tessera.serving.server.metrics.version_metrics import ShadowResult, VersionMetrics
from tessera.serving.server.model.served_model import ServedModel
from tessera.serving.server.request.decoded_request import NO_DEADLINE, DecodedRequest

_LOWEST = -(1 << 31)
_BUDGET_NAME = "shadow"
"""The shadows' calls share the bytes that one connection may have."""


class Shadowing:
    """Owned by the event loop's thread.

    Args:
        budget: what shadows hold counts, too.
        metrics: where differences and drops are counted.
        log: where bugs go.
    """

    def __init__(self, budget: ByteBudget, metrics: VersionMetrics, log: Any) -> None:
        self._budget = budget
        self._metrics = metrics
        self._log = log
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(
        self,
        shadow: ServedModel,
        model: ServedModel,
        call: DecodedCall,
        outputs: Mapping[str, bytes],
    ) -> None:
        """Let ``shadow`` compute the request of ``call``, to which ``model`` has given ``outputs``."""
        held = HeldBytes(self._budget, _BUDGET_NAME)
        request = call.request
        size = request.samples * (model.sample_bytes + shadow.sample_bytes) + 8 * request.ids
        if not shadow.scheduler.is_idle():
            self._metrics.count_shadow(model.metrics, shadow.metrics, ShadowResult.DROPPED)
            return
        try:
            held.take(size + call.copied_bytes)
        except ServeError:
            self._metrics.count_shadow(model.metrics, shadow.metrics, ShadowResult.DROPPED)
            return
        try:
            other = request if shadow.schema == model.schema else call.decode_for(shadow)
        except ServeError:  # its features are others
            held.keep(0)
            self._metrics.count_shadow(model.metrics, shadow.metrics, ShadowResult.FAILED)
            return
        task = asyncio.ensure_future(self._compute(shadow, model, other, outputs, held))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compute(
        self,
        shadow: ServedModel,
        model: ServedModel,
        request: DecodedRequest,
        outputs: Mapping[str, bytes],
        held: HeldBytes,
    ) -> None:
        shadow.calls.enter()
        result = ShadowResult.FAILED
        try:
            answer = await shadow.scheduler.submit(request, priority=_LOWEST, deadline=NO_DEADLINE)
            differences = _differences(outputs, answer.outputs)
            self._metrics.compare(model.metrics, shadow.metrics, differences)
            result = ShadowResult.COMPARED
        except ServeError as error:
            self._log.debug("shadow_failed", model=shadow.name, error=error.message)
        finally:
            self._metrics.count_shadow(model.metrics, shadow.metrics, result)
            held.keep(0)
            shadow.calls.leave()


def _differences(first: Mapping[str, bytes], second: Mapping[str, bytes]) -> np.ndarray:
    """``|a - b|`` of every score that both have."""
    pairs = [
        (np.frombuffer(first[name], "<f4"), np.frombuffer(second[name], "<f4"))
        for name in first
        if len(first[name]) == len(second.get(name, b""))
    ]
    if not pairs:
        return np.empty(0)
    firsts, seconds = (np.concatenate(one, dtype=np.float64) for one in zip(*pairs, strict=True))
    differences: np.ndarray = np.abs(firsts - seconds)
    return differences
