"""The names that programs import from ``torchrec.distributed.train_pipeline.utils``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.train_pipeline.contexts import (
    TrainPipelineContext as TrainPipelineContext,
)
from tessera.training.distributed.train_pipeline.tracing import ArgInfo as ArgInfo, Tracer as Tracer
