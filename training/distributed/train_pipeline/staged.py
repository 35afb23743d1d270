"""A pipeline of stages that the caller lists; the model's step is the caller's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tessera.errors import UserError
from tessera.training.distributed.train_pipeline.pipelines import BatchSource, In, TrainPipeline
from tessera.training.distributed.train_pipeline.streams import (
    is_cuda,
    on_stream,
    record_all,
    work_queued,
)

StageOut = TypeVar("StageOut")


@dataclass
class PipelineStage:
    """Something done to each batch ahead of the model, that does not depend on the step before.

    Attributes:
        name: what errors and profiles call it.
        runnable: called with the stage's input; gives the next stage's.
        stream: the stream of its work on a GPU; None: the one that is current when `StagedTrainPipeline.progress` is
            called; None or a stream of the CPU elsewhere.
        fill_callback: called after the stage while the pipeline is filled, when no model runs between.
        data_exhausted_callback: called when there is no batch for the stage.
    """

    name: str
    runnable: Callable[[Any], Any]
    stream: torch.Stream | None
    fill_callback: Callable[[], None] | None = None
    data_exhausted_callback: Callable[[], None] | None = None


@dataclass
class _Batch:
    """A batch in the pipeline.

    Attributes:
        value: what its last stage has given.
        made: the event after that stage's work.
        on_gpu: whether the stage had a GPU's stream of its own, so that the value is there.
    """

    value: Any
    made: torch.cuda.Event | None = None
    on_gpu: bool = False


class StagedTrainPipeline(TrainPipeline[In, StageOut | None]):
    """Runs each stage on another batch: the last on the next batch, the first on the newest.

    With ``n`` stages, ``n`` batches are on their way.  A stage that sends ids
    (`SparseDataDistUtil.start_sparse_data_dist`) must be the last, but for a stage that prefetches or
    looks up what was sent.

    Args:
        pipeline_stages: the stages in order; the first is called with the iterator's batches.
        debug_mode: name the stages in profiles of ``torch.profiler``.
        compute_stream: the stream that the caller's model runs on; None: the one that is current when
            `progress` is called.
        on_flush_end: called when a flush, see `set_flush`, has ended.

    Raises:
        UserError: no stages.
    """

    def __init__(
        self,
        pipeline_stages: list[PipelineStage],
        debug_mode: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        compute_stream: torch.Stream | None = None,
        on_flush_end: Callable[[], None] | None = None,
    ) -> None:
        if not pipeline_stages:
            raise UserError("pipeline_stages is empty; a pipeline needs at least one stage")
        self._stages = pipeline_stages
        self._debug_mode = debug_mode
        self._compute_stream = compute_stream
        self.on_flush_end = on_flush_end
        self._source: BatchSource[In] = BatchSource()
        self._batches: list[_Batch | None] = []
        self._flushing = False

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return len(self._stages)

    def set_flush(self, flush: bool) -> None:  # noqa: FBT001 - the signature TorchRec users know
        """Whether to take no further batches until those in the pipeline were given.

        Then ``on_flush_end`` is called and the pipeline is filled again.
        """
        self._flushing = flush

    def flush_end(self) -> None:
        """End a flush."""
        self._flushing = False
        self._batches = []
        if self.on_flush_end is not None:
            self.on_flush_end()

    def reset(self) -> None:
        """Forget the batches in the pipeline and the iterator."""
        self._batches = []
        self._source = BatchSource()

    def _run(self, stage: PipelineStage, batch: _Batch | None, *, filling: bool) -> _Batch | None:
        """A stage on a batch; nothing, and the stage's callback, where there is none."""
        result = None
        if batch is not None:
            with (
                torch.profiler.record_function(f"stage {stage.name}"),
                on_stream(stage.stream),
            ):
                _take_over(batch)
                result = _Batch(stage.runnable(batch.value), work_queued(), is_cuda(stage.stream))
        elif stage.data_exhausted_callback is not None:
            stage.data_exhausted_callback()
        if filling and stage.fill_callback is not None:
            stage.fill_callback()
        return result

    def _next(self, dataloader_iter: Iterator[In]) -> _Batch | None:
        batch = None if self._flushing else self._source.next(dataloader_iter)
        return None if batch is None else _Batch(batch)

    def _fill(self, dataloader_iter: Iterator[In]) -> None:
        """Run all stages on the first batch, all but the last on the second, and so on."""
        while len(self._batches) < self.num_stages:
            batch = self._next(dataloader_iter)
            for stage in self._stages[: self.num_stages - len(self._batches)]:
                batch = self._run(stage, batch, filling=True)
            self._batches.append(batch)

    def progress(self, dataloader_iter: Iterator[In]) -> StageOut | None:
        """The last stage's result for the oldest batch; None: no batch is left.

        Train on the result before the next call.  Batches of the iterator before are given first.
        """
        while True:
            self._fill(dataloader_iter)
            # Read first: an iterator that raises leaves the pipeline as it was.
            newest = self._next(dataloader_iter)
            first = self._batches.pop(0)
            self._batches.append(newest)
            for place in reversed(range(self.num_stages)):
                stage = self._stages[self.num_stages - 1 - place]
                self._batches[place] = self._run(stage, self._batches[place], filling=False)
            if first is not None:
                with on_stream(self._compute_stream):
                    _take_over(first)
                value: StageOut = first.value
                return value
            if any(self._batches):
                continue
            if not self._flushing:
                self._batches = []
                return None
            self.flush_end()


def _take_over(batch: _Batch) -> None:
    """Let the current stream use a batch."""
    if batch.made is not None:
        batch.made.wait()
        # The current stream's stages may work on the host as well, whose memory has no streams.
        with nullcontext() if batch.on_gpu else suppress(NotImplementedError):
            record_all(batch.value)
