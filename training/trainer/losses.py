"""The loss of a batch: one term per label, by the label's task.

Shapes: ``B`` samples, ``L`` labels.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from tessera.errors import UserError
from tessera.training.data.columns import LabelColumn, Task

Reduction = Literal["mean", "sum"]


def _binary(
    logits: Tensor, labels: Tensor, weights: Tensor, positive_weight: float, reduction: Reduction
) -> Tensor:
    return functional.binary_cross_entropy_with_logits(
        logits,
        labels,
        weights,
        pos_weight=None if positive_weight == 1.0 else logits.new_full((), positive_weight),
        reduction=reduction,
    )


def _regression(
    outputs: Tensor, labels: Tensor, weights: Tensor, _positive_weight: float, reduction: Reduction
) -> Tensor:
    losses = (outputs - labels).square() * weights
    return losses.mean() if reduction == "mean" else losses.sum()


_OF_TASK: dict[Task, Callable[[Tensor, Tensor, Tensor, float, Reduction], Tensor]] = {
    "binary": _binary,
    "regression": _regression,
}


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The sum over the labels of their losses, each times the label's weight.

    Attributes:
        labels: what is predicted.
        weights: what each label's loss counts.
        positive_weights: of each binary label, what a row with label 1 counts for one with 0.
    """

    labels: tuple[LabelColumn, ...]
    weights: tuple[float, ...]
    positive_weights: tuple[float, ...]

    @classmethod
    def of(
        cls,
        labels: Sequence[LabelColumn],
        *,
        label_weights: Mapping[str, float],
        positive_weights: Mapping[str, float],
    ) -> Losses:
        """The losses of these labels; a label that a mapping does not name has weight 1.

        Raises:
            UserError: a mapping names a label that the data has not, or ``positive_weights`` one
                that is not binary.
        """
        tasks = {label.name: label.task for label in labels}
        for setting, given in (
            ("label_weights", label_weights),
            ("positive_weights", positive_weights),
        ):
            for name in given:
                _check_label(name, tasks, f"train.{setting}")
        for name in positive_weights:
            if tasks[name] != "binary":
                raise UserError(
                    f"train.positive_weights.{name}: the label's task is {tasks[name]}; only binary"
                    " labels have rows with label 1, so leave it out"
                )
        return cls(
            labels=tuple(labels),
            weights=tuple(label_weights.get(name, 1.0) for name in tasks),
            positive_weights=tuple(positive_weights.get(name, 1.0) for name in tasks),
        )

    def __call__(
        self,
        outputs: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        *,
        reduction: Reduction,
    ) -> Tensor:
        """The loss of a batch.

        Args:
            outputs: ``[B, L]``: logits of binary labels, values of others.
            labels: ``[B]`` for one label, ``[B, L]`` for several; NaN, where a label is not
                known, adds nothing.
            weights: ``[B]``, what each sample counts; None: all 1.
            reduction: whether the losses of the samples are summed, or the sum divided by ``B``.

        Returns:
            A scalar.
        """
        by_label = labels.unsqueeze(1) if len(self.labels) == 1 else labels
        total: Tensor | None = None
        for place, label in enumerate(self.labels):
            wanted = by_label[:, place]
            known = ~torch.isnan(wanted)
            loss = _OF_TASK[label.task](
                outputs[:, place],
                torch.where(known, wanted, 0.0),
                known.float() if weights is None else known * weights,
                self.positive_weights[place],
                reduction,
            )
            if self.weights[place] != 1.0:
                loss = loss * self.weights[place]
            total = loss if total is None else total + loss
        assert total is not None, "there is at least one label"
        return total


def _check_label(name: str, known: Mapping[str, Task], setting: str) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(
        f"{setting} names {name!r}, which is not a label of the data; give one of"
        f" {', '.join(known)}{hint}"
    )
