"""The names of ``torchrec.distributed.train_pipeline.pipeline_context``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.train_pipeline.contexts import (
    EmbeddingTrainPipelineContext as EmbeddingTrainPipelineContext,
    PrefetchTrainPipelineContext as PrefetchTrainPipelineContext,
    TrainPipelineContext as TrainPipelineContext,
)
from tessera.training.distributed.train_pipeline.pipelines import In as In, Out as Out
