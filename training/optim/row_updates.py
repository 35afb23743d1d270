"""The arithmetic of the tables' optimizers: one update of some rows, by plain tensor operations.

Legend: U rows that a batch touches, D columns.

Every rule takes the touched rows ``w`` ``[U, D]``, the sum ``g`` ``[U, D]`` of each row's
gradients in the batch, and the rows' states, ``[U, D]`` or (row-wise) ``[U]``; all are float32
and all but ``g`` are changed in place.  Rows that a batch does not touch are left alone: neither
their momentum nor their weights decay.

The formulas are those of FBGEMM's GPU tables
(https://pytorch.org/FBGEMM/fbgemm_gpu/fbgemm_gpu-python-api/table_batched_embedding_ops.html),
which count one step per batch for all rows of a table.  Where a norm that FBGEMM divides by is
zero, which gives not-a-number there, the row is left as it is here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, unique
from functools import partial
from typing import Any

import torch
from torch import Tensor


@unique
class EmbOptimType(Enum):
    """The optimizers that fused tables know, under the names that FBGEMM gives them."""

    EXACT_SGD = "exact_sgd"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    ADAM = "adam"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    LAMB = "lamb"
    PARTIAL_ROWWISE_LAMB = "partial_row_wise_lamb"
    LARS_SGD = "lars_sgd"
    LION = "lion"


@dataclass(frozen=True, kw_only=True)
class HyperParameters:
    """The numbers of one update; a rule reads those that it has a use for.

    Attributes:
        lr: learning rate.
        eps: added to denominators.
        weight_decay: see ``l2``.
        l2: weight decay is added to the gradient; otherwise it is decoupled: weights shrink by
            ``lr * weight_decay`` of themselves.
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of squares (Lion: of its momentum).
        momentum: decay of LARS' momentum.
        eta: LARS' trust coefficient.
    """

    lr: float = 0.0
    eps: float = 1e-8
    weight_decay: float = 0.0
    l2: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    momentum: float = 0.9
    eta: float = 0.001

    def group(self, settings: Collection[str]) -> dict[str, Any]:
        """A parameter group of torch's with these numbers, of ``settings`` as far as wanted."""
        group: dict[str, Any] = {
            name: getattr(self, name) for name in ("lr", "eps", "weight_decay")
        }
        if set(_BETAS) <= set(settings):
            group["betas"] = (self.beta1, self.beta2)
        return {**group, **{name: getattr(self, name) for name in _LARS if name in settings}}

    def read(self, group: Mapping[str, Any]) -> HyperParameters:
        """The same with the numbers that a parameter group has; itself where they are equal."""
        names = ("lr", "eps", "weight_decay", *_LARS)
        found: dict[str, Any] = {name: float(group[name]) for name in names if name in group}
        if "betas" in group:
            beta1, beta2 = group["betas"]
            found |= {"beta1": float(beta1), "beta2": float(beta2)}
        # In every lookup, so nothing is made where nothing has changed.
        if all(getattr(self, name) == value for name, value in found.items()):
            return self
        return replace(self, **found)


_BETAS = ("beta1", "beta2")
_LARS = ("momentum", "eta")
States = Sequence[Tensor]


@dataclass(frozen=True, kw_only=True)
class RowRule:
    """One optimizer.

    Attributes:
        rule: ``rule(w, g, states, hyper, step)``; L2 regularization is in ``g`` already.
        rowwise_states: per state, ``momentum1`` first, whether it is one number per row.
        counts_steps: whether the step's number is part of the state.
        settings: which of beta1, beta2, momentum and eta it reads.
        shrinks: whether decoupled weight decay comes before the rule; otherwise the rule has it.
    """

    rule: Callable[[Tensor, Tensor, States, HyperParameters, int], None]
    rowwise_states: tuple[bool, ...] = ()
    counts_steps: bool = False
    settings: tuple[str, ...] = ()
    shrinks: bool = True

    def update(self, w: Tensor, g: Tensor, states: States, h: HyperParameters, step: int) -> None:
        """Update rows in place; see the description of the module.  ``step`` counts from 1."""
        if h.weight_decay and h.l2:
            g = g.add(w, alpha=h.weight_decay)
        elif h.weight_decay and self.shrinks:
            w.mul_(1.0 - h.lr * h.weight_decay)
        self.rule(w, g, states, h, step)


def _sgd(w: Tensor, g: Tensor, _: States, h: HyperParameters, _step: int) -> None:
    w.add_(g, alpha=-h.lr)


def _adagrad(w: Tensor, g: Tensor, states: States, h: HyperParameters, _step: int) -> None:
    (total,) = states
    if total.dim() == 1:
        total.add_(_mean_square(g))
    else:
        total.addcmul_(g, g)
    w.addcdiv_(g, _per_number(total.sqrt().add_(h.eps)), value=-h.lr)


def _mean_square(g: Tensor) -> Tensor:
    return g.square().mean(dim=1)


def _per_number(state: Tensor) -> Tensor:
    """A state of one number per row or per number, in a form that ``[U, D]`` can be divided by."""
    return state.unsqueeze(1) if state.dim() == 1 else state


def _adam_direction(w: Tensor, g: Tensor, states: States, h: HyperParameters, step: int) -> Tensor:
    """Adam's step before the learning rate, decoupled weight decay included; new ``[U, D]``."""
    first, second = states
    first.lerp_(g, 1.0 - h.beta1)
    squares = _mean_square(g) if second.dim() == 1 else g.square()
    second.mul_(h.beta2).add_(squares, alpha=1.0 - h.beta2)
    spread = second.div(1.0 - h.beta2**step).sqrt_().add_(h.eps)
    direction = first.div(1.0 - h.beta1**step).div_(_per_number(spread))
    return direction.add_(w, alpha=_decoupled(h)) if _decoupled(h) else direction


def _decoupled(h: HyperParameters) -> float:
    return 0.0 if h.l2 else h.weight_decay


def _adam(w: Tensor, g: Tensor, states: States, h: HyperParameters, step: int) -> None:
    w.add_(_adam_direction(w, g, states, h, step), alpha=-h.lr)


def _lamb(w: Tensor, g: Tensor, states: States, h: HyperParameters, step: int) -> None:
    direction = _adam_direction(w, g, states, h, step)
    trust = _quotient(w.norm(dim=1, keepdim=True), direction.norm(dim=1, keepdim=True))
    w.addcmul_(direction, trust, value=-h.lr)


def _lars(w: Tensor, g: Tensor, states: States, h: HyperParameters, _step: int) -> None:
    (momentum,) = states
    decay = _decoupled(h)
    weight_norm = w.norm(dim=1, keepdim=True)
    denominator = g.norm(dim=1, keepdim=True).add_(weight_norm, alpha=decay)
    local_lr = _quotient(weight_norm, denominator).mul_(h.lr * h.eta)
    momentum.mul_(h.momentum).addcmul_(local_lr, g.add(w, alpha=decay))
    w.sub_(momentum)


def _lion(w: Tensor, g: Tensor, states: States, h: HyperParameters, _step: int) -> None:
    """Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, https://arxiv.org/abs/2302.06675."""
    (momentum,) = states
    w.add_(momentum.lerp(g, 1.0 - h.beta1).sign_(), alpha=-h.lr)
    momentum.lerp_(g, 1.0 - h.beta2)


def _quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``numerator / denominator``, 0 where the denominator is 0."""
    return torch.where(denominator > 0, numerator / denominator, 0.0)


_of_adam = partial(RowRule, counts_steps=True, settings=_BETAS, shrinks=False)

RULES: dict[EmbOptimType, RowRule] = {
    EmbOptimType.EXACT_SGD: RowRule(rule=_sgd),
    EmbOptimType.EXACT_ADAGRAD: RowRule(rule=_adagrad, rowwise_states=(False,)),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: RowRule(rule=_adagrad, rowwise_states=(True,)),
    EmbOptimType.ADAM: _of_adam(rule=_adam, rowwise_states=(False, False)),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: _of_adam(rule=_adam, rowwise_states=(False, True)),
    EmbOptimType.LAMB: _of_adam(rule=_lamb, rowwise_states=(False, False)),
    EmbOptimType.PARTIAL_ROWWISE_LAMB: _of_adam(rule=_lamb, rowwise_states=(False, True)),
    EmbOptimType.LARS_SGD: RowRule(
        rule=_lars, rowwise_states=(False,), settings=_LARS, shrinks=False
    ),
    EmbOptimType.LION: RowRule(rule=_lion, rowwise_states=(False,), settings=_BETAS),
}
"""The rule of every optimizer."""
