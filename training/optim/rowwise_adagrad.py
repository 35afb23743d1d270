"""Row-wise Adagrad as torch has Adagrad: with L2 regularization and a rate that decays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tessera.training.optim.optimizers import RowOptimizer
from tessera.training.optim.row_updates import EmbOptimType


class RowWiseAdagrad(RowOptimizer):
    """Adagrad with one sum of squares per row, which grows by the mean of ``g * g`` over the row.

    The state of a parameter ``[rows, ...]`` is ``momentum1`` ``[rows]`` (of one without rows:
    ``[1]``), as that of a fused table is, and with ``lr_decay`` also ``step``.

    Args:
        params: parameters or torch's parameter groups.
        lr: learning rate.
        lr_decay: the rate of step t is ``lr / (1 + (t - 1) * lr_decay)``.
        weight_decay: ``weight_decay * w`` is added to the gradient (L2).
        initial_accumulator_value: where sums begin.
        eps: added to the root of the sum.
        gradient_clipping, max_gradient: of fused tables alone, see `RowOptimizer`.

    Raises:
        ValueError: a negative value.
    """

    kind = EmbOptimType.EXACT_ROWWISE_ADAGRAD
    l2 = True

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        gradient_clipping: bool = False,
        max_gradient: float = 1.0,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
            gradient_clipping=gradient_clipping,
            max_gradient=max_gradient,
        )
