"""The names of metrics, and the keys under which a metric module reports them.

A key is ``namespace-task|prefix + name``, such as ``ne-click|window_ne``: the namespace is the metric's class,
the prefix says of which examples a value is.  Keys are those of ``torchrec.metrics.metrics_namespace``.
"""

from __future__ import annotations

from enum import Enum


class StrValueMixin:
    """An enumeration whose members are written as their value."""

    value: str

    def __str__(self) -> str:
        return self.value


class MetricNameBase(StrValueMixin, Enum):
    """The base class of enumerations of names; a user's own metric defines one."""


class MetricName(MetricNameBase):
    """What a value is."""

    DEFAULT = ""
    NE = "ne"
    NE_POSITIVE = "ne_positive"
    SEGMENTED_NE = "segmented_ne"
    CALI_FREE_NE = "cali_free_ne"
    UNWEIGHTED_NE = "unweighted_ne"
    LOG_LOSS = "logloss"
    THROUGHPUT = "throughput"
    TOTAL_EXAMPLES = "total_examples"
    ATTEMPT_EXAMPLES = "attempt_examples"
    BATCH_SIZE = "batch_size"
    CTR = "ctr"
    CALIBRATION = "calibration"
    MSE = "mse"
    MAE = "mae"
    RMSE = "rmse"
    R_SQUARED = "r_squared"
    AUC = "auc"
    GAUC = "gauc"
    GAUC_NUM_SAMPLES = "gauc_num_samples"
    AUPRC = "auprc"
    GROUPED_AUC = "grouped_auc"
    GROUPED_AUPRC = "grouped_auprc"
    RAUC = "rauc"
    GROUPED_RAUC = "grouped_rauc"
    XAUC = "xauc"
    RECALL_SESSION_LEVEL = "recall_session_level"
    PRECISION_SESSION_LEVEL = "precision_session_level"
    MULTICLASS_RECALL = "multiclass_recall"
    MULTI_LABEL_PRECISION = "multi_label_precision"
    HINDSIGHT_TARGET_PR = "hindsight_target_pr"
    HINDSIGHT_TARGET_PRECISION = "hindsight_target_precision"
    HINDSIGHT_TARGET_RECALL = "hindsight_target_recall"
    NMSE = "nmse"
    NRMSE = "nrmse"
    LABEL_AVERAGE = "label_average"
    PREDICTION_AVERAGE = "prediction_average"
    NUM_POSITIVE_SAMPLES = "num_positive_samples"
    NUM_MISSING_LABELS = "num_missing_labels"
    SUM_WEIGHTS = "sum_weights"
    WEIGHTED_SUM_PREDICTIONS = "weighted_sum_predictions"
    TOWER_QPS = "qps"
    SCALAR = "scalar"
    OUTPUT = "output"
    WEIGHTED_AVG = "weighted_avg"
    ACCURACY = "accuracy"
    NDCG = "ndcg"
    PRECISION = "precision"
    RECALL = "recall"


class MetricNamespaceBase(StrValueMixin, Enum):
    """The base class of enumerations of namespaces; a user's own metric defines one."""


class MetricNamespace(MetricNamespaceBase):
    """Which metric reports a value."""

    DEFAULT = ""
    NE = "ne"
    THROUGHPUT = "throughput"
    CTR = "ctr"
    CALIBRATION = "calibration"
    MSE = "mse"
    MAE = "mae"
    AUC = "auc"
    GAUC = "gauc"
    AUPRC = "auprc"
    ACCURACY = "accuracy"
    WEIGHTED_AVG = "weighted_avg"
    NDCG = "ndcg"
    PRECISION = "precision"
    RECALL = "recall"
    NE_POSITIVE = "ne_positive"
    SEGMENTED_NE = "segmented_ne"
    CALI_FREE_NE = "cali_free_ne"
    UNWEIGHTED_NE = "unweighted_ne"
    RECALIBRATED_NE = "recalibrated_ne"
    RECALIBRATED_CALIBRATION = "recalibrated_calibration"
    SERVING_NE = "serving_ne"
    SERVING_CALIBRATION = "serving_calibration"
    RAUC = "rauc"
    XAUC = "xauc"
    RECALL_SESSION_LEVEL = "recall_session_level"
    PRECISION_SESSION_LEVEL = "precision_session_level"
    MULTICLASS_RECALL = "multiclass_recall"
    MULTI_LABEL_PRECISION = "multi_label_precision"
    HINDSIGHT_TARGET_PR = "hindsight_target_pr"
    NMSE = "nmse"
    AVERAGE = "average"
    NUM_POSITIVE_SAMPLES = "num_positive_samples"
    NUM_MISSING_LABELS = "num_missing_labels"
    SUM_WEIGHTS = "sum_weights"
    WEIGHTED_SUM_PREDICTIONS = "weighted_sum_predictions"
    TENSOR_WEIGHTED_AVG = "tensor_weighted_avg"
    TOWER_QPS = "qps"
    SCALAR = "scalar"
    OUTPUT = "output"
    OPTIMIZERS = "optimizers"
    MODEL_CONFIGURATOR = "model_configurator"


class MetricPrefix(StrValueMixin, Enum):
    """The examples that a value is of: all, those of the window, or those since the process began."""

    DEFAULT = ""
    LIFETIME = "lifetime_"
    WINDOW = "window_"
    ATTEMPT = "attempt_"


def task_wildcard_metrics_pattern(
    namespace: MetricNamespaceBase,
    metric_name: MetricNameBase,
    metric_prefix: MetricPrefix = MetricPrefix.DEFAULT,
) -> str:
    """A regular expression that fits a metric's keys of every task."""
    return rf"{namespace}-.+\|{metric_prefix}{metric_name}"


def compose_metric_namespace(namespace: MetricNamespaceBase, task_name: str) -> str:
    """The part of a key before the bar."""
    return f"{namespace}-{task_name}"


def compose_customized_metric_key(
    namespace: str, metric_name: str, description: str | None = None
) -> str:
    """A key of any namespace and name, such as those of a `StateMetric`."""
    return f"{namespace}|{metric_name}{description or ''}"


def compose_metric_key(
    namespace: MetricNamespaceBase,
    task_name: str,
    metric_name: MetricNameBase,
    metric_prefix: MetricPrefix = MetricPrefix.DEFAULT,
    description: str | None = None,
) -> str:
    """The key under which a metric reports a value of a task."""
    return compose_customized_metric_key(
        compose_metric_namespace(namespace, task_name),
        f"{metric_prefix}{metric_name}",
        description,
    )
