"""Labels, predictions and weights of tasks out of a model's output, a dict of tensors by name.

Shapes: ``B`` examples, ``C`` classes where a prediction is one number for each.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from tessera.training.metrics.metrics_config import RecTaskInfo
from tessera.training.metrics.states import RecMetricException


def session_ids_to_tensor(session_ids: list[str], device: torch.device | None = None) -> Tensor:
    """Integers ``[B]`` from 1 up; one more wherever the session differs from that of the example before."""
    changes = [int(one != other) for one, other in itertools.pairwise(session_ids)]
    numbers = list(itertools.accumulate(changes, initial=1)) if session_ids else []
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def is_empty_signals(labels: Tensor, predictions: Tensor, weights: Tensor) -> bool:
    """Whether none of them has elements."""
    return not (labels.numel() or predictions.numel() or weights.numel())


def parse_model_outputs(
    label_name: str, prediction_name: str, weight_name: str, model_out: dict[str, Any]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Labels, predictions and weights of one task, without dimensions of size 1.

    Args:
        label_name: the key of the labels ``[B]``.
        prediction_name: the key of the predictions ``[B]`` or ``[B, C]``; empty: there are none, and no
            weights.
        weight_name: the key of the weights ``[B]``.
        model_out: the model's output.

    Raises:
        RecMetricException: a key is missing, or they do not have as many examples.
    """
    labels = _of(model_out, label_name).squeeze()
    if not prediction_name:
        if weight_name:
            raise RecMetricException(
                f"weight_name is {weight_name!r} and prediction_name empty; give both or none"
            )
        return labels, None, None
    predictions = _of(model_out, prediction_name).squeeze()
    weights = _of(model_out, weight_name).squeeze()
    if is_empty_signals(labels, predictions, weights):
        return labels, predictions, weights
    if labels.dim() == 0:
        labels, predictions, weights = (
            labels.unsqueeze(0),
            predictions.unsqueeze(0),
            weights.unsqueeze(0),
        )
    of_vectors = (
        labels.dim() == predictions.dim() == 2
        and weights.dim() == 1
        and len(labels) == len(predictions) == len(weights)
    )
    examples = (
        predictions.shape[:-1].numel() if predictions.dim() > labels.dim() else predictions.numel()
    )
    if not of_vectors and not labels.numel() == examples == weights.numel():
        raise RecMetricException(
            f"{label_name!r} has {labels.numel()} labels, {prediction_name!r} predictions of {examples} "
            f"examples and {weight_name!r} {weights.numel()} weights; give as many of each"
        )
    return labels, predictions, weights


def parse_required_inputs(
    model_out: dict[str, Any],
    required_inputs_list: list[str],
    ndcg_transform_input: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
    device: torch.device | None = None,
) -> dict[str, Tensor]:
    """The tensors that metrics need besides, by name.

    Args:
        model_out: the model's output.
        required_inputs_list: their keys.
        ndcg_transform_input: whether lists of sessions' names become numbers, see `session_ids_to_tensor`.
        device: where those numbers are.

    Raises:
        RecMetricException: a key is missing, or its value is not a tensor.
    """
    found = {}
    for name in required_inputs_list:
        value = model_out.get(name)
        if ndcg_transform_input and isinstance(value, list):
            value = session_ids_to_tensor(value, device=device)
        found[name] = _of({**model_out, name: value}, name).squeeze()
    return found


def parse_task_model_outputs(
    tasks: list[RecTaskInfo],
    model_out: dict[str, Any],
    required_inputs_list: list[str] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Labels, predictions and weights by task, and what metrics need besides by its key.

    A task without examples is left out.  Names of sessions in a list become numbers if the name of a task
    begins with ``ndcg``.

    Raises:
        RecMetricException: a key is missing, or values do not fit.
    """
    all_labels: dict[str, Tensor] = {}
    all_predictions: dict[str, Tensor] = {}
    all_weights: dict[str, Tensor] = {}
    device = None
    for task in tasks:
        labels, predictions, weights = parse_model_outputs(
            task.label_name, task.prediction_name, task.weight_name, model_out
        )
        device = labels.device
        if predictions is None or weights is None:
            if labels.numel():
                all_labels[task.name] = labels
        elif not is_empty_signals(labels, predictions, weights):
            all_labels[task.name] = labels
            all_predictions[task.name] = predictions
            all_weights[task.name] = weights
    required = parse_required_inputs(
        model_out,
        required_inputs_list or [],
        ndcg_transform_input=any(task.name.startswith("ndcg") for task in tasks),
        device=device,
    )
    return all_labels, all_predictions, all_weights, required


def _of(model_out: dict[str, Any], name: str) -> Tensor:
    value = model_out.get(name)
    if not isinstance(value, Tensor):
        have = ", ".join(sorted(model_out))
        raise RecMetricException(
            f"the model's output has no tensor {name!r} (it has {have}); give it, or name another key"
        )
    return value
