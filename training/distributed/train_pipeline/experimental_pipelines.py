"""The names that programs import from ``torchrec.distributed.train_pipeline.experimental_pipelines``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.train_pipeline.eval_pipelines import (
    TrainEvalHybridPipelineBase as TrainEvalHybridPipelineBase,
)
