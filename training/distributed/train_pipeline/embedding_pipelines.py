"""Pipelines that look vectors up ahead of the forward pass, and send them while something else runs.

`TrainPipelineFusedSparseDist` starts the lookup of a batch as soon as the batch before it has updated
the tables, beside the step of the dense optimizer: the results are those of the plain loop.

`TrainPipelineSemiSync` starts it before the batch's predecessor runs backward, so the vectors travel
beside a whole backward pass and are one update old.  See its description for what that changes.
"""

# ruff: noqa: FBT001, FBT002, PLR0917 - signatures that TorchRec users know

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tessera.errors import UserError
from tessera.training.distributed.train_pipeline.contexts import EmbeddingTrainPipelineContext
from tessera.training.distributed.train_pipeline.embedding_forwards import (
    EmbeddingPipelinedForward,
    InSyncEmbeddingPipelinedForward,
    embedding_backward,
)
from tessera.training.distributed.train_pipeline.forwards import BaseForward
from tessera.training.distributed.train_pipeline.pipelines import In, Out
from tessera.training.distributed.train_pipeline.replicated import replicated_parts
from tessera.training.distributed.train_pipeline.sparse_dist import TrainPipelineSparseDist
from tessera.training.distributed.train_pipeline.streams import (
    follow_current,
    hand_over,
    make_stream,
    on_stream,
    record_event,
    wait_for,
)

LookupStream = Literal["data_dist", "new", "current"]


class TrainPipelineFusedSparseDist(TrainPipelineSparseDist[In, Out]):
    """Overlaps lookups with the step of the dense optimizer, as well as what the base class overlaps.

    The tables of sharded modules are updated in the backward pass, so their next lookup need not wait
    for the dense optimizer.  A feature processor with trainable weights is updated by that optimizer:
    train such a model with `TrainPipelineSparseDist`.

    Args:
        model: see `TrainPipelineSparseDist`.
        optimizer: of the parameters that the backward pass does not update itself.
        device: where the model is.
        execute_all_batches: see `TrainPipelineSparseDist`.
        apply_jit: see `TrainPipelineSparseDist`.
        pipeline_postproc: see `TrainPipelineSparseDist`.
        custom_model_fwd: see `TrainPipelineSparseDist`.
        strict: whether an ``optimizer`` that holds parameters of a sharded module is an error rather than
            a warning.
        emb_lookup_stream: the stream of lookups on a GPU: that of ids, one of its own, or the current.
        embedding_lookup_after_data_dist: start the lookup after the next batch's sizes are asked for.
        enqueue_batch_after_forward: see `TrainPipelineSparseDist`.
    """

    _pipelined_forward_type: ClassVar[type[BaseForward[Any]]] = InSyncEmbeddingPipelinedForward

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Callable[[In], tuple[Tensor, Out]] | None = None,
        strict: bool = False,
        emb_lookup_stream: LookupStream = "data_dist",
        embedding_lookup_after_data_dist: bool = False,
        enqueue_batch_after_forward: bool = False,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            device,
            execute_all_batches,
            apply_jit,
            context_type=EmbeddingTrainPipelineContext,
            pipeline_postproc=pipeline_postproc,
            custom_model_fwd=custom_model_fwd,
            enqueue_batch_after_forward=enqueue_batch_after_forward,
        )
        if emb_lookup_stream not in {"data_dist", "new", "current"}:
            raise UserError(
                f"emb_lookup_stream={emb_lookup_stream!r}: must be 'data_dist', 'new' or 'current'"
            )
        self._strict = strict
        self._lookup_after_dist = embedding_lookup_after_data_dist
        self._emb_lookup_stream: torch.cuda.Stream | None = None  # the current one
        if emb_lookup_stream == "data_dist":
            self._emb_lookup_stream = self._data_dist_stream
        elif emb_lookup_stream == "new":
            self._emb_lookup_stream = make_stream(device)
        self._tables_updated: torch.cuda.Event | None = None

    def attach(self, model: nn.Module | None = None) -> None:
        """Put pipelined forward passes into the model, see `TrainPipelineSparseDist.attach`."""
        was_attached = self._attached is not None
        super().attach(model)
        if not was_attached:
            follow_current(self._emb_lookup_stream)
            warn_of_shared_parameters(self._modules.forwards, self._optimizer, strict=self._strict)

    def start_embedding_lookup(self, batch: Any, context: EmbeddingTrainPipelineContext) -> None:
        """Look up a batch's rows once the tables are updated, and begin to send the vectors.

        Does nothing for a batch whose lookup was started.
        """
        del batch
        with on_stream(self._emb_lookup_stream):
            wait_for(self._tables_updated)
            for forward in self._modules.forwards:
                if forward.name in context.input_dist_tensors_requests:
                    forward.start_embedding_lookup(context)

    def wait_embedding_lookup(self) -> None:
        """Let the current stream use the vectors."""
        hand_over(self._emb_lookup_stream)

    def _forward(self, dataloader_iter: Iterator[In]) -> tuple[Tensor, Out]:
        batch, context = self.batches[0], self.contexts[0]
        self._modules.set_context(context)
        if not self._lookup_after_dist:
            self.start_embedding_lookup(batch, context)
        has_next = len(self.batches) > 1
        if has_next:
            self.start_sparse_data_dist(self.batches[1], self.contexts[1])
        if not self._enqueue_batch_after_forward:
            self.enqueue_batch(dataloader_iter)
        if self._lookup_after_dist:
            self.start_embedding_lookup(batch, context)
        self.wait_embedding_lookup()
        losses, output = self._model_fwd(batch)
        if self._enqueue_batch_after_forward:
            self.enqueue_batch(dataloader_iter)
        if has_next:
            self.wait_sparse_data_dist(self.contexts[1])
        return losses, output

    def _backward(self, losses: Tensor) -> None:
        super()._backward(losses)
        self.wait_embedding_lookup()  # updates run on the stream of the lookups
        self._tables_updated = record_event(self._device)


class TrainPipelineSemiSync(TrainPipelineSparseDist[In, Out]):
    """Trains each batch on vectors that lack the update of the batch before it.

    From batch ``start_batch`` on the lookup of batch ``i + 1`` starts before the backward pass of batch
    ``i``, so that its vectors travel meanwhile.  Rows that both batches have are therefore read one
    update too early.  With ``stash_gradients`` the dense parameters are as old: their gradients of batch
    ``i`` are applied after batch ``i + 1``.  The gradients of the last batch are then not applied.
    Batches before ``start_batch`` are trained as in the plain loop.

    Args:
        model: see `TrainPipelineSparseDist`.
        optimizer: of the parameters that the backward pass does not update itself; not of those of
            sharded modules.
        device: where the model is.
        execute_all_batches: see `TrainPipelineSparseDist`.
        apply_jit: see `TrainPipelineSparseDist`.
        start_batch: the first batch whose successor is looked up early; batches are counted from 0.
        stash_gradients: whether dense gradients wait for a batch too.
        pipeline_postproc: see `TrainPipelineSparseDist`.
        custom_model_fwd: see `TrainPipelineSparseDist`.
        strict: whether an ``optimizer`` that holds parameters of a sharded module is an error rather than
            a warning.
        dmp_collection_sync_interval_batches: see `TrainPipelineSparseDist`.
    """

    _pipelined_forward_type: ClassVar[type[BaseForward[Any]]] = EmbeddingPipelinedForward

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        start_batch: int = 900,
        stash_gradients: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Callable[[In], tuple[Tensor, Out]] | None = None,
        strict: bool = False,
        dmp_collection_sync_interval_batches: int | None = 1,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            device,
            execute_all_batches,
            apply_jit,
            context_type=EmbeddingTrainPipelineContext,
            pipeline_postproc=pipeline_postproc,
            custom_model_fwd=custom_model_fwd,
            dmp_collection_sync_interval_batches=dmp_collection_sync_interval_batches,
        )
        self._start_batch = start_batch
        self._stash_gradients = stash_gradients
        self._strict = strict
        self._stashed: dict[str, Tensor] = {}

    def attach(self, model: nn.Module | None = None) -> None:
        """Put pipelined forward passes into the model, see `TrainPipelineSparseDist.attach`."""
        was_attached = self._attached is not None
        super().attach(model)
        if was_attached:
            return
        for forward in self._modules.forwards:
            if replicated_parts(forward.module):
                self.detach()
                raise UserError(
                    f"module {forward.name!r} has data-parallel tables, whose gradients are added up in one "
                    "backward pass for each lookup: they cannot be looked up before the batch ahead has run "
                    "backward; train with TrainPipelineSparseDist, or shard them another way"
                )
        warn_of_shared_parameters(self._modules.forwards, self._optimizer, strict=self._strict)

    def is_semi_sync(self) -> bool:
        """Whether the lookup of the batch after the first one starts early."""
        return bool(self.contexts) and self._starts_early(self.contexts[0])

    def _starts_early(self, context: EmbeddingTrainPipelineContext) -> bool:
        return (context.index or 0) >= self._start_batch

    def start_embedding_lookup(self, batch: Any, context: EmbeddingTrainPipelineContext) -> None:
        """Look up a batch's rows on the current stream, and begin to send the vectors."""
        del batch
        for forward in self._modules.forwards:
            if forward.name in context.input_dist_tensors_requests:
                forward.start_embedding_lookup(context)

    def fill_pipeline(self, dataloader_iter: Iterator[In]) -> None:
        """Have three batches in the pipeline: vectors of the first and ids of the second on their way."""
        if not self.batches and self.enqueue_batch(dataloader_iter):
            self._send(0)
        if self.batches:
            self.start_embedding_lookup(self.batches[0], self.contexts[0])
        if len(self.batches) == 1 and self.enqueue_batch(dataloader_iter):
            self._send(1)
        if len(self.batches) == 2:
            self.enqueue_batch(dataloader_iter)

    def embedding_backward(self, context: EmbeddingTrainPipelineContext) -> None:
        """The backward passes of the tables, from the gradients that the model's backward pass left."""
        embedding_backward(context)

    def _swap_gradients(self) -> None:
        """Give the optimizer the gradients of the batch before, and keep those of this one."""
        for name, parameter in self._model.named_parameters():
            kept = self._stashed.pop(name, None)
            if parameter.grad is not None:
                # Copied: it may lie in a buffer that the next backward pass writes to.
                self._stashed[name] = parameter.grad.clone()
            parameter.grad = kept

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """One step; in evaluation mode (``model.eval()``) only its forward pass.

        Raises:
            StopIteration: no batch is left.
            UserError: the model cannot be traced, or has data-parallel tables in a sharded module.
        """
        self.fill_pipeline(dataloader_iter)
        if not self._has_work:
            raise StopIteration
        training = self._model.training
        context, early = self.contexts[0], self.is_semi_sync()
        self._modules.set_context(context)
        if training:
            self._optimizer.zero_grad()
        self._wait_for_batch()
        if len(self.batches) > 2:
            self.start_sparse_data_dist(self.batches[2], self.contexts[2])
        losses, output = self._model_fwd(self.batches[0])
        if early and len(self.batches) > 1:
            self.start_embedding_lookup(self.batches[1], self.contexts[1])
        if len(self.batches) > 2:
            self.wait_sparse_data_dist(self.contexts[2])
        if training:
            self._train(losses, early=early)
        if not early and len(self.batches) > 1:
            self.start_embedding_lookup(self.batches[1], self.contexts[1])
        self.dequeue_batch()
        return cast("Out", output)

    def _train(self, losses: Tensor, *, early: bool) -> None:
        """Both backward passes and the dense optimizer's step."""
        self._backward(losses)
        if early and self._stash_gradients:
            waited = bool(self._stashed)
            self._swap_gradients()
            if not waited:  # not all optimizers take a step without gradients
                return
        self._optimizer.step()

    def _backward(self, losses: Tensor) -> None:
        torch.sum(losses, dim=0).backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.embedding_backward(self.contexts[0])
        self.sync_embeddings(self._model, self._sync_interval, self.contexts[0])

    def reset(self) -> None:
        """Forget the batches in the pipeline, the iterator and gradients that wait; on all ranks alike."""
        super().reset()
        self._stashed = {}


def warn_of_shared_parameters(
    forwards: list[BaseForward[Any]], optimizer: Optimizer, *, strict: bool
) -> None:
    """Say that a lookup may start before ``optimizer`` has updated what it reads.

    Raises:
        UserError: ``strict``, and the optimizer holds parameters of a sharded module.
    """
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for forward in forwards:
        if any(id(parameter) in optimized for parameter in forward.module.parameters()):
            message = (
                f"the optimizer holds parameters of module {forward.name!r}, whose lookup starts before "
                "the optimizer's step: the lookup may read them one step late; train with "
                "TrainPipelineSparseDist, or give the tables a fused kernel"
            )
            if strict:
                raise UserError(message)
            warnings.warn(message, stacklevel=3)
