"""The names of ``torchrec.distributed.train_pipeline``."""

# isort: skip_file
# fmt: off
from tessera.training.distributed.train_pipeline.contexts import (
    PrefetchTrainPipelineContext as PrefetchTrainPipelineContext,
    TrainPipelineContext as TrainPipelineContext,
)
from tessera.training.distributed.train_pipeline.forwards import (
    BaseForward as BaseForward, KJTAllToAllForward as KJTAllToAllForward,
    PipelinedForward as PipelinedForward, PrefetchPipelinedForward as PrefetchPipelinedForward,
)
from tessera.training.distributed.train_pipeline.pipelines import (
    TrainPipeline as TrainPipeline, TrainPipelineBase as TrainPipelineBase,
)
from tessera.training.distributed.train_pipeline.prefetch import (
    PrefetchTrainPipelineSparseDist as PrefetchTrainPipelineSparseDist,
)
from tessera.training.distributed.train_pipeline.sparse_dist import (
    TrainPipelineSparseDist as TrainPipelineSparseDist,
)
from tessera.training.distributed.train_pipeline.tracing import ArgInfo as ArgInfo, Tracer as Tracer
from tessera.training.distributed.travel.features_awaitable import (
    FusedKJTListSplitsAwaitable as FusedKJTListSplitsAwaitable,
)
from tessera.training.distributed.travel.kjt_all_to_all import (
    KJTSplitsAllToAllMeta as KJTSplitsAllToAllMeta,
    SplitsAllToAllAwaitable as SplitsAllToAllAwaitable,
)
