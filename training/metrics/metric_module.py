"""All metrics of a training, as one module that a trainer updates after each batch.

The states that a checkpoint needs are in its state dict: `RecMetricModule.sync` puts those of all ranks there,
and they belong to one rank of the training that loads them (`RecMetricModule.load_pre_compute_states` does so
by itself).  Windows begin anew.
"""

from __future__ import annotations

import abc
import math
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from tessera.training.metrics.deferrable_metrics import DeferrableMetrics
from tessera.training.metrics.mapping import REC_METRICS_MAPPING
from tessera.training.metrics.metrics_config import (
    BatchSizeStage,
    MetricsConfig,
    RecMetricDef,
    RecMetricEnumBase,
    RecTaskInfo,
    StateMetricEnum,
)
from tessera.training.metrics.metrics_namespace import (
    MetricNamespace,
    compose_customized_metric_key,
    compose_metric_namespace,
)
from tessera.training.metrics.model_utils import parse_task_model_outputs
from tessera.training.metrics.rec_metric import RecMetric, RecMetricException, RecMetricList
from tessera.training.metrics.throughput import ThroughputMetric

_STATE_NAMESPACES = {
    StateMetricEnum.OPTIMIZERS: MetricNamespace.OPTIMIZERS,
    StateMetricEnum.MODEL_CONFIGURATOR: MetricNamespace.MODEL_CONFIGURATOR,
}

MetricValue = Tensor | float
MetricStateDict = dict[str, dict[str, dict[str, Any]]]
"""Namespace -> task -> state."""


class StateMetric(abc.ABC):
    """A part of a training that reports values of its own, such as an optimizer its learning rate."""

    @abc.abstractmethod
    def get_metrics(self) -> dict[str, MetricValue]:
        """Return the values of this part by name."""


class RecMetricModule(nn.Module):
    """The metrics of a training.

    Args:
        batch_size: examples of a rank's batch.
        world_size: ranks.
        rec_tasks: the model's tasks, which say where their values are in its output.
        rec_metrics: the metrics of predictions.
        throughput_metric: what times batches.
        state_metrics: parts that report values of their own, by namespace.
        compute_interval_steps: `should_compute` says yes once in so many batches.
        min_compute_interval: seconds that should pass between two computations at least. The second one
            sets the steps, and the ranks agree on the most.
        max_compute_interval: seconds that should pass at most.

    Raises:
        ValueError: seconds that are not positive.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        batch_size: int,
        world_size: int,
        rec_tasks: list[RecTaskInfo] | None = None,
        rec_metrics: RecMetricList | None = None,
        throughput_metric: ThroughputMetric | None = None,
        state_metrics: dict[str, StateMetric] | None = None,
        compute_interval_steps: int = 100,
        min_compute_interval: float = 0.0,
        max_compute_interval: float = math.inf,
    ) -> None:
        super().__init__()
        if max_compute_interval <= 0 or min_compute_interval < 0:
            raise ValueError(
                f"compute intervals of {min_compute_interval} to {max_compute_interval} s; give 0 or more "
                "and more than 0"
            )
        self.batch_size = batch_size
        self.world_size = world_size
        self.rec_tasks = rec_tasks or []
        self.rec_metrics = RecMetricList([]) if rec_metrics is None else rec_metrics
        self.throughput_metric = throughput_metric
        self.state_metrics = state_metrics or {}
        self.compute_interval_steps = compute_interval_steps
        self.min_compute_interval = min_compute_interval
        self.max_compute_interval = max_compute_interval
        self.trained_batches = 0
        self.compute_count = 0
        self.last_compute_time = -1.0
        self._interval_is_set = min_compute_interval == 0 and math.isinf(max_compute_interval)
        self._on_device: Tensor
        self.register_buffer("_on_device", torch.empty(0), persistent=False)

    def update(self, model_out: dict[str, Any], **kwargs: Any) -> None:
        """Count a batch.

        Args:
            model_out: labels, predictions and weights of each task under the keys that `RecTaskInfo` names,
                and what metrics need besides, see `get_required_inputs`.
            **kwargs: for the metrics.

        Raises:
            RecMetricException: a key is missing, or values do not fit.
        """
        self._update_rec_metrics(model_out, **kwargs)
        if self.throughput_metric is not None:
            self.throughput_metric.update()
        self.trained_batches += 1

    def _update_rec_metrics(self, model_out: dict[str, Any], **kwargs: Any) -> None:
        if not len(self.rec_metrics) or not self.rec_tasks:
            return
        labels, predictions, weights, required = parse_task_model_outputs(
            self.rec_tasks, model_out, self.get_required_inputs()
        )
        if required:
            kwargs["required_inputs"] = required
        self.rec_metrics.update(predictions=predictions, labels=labels, weights=weights, **kwargs)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # An entry of older checkpoints of TorchRec; the count begins anew with each run.
        state_dict.pop(f"{prefix}_trained_batches", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def should_compute(self) -> bool:
        """Whether it is time for `compute`, the same on all ranks."""
        return self.trained_batches % self.compute_interval_steps == 0

    def compute(self) -> DeferrableMetrics:
        """The values of all ranks by their keys; every rank must call it, see `RecMetric.compute`."""
        self.compute_count += 1
        values: dict[str, MetricValue] = {}
        if len(self.rec_metrics):
            self._adjust_compute_interval()
            values.update(self.rec_metrics.compute())
        if self.throughput_metric is not None:
            values.update(self.throughput_metric.compute())
        for namespace, part in self.state_metrics.items():
            for name, value in part.get_metrics().items():
                values[compose_customized_metric_key(namespace, name)] = value
        return DeferrableMetrics(values)

    def local_compute(self) -> DeferrableMetrics:
        """The values of this rank's examples."""
        return DeferrableMetrics(dict(self.rec_metrics.local_compute()))

    def async_compute(self) -> DeferrableMetrics:
        """Refuse: metrics are computed by the thread that calls `compute`.

        Raises:
            RecMetricException: always.
        """
        raise RecMetricException("metrics are computed by the thread that trains; call compute")

    def shutdown(self) -> None:
        """Do nothing: there is no thread to end.  Programs call it when a training is over."""

    def sync(self) -> None:
        """Put the states of all ranks in the place of this one's, as for a checkpoint."""
        self.rec_metrics.sync()

    def unsync(self) -> None:
        """Put the rank's own states back."""
        self.rec_metrics.unsync()

    def reset(self) -> None:
        """Forget all examples."""
        self.rec_metrics.reset()

    def get_required_inputs(self) -> list[str] | None:
        """The keys of the model's output that metrics need besides those of tasks; None: none."""
        return self.rec_metrics.get_required_inputs()

    def _adjust_compute_interval(self) -> None:
        """At the second computation, set the steps so that computations lie in the wanted seconds."""
        now = time.time()
        if self.last_compute_time > 0 and not self._interval_is_set:
            wanted = steps_for_interval(
                self.compute_interval_steps,
                now - self.last_compute_time,
                self.min_compute_interval,
                self.max_compute_interval,
            )
            steps = torch.tensor([wanted], dtype=torch.int64, device=self._on_device.device)
            if dist.is_available() and dist.is_initialized():
                dist.all_reduce(steps, op=dist.ReduceOp.MAX)
            self.compute_interval_steps = int(steps)
            self._interval_is_set = True
        self.last_compute_time = now

    def get_pre_compute_states(self, pg: dist.ProcessGroup | None = None) -> MetricStateDict:
        """The states of all ranks, the same on each; every rank must call it.

        Args:
            pg: the ranks; None: those of each metric.

        Returns:
            Namespace -> task -> name -> state. A metric of fused tasks has its states under its first task;
            the throughput has them under its own name.
        """
        found: MetricStateDict = {}
        for metric in self.rec_metrics.metrics():
            by_task = found.setdefault(str(metric._namespace), {})  # noqa: SLF001 - a class of ours
            for task, computation in metric.tasks_with_states():
                by_task[task.name] = computation.states_of_ranks(pg)
        if self.throughput_metric is not None:
            found[str(MetricNamespace.THROUGHPUT)] = {
                str(MetricNamespace.THROUGHPUT): {
                    name: state.clone() for name, state in self.throughput_metric.named_buffers()
                }
            }
        return found

    def load_pre_compute_states(self, source: MetricStateDict) -> None:
        """Continue from what `get_pre_compute_states` gave, with as many ranks as there are.

        The first rank takes the states and the others begin without, so `compute` gives what it gave before.
        Nothing is communicated.  Windows begin anew.

        Raises:
            RecMetricException: a state is missing.
        """
        for metric in self.rec_metrics.metrics():
            metric.reset()
            for task, computation in metric.tasks_with_states():
                states = _entry(source, str(metric._namespace), task.name)  # noqa: SLF001 - a class of ours
                computation.load_states(states)
        if self.throughput_metric is not None:
            namespace = str(MetricNamespace.THROUGHPUT)
            states = _entry(source, namespace, namespace)
            for name, state in self.throughput_metric.named_buffers():
                state.copy_(states[name])


def _entry(source: MetricStateDict, namespace: str, task: str) -> dict[str, Any]:
    if task not in source.get(namespace, {}):
        raise RecMetricException(
            f"the states have nothing of task {task!r} under {namespace!r}; give those of the same config"
        )
    return source[namespace][task]


def steps_for_interval(steps: int, elapsed_s: float, min_s: float, max_s: float) -> int:
    """How many batches two computations should be apart.

    Args:
        steps: how many they were apart.
        elapsed_s: the seconds that took.
        min_s: seconds that it should take at least.
        max_s: seconds that it should take at most.

    Returns:
        ``steps`` if they fit; else what takes the middle, or with one bound a second inside of it.
    """
    if min_s <= elapsed_s <= max_s:
        return steps
    if math.isinf(max_s):
        wanted_s = min_s + 1.0
    elif min_s == 0:
        wanted_s = max_s - 1.0 if max_s > 1.0 else max_s
    else:
        wanted_s = (min_s + max_s) / 2
    return max(1, int(wanted_s * steps / max(elapsed_s, 1e-9)))


def generate_metric_module(  # noqa: PLR0917 - the signature TorchRec users know
    metric_class: type[RecMetricModule],
    metrics_config: MetricsConfig,
    batch_size: int,
    world_size: int,
    my_rank: int,
    state_metrics_mapping: dict[StateMetricEnum, StateMetric],
    device: torch.device,
    process_group: dist.ProcessGroup | None = None,
    batch_size_stages: list[BatchSizeStage] | None = None,
) -> RecMetricModule:
    """The metrics that a config asks for.

    Args:
        metric_class: `RecMetricModule` or a class of it.
        metrics_config: what is computed.
        batch_size: examples of a rank's batch.
        world_size: ranks.
        my_rank: this rank.
        state_metrics_mapping: the parts that report values of their own.
        device: where the states are.
        process_group: the ranks; None: all.
        batch_size_stages: batch sizes that change, which the throughput counts.

    Raises:
        ValueError: a metric without tasks, with both ways to name them, or that there is not; stages or
            windows that do not fit.
    """
    metrics = [
        _metric_class(kind)(
            world_size=world_size,
            my_rank=my_rank,
            batch_size=batch_size,
            tasks=_tasks(kind, definition, metrics_config),
            compute_mode=metrics_config.rec_compute_mode,
            window_size=definition.window_size,
            fused_update_limit=metrics_config.fused_update_limit,
            compute_on_all_ranks=metrics_config.compute_on_all_ranks,
            should_validate_update=metrics_config.should_validate_update,
            process_group=process_group,
            should_clone_update_inputs=metrics_config.should_clone_update_inputs,
            **(definition.arguments or {}),
        )
        for kind, definition in metrics_config.rec_metrics.items()
    ]
    throughput = None
    if metrics_config.throughput_metric is not None:
        throughput = ThroughputMetric(
            batch_size=batch_size,
            world_size=world_size,
            window_seconds=metrics_config.throughput_metric.window_size,
            warmup_steps=metrics_config.throughput_metric.warmup_steps,
            batch_size_stages=batch_size_stages,
        )
    parts = {}
    for part in metrics_config.state_metrics:
        if part not in state_metrics_mapping:
            raise ValueError(f"state_metrics has {part}; give it in state_metrics_mapping, too")
        namespace = _STATE_NAMESPACES[part]
        parts[compose_metric_namespace(namespace, str(namespace))] = state_metrics_mapping[part]
    return metric_class(
        batch_size=batch_size,
        world_size=world_size,
        rec_tasks=metrics_config.rec_tasks,
        rec_metrics=RecMetricList(metrics),
        throughput_metric=throughput,
        state_metrics=parts,
        compute_interval_steps=metrics_config.compute_interval_steps,
        min_compute_interval=metrics_config.min_compute_interval,
        max_compute_interval=metrics_config.max_compute_interval,
    ).to(device)


def _metric_class(kind: RecMetricEnumBase) -> type[RecMetric]:
    if kind not in REC_METRICS_MAPPING:
        raise ValueError(f"rec_metrics has {kind}; add its class to REC_METRICS_MAPPING")
    return REC_METRICS_MAPPING[kind]


def _tasks(
    kind: RecMetricEnumBase, definition: RecMetricDef, config: MetricsConfig
) -> list[RecTaskInfo]:
    if bool(definition.rec_tasks) == bool(definition.rec_task_indices):
        raise ValueError(f"metric {kind} needs rec_tasks or rec_task_indices; give one of the two")
    return definition.rec_tasks or [config.rec_tasks[i] for i in definition.rec_task_indices]
