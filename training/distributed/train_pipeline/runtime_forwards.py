"""The names of ``torchrec.distributed.train_pipeline.runtime_forwards``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.train_pipeline.embedding_forwards import (
    EmbeddingPipelinedForward as EmbeddingPipelinedForward,
    InSyncEmbeddingPipelinedForward as InSyncEmbeddingPipelinedForward,
)
from tessera.training.distributed.train_pipeline.forwards import (
    BaseForward as BaseForward, KJTAllToAllForward as KJTAllToAllForward,
    PipelinedForward as PipelinedForward, PrefetchPipelinedForward as PrefetchPipelinedForward,
)
