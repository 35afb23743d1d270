"""Batch normalisation over the samples of all ranks.

Shapes: ``B`` samples of this rank, ``C`` columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def batch_statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The number of samples, and the mean and variance of each column, over all ranks' samples.

    With a process group, every rank calls it, also one without samples; gradients go back to
    all of them.

    Args:
        x: ``[B, C]`` float32.

    Returns:
        ``[1]``, ``[C]`` and ``[C]``; the variance is that of the samples themselves (divided by
        their number).
    """
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    sums = torch.cat([x.sum(dim=0), x.new_full([1], x.size(0))])
    if several:
        sums = _of_all_ranks(sums)
    count = sums[-1:].detach().clamp(min=1.0)
    mean = sums[:-1] / count
    squares = (x - mean).square().sum(dim=0)
    if several:
        squares = _of_all_ranks(squares)
    return count, mean, squares / count


class _SumOfRanks(torch.autograd.Function):
    """The sum of a tensor over all ranks; its gradient is the sum of theirs."""

    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


def _of_all_ranks(sums: Tensor) -> Tensor:
    total: Tensor = _SumOfRanks.apply(sums)  # type: ignore[no-untyped-call] # torch's
    return total


torch.fx.wrap("batch_statistics")  # a graph does not hold the number of ranks


class BatchNorm(nn.Module):
    """Columns with mean 0 and variance 1 over the batch of all ranks, then scaled and shifted.

    Evaluation takes moving averages of training's means and variances.  On one rank it does what
    ``nn.BatchNorm1d`` does.  Source: Ioffe and Szegedy, "Batch Normalization" (2015).

    Args:
        columns: ``C``.
        eps: added to the variance.
        momentum: share of a batch in the moving averages.
        affine: whether there are a scale and a shift per column.
    """

    def __init__(
        self, columns: int, *, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True
    ) -> None:
        super().__init__()
        self._eps = eps
        self._momentum = momentum
        self.weight: nn.Parameter | None = nn.Parameter(torch.ones(columns)) if affine else None
        self.bias: nn.Parameter | None = nn.Parameter(torch.zeros(columns)) if affine else None
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", torch.zeros(columns))
        self.register_buffer("running_var", torch.ones(columns))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, C]`` float32 to the same shape."""
        if self.training:
            count, mean, variance = batch_statistics(x)
            self._remember(count, mean, variance)
        else:
            mean, variance = self.running_mean, self.running_var
        result = (x - mean) * torch.rsqrt(variance + self._eps)
        if self.weight is not None and self.bias is not None:
            result = result * self.weight + self.bias
        return result

    @torch.no_grad()
    def _remember(self, count: Tensor, mean: Tensor, variance: Tensor) -> None:
        # As torch does it, the average is of variances that are not biased.
        unbiased = variance * (count / (count - 1).clamp(min=1.0))
        self.running_mean.lerp_(mean, self._momentum)
        self.running_var.lerp_(unbiased, self._momentum)
