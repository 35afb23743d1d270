"""The names that programs import from ``torchrec.distributed.train_pipeline.utils``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.train_pipeline.contexts import (
    TrainPipelineContext as TrainPipelineContext,
)
from tessera.training.distributed.train_pipeline.data_loading import (
    DataLoadingThread as DataLoadingThread,
)
from tessera.training.distributed.train_pipeline.pipeline_stage import (
    SparseDataDistUtil as SparseDataDistUtil,
)
from tessera.training.distributed.train_pipeline.postproc import (
    use_context_for_postprocs as use_context_for_postprocs,
)
from tessera.training.distributed.train_pipeline.staged import (
    PipelineStage as PipelineStage, StageOut as StageOut,
)
from tessera.training.distributed.train_pipeline.streams import get_h2d_func as get_h2d_func
from tessera.training.distributed.train_pipeline.batch_parts import ArgInfo as ArgInfo
from tessera.training.distributed.train_pipeline.tracing import Tracer as Tracer
