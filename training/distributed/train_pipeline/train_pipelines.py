"""The names of ``torchrec.distributed.train_pipeline.train_pipelines``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.train_pipeline.compiled import (
    TorchCompileConfig as TorchCompileConfig, TrainPipelinePT2 as TrainPipelinePT2,
)
from tessera.training.distributed.train_pipeline.embedding_pipelines import (
    TrainPipelineFusedSparseDist as TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync as TrainPipelineSemiSync,
)
from tessera.training.distributed.train_pipeline.eval_pipelines import (
    EvalPipelineFusedSparseDist as EvalPipelineFusedSparseDist,
    EvalPipelineSparseDist as EvalPipelineSparseDist,
)
from tessera.training.distributed.train_pipeline.pipelines import (
    TrainPipeline as TrainPipeline, TrainPipelineBase as TrainPipelineBase,
)
from tessera.training.distributed.train_pipeline.prefetch import (
    PrefetchTrainPipelineSparseDist as PrefetchTrainPipelineSparseDist,
)
from tessera.training.distributed.train_pipeline.sparse_dist import (
    TrainPipelineSparseDist as TrainPipelineSparseDist,
    TrainPipelineSparseDistLite as TrainPipelineSparseDistLite,
)
from tessera.training.distributed.train_pipeline.staged import (
    StagedTrainPipeline as StagedTrainPipeline,
)
