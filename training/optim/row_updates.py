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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, unique

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

    lr: float
    eps: float = 1e-8
    weight_decay: float = 0.0
    l2: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    momentum: float = 0.9
    eta: float = 0.001


Update = Callable[[Tensor, Tensor, Sequence[Tensor], HyperParameters, int], None]


@dataclass(frozen=True, kw_only=True)
class RowRule:
    """One optimizer.

    Attributes:
        update: ``update(w, g, states, hyper, step)``; ``step`` counts from 1.
        rowwise_states: per state, ``momentum1`` first, whether it is one number per row.
        counts_steps: whether the step's number is part of the state.
        settings: which of beta1, beta2, momentum and eta it reads.
    """

    update: Update
    rowwise_states: tuple[bool, ...] = ()
    counts_steps: bool = False
    settings: frozenset[str] = frozenset()


def _shrink(w: Tensor, h: HyperParameters) -> None:
    if h.weight_decay and not h.l2:
        w.mul_(1.0 - h.lr * h.weight_decay)


def _decayed(g: Tensor, w: Tensor, h: HyperParameters) -> Tensor:
    """The gradient, with L2 regularization's part where that is asked for."""
    return g.add(w, alpha=h.weight_decay) if h.weight_decay and h.l2 else g


def _decoupled(h: HyperParameters) -> float:
    return 0.0 if h.l2 else h.weight_decay


def _sgd(w: Tensor, g: Tensor, states: Sequence[Tensor], h: HyperParameters, step: int) -> None:
    del states, step
    g = _decayed(g, w, h)
    _shrink(w, h)
    w.add_(g, alpha=-h.lr)


def _adagrad(w: Tensor, g: Tensor, states: Sequence[Tensor], h: HyperParameters, step: int) -> None:
    del step
    (total,) = states
    g = _decayed(g, w, h)
    _shrink(w, h)
    total.addcmul_(g, g)
    w.addcdiv_(g, total.sqrt().add_(h.eps), value=-h.lr)


def _rowwise_adagrad(
    w: Tensor, g: Tensor, states: Sequence[Tensor], h: HyperParameters, step: int
) -> None:
    del step
    (total,) = states
    g = _decayed(g, w, h)
    _shrink(w, h)
    total.add_(_mean_square(g))
    w.addcdiv_(g, total.sqrt().add_(h.eps).unsqueeze(1), value=-h.lr)


def _mean_square(g: Tensor) -> Tensor:
    return g.square().mean(dim=1)


def _adam_direction(
    w: Tensor,
    g: Tensor,
    states: Sequence[Tensor],
    h: HyperParameters,
    step: int,
    *,
    rowwise: bool,
) -> Tensor:
    """Adam's step before the learning rate, decoupled weight decay included; new ``[U, D]``."""
    first, second = states
    g = _decayed(g, w, h)
    first.lerp_(g, 1.0 - h.beta1)
    second.mul_(h.beta2).add_(_mean_square(g) if rowwise else g.square(), alpha=1.0 - h.beta2)
    spread = second.div(1.0 - h.beta2**step).sqrt_().add_(h.eps)
    direction = first.div(1.0 - h.beta1**step).div_(spread.unsqueeze(1) if rowwise else spread)
    return direction.add_(w, alpha=_decoupled(h)) if _decoupled(h) else direction


def _adam(*, rowwise: bool) -> Update:
    def update(
        w: Tensor, g: Tensor, states: Sequence[Tensor], h: HyperParameters, step: int
    ) -> None:
        w.add_(_adam_direction(w, g, states, h, step, rowwise=rowwise), alpha=-h.lr)

    return update


def _lamb(*, rowwise: bool) -> Update:
    def update(
        w: Tensor, g: Tensor, states: Sequence[Tensor], h: HyperParameters, step: int
    ) -> None:
        direction = _adam_direction(w, g, states, h, step, rowwise=rowwise)
        trust = _quotient(w.norm(dim=1, keepdim=True), direction.norm(dim=1, keepdim=True))
        w.addcmul_(direction, trust, value=-h.lr)

    return update


def _lars(w: Tensor, g: Tensor, states: Sequence[Tensor], h: HyperParameters, step: int) -> None:
    del step
    (momentum,) = states
    g = _decayed(g, w, h)
    decay = _decoupled(h)
    weight_norm = w.norm(dim=1, keepdim=True)
    denominator = g.norm(dim=1, keepdim=True).add_(weight_norm, alpha=decay)
    local_lr = _quotient(weight_norm, denominator).mul_(h.lr * h.eta)
    momentum.mul_(h.momentum).addcmul_(local_lr, g.add(w, alpha=decay))
    w.sub_(momentum)


def _lion(w: Tensor, g: Tensor, states: Sequence[Tensor], h: HyperParameters, step: int) -> None:
    """Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, https://arxiv.org/abs/2302.06675."""
    del step
    (momentum,) = states
    g = _decayed(g, w, h)
    direction = momentum.lerp(g, 1.0 - h.beta1).sign_()
    _shrink(w, h)
    w.add_(direction, alpha=-h.lr)
    momentum.lerp_(g, 1.0 - h.beta2)


def _quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``numerator / denominator``, 0 where the denominator is 0."""
    return torch.where(denominator > 0, numerator / denominator, 0.0)


_BETAS = frozenset({"beta1", "beta2"})

RULES: dict[EmbOptimType, RowRule] = {
    EmbOptimType.EXACT_SGD: RowRule(update=_sgd),
    EmbOptimType.EXACT_ADAGRAD: RowRule(update=_adagrad, rowwise_states=(False,)),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: RowRule(update=_rowwise_adagrad, rowwise_states=(True,)),
    EmbOptimType.ADAM: RowRule(
        update=_adam(rowwise=False),
        rowwise_states=(False, False),
        counts_steps=True,
        settings=_BETAS,
    ),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: RowRule(
        update=_adam(rowwise=True),
        rowwise_states=(False, True),
        counts_steps=True,
        settings=_BETAS,
    ),
    EmbOptimType.LAMB: RowRule(
        update=_lamb(rowwise=False),
        rowwise_states=(False, False),
        counts_steps=True,
        settings=_BETAS,
    ),
    EmbOptimType.PARTIAL_ROWWISE_LAMB: RowRule(
        update=_lamb(rowwise=True),
        rowwise_states=(False, True),
        counts_steps=True,
        settings=_BETAS,
    ),
    EmbOptimType.LARS_SGD: RowRule(
        update=_lars, rowwise_states=(False,), settings=frozenset({"momentum", "eta"})
    ),
    EmbOptimType.LION: RowRule(update=_lion, rowwise_states=(False,), settings=_BETAS),
}
"""The rule of every optimizer."""
