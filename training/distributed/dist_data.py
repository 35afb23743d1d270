"""The names of ``torchrec.distributed.dist_data``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.travel.kjt_all_to_all import (
    KJTAllToAll as KJTAllToAll, KJTAllToAllSplitsAwaitable as KJTAllToAllSplitsAwaitable,
    KJTAllToAllTensorsAwaitable as KJTAllToAllTensorsAwaitable,
    SplitsAllToAllAwaitable as SplitsAllToAllAwaitable, get_recat as get_recat,
)
from tessera.training.distributed.travel.one_to_all import (
    EmbeddingsAllToOne as EmbeddingsAllToOne, EmbeddingsAllToOneReduce as EmbeddingsAllToOneReduce,
    KJTOneToAll as KJTOneToAll, SeqEmbeddingsAllToOne as SeqEmbeddingsAllToOne,
)
from tessera.training.distributed.travel.pooled_vectors import (
    PooledEmbeddingsAllGather as PooledEmbeddingsAllGather,
    PooledEmbeddingsAllToAll as PooledEmbeddingsAllToAll,
    PooledEmbeddingsAwaitable as PooledEmbeddingsAwaitable,
    PooledEmbeddingsReduceScatter as PooledEmbeddingsReduceScatter,
    VariableBatchPooledEmbeddingsAllToAll as VariableBatchPooledEmbeddingsAllToAll,
    VariableBatchPooledEmbeddingsReduceScatter as VariableBatchPooledEmbeddingsReduceScatter,
)
from tessera.training.distributed.travel.rows_all_to_all import (
    JaggedTensorAllToAll as JaggedTensorAllToAll, TensorAllToAll as TensorAllToAll,
    TensorAllToAllSplitsAwaitable as TensorAllToAllSplitsAwaitable,
    TensorAllToAllValuesAwaitable as TensorAllToAllValuesAwaitable,
    TensorValuesAllToAll as TensorValuesAllToAll,
)
from tessera.training.distributed.travel.sequence_vectors import (
    SequenceEmbeddingsAllToAll as SequenceEmbeddingsAllToAll,
    SequenceEmbeddingsAwaitable as SequenceEmbeddingsAwaitable,
)
