"""The names of ``torchrec.distributed.keyed_jagged_tensor_pool``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.pools.inference import (
    ShardedInferenceKeyedJaggedTensorPool as ShardedInferenceKeyedJaggedTensorPool,
)
from tessera.training.distributed.pools.kjt_pool import (
    KeyedJaggedTensorPoolAwaitable as KeyedJaggedTensorPoolAwaitable,
    KeyedJaggedTensorPoolSharder as KeyedJaggedTensorPoolSharder,
    ShardedKeyedJaggedTensorPool as ShardedKeyedJaggedTensorPool,
)
