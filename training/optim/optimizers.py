"""Torch optimizers with the arithmetic of fused tables, and the parameters that they are left.

The optimizers work on any parameters.  A parameter with two or more dimensions is a table of
rows ``[rows, D]``, one with fewer is a single row.  A sparse gradient
(``nn.EmbeddingBag(sparse=True)``) updates the rows that it names, as fused tables do; a dense one
updates every row.  Given to `tessera.training.optim.apply_optimizer_in_backward`, they say what a
fused table does in its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tessera.training.optim.row_updates import RULES, EmbOptimType, HyperParameters
from tessera.training.optim.steps import refuse_negative, value_of

# The mark on a parameter that is updated in the backward pass: a list of its optimizers.
IN_BACKWARD_OPTIMIZERS = "_in_backward_optimizers"


def in_backward_optimizer_filter(
    named_parameters: Iterator[tuple[str, nn.Parameter]],
    include: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that are left for an optimizer of the user's.

    Args:
        named_parameters: of a model.
        include: True gives the other ones, which the backward pass updates.
    """
    for name, parameter in named_parameters:
        if hasattr(parameter, IN_BACKWARD_OPTIMIZERS) == include:
            yield name, parameter


class RowOptimizer(Optimizer):
    """An optimizer by one of the rules of `tessera.training.optim.row_updates`.

    States are ``momentum1``, ``momentum2`` and ``step`` as far as the rule has them; a row-wise
    one is ``[rows]``.

    Args:
        params: parameters or torch's parameter groups.
        lr: learning rate.
        weight_decay: decoupled: weights shrink by ``lr * weight_decay`` of themselves.
        gradient_clipping: of fused tables alone: cut every number of the output's gradient to
            ``[-max_gradient, max_gradient]``.
        max_gradient: the bound of ``gradient_clipping``, without which it has no effect.
        settings: ``eps``, ``betas``, ``momentum`` or ``eta``, as far as the rule has them;
            ``lr_decay`` (the rate of step t is ``lr / (1 + (t - 1) * lr_decay)``) and
            ``initial_accumulator_value`` (where ``momentum1`` begins).

    Raises:
        ValueError: a setting that is negative; in a step, ``gradient_clipping``, as a parameter that is not a fused
            table has no gradient of the output.
    """

    kind: ClassVar[EmbOptimType]
    l2: ClassVar[bool] = False  # weight decay is added to the gradient instead
    _clips = False  # also where a pickle of before does not say it

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        weight_decay: float,
        gradient_clipping: bool = False,
        max_gradient: float = 1.0,
        **settings: Any,
    ) -> None:
        values = {"lr": lr, "weight_decay": weight_decay, **settings}
        refuse_negative({**values, "max_gradient": max_gradient})
        self._clips = gradient_clipping
        super().__init__(params, values)

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles keep: torch's parts, and whether gradients are to be clipped."""
        return {**super().__getstate__(), "_clips": self._clips}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; the closure, if any, is evaluated first and its value returned."""
        if self._clips:
            raise ValueError(
                f"{type(self).__name__}(gradient_clipping=True) cuts the gradient of what a fused table gives, and these "
                "parameters are not fused tables; shard them, or clip their gradients with "
                "GradientClippingOptimizer"
            )
        loss = value_of(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        rule = RULES[self.kind]
        hyper = HyperParameters(l2=self.l2).read(group)
        lr_decay = group.get("lr_decay", 0.0)
        weights = _as_rows(parameter)
        state = self.state[parameter]
        if not state:
            start = group.get("initial_accumulator_value", 0.0)
            for number, rowwise in enumerate(rule.rowwise_states):
                like = weights[:, 0] if rowwise else weights
                state[f"momentum{number + 1}"] = torch.full_like(
                    like, start, memory_format=torch.contiguous_format
                )
            if rule.counts_steps or lr_decay:
                state["step"] = torch.zeros((), dtype=torch.int64)
        step = 0
        if "step" in state:
            state["step"] += 1
            step = int(state["step"])
        if lr_decay:
            hyper = replace(hyper, lr=hyper.lr / (1 + (step - 1) * lr_decay))
        states = [state[f"momentum{number + 1}"] for number in range(len(rule.rowwise_states))]
        if not gradient.is_sparse:
            rule.update(weights, _as_rows(gradient), states, hyper, step)
            return
        gradient = gradient.coalesce()
        rows = gradient.indices()[0]
        parts = [weights[rows], *[whole[rows] for whole in states]]
        rule.update(parts[0], gradient.values(), parts[1:], hyper, step)
        for whole, part in zip([weights, *states], parts, strict=True):
            whole[rows] = part


def both_betas(
    betas: tuple[float, float], beta1: float | None, beta2: float | None
) -> tuple[float, float]:
    """``betas``, with ``beta1`` and ``beta2`` in the places of its numbers where they are given."""
    return (betas[0] if beta1 is None else beta1, betas[1] if beta2 is None else beta2)


def _as_rows(tensor: Tensor) -> Tensor:
    """A view ``[rows, D]``."""
    return tensor.flatten(1) if tensor.dim() > 1 else tensor.view(1, -1)


class SGD(RowOptimizer):
    """Stochastic gradient descent: ``w -= lr * g``."""

    kind = EmbOptimType.EXACT_SGD

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        weight_decay: float = 0.0,
        *,
        gradient_clipping: bool = False,
        max_gradient: float = 1.0,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            weight_decay=weight_decay,
            gradient_clipping=gradient_clipping,
            max_gradient=max_gradient,
        )


class Adagrad(RowOptimizer):
    """Adagrad with a sum per number: ``s += g * g``, ``w -= lr * g / (sqrt(s) + eps)``."""

    kind = EmbOptimType.EXACT_ADAGRAD

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        gradient_clipping: bool = False,
        max_gradient: float = 1.0,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            eps=eps,
            weight_decay=weight_decay,
            gradient_clipping=gradient_clipping,
            max_gradient=max_gradient,
        )


class LarsSGD(RowOptimizer):
    """SGD with momentum and a rate per row, ``lr * eta * |w| / (|g| + weight_decay * |w|)``.

    You et al. 2017, https://arxiv.org/abs/1708.03888.
    """

    kind = EmbOptimType.LARS_SGD

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        momentum: float = 0.9,
        eta: float = 0.001,
        weight_decay: float = 0.0,
        *,
        gradient_clipping: bool = False,
        max_gradient: float = 1.0,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            eta=eta,
            weight_decay=weight_decay,
            gradient_clipping=gradient_clipping,
            max_gradient=max_gradient,
        )


class _WithBetas(RowOptimizer):
    """``beta1`` and ``beta2``, where they are given, stand for the numbers of ``betas``, as FBGEMM calls them."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        gradient_clipping: bool = False,
        max_gradient: float = 1.0,
        beta1: float | None = None,
        beta2: float | None = None,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=both_betas(betas, beta1, beta2),
            eps=eps,
            weight_decay=weight_decay,
            gradient_clipping=gradient_clipping,
            max_gradient=max_gradient,
        )


class Adam(_WithBetas):
    """Adam with decoupled weight decay (https://arxiv.org/abs/1711.05101)."""

    kind = EmbOptimType.ADAM


class PartialRowWiseAdam(_WithBetas):
    """Adam whose mean of squares is one number per row."""

    kind = EmbOptimType.PARTIAL_ROWWISE_ADAM


class LAMB(_WithBetas):
    """Adam's direction, scaled per row to the row's own length (https://arxiv.org/abs/1904.00962)."""

    kind = EmbOptimType.LAMB


class PartialRowWiseLAMB(_WithBetas):
    """LAMB whose mean of squares is one number per row."""

    kind = EmbOptimType.PARTIAL_ROWWISE_LAMB


class Lion(RowOptimizer):
    """Steps by the sign of a momentum (https://arxiv.org/abs/2302.06675)."""

    kind = EmbOptimType.LION

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        gradient_clipping: bool = False,
        max_gradient: float = 1.0,
        beta1: float | None = None,
        beta2: float | None = None,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=both_betas(betas, beta1, beta2),
            weight_decay=weight_decay,
            gradient_clipping=gradient_clipping,
            max_gradient=max_gradient,
        )
