"""An engine with futures: one thread of Python takes completions and hands them out."""

from __future__ import annotations

import itertools
import threading
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from tessera.serving.client.arrays import Array, RequestArrays
from tessera.serving.engine.handle import EngineHandle, PreparedRequest, split_outputs
from tessera.serving.engine.options import EngineOptions

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class _Waiting:
    """A request whose completion has not come: what must live until then, and its future."""

    request: PreparedRequest
    scores: Array
    future: Future[dict[str, Array]]


class Engine:
    """Scores of the package at ``package``, computed in this process as tessera-server computes them.

    Any thread may submit.  What was submitted and has not been computed is bounded by
    ``max_queue_requests``, ``max_queue_samples`` and ``max_inflight_bytes`` of ``options``; above
    them a request ends with `Overloaded`.  `close`, the end of a ``with`` block or the end of the
    interpreter computes what was submitted and ends the workers.

    Raises:
        UserError: the library is not there, or the package or an option has to be changed.
    """

    def __init__(self, package: str | Path, options: EngineOptions | None = None) -> None:
        self._handle = EngineHandle(package, options)
        self._waiting: dict[int, _Waiting] = {}
        self._tags = itertools.count()
        # It knows nothing of this object, so that one that nobody holds any more can end.
        collector = threading.Thread(
            target=_collect,
            args=(self._handle, self._waiting),
            name="tessera-engine",
            daemon=True,
        )
        collector.start()
        self._end = weakref.finalize(self, _end, self._handle, collector)

    @property
    def outputs(self) -> list[tuple[str, int]]:
        """Each output's name and how many scores it has of a sample."""
        return list(self._handle.outputs)

    def submit(
        self,
        arrays: RequestArrays,
        *,
        timeout_s: float | None = None,
        priority: int = 0,
        copy: bool = True,
    ) -> Future[dict[str, Array]]:
        """Queue one request; it does not wait.

        Args:
            arrays: the request, as `tessera.serving.client.assemble` makes it; no shared features.
            timeout_s: the work begins within so many seconds, or the future has `DeadlineExceeded`.
            priority: higher is computed first.
            copy: False borrows the arrays; nobody may change them until the future is done.

        Returns:
            A future of each output's scores by its name, float32 ``[B]`` or ``[B, k]``.  It cannot be
            cancelled.  Its callbacks run in the engine's one thread and should be short.

        Raises:
            PredictError: the request was not taken: `InvalidRequest`, `Overloaded` or `Unavailable`.
            UserError: ``arrays`` has shared features, or ``timeout_s`` is out of range.
        """
        return self._submit(
            PreparedRequest(arrays, timeout_s=timeout_s, priority=priority, copy=copy)
        )

    def _submit(self, request: PreparedRequest) -> Future[dict[str, Array]]:
        scores = self._handle.scores(max(request.batch_size, 0))
        waiting = _Waiting(request, scores, Future())
        waiting.future.set_running_or_notify_cancel()
        tag = next(self._tags)
        self._waiting[tag] = waiting
        try:
            self._handle.submit(request, scores, tag)
        except BaseException:
            del self._waiting[tag]
            raise
        return waiting.future

    def predict(
        self, arrays: RequestArrays, *, timeout_s: float | None = None, priority: int = 0
    ) -> dict[str, Array]:
        """`submit`, and wait for the scores; raises what the future would hold, too."""
        return self.submit(arrays, timeout_s=timeout_s, priority=priority, copy=False).result()

    def close(self) -> None:
        """Compute what was submitted, end the workers and give the model's memory back.

        Every future is done when it returns, and `submit` raises `Unavailable` from now on.
        """
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _collect(handle: EngineHandle, waiting: dict[int, _Waiting]) -> None:
    while (ended := handle.wait()) is not None:
        for tag, code, message in zip(
            ended.tags.tolist(), ended.codes.tolist(), ended.messages, strict=True
        ):
            one = waiting.pop(tag)
            if code == 0:
                size = one.request.batch_size
                one.future.set_result(split_outputs(handle.outputs, one.scores, size))
            else:
                one.future.set_exception(handle.error(code, bytes(message)))


def _end(handle: EngineHandle, collector: threading.Thread) -> None:
    handle.close()
    # A callback of a future may have held the last engine.
    if threading.current_thread() is not collector:
        collector.join()
