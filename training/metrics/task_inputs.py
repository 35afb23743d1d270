"""What a metric is updated with, taken apart by task.

Shapes: ``T`` tasks, ``B`` examples, ``C`` classes where a prediction is one number for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessera.training.metrics.states import RecMetricException

REQUIRED_INPUTS = "required_inputs"


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A batch as it was given.

    Attributes:
        predictions: by task, or of all.
        labels: by task, or of all.
        weights: by task, or of all; None: 1.
        others: more arguments: tensors, and under ``required_inputs`` tensors by name.
    """

    predictions: Tensor | dict[str, Tensor]
    labels: Tensor | dict[str, Tensor]
    weights: Tensor | dict[str, Tensor] | None
    others: dict[str, Any]

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of it."""
        found: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        _each(self, keep)
        yield from found


@dataclass(frozen=True, kw_only=True)
class TaskBatch:
    """A batch as a computation takes it.

    Attributes:
        predictions: ``[T, B]`` or ``[T, B, C]``.
        labels: ``[T, B]``.
        weights: ``[T, B]``.
        others: more arguments.
    """

    predictions: Tensor
    labels: Tensor
    weights: Tensor
    others: dict[str, Any]


def cloned(inputs: Inputs) -> Inputs:
    """The same with memory of its own."""
    return _each(inputs, Tensor.clone)


def joined(batches: list[Inputs]) -> Inputs:
    """Batches behind one another, as one. A task that a batch has not is joined from those that have it."""

    def join(parts: list[Any]) -> Any:
        first = parts[0]
        if isinstance(first, Tensor):
            return torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts])
        if isinstance(first, dict):
            names = dict.fromkeys(name for part in parts for name in part)
            return {name: join([part[name] for part in parts if name in part]) for name in names}
        return first

    weights = [batch.weights for batch in batches if batch.weights is not None]
    if 0 < len(weights) < len(batches):
        raise RecMetricException("some batches have weights and others have none; give all of them")
    return Inputs(
        predictions=join([batch.predictions for batch in batches]),
        labels=join([batch.labels for batch in batches]),
        weights=join(weights) if weights else None,
        others=join([batch.others for batch in batches]),
    )


def of_task(inputs: Inputs, task: str) -> TaskBatch | None:
    """The examples of one task, or None if there are none.

    Raises:
        RecMetricException: labels or weights are missing, or of other lengths.
    """
    predictions, labels, weights = inputs.predictions, inputs.labels, inputs.weights
    if not (isinstance(predictions, dict) and isinstance(labels, dict)) or isinstance(
        weights, Tensor
    ):
        raise RecMetricException(
            "predictions, labels or weights are one tensor of all tasks; give a tensor by task, or use "
            "a fused compute_mode"
        )
    if task not in predictions:
        return None
    if task not in labels or (weights is not None and task not in weights):
        raise RecMetricException(f"task {task!r} has predictions; give its labels and weights, too")
    own = None if weights is None else weights[task]
    return _shaped(predictions[task], labels[task], own, inputs.others, tasks=1)


def of_all_tasks(inputs: Inputs, tasks: list[str]) -> TaskBatch | None:
    """The examples of all tasks, or None if there are none.

    Raises:
        RecMetricException: a task is missing, or tasks have different lengths.
    """

    def stacked(given: Tensor | dict[str, Tensor]) -> Tensor:
        if isinstance(given, Tensor):
            return given
        missing = [task for task in tasks if task not in given]
        if missing:
            raise RecMetricException(
                f"tasks {', '.join(map(repr, missing))} are not in the batch; fused tasks need all, so "
                "give them or use UNFUSED_TASKS_COMPUTATION"
            )
        if len({given[task].shape for task in tasks}) > 1:
            shapes = ", ".join(f"{task!r} {list(given[task].shape)}" for task in tasks)
            raise RecMetricException(f"fused tasks need one shape; they have {shapes}")
        return torch.stack([given[task] for task in tasks])

    if not isinstance(inputs.predictions, Tensor) and not inputs.predictions:
        return None
    weights = None if inputs.weights is None else stacked(inputs.weights)
    return _shaped(
        stacked(inputs.predictions), stacked(inputs.labels), weights, inputs.others, len(tasks)
    )


def _shaped(
    predictions: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    others: dict[str, Any],
    tasks: int,
) -> TaskBatch | None:
    """``T`` tasks of flat tensors; predictions with one dimension more than labels are of classes."""
    if not labels.numel() and not predictions.numel():
        return None
    by_class = predictions.dim() > labels.dim()
    labels = labels.reshape(tasks, -1)
    if by_class:
        predictions = predictions.reshape(tasks, -1, predictions.shape[-1])
    else:
        predictions = predictions.reshape(tasks, -1)
    weights = (
        torch.ones_like(labels, dtype=predictions.dtype)
        if weights is None
        else weights.reshape(tasks, -1)
    )
    if predictions.shape[:2] != labels.shape or weights.shape != labels.shape:
        raise RecMetricException(
            f"predictions {list(predictions.shape)}, labels {list(labels.shape)} and weights "
            f"{list(weights.shape)} of tasks and examples differ; give as many of each"
        )
    if REQUIRED_INPUTS in others:
        others = {
            **others,
            REQUIRED_INPUTS: {
                name: _like(labels, values) for name, values in others[REQUIRED_INPUTS].items()
            },
        }
    return TaskBatch(predictions=predictions, labels=labels, weights=weights, others=others)


def _like(labels: Tensor, values: Tensor) -> Tensor:
    """Values of all tasks or of one, or a single one, in the labels' shape; others as they are."""
    if values.numel() == labels.numel():
        return values.reshape(labels.shape)
    if values.numel() in {1, labels.shape[1]}:
        return values.reshape(1, -1).expand(labels.shape)
    return values


def _each(inputs: Inputs, fn: Callable[[Tensor], Tensor]) -> Inputs:
    def of(given: Any) -> Any:
        if isinstance(given, Tensor):
            return fn(given)
        return (
            {name: of(value) for name, value in given.items()} if isinstance(given, dict) else given
        )

    return Inputs(
        predictions=of(inputs.predictions),
        labels=of(inputs.labels),
        weights=of(inputs.weights),
        others=of(inputs.others),
    )
