"""The names of ``torchrec.distributed.train_pipeline.train_pipelines``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.train_pipeline.pipelines import (
    TrainPipeline as TrainPipeline, TrainPipelineBase as TrainPipelineBase,
)
from tessera.training.distributed.train_pipeline.prefetch import (
    PrefetchTrainPipelineSparseDist as PrefetchTrainPipelineSparseDist,
)
from tessera.training.distributed.train_pipeline.sparse_dist import (
    TrainPipelineSparseDist as TrainPipelineSparseDist,
)
