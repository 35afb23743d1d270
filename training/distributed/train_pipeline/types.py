"""The names of ``torchrec.distributed.train_pipeline.types``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.train_pipeline.arguments import (
    ArgInfo as ArgInfo,
    BaseArgInfoStep as BaseArgInfoStep,
    CallArgs as CallArgs,
)
