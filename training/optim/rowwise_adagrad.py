"""Row-wise Adagrad as a plain torch optimizer, written for reading rather than for speed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from tessera.training.optim.steps import refuse_negative, value_of


class RowWiseAdagrad(Optimizer):
    """Adagrad with one sum of squares per row, which grows by the mean of ``g * g`` over the row.

    The state of a parameter ``[rows, ...]`` is ``momentum1`` ``[rows]`` (of one without rows:
    ``[1]``), as that of a fused table is, and with ``lr_decay`` also ``step``.  Dense gradients
    only; every row is updated.

    Args:
        params: parameters or torch's parameter groups.
        lr: learning rate.
        lr_decay: the rate of step t is ``lr / (1 + (t - 1) * lr_decay)``.
        weight_decay: ``weight_decay * w`` is added to the gradient (L2).
        initial_accumulator_value: where sums begin.
        eps: added to the root of the sum.

    Raises:
        ValueError: a negative value.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        values = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        refuse_negative(values)
        super().__init__(params, values)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; the closure, if any, is evaluated first and its value returned."""
        loss = value_of(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                w = parameter.view(1, -1) if parameter.dim() < 2 else parameter.flatten(1)
                state = self.state[parameter]
                if not state:
                    start = group["initial_accumulator_value"]
                    state["momentum1"] = torch.full(
                        (w.size(0),), start, dtype=w.dtype, device=w.device
                    )
                    if group["lr_decay"]:
                        state["step"] = torch.zeros((), dtype=torch.int64)
                rate = group["lr"]
                if group["lr_decay"]:
                    rate /= 1 + int(state["step"]) * group["lr_decay"]
                    state["step"] += 1
                g = parameter.grad.view_as(w).add(w, alpha=group["weight_decay"])
                state["momentum1"] += g.square().mean(dim=1)
                spread = state["momentum1"].sqrt().add_(group["eps"]).unsqueeze(1)
                w.addcdiv_(g, spread, value=-rate)
        return loss
