"""The names of ``torchrec.distributed.planner.estimator.estimator``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.planner.estimator.evaluators import (
    INFERENCE_EVALUATORS as INFERENCE_EVALUATORS, TRAINING_EVALUATORS as TRAINING_EVALUATORS,
    ColumnWiseEvaluator as ColumnWiseEvaluator, DataParallelEvaluator as DataParallelEvaluator,
    EmbeddingShardingPerfEvaluator as EmbeddingShardingPerfEvaluator,
    GridShardEvaluator as GridShardEvaluator, RowWiseEvaluator as RowWiseEvaluator,
    TableColumnWiseEvaluator as TableColumnWiseEvaluator,
    TableRowWiseEvaluator as TableRowWiseEvaluator, TableWiseEvaluator as TableWiseEvaluator,
    compute_block_usage_penalty as compute_block_usage_penalty,
    get_embedding_perf_sharding_evaluator as get_embedding_perf_sharding_evaluator,
)
from tessera.training.distributed.planner.estimator.factory import (
    EmbeddingPerfEstimatorFactory as EmbeddingPerfEstimatorFactory,
    EmbeddingPerfEstimatorV2 as EmbeddingPerfEstimatorV2,
)

EmbeddingPerfEstimator = EmbeddingPerfEstimatorV2
