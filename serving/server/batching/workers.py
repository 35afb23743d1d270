"""Inference threads: each takes a batch, merges it, runs the model, splits the scores.

No worker touches the event loop but by one call per batch, `loop.call_soon_threadsafe`.
A batch that fails is run again request by request, so that one bad request cannot fail its
neighbours.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from tessera.errors import UserError
from tessera.serving.package.runner import HostBatch, Runner
from tessera.serving.package.schema import InputSchema, OutputSpec
from tessera.serving.server.batching.commit_lock import CommitLock, PassState
from tessera.serving.server.batching.merger import MergedBatch, Merger
from tessera.serving.server.batching.request_queue import Part
from tessera.serving.server.errors import Code, QueueFullError, ServeError
from tessera.serving.server.named_thread import NamedThread
from tessera.serving.server.request.decoded_request import DecodedRequest, PassTimings

Outcome = Mapping[str, bytes] | ServeError

_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")
_LOGGED_ERROR = 300


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """What became of a batch.

    Attributes:
        parts: the batch.
        outcomes: per part, its outputs or its error.
        timings: per part, of the forward pass that served it.
        passes: every forward pass that succeeded: one, unless the batch had to be retried.
        out_of_range_ids: ids that were clamped or hashed into their table.
        work_s: CPU seconds that the thread has used for it.
        together: whether these are the parts of one request, computed once more because they had seen
            different commits.
        started: the clock when the worker took the batch (seconds).
    """

    parts: list[Part]
    outcomes: list[Outcome]
    timings: list[PassTimings]
    passes: list[PassTimings]
    out_of_range_ids: int
    started: float
    work_s: float
    together: bool = False


class WorkerPool:
    """The inference threads of one model.

    Args:
        schema: what the model takes and gives.
        runner: the model.
        workers: number of threads.
        threads_per_worker: threads that torch may use inside one forward pass.
        niceness: how far the threads stand back behind the event loop's for a CPU.
        loop: where outcomes are delivered.
        deliver: called on the loop with each `BatchOutcome`.
        log: where failures go, with their id.
        lock: what passes hold while commits change the model; None: nothing changes it.

    Raises:
        UserError: the system gives no thread for a worker.
    """

    def __init__(
        self,
        *,
        schema: InputSchema,
        runner: Runner,
        workers: int,
        threads_per_worker: int,
        niceness: int,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[BatchOutcome], None],
        log: Any,
        lock: CommitLock | None = None,
    ) -> None:
        self._lock = lock
        self._schema = schema
        self._runner = runner
        self._threads_per_worker = threads_per_worker
        self._niceness = niceness
        self._loop = loop
        self._deliver = deliver
        self._log = log
        self._inbox: SimpleQueue[tuple[list[Part], bool] | None] = SimpleQueue()
        self._mergers = [Merger(schema) for _ in range(workers)]
        self._threads = [
            NamedThread(target=self._run, args=(merger,), name=f"worker-{i}", daemon=True)
            for i, merger in enumerate(self._mergers)
        ]
        started = 0
        try:
            for thread in self._threads:
                thread.start()
                started += 1
        except RuntimeError as error:
            for _ in range(started):
                self._inbox.put(None)
            raise UserError(
                f"no more than {started} of {workers} workers could be started ({error}); give "
                "fewer with --workers, or let the process have more threads"
            ) from error

    def start_batch(self, parts: list[Part]) -> None:
        """Hand a batch to whichever worker is free next."""
        self._inbox.put((parts, False))

    def compute_together(self, parts: list[Part]) -> None:
        """Hand all parts of one request to a worker, to be computed one after the other with one commit."""
        self._inbox.put((parts, True))

    def close(self, timeout_s: float) -> bool:
        """Let every worker finish what it has, then end; wait ``timeout_s`` seconds for it; returns whether all have ended."""
        for _ in self._threads:
            self._inbox.put(None)
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def buffer_bytes(self) -> int:
        """Bytes of the merge buffers."""
        return sum(merger.nbytes() for merger in self._mergers)

    def _run(self, merger: Merger) -> None:
        # Only the thread itself can set this: a pool that OpenMP starts here would spin
        # between batches and take the CPU from everybody else.
        torch.set_num_threads(self._threads_per_worker)
        # Where CPUs are short, the event loop comes first: requests gather and a batch holds
        # many, instead of the loop waiting while batches of one or two are computed.
        if self._niceness:
            this = threading.get_native_id()
            own = os.getpriority(os.PRIO_PROCESS, this)
            os.setpriority(os.PRIO_PROCESS, this, own + self._niceness)
        executor = Executor(self._schema, self._runner, merger, self._log, self._lock)
        while (order := self._inbox.get()) is not None:
            parts, together = order
            outcome = executor.execute_together(parts) if together else executor.execute(parts)
            with contextlib.suppress(RuntimeError):  # the loop was closed without waiting
                self._loop.call_soon_threadsafe(self._deliver, outcome)
            del (
                order,
                parts,
                outcome,
            )  # they hold whole requests, and the next batch may be long in coming


class Executor:
    """Runs batches on the calling thread, with the calling thread's own buffers."""

    def __init__(
        self,
        schema: InputSchema,
        runner: Runner,
        merger: Merger,
        log: Any,
        lock: CommitLock | None = None,
    ) -> None:
        self._outputs = schema.outputs
        self._runner = runner
        self._lock = lock
        self._merger = merger
        self._log = log

    def execute(self, parts: list[Part]) -> BatchOutcome:
        """Scores or an error for every part; never raises for what a model may raise."""
        started, work = time.monotonic(), time.thread_time()
        requests = [part.request for part in parts]
        try:
            outputs, timings, outside = self._forward(requests, self._state())
        except Exception as error:  # noqa: BLE001 - whatever a model raises, the server lives on
            return self._one_by_one(parts, started, work, error)
        count = len(parts)
        work = time.thread_time() - work
        return BatchOutcome(
            parts, list(outputs), [timings] * count, [timings], outside, started, work
        )

    def execute_together(self, parts: list[Part]) -> BatchOutcome:
        """As `execute`, of all parts of one request, which see one commit."""
        assert self._lock is not None
        started, work = time.monotonic(), time.thread_time()
        outcomes: list[Outcome] = []
        passes: list[PassTimings] = []
        with self._lock.shared() as state:
            for part in parts:
                try:
                    outputs, timings, _ = self._forward([part.request], nullcontext(state))
                except Exception as failure:  # noqa: BLE001 - see execute
                    outcomes.append(refusal_of(self._log, failure))
                    passes.append(_NO_TIMINGS)
                    continue
                outcomes += outputs
                passes.append(timings)
        # Its ids were counted before.
        work = time.thread_time() - work
        return BatchOutcome(parts, outcomes, passes, passes, 0, started, work, together=True)

    def _one_by_one(
        self, parts: list[Part], started: float, work: float, error: Exception
    ) -> BatchOutcome:
        if len(parts) > 1:
            self._log.warning(
                "batch_failed_retrying_each",
                requests=len(parts),
                error=repr(error),
                limited=True,
            )
        outcomes: list[Outcome] = []
        per_part: list[PassTimings] = []
        passes: list[PassTimings] = []
        outside = 0
        for part in parts:
            try:
                if len(parts) == 1:
                    raise error  # noqa: TRY301 - it was alone already
                outputs, timings, count = self._forward([part.request], self._state())
            except Exception as failure:  # noqa: BLE001 - see execute
                outcomes.append(refusal_of(self._log, failure))
                per_part.append(_NO_TIMINGS)
                continue
            outcomes += outputs
            per_part.append(timings)
            passes.append(timings)
            outside += count
        work = time.thread_time() - work
        return BatchOutcome(parts, outcomes, per_part, passes, outside, started, work)

    def _state(self) -> AbstractContextManager[PassState]:
        """Keeps the model as it is while it is held, and gives its state."""
        return _UNCHANGING if self._lock is None else self._lock.shared()

    def _forward(
        self, requests: list[DecodedRequest], state: AbstractContextManager[PassState]
    ) -> tuple[list[Mapping[str, bytes]], PassTimings, int]:
        begin = time.perf_counter()
        merged = self._merger.merge(requests)
        assembled = time.perf_counter()
        batch = _wrap(merged)
        wrapped = time.perf_counter()
        with state as seen:
            scores = (seen.runner or self._runner).forward(batch)
            computed = time.perf_counter()
            samples = [request.samples for request in requests]
            outputs = split_scores(scores, self._outputs, samples)
        end = time.perf_counter()
        timings = PassTimings(
            assembled - begin,
            wrapped - assembled,
            computed - wrapped,
            end - computed,
            len(requests),
            merged.samples,
            merged.ids,
            seen.commit,
        )
        return outputs, timings, merged.out_of_range_ids


class OwnExecutor:
    """Runs batches on the event loop's thread, which has torch use no other thread from the first one on.

    ``schema``, ``runner`` and ``log`` as for `WorkerPool`; nothing changes the model.
    """

    def __init__(self, schema: InputSchema, runner: Runner, log: Any) -> None:
        self._merger = Merger(schema)
        self._executor = Executor(schema, runner, self._merger, log)
        self._begun = False

    def execute(self, parts: list[Part]) -> BatchOutcome:
        """As `Executor.execute`."""
        if not self._begun:
            self._begun = True
            torch.set_num_threads(1)
        return self._executor.execute(parts)

    def buffer_bytes(self) -> int:
        """Bytes of the merge buffers."""
        return self._merger.nbytes()


_UNCHANGING = nullcontext(PassState())
_NO_TIMINGS = PassTimings(0.0, 0.0, 0.0, 0.0, 0, 0, 0)


def _wrap(merged: MergedBatch) -> HostBatch:
    wrap = torch.from_numpy
    return HostBatch(
        float_features=wrap(merged.dense),
        id_list_features_lengths=wrap(merged.id_list.lengths),
        id_list_features_values=wrap(merged.id_list.values),
        id_score_list_features_lengths=wrap(merged.id_score_list.lengths),
        id_score_list_features_values=wrap(merged.id_score_list.values),
        id_score_list_features_weights=wrap(merged.id_score_list.weights),
        batch_size=merged.samples,
        id_list_features_shared=None if merged.shared is None else wrap(merged.shared),
        shared_row_index=None if merged.row_index is None else wrap(merged.row_index),
    )


def split_scores(
    scores: Mapping[str, torch.Tensor], outputs: tuple[OutputSpec, ...], samples: list[int]
) -> list[Mapping[str, bytes]]:
    """Each request's share of a batch's scores, as little-endian float32 bytes.

    Args:
        scores: by name, ``[B]`` or ``[B, width]`` float32.
        outputs: what the schema promises.
        samples: samples of each request; their sum is ``B``.

    Raises:
        RuntimeError: the model gave something else than the schema promises.
    """
    shares: list[dict[str, bytes]] = [{} for _ in samples]
    total = sum(samples)
    for output in outputs:
        tensor = scores[output.name]
        if tensor.dtype != torch.float32 or tensor.numel() != total * output.width:
            raise RuntimeError(
                f"output {output.name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}, the "
                f"schema promises float32 of {total} samples by {output.width}"
            )
        content = tensor.contiguous().numpy().tobytes()
        row_bytes = 4 * output.width
        begin = 0
        for share, count in zip(shares, samples, strict=True):
            end = begin + count * row_bytes
            share[output.name] = content[begin:end]
            begin = end
    return list(shares)


def refusal_of(log: Any, failure: BaseException) -> ServeError:
    """What to answer when the work of a request has raised ``failure``.

    Where memory was short, a refusal; else the id of a bug, under which the log has the whole story.
    """
    if is_out_of_memory(failure):
        # Without a traceback, which would take memory.
        log.warning("out_of_memory", error=str(failure)[:_LOGGED_ERROR], limited=True)
        return QueueFullError("the server has no memory left for this request; try again later")
    error_id = uuid.uuid4().hex[:12]
    log.error(
        "internal_error",
        error_id=error_id,
        error=repr(failure),
        exc_info=(type(failure), failure, failure.__traceback__),
    )
    return ServeError(Code.INTERNAL, f"internal error, id {error_id} in the server's log")


def is_out_of_memory(failure: BaseException) -> bool:
    """Whether ``failure`` says that memory could not be had."""
    if isinstance(failure, MemoryError | torch.OutOfMemoryError):
        return True
    # torch has no type of its own for the memory of CPUs, and TorchScript none for what it passes on.
    text = str(failure)
    return isinstance(failure, RuntimeError) and any(sign in text for sign in _OUT_OF_MEMORY)
