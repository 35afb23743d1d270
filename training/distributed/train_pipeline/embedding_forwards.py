"""Forward passes of sharded modules whose vectors were looked up ahead."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tessera.errors import UserError
from tessera.training.distributed.comm.awaitable import Awaitable, LazyNoWait
from tessera.training.distributed.train_pipeline.contexts import EmbeddingTrainPipelineContext
from tessera.training.distributed.train_pipeline.forwards import BaseForward
from tessera.training.distributed.train_pipeline.streams import hand_over, record_all
from tessera.training.sparse.jagged_tensor import JaggedTensor, KeyedTensor


class InSyncEmbeddingPipelinedForward(BaseForward[EmbeddingTrainPipelineContext]):
    """Waits for vectors that were looked up before the forward pass began."""

    def start_embedding_lookup(self, context: EmbeddingTrainPipelineContext) -> None:
        """Look up a batch's rows on the current stream, and begin to send the vectors."""
        data, ctx = self.arrived(context, self.stream)
        hand_over(self.stream, data, ctx)
        result = self.module.compute_and_output_dist(ctx, data)
        if self.stream is not None:  # the memory of both belongs to the stream of lookups
            for part in result if isinstance(result, tuple) else (result,):
                part.callbacks.append(partial(_recorded, ctx))
        context.embedding_a2a_requests[self.name] = result

    @property
    def _sent(self) -> dict[str, Any]:
        return self.context.embedding_a2a_requests

    def _result(self) -> Any:
        return self.context.embedding_a2a_requests.pop(self.name)


def _recorded(ctx: Any, made: Any) -> Any:
    """``made``, whose memory and that of the module's context are kept until the stream that waits is done with them."""
    record_all(ctx)
    return record_all(made)


class EmbeddingPipelinedForward(InSyncEmbeddingPipelinedForward):
    """Waits for the vectors, and cuts the model's backward pass off from that of the tables.

    `embedding_backward` runs the tables' backward passes with the gradients that the model's left.
    """

    def _result(self) -> Any:
        result = super()._result()
        if isinstance(result, Awaitable):
            result = result.wait()
        if isinstance(result, tuple):  # with the ids that a map of ids gave
            vectors, ids = (part.wait() if isinstance(part, Awaitable) else part for part in result)
            return LazyNoWait(self._detached(vectors)), LazyNoWait(ids)
        return LazyNoWait(self._detached(result))

    def _detached(self, vectors: Any) -> Any:
        """The same vectors, as leaves that keep their gradient."""
        if isinstance(vectors, KeyedTensor):
            leaf = _leaf(vectors.values())
            self._keep([vectors.values()], [vectors.keys()], [leaf])
            return KeyedTensor(vectors.keys(), vectors.length_per_key(), leaf, vectors.key_dim())
        if isinstance(vectors, dict):
            parts: dict[str, JaggedTensor] = vectors
            leaves = {name: _leaf(part.values()) for name, part in parts.items()}
            self._keep([part.values() for part in parts.values()], list(parts), [*leaves.values()])
            return {
                name: JaggedTensor(
                    leaves[name], part.weights_or_none(), part.lengths(), part.offsets()
                )
                for name, part in parts.items()
            }
        raise UserError(
            f"module {self.name!r} returns a {type(vectors).__name__}; vectors that are looked up ahead "
            "must be a KeyedTensor or a dictionary of JaggedTensor; train with TrainPipelineSparseDist"
        )

    def _keep(self, tensors: list[Tensor], features: list[Any], leaves: list[Tensor]) -> None:
        self.context.embedding_tensors.append(tensors)
        self.context.embedding_features.append(features)
        self.context.detached_embedding_tensors.append(leaves)


def _leaf(vectors: Tensor) -> Tensor:
    return vectors.detach().requires_grad_(vectors.requires_grad)


def embedding_backward(context: EmbeddingTrainPipelineContext) -> None:
    """The backward passes of the tables, from the gradients that the model's backward pass left.

    Vectors that the loss does not depend on have none, and are left out.
    """
    tensors, gradients = [], []
    for made, leaves in zip(
        context.embedding_tensors, context.detached_embedding_tensors, strict=True
    ):
        for tensor, leaf in zip(made, leaves, strict=True):
            if leaf.grad is not None:
                tensors.append(tensor)
                gradients.append(leaf.grad)
    if tensors:
        torch.autograd.backward(tensors, gradients)
