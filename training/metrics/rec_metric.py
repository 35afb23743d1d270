"""Metrics over a training's examples: since it began, and of a window of the newest ones.

A `RecMetric` is a metric of some tasks.  It takes the model's outputs apart by task and hands them to
`RecMetricComputation` objects, which hold the states: one for each task, or one for all in the fused modes.
Each rank updates its own states; only `compute` and `sync` communicate, and every rank must call them.

A window of W examples over R ranks is a window of ``ceil(W / R)`` examples on each.

Shapes: ``T`` tasks of a computation (1 unless fused), ``B`` examples of a batch.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist

from tessera.training.metrics.computation import MetricComputationReport, RecMetricComputation
from tessera.training.metrics.metrics_config import RecComputeMode, RecTaskInfo
from tessera.training.metrics.metrics_namespace import (
    MetricNamespaceBase,
    MetricPrefix,
    compose_metric_key,
)
from tessera.training.metrics.states import RecMetricException
from tessera.training.metrics.task_inputs import Inputs, cloned, joined, of_all_tasks, of_task
from tessera.training.metrics.window import WindowBuffer

__all__ = [
    "MetricComputationReport",
    "RecMetric",
    "RecMetricComputation",
    "RecMetricException",
    "RecMetricList",
    "RecModelOutput",
    "WindowBuffer",
]

RecModelOutput = Tensor | dict[str, Tensor]
"""Values of all tasks ``[T, B]``, or of each task ``[B]`` by its name."""


class RecMetric(nn.Module, abc.ABC):
    """A metric of some tasks: the base class of a metric of one's own.

    A class of it sets ``_namespace`` and ``_computation_class``.

    Args:
        world_size: ranks.
        my_rank: this rank.
        batch_size: examples of a rank's batch.
        tasks: whose values it takes.
        compute_mode: whether tasks are computed together.
        window_size: examples of all ranks in a window.
        fused_update_limit: batches that are kept and then counted as one; not with fused tasks.
        compute_on_all_ranks: whether each rank gets the values, or the first alone.
        should_validate_update: whether a batch whose weights are all 0 is left out of a task.
        process_group: the ranks; None: all.
        should_clone_update_inputs: whether batches are copied first.
        **kwargs: for the computation class.

    Raises:
        ValueError: fused tasks with a ``fused_update_limit``, or a rank's window that does not hold a batch.
    """

    PREDICTIONS: ClassVar[str] = "predictions"
    LABELS: ClassVar[str] = "labels"
    WEIGHTS: ClassVar[str] = "weights"

    _namespace: MetricNamespaceBase
    _computation_class: type[RecMetricComputation]

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        world_size: int,
        my_rank: int,
        batch_size: int,
        tasks: list[RecTaskInfo],
        compute_mode: RecComputeMode = RecComputeMode.UNFUSED_TASKS_COMPUTATION,
        window_size: int = 100,
        fused_update_limit: int = 0,
        compute_on_all_ranks: bool = False,  # noqa: FBT001, FBT002
        should_validate_update: bool = False,  # noqa: FBT001, FBT002
        process_group: dist.ProcessGroup | None = None,
        *,
        should_clone_update_inputs: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self._fused = compute_mode is not RecComputeMode.UNFUSED_TASKS_COMPUTATION
        if self._fused and fused_update_limit > 0:
            raise ValueError(
                f"fused_update_limit={fused_update_limit} and {compute_mode}; give one of the two"
            )
        self._window_size = math.ceil(window_size / world_size)
        if self._window_size < batch_size:
            raise ValueError(
                f"window_size={window_size} is {self._window_size} examples on each of {world_size} "
                f"ranks; it must hold a batch, so give at least {world_size * batch_size}"
            )
        self._world_size = world_size
        self._my_rank = my_rank
        self._batch_size = batch_size
        self._tasks = tasks
        self._compute_mode = compute_mode
        self._fused_update_limit = fused_update_limit
        self._should_validate_update = should_validate_update
        self._should_clone_update_inputs = should_clone_update_inputs
        self._required_inputs: set[str] = set()
        self._kept: list[Inputs] = []
        self._metrics_computations = nn.ModuleList(
            self._computation_class(
                my_rank=my_rank,
                batch_size=batch_size,
                n_tasks=len(own),
                window_size=self._window_size,
                compute_on_all_ranks=compute_on_all_ranks,
                should_validate_update=should_validate_update,
                process_group=process_group,
                **{**kwargs, **self._get_task_kwargs(own if self._fused else own[0])},
            )
            for own in ([tasks] if self._fused else [[task] for task in tasks])
        )

    def _get_task_kwargs(self, task_config: RecTaskInfo | list[RecTaskInfo]) -> dict[str, Any]:  # noqa: ARG002
        """Arguments of the computation that come from its task, or from its tasks where they are fused."""
        return {}

    def computations(self) -> list[RecMetricComputation]:
        """The objects that hold the states: one for each task, or one for all."""
        return cast("list[RecMetricComputation]", list(self._metrics_computations))

    def tasks_with_states(self) -> list[tuple[RecTaskInfo, RecMetricComputation]]:
        """Each object of states with its task, the first one of fused tasks."""
        return list(zip(self._tasks, self.computations(), strict=False))

    def update(
        self,
        *,
        predictions: RecModelOutput,
        labels: RecModelOutput,
        weights: RecModelOutput | None,
        **kwargs: Any,
    ) -> None:
        """Count a batch.

        Args:
            predictions: of each task ``[B]`` by its name, or ``[T, B]`` in the fused modes; ``[..., C]`` of C
                classes. A task that is not there, or has no examples, is left out.
            labels: as the predictions.
            weights: as the labels; None: 1.
            **kwargs: what the computation takes besides, as ``required_inputs``, tensors by name.

        Raises:
            RecMetricException: the states are those of all ranks, between `sync` and `unsync`, or a batch
                does not fit.
        """
        inputs = Inputs(predictions=predictions, labels=labels, weights=weights, others=kwargs)
        with torch.no_grad():
            if self._should_clone_update_inputs:
                inputs = cloned(inputs)
            if self._fused_update_limit <= 0:
                self._count(inputs)
                return
            self._kept.append(inputs)
            if len(self._kept) >= self._fused_update_limit:
                self._count_kept()

    def _count_kept(self) -> None:
        if self._kept:
            inputs, self._kept = joined(self._kept), []
            with torch.no_grad():
                self._count(inputs)

    def _count(self, inputs: Inputs) -> None:
        for place, computation in enumerate(self.computations()):
            if computation._is_synced:  # noqa: SLF001 - a state of ours
                raise RecMetricException("the states are those of all ranks; call unsync first")
            if self._fused:
                batch = of_all_tasks(inputs, [task.name for task in self._tasks])
            else:
                batch = of_task(inputs, self._tasks[place].name)
            if batch is None:
                continue
            if self._should_validate_update:
                seen = torch.count_nonzero(batch.weights, dim=-1) > 0
                if not bool(seen.any()):
                    continue
                computation.get_buffer("has_valid_update").logical_or_(seen)
            computation.update(
                predictions=batch.predictions,
                labels=batch.labels,
                weights=batch.weights,
                **batch.others,
            )

    def compute(self) -> dict[str, Tensor]:
        """The values of all ranks' examples by their keys, see `compose_metric_key`."""
        return self._values("", RecMetricComputation.compute)

    def local_compute(self) -> dict[str, Tensor]:
        """The values of this rank's examples; their prefixes begin with ``local_``."""
        return self._values("local_", RecMetricComputation.local_compute)

    def _values(
        self,
        scope: str,
        reports_of: Callable[[RecMetricComputation], list[MetricComputationReport]],
    ) -> dict[str, Tensor]:
        self._count_kept()
        values = {}
        for place, computation in enumerate(self.computations()):
            computation.pre_compute()
            for report in reports_of(computation):
                of_tasks: Sequence[tuple[RecTaskInfo, Tensor]] = (
                    list(zip(self._tasks, report.value, strict=True))
                    if self._fused
                    else [(self._tasks[place], report.value)]
                )
                for task, value in of_tasks:
                    key = compose_metric_key(
                        self._namespace,
                        task.name,
                        report.name,
                        cast("MetricPrefix", f"{scope}{report.metric_prefix}"),
                        report.description,
                    )
                    values[key] = value
        return values

    def sync(self) -> None:
        """Put the states of all ranks in the place of this one's, as for a checkpoint."""
        self._count_kept()
        for computation in self.computations():
            computation.sync()

    def unsync(self) -> None:
        """Put the rank's own states back, if they are not there."""
        for computation in self.computations():
            if computation._is_synced:  # noqa: SLF001 - a state of ours
                computation.unsync()

    def reset(self) -> None:
        """Forget all examples."""
        self._kept = []
        for computation in self.computations():
            computation.reset()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The persistent states, with the batches that ``fused_update_limit`` keeps."""
        self._count_kept()
        return super().state_dict(*args, **kwargs)

    def get_memory_usage(self) -> dict[Tensor, int]:
        """Bytes of each tensor that the metric holds on to."""
        held = [tensor for inputs in self._kept for tensor in inputs.tensors()]
        for computation in self.computations():
            held += list(computation.buffers())
            held += [
                part
                for name in computation._defaults  # noqa: SLF001 - a state of ours
                for part in getattr(computation, name)
                if isinstance(getattr(computation, name), list)
            ]
            for window in computation._batch_window_buffers.values():  # noqa: SLF001
                held += window.buffers
        return {tensor: tensor.numel() * tensor.element_size() for tensor in held}

    def get_required_inputs(self) -> set[str]:
        """The keys of the model's output that the metric needs besides those of its tasks."""
        return self._required_inputs


class RecMetricList(nn.Module):
    """Several metrics that are used as one.

    Args:
        rec_metrics: them.
    """

    def __init__(self, rec_metrics: list[RecMetric]) -> None:
        super().__init__()
        self.rec_metrics = nn.ModuleList(rec_metrics)
        needed = {name for metric in rec_metrics for name in metric.get_required_inputs()}
        self.required_inputs: list[str] | None = sorted(needed) or None

    def __len__(self) -> int:
        return len(self.rec_metrics)

    def __getitem__(self, idx: int) -> RecMetric:
        return self.metrics()[idx]

    def metrics(self) -> list[RecMetric]:
        """The metrics in order."""
        return cast("list[RecMetric]", list(self.rec_metrics))

    def get_required_inputs(self) -> list[str] | None:
        """The keys of the model's output that some metric needs besides those of its tasks; None: none."""
        return self.required_inputs

    def update(
        self,
        *,
        predictions: RecModelOutput,
        labels: RecModelOutput,
        weights: RecModelOutput | None,
        **kwargs: Any,
    ) -> None:
        """`RecMetric.update` of each."""
        for metric in self.metrics():
            metric.update(predictions=predictions, labels=labels, weights=weights, **kwargs)

    def compute(self) -> dict[str, Tensor]:
        """`RecMetric.compute` of all."""
        return {key: value for metric in self.metrics() for key, value in metric.compute().items()}

    def local_compute(self) -> dict[str, Tensor]:
        """`RecMetric.local_compute` of all."""
        return {
            key: value for metric in self.metrics() for key, value in metric.local_compute().items()
        }

    def sync(self) -> None:
        """`RecMetric.sync` of each."""
        for metric in self.metrics():
            metric.sync()

    def unsync(self) -> None:
        """`RecMetric.unsync` of each."""
        for metric in self.metrics():
            metric.unsync()

    def reset(self) -> None:
        """`RecMetric.reset` of each."""
        for metric in self.metrics():
            metric.reset()
