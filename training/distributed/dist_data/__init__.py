"""What travels between ranks, as modules: ids there (`kjt`), vectors back (`pooled`, `sequence`)."""

from tessera.training.distributed.dist_data.kjt import (
    KJTAllToAll,
    KJTAllToAllSplitsAwaitable,
    KJTAllToAllTensorsAwaitable,
    ReceivedSizes,
    SplitsAllToAllAwaitable,
    get_recat,
    sizes_to_send,
)
from tessera.training.distributed.dist_data.one_to_all import (
    EmbeddingsAllToOne,
    EmbeddingsAllToOneReduce,
    KJTOneToAll,
    SeqEmbeddingsAllToOne,
)
from tessera.training.distributed.dist_data.pooled import (
    PooledEmbeddingsAllGather,
    PooledEmbeddingsAllToAll,
    PooledEmbeddingsAwaitable,
    PooledEmbeddingsReduceScatter,
    VariableBatchPooledEmbeddingsAllToAll,
    VariableBatchPooledEmbeddingsReduceScatter,
)
from tessera.training.distributed.dist_data.sequence import (
    SequenceEmbeddingsAllToAll,
    SequenceEmbeddingsAwaitable,
)

__all__ = [
    "EmbeddingsAllToOne",
    "EmbeddingsAllToOneReduce",
    "KJTAllToAll",
    "KJTAllToAllSplitsAwaitable",
    "KJTAllToAllTensorsAwaitable",
    "KJTOneToAll",
    "PooledEmbeddingsAllGather",
    "PooledEmbeddingsAllToAll",
    "PooledEmbeddingsAwaitable",
    "PooledEmbeddingsReduceScatter",
    "ReceivedSizes",
    "SeqEmbeddingsAllToOne",
    "SequenceEmbeddingsAllToAll",
    "SequenceEmbeddingsAwaitable",
    "SplitsAllToAllAwaitable",
    "VariableBatchPooledEmbeddingsAllToAll",
    "VariableBatchPooledEmbeddingsReduceScatter",
    "get_recat",
    "sizes_to_send",
]
