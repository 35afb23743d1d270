"""Gradients cut to a bound before each step, across ranks where parameters are spread over them.

Fused tables have no gradients to look at; theirs are cut number by number, by ``max_gradient``
in ``fused_params``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum, unique
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from tessera.training.optim.keyed import KeyedOptimizer, OptimizerWrapper
from tessera.training.optim.steps import value_of


@unique
class GradientClipping(Enum):
    """What is bounded: the norm of all gradients together, each number, or nothing."""

    NORM = "norm"
    VALUE = "value"
    NONE = "none"


class GradientClippingOptimizer(OptimizerWrapper):
    """Clips gradients, then steps.

    Args:
        optimizer: what is wrapped.
        clipping: what is bounded.
        max_gradient: the bound; with 0 nothing is learned.
        norm_type: p of the p-norm; infinity (or ``"inf"``) for the largest absolute value.
        enable_global_grad_clip: the norm is that of the whole model: of ``param_to_pgs``'s
            parameters the other ranks' parts are counted too.
        param_to_pgs: parameter to the groups of ranks that hold its parts; the parts' norms are
            added up over each group in turn.  Parameters that are not in it are the same on
            every rank.
        track_grad_norm: `last_total_grad_norm` is worked out also where nothing is bounded by norm.

    Raises:
        ValueError: a bound or norm that makes no sense.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        optimizer: KeyedOptimizer,
        clipping: GradientClipping = GradientClipping.NONE,
        max_gradient: float = 0.1,
        norm_type: float | str = 2.0,
        enable_global_grad_clip: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        param_to_pgs: Mapping[nn.Parameter, list[dist.ProcessGroup]] | None = None,
        track_grad_norm: bool = False,  # noqa: FBT001, FBT002 - as above
    ) -> None:
        super().__init__(optimizer)
        self._norm_type = float(norm_type)
        if clipping is not GradientClipping.NONE and not max_gradient >= 0:
            raise ValueError(f"max_gradient is {max_gradient}; give 0 or a number above it")
        if not self._norm_type > 0:
            raise ValueError(f"norm_type is {norm_type}; give a number above 0, or 'inf'")
        if param_to_pgs and not enable_global_grad_clip:
            raise ValueError(
                "param_to_pgs is given, but enable_global_grad_clip is False; set it to True"
            )
        self._clipping = clipping
        self._max_gradient = max_gradient
        self._track_grad_norm = track_grad_norm
        self._groups_of = dict(param_to_pgs or {})
        self._total_norm: Tensor | None = None

    @property
    def last_total_grad_norm(self) -> Tensor | None:
        """The norm before clipping of the last step that clipped by norm or tracked it; a scalar."""
        return self._total_norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Clip, then one step of the wrapped optimizer.

        The closure, if any, is evaluated first: it computes the gradients.
        """
        loss = value_of(closure)
        if self._clipping is GradientClipping.NORM:
            self.clip_grad_norm_()
        else:
            if self._track_grad_norm:
                self._total_norm = self.compute_total_grad_norm()[0]
            if self._clipping is GradientClipping.VALUE:
                nn.utils.clip_grad_value_(self._parameters(), self._max_gradient)
        super().step()
        return loss

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def clip_grad_norm_(self) -> Tensor:
        """Scale all gradients so that their norm is at most ``max_gradient``.

        Returns:
            The norm before that, a scalar; `last_total_grad_norm` is then the same.
        """
        self._total_norm, gradients = self.compute_total_grad_norm()
        # Not above 1, and without a wait for the device.
        factor = (self._max_gradient / (self._total_norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))
        return self._total_norm

    @torch.no_grad()
    def compute_total_grad_norm(self) -> tuple[Tensor, list[Tensor]]:
        """The norm of all gradients, of all ranks where those hold parts; and this rank's gradients."""
        gradients = [(p, p.grad) for p in self._parameters() if p.grad is not None]
        whole = [gradient for p, gradient in gradients if not self._groups_of.get(p)]
        device = next((p.device for p in self._groups_of), None) or (
            whole[0].device if whole else torch.device("cpu")
        )
        total = self._power(whole, device)
        infinite = math.isinf(self._norm_type)
        # Every rank takes part in every sum, with or without a gradient of its own.
        for groups in dict.fromkeys(tuple(groups) for groups in self._groups_of.values() if groups):
            own = [g for p, g in gradients if tuple(self._groups_of.get(p, ())) == groups]
            part = self._power(own, device)
            for group in groups:
                dist.all_reduce(
                    part, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group
                )
            total = self._joined(total, part)
        norm = total if infinite else total.pow(1.0 / self._norm_type)
        return norm, [gradient for _, gradient in gradients]

    def _power(self, gradients: Sequence[Tensor], device: torch.device) -> Tensor:
        """Sum of the p-th powers, or the largest absolute value; a scalar."""
        total = torch.zeros((), device=device)
        for gradient in gradients:
            if gradient.numel():
                norm = torch.linalg.vector_norm(gradient.float(), self._norm_type).to(device)
                power = norm if math.isinf(self._norm_type) else norm.pow(self._norm_type)
                total = self._joined(total, power)
        return total

    def _joined(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.maximum(first, second) if math.isinf(self._norm_type) else first + second
