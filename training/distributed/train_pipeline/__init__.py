"""Training loops that overlap copies and communication with computation.

pipeline = TrainPipelineSparseDist(model, optimizer, device)
batches = iter(loader)
while True:
    try:
        output = pipeline.progress(batches)
    except StopIteration:
        break
"""

from tessera.training.distributed.dist_data import SplitsAllToAllAwaitable
from tessera.training.distributed.embedding_sharding import (
    FusedKJTListSplitsAwaitable,
    KJTSplitsAllToAllMeta,
)
from tessera.training.distributed.train_pipeline.contexts import (
    PrefetchTrainPipelineContext,
    TrainPipelineContext,
)
from tessera.training.distributed.train_pipeline.forwards import (
    BaseForward,
    KJTAllToAllForward,
    PipelinedForward,
    PrefetchPipelinedForward,
)
from tessera.training.distributed.train_pipeline.pipelines import (
    TrainPipeline,
    TrainPipelineBase,
)
from tessera.training.distributed.train_pipeline.prefetch import PrefetchTrainPipelineSparseDist
from tessera.training.distributed.train_pipeline.sparse_dist import TrainPipelineSparseDist
from tessera.training.distributed.train_pipeline.tracing import ArgInfo, Tracer

__all__ = [
    "ArgInfo",
    "BaseForward",
    "FusedKJTListSplitsAwaitable",
    "KJTAllToAllForward",
    "KJTSplitsAllToAllMeta",
    "PipelinedForward",
    "PrefetchPipelinedForward",
    "PrefetchTrainPipelineContext",
    "PrefetchTrainPipelineSparseDist",
    "SplitsAllToAllAwaitable",
    "Tracer",
    "TrainPipeline",
    "TrainPipelineBase",
    "TrainPipelineContext",
    "TrainPipelineSparseDist",
]
