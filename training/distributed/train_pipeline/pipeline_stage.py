"""Stages of `StagedTrainPipeline` that send the ids of a model's sharded modules."""

# ruff: noqa: PLR0917, PLC0414 - the signature TorchRec users know; names for those who import from here

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tessera.errors import UserError
from tessera.training.distributed.train_pipeline.attached import AttachedModel
from tessera.training.distributed.train_pipeline.contexts import (
    EmbeddingTrainPipelineContext,
    PrefetchTrainPipelineContext,
    TrainPipelineContext,
)
from tessera.training.distributed.train_pipeline.embedding_forwards import (
    InSyncEmbeddingPipelinedForward,
)
from tessera.training.distributed.train_pipeline.forwards import (
    BaseForward,
    PipelinedForward,
    PrefetchPipelinedForward,
)
from tessera.training.distributed.train_pipeline.pipelines import In
from tessera.training.distributed.train_pipeline.prefetch import prefetch_embeddings
from tessera.training.distributed.train_pipeline.staged import PipelineStage as PipelineStage
from tessera.training.distributed.train_pipeline.staged import StageOut as StageOut
from tessera.training.distributed.train_pipeline.streams import is_cuda


class SparseDataDistUtil(Generic[In]):
    """Sends a batch's ids in a stage of its own, and lets the model's forward pass take them.

    A forward pass of the model, at its end, lets the ids of the batch that was sent last travel.  A
    model must therefore be called once for each batch that `StagedTrainPipeline.progress` gives, in
    their order.  An example of the stages, on a CPU with ``stream=None``::

        sdd = SparseDataDistUtil(model, data_dist_stream=stream)
        StagedTrainPipeline([
            PipelineStage("copy", lambda batch: batch.to(device, non_blocking=True), copies),
            sdd.start_sparse_data_dist_stage(),
        ])

    Args:
        model: see `TrainPipelineSparseDist`.
        data_dist_stream: the stream that ids are sent on; None: the current one; a stream of the CPU elsewhere.
        apply_jit: script the modules that hold no sharded ones.
        prefetch_stream: makes `prefetch` a stage, which brings rows into the device's cache.
        pipeline_postproc: see `TrainPipelineSparseDist`.
        embedding_lookup_stream: makes `start_embedding_lookup` a stage.  A batch is then looked up before
            the batch ahead of it updates the tables.

    Raises:
        UserError: both ``prefetch_stream`` and ``embedding_lookup_stream``.
    """

    def __init__(
        self,
        model: nn.Module,
        data_dist_stream: torch.Stream | None,
        apply_jit: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        prefetch_stream: torch.Stream | None = None,
        pipeline_postproc: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        embedding_lookup_stream: torch.Stream | None = None,
    ) -> None:
        if prefetch_stream is not None and embedding_lookup_stream is not None:
            raise UserError(
                "prefetch_stream and embedding_lookup_stream: give one; rows that are looked up ahead "
                "need no prefetch"
            )
        ahead = prefetch_stream if prefetch_stream is not None else embedding_lookup_stream
        if is_cuda(ahead) and not is_cuda(data_dist_stream):
            # Stages run on streams of their own, which must know where the ids arrive.
            data_dist_stream = torch.cuda.current_stream()
        self.model = model
        self.data_dist_stream = data_dist_stream
        self.prefetch_stream = prefetch_stream
        self.embedding_lookup_stream = embedding_lookup_stream
        self.apply_jit = apply_jit
        self._pipeline_postproc = pipeline_postproc
        self._forward_type: type[BaseForward[Any]] = PipelinedForward
        self._context_type: type[TrainPipelineContext] = TrainPipelineContext
        if prefetch_stream is not None:
            self._forward_type = PrefetchPipelinedForward
            self._context_type = PrefetchTrainPipelineContext
        elif embedding_lookup_stream is not None:
            self._forward_type = InSyncEmbeddingPipelinedForward
            self._context_type = EmbeddingTrainPipelineContext
        self._contexts: deque[Any] = deque()  # of batches that were sent and not worked on
        self._sent = 0
        self._attached: AttachedModel | None = None
        self._hooks: list[RemovableHandle] = []

    # The model

    def _attach(self) -> AttachedModel:
        if self._attached is None:
            context = self._contexts[0] if self._contexts else self._context_type()
            ids, rows = _cuda(self.data_dist_stream), _cuda(self.prefetch_stream)
            self._attached = AttachedModel(
                self.model,
                self._forward_type,
                context,
                dist_stream=ids,
                input_stream=ids if self.prefetch_stream is None else rows,
                pipeline_postproc=self._pipeline_postproc,
                apply_jit=self.apply_jit,
            )
            self._hooks = [
                self.model.register_forward_pre_hook(self._before_forward),
                self.model.register_forward_hook(self._after_forward),
            ]
        return self._attached

    def _before_forward(self, *_: Any) -> None:
        """Take the oldest batch's input."""
        if self._contexts:
            self._attach().wait_dist(self._contexts[0])
            self._attach().set_context(self._contexts[0])

    def _after_forward(self, *_: Any) -> None:
        """Let the ids of the batch that was sent last travel; forget the batch that was worked on."""
        self.wait_sparse_data_dist()
        if self._contexts:
            self._contexts.popleft()

    def detach(self) -> nn.Module:
        """Give the model its own forward passes back, and return it.

        Batches that were sent are kept; the pipeline's next step attaches the model again.
        """
        if self._attached is not None:
            for hook in self._hooks:
                hook.remove()
            self._attached.detach()
            self._attached = None
        return self.model

    # What stages call

    def start_sparse_data_dist(self, batch: In) -> In:
        """Tell the other ranks how many ids of ``batch`` they will get; return the batch."""
        attached = self._attach()
        context = self._context_type(index=self._sent)
        self._sent += 1
        self._contexts.append(context)
        attached.start_dist(batch, context)
        return batch

    def wait_sparse_data_dist(self) -> None:
        """Wait for the sizes of ids that were sent, and let the ids travel."""
        for context in self._contexts:
            self._attach().wait_dist(context)

    def wait_sdd_fill_callback(self) -> None:
        """`wait_sparse_data_dist`, while the pipeline is filled and no forward pass does it."""
        self.wait_sparse_data_dist()

    def data_exhausted_callback(self) -> None:
        """Attach the model again, if it was detached and batches that were sent are left."""
        if self._contexts:
            self._attach()

    def prefetch(self, batch: In) -> In:
        """Bring the rows of the oldest batch without them into the device's cache; return ``batch``.

        Raises:
            UserError: there is no ``prefetch_stream``.
        """
        if self.prefetch_stream is None:
            raise UserError("prefetch is a stage where SparseDataDistUtil has a prefetch_stream")
        context = self._arriving()
        if context is not None:
            prefetch_embeddings(
                context,
                self._attach().forwards,
                _cuda(self.data_dist_stream),
                _cuda(self.prefetch_stream),
                torch.cuda.default_stream() if is_cuda(self.prefetch_stream) else None,
            )
        return batch

    def load_prefetch(self) -> None:
        """Do nothing: each batch has a context of its own, which holds what was prefetched."""

    def start_embedding_lookup(self, batch: In) -> In:
        """Look up the rows of the oldest batch without vectors, on the current stream; return ``batch``.

        Raises:
            UserError: there is no ``embedding_lookup_stream``.
        """
        if self.embedding_lookup_stream is None:
            raise UserError(
                "start_embedding_lookup is a stage where SparseDataDistUtil has an "
                "embedding_lookup_stream"
            )
        context = self._arriving()
        if context is not None:
            for forward in self._attach().forwards:
                forward.start_embedding_lookup(context)
        return batch

    def _arriving(self) -> Any | None:
        """The context of the oldest batch that was sent and whose ids were not used; None: there is none."""
        context = next((c for c in self._contexts if c.is_started), None)
        if context is not None:
            self._attach().wait_dist(context)
        return context

    # Stages

    def start_sparse_data_dist_stage(
        self,
        name: str = "start_sparse_data_dist",
        runnable: Callable[[Any], Any] | None = None,
    ) -> PipelineStage:
        """The stage that sends ids.

        Args:
            name: the stage's name.
            runnable: called in the place of `start_sparse_data_dist`.
        """
        return PipelineStage(
            name=name,
            runnable=runnable or self.start_sparse_data_dist,
            stream=self.data_dist_stream,
            fill_callback=self.wait_sdd_fill_callback,
            data_exhausted_callback=self.data_exhausted_callback,
        )

    def start_embedding_lookup_stage(
        self,
        name: str = "start_embedding_lookup",
        runnable: Callable[[Any], Any] | None = None,
    ) -> PipelineStage:
        """The stage that looks up.

        Args:
            name: the stage's name.
            runnable: called in the place of `start_embedding_lookup`.
        """
        return PipelineStage(
            name=name,
            runnable=runnable or self.start_embedding_lookup,
            stream=self.embedding_lookup_stream,
        )


def _cuda(stream: torch.Stream | None) -> torch.cuda.Stream | None:
    return stream if is_cuda(stream) else None
