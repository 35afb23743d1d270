"""The names of ``torchrec.modules.fused_embedding_modules``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.collections.fused import (
    FusedEmbeddingBagCollection as FusedEmbeddingBagCollection,
)
from tessera.training.distributed.collections.fused_sequence import (
    FusedEmbeddingCollection as FusedEmbeddingCollection,
    fuse_embedding_optimizer as fuse_embedding_optimizer,
)
from tessera.training.optim.apply_optimizer_in_backward import (
    convert_optimizer_type_and_kwargs as convert_optimizer_type_and_kwargs,
)
