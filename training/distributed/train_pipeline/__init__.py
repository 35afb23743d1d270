"""The names of ``torchrec.distributed.train_pipeline``."""

# isort: skip_file
# fmt: off
from tessera.training.distributed.train_pipeline.compiled import (
    TorchCompileConfig as TorchCompileConfig, TrainPipelinePT2 as TrainPipelinePT2,
)
from tessera.training.distributed.train_pipeline.contexts import (
    PrefetchTrainPipelineContext as PrefetchTrainPipelineContext,
    TrainPipelineContext as TrainPipelineContext,
)
from tessera.training.distributed.train_pipeline.data_loading import (
    DataLoadingThread as DataLoadingThread,
)
from tessera.training.distributed.train_pipeline.embedding_pipelines import (
    TrainPipelineFusedSparseDist as TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync as TrainPipelineSemiSync,
)
from tessera.training.distributed.train_pipeline.eval_pipelines import (
    EvalPipelineSparseDist as EvalPipelineSparseDist,
)
from tessera.training.distributed.train_pipeline.forwards import (
    BaseForward as BaseForward, KJTAllToAllForward as KJTAllToAllForward,
    PipelinedForward as PipelinedForward, PrefetchPipelinedForward as PrefetchPipelinedForward,
)
from tessera.training.distributed.train_pipeline.gradient_accumulation import (
    GradientAccumulationConfig as GradientAccumulationConfig,
    GradientAccumulationWrapper as GradientAccumulationWrapper,
)
from tessera.training.distributed.train_pipeline.pipeline_stage import (
    SparseDataDistUtil as SparseDataDistUtil,
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
from tessera.training.distributed.train_pipeline.staged import (
    PipelineStage as PipelineStage, StagedTrainPipeline as StagedTrainPipeline,
    StageOut as StageOut,
)
from tessera.training.distributed.train_pipeline.batch_parts import ArgInfo as ArgInfo
from tessera.training.distributed.train_pipeline.tracing import Tracer as Tracer
from tessera.training.distributed.travel.features_awaitable import (
    FusedKJTListSplitsAwaitable as FusedKJTListSplitsAwaitable,
)
from tessera.training.distributed.travel.kjt_all_to_all import (
    KJTSplitsAllToAllMeta as KJTSplitsAllToAllMeta,
    SplitsAllToAllAwaitable as SplitsAllToAllAwaitable,
)
