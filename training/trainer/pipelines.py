"""Which training pipeline takes a run's steps; see `tessera.training.distributed.train_pipeline`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch

from tessera.errors import UserError
from tessera.training.distributed.model.model_parallel import (
    DistributedModelParallel,
    get_unwrapped_module,
)
from tessera.training.distributed.train_pipeline.pipelines import TrainPipeline, TrainPipelineBase
from tessera.training.distributed.train_pipeline.prefetch import PrefetchTrainPipelineSparseDist
from tessera.training.distributed.train_pipeline.sparse_dist import TrainPipelineSparseDist
from tessera.training.distributed.train_pipeline.tracing import trace
from tessera.training.trainer.assembly import Assembly

PipelineName = Literal["auto", "plain", "sparse_dist", "prefetch"]

PIPELINES: dict[str, type[TrainPipeline[Any, Any]]] = {
    "plain": TrainPipelineBase,
    "sparse_dist": TrainPipelineSparseDist,
    "prefetch": PrefetchTrainPipelineSparseDist,
}


class TrainPipelineInOrder(TrainPipelineBase[Any, Any]):
    """Takes the next batch only when the one before it was trained on.

    For batches that are waited for: a step does not wait for the batch behind it, and what has arrived is
    learned at once.
    """

    def _forward(self, dataloader_iter: Iterator[Any]) -> tuple[torch.Tensor, Any]:
        del dataloader_iter
        losses, output = self._model_fwd(self.batches[0])
        return losses, output


def chosen_pipeline(
    name: PipelineName, model: DistributedModelParallel, *, alone: bool = False
) -> str:
    """The pipeline that ``train.pipeline`` means for this model, a key of `PIPELINES`.

    ``auto`` is ``plain`` on the CPU, where nothing overlaps, with one rank (``alone``), whose ids travel
    nowhere, and for models that cannot be traced; otherwise ``sparse_dist``.

    Raises:
        UserError: the pipeline that is asked for cannot run this model.
    """
    if name == "plain" or (name == "auto" and (alone or model.device.type == "cpu")):
        return "plain"
    try:
        trace(get_unwrapped_module(model))
    except UserError as error:
        if name == "auto":
            return "plain"
        raise UserError(f"train.pipeline={name}: {error}, or set train.pipeline=plain") from error
    return "sparse_dist" if name == "auto" else name


def make_pipeline(
    name: PipelineName, assembly: Assembly, *, waits: bool = False
) -> TrainPipeline[Any, Any]:
    """The pipeline that trains ``assembly``; raises as `chosen_pipeline` does.

    ``waits``: batches come as rows arrive.  On the CPU a step then does not wait for the next batch.
    """
    kind = PIPELINES[chosen_pipeline(name, assembly.model, alone=assembly.ranks.alone)]
    if waits and kind is TrainPipelineBase and assembly.model.device.type == "cpu":
        kind = TrainPipelineInOrder
    # Their constructors are alike; the base class leaves the constructor open.
    return kind(assembly.model, assembly.dense_optimizer, assembly.model.device)  # type: ignore[call-arg]


def give_model_back(pipeline: TrainPipeline[Any, Any]) -> None:
    """Let the model be called directly again; the pipeline attaches itself with its next step.

    The pipeline must be empty.
    """
    if isinstance(pipeline, TrainPipelineSparseDist):
        pipeline.detach()
