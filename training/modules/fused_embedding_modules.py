"""The names of ``torchrec.modules.fused_embedding_modules``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.collections.fused import (
    FusedEmbeddingBagCollection as FusedEmbeddingBagCollection,
)
