"""Which metrics a metric module computes, of which tasks, over which windows.

Names, fields and defaults are those of ``torchrec.metrics.metrics_config``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tessera.training.metrics.metrics_namespace import StrValueMixin

_WINDOW_EXAMPLES = 10_000_000
_THROUGHPUT_WINDOW_S = 100
_THROUGHPUT_WARMUP_STEPS = 100


class RecMetricEnumBase(StrValueMixin, Enum):
    """The base class of enumerations of metrics."""


class RecMetricEnum(RecMetricEnumBase):
    """The metrics that a `MetricsConfig` can ask for."""

    NE = "ne"
    CTR = "ctr"
    AUC = "auc"
    AUPRC = "auprc"
    CALIBRATION = "calibration"
    MSE = "mse"
    MAE = "mae"
    WEIGHTED_AVG = "weighted_avg"
    ACCURACY = "accuracy"
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
    TOWER_QPS = "tower_qps"
    SCALAR = "scalar"
    OUTPUT = "output"


@dataclass(unsafe_hash=True)
class SessionMetricDef:
    """What the metrics of sessions need of a task.

    Attributes:
        session_var_name: the key, in the model's output, of the tensor with each example's session.
        top_threshold: how many of the best predictions of a session are taken for positive.
        run_ranking_of_labels: whether the best labels of a session take the labels' place.
    """

    session_var_name: str
    top_threshold: int | None = None
    run_ranking_of_labels: bool = False


@dataclass(unsafe_hash=True)
class RecTaskInfo:
    """A task of a model, and where its values stand in the model's output.

    Attributes:
        name: in the keys of its metrics.
        label_name: the key of its labels.
        prediction_name: the key of its predictions.
        weight_name: the key of its weights.
        session_metric_def: what metrics of sessions need.
        is_negative_task: whether NDCG ranks by one minus the prediction, with one minus the label.
        tensor_name: the key of the tensor whose mean `TensorWeightedAvgMetric` reports.
        weighted: whether the weights count in that mean.
    """

    name: str = "DefaultTask"
    label_name: str = "label"
    prediction_name: str = "prediction"
    weight_name: str = "weight"
    session_metric_def: SessionMetricDef | None = None
    is_negative_task: bool = False
    tensor_name: str | None = None
    weighted: bool = True


class RecComputeMode(Enum):
    """Whether a metric's tasks are computed together.

    Unfused, each task has states of its own and is updated alone, and a task may be missing in a batch.
    Fused, one tensor ``[tasks, B]`` holds all of them, which is faster with many tasks; the values are the
    same.  The states of a metric always travel between ranks together, so the third mode is the first.
    """

    FUSED_TASKS_COMPUTATION = 1
    UNFUSED_TASKS_COMPUTATION = 2
    FUSED_TASKS_AND_STATES_COMPUTATION = 3


@dataclass
class RecMetricDef:
    """A metric of a `MetricsConfig`.

    Attributes:
        rec_tasks: its tasks; give them or ``rec_task_indices``.
        rec_task_indices: its tasks, as places in the config's ``rec_tasks``.
        window_size: how many examples of all ranks a window holds. A rank's share must hold a batch.
        arguments: more arguments of the metric's class.
    """

    rec_tasks: list[RecTaskInfo] = field(default_factory=list)
    rec_task_indices: list[int] = field(default_factory=list)
    window_size: int = _WINDOW_EXAMPLES
    arguments: dict[str, Any] | None = None


class StateMetricEnum(StrValueMixin, Enum):
    """The parts of a training that can report values of their own."""

    OPTIMIZERS = "optimizers"
    MODEL_CONFIGURATOR = "model_configurator"


@dataclass
class ThroughputDef:
    """The throughput of a `MetricsConfig`.

    Attributes:
        window_size: seconds that a window holds.
        warmup_steps: batches at the beginning that are not timed.
    """

    window_size: int = _THROUGHPUT_WINDOW_S
    warmup_steps: int = _THROUGHPUT_WARMUP_STEPS


@dataclass
class MetricsConfig:
    """What a metric module computes.

    Attributes:
        rec_tasks: the model's tasks.
        rec_metrics: the metrics of predictions.
        throughput_metric: None leaves the throughput out.
        rec_compute_mode: whether tasks are computed together.
        fused_update_limit: batches that are kept and then counted as one, which starts fewer kernels; 0 and 1
            count each at once. Not with fused tasks.
        state_metrics: parts that report values of their own.
        compute_interval_steps: `RecMetricModule.should_compute` says yes once in so many batches.
        min_compute_interval: seconds that should pass between two computations at least; the steps are set
            after the second one.
        max_compute_interval: seconds that should pass at most.
        compute_on_all_ranks: whether each rank gets the values, or the first alone.
        should_validate_update: whether a batch whose weights are all 0 is left out of a task; a task that has
            seen nothing else reports 0.
        should_clone_update_inputs: whether batches are copied first, for a program that writes the next one
            into the same memory, as CUDA graphs do.
    """

    rec_tasks: list[RecTaskInfo] = field(default_factory=list)
    rec_metrics: dict[RecMetricEnumBase, RecMetricDef] = field(default_factory=dict)
    throughput_metric: ThroughputDef | None = None
    rec_compute_mode: RecComputeMode = RecComputeMode.UNFUSED_TASKS_COMPUTATION
    fused_update_limit: int = 0
    state_metrics: list[StateMetricEnum] = field(default_factory=list)
    compute_interval_steps: int = 100
    min_compute_interval: float = 0.0
    max_compute_interval: float = float("inf")
    compute_on_all_ranks: bool = False
    should_validate_update: bool = False
    should_clone_update_inputs: bool = False


DefaultTaskInfo = RecTaskInfo()
DefaultMetricsConfig = MetricsConfig(
    rec_tasks=[DefaultTaskInfo],
    rec_metrics={RecMetricEnum.NE: RecMetricDef(rec_tasks=[DefaultTaskInfo])},
    throughput_metric=ThroughputDef(),
)
EmptyMetricsConfig = MetricsConfig()


@dataclass
class BatchSizeStage:
    """A part of a training with a batch size of its own.

    Attributes:
        batch_size: examples of a rank's batch.
        max_iters: the last batch of this part, counted from the beginning of the training; None: the rest.
    """

    batch_size: int = 0
    max_iters: int | None = 0


def validate_batch_size_stages(batch_size_stages: list[BatchSizeStage] | None) -> None:
    """Check that the last stage has no end and that ends rise.

    Raises:
        ValueError: they do not.
    """
    if not batch_size_stages:
        return
    *ends, last = [stage.max_iters for stage in batch_size_stages]
    if last is not None:
        raise ValueError(f"the last batch size stage ends at max_iters={last}; give it None")
    rising = [end for end in ends if end is not None]
    if len(rising) < len(ends) or sorted(set(rising)) != rising:
        raise ValueError(f"the batch size stages end at max_iters {ends}; give rising numbers")
