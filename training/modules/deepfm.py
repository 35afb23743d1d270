"""The two interactions of DeepFM over vectors of any sizes, as TorchRec defines them.

Source: Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction" (2017).
The factorization machine of the paper, over the dot products of whole vectors of one size, is
`tessera.training.models.terms.FactorizationMachine`; the one here takes every number for a vector of
its own.
"""

# Annotations are not postponed: a graph that torch.fx traces has them, and TorchScript reads them there.

from typing import Any

import torch
from torch import Tensor, nn

from tessera.training.sparse.checks import is_traced
from tessera.training.sparse.script_types import is_scripting

_MANY = 2**19  # of fewer numbers the calls of a function of our own take longer than what they save


def _side_by_side(embeddings: list[Tensor]) -> Tensor:
    """Tensors ``[B, ...]`` as one, ``[B, all columns]``."""
    return torch.cat([vectors.flatten(1) for vectors in embeddings], dim=1)


# One step of a traced graph: the number of vectors is not known while it is traced.
torch.fx.wrap("_side_by_side")


def _pair_sums(numbers: Tensor) -> Tensor:
    """The sum of the products of all pairs of numbers of a row, ``[B, N]`` to ``[B, 1]``."""
    total = numbers.sum(dim=1, keepdim=True)
    # The gradient of a product takes half the time of the gradient of a power.
    square_of_sum = total * total
    sum_of_squares = (numbers * numbers).sum(dim=1, keepdim=True)
    return (square_of_sum - sum_of_squares) * 0.5


def _pair_sums_by_powers(numbers: Tensor) -> Tensor:
    """`_pair_sums` in fewer operations with its gradient; a GPU waits for each of them to be started."""
    square_of_sum = numbers.sum(dim=1, keepdim=True).square()
    return (square_of_sum - numbers.square().sum(dim=1, keepdim=True)) * 0.5


class _PairSums(torch.autograd.Function):
    """`_pair_sums` with a gradient in two steps, whose bits are those of autograd's own six."""

    generate_vmap_rule = True

    @staticmethod
    def forward(numbers: Tensor) -> Tensor:
        return _pair_sums(numbers)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (numbers,), (grad,) = ctx.saved_tensors, grads
        found: Tensor = grad * numbers.sum(dim=1, keepdim=True) - grad * numbers
        return found

    @staticmethod
    def of(numbers: Tensor) -> Tensor:
        """What `_pair_sums` gives."""
        found: Tensor = _PairSums.apply(numbers)  # type: ignore[no-untyped-call] # torch leaves apply untyped
        return found

    @staticmethod
    def serves(numbers: Tensor) -> bool:
        """Whether its gradient is asked for, is of the type of ``numbers``, and they are many."""
        return (
            numbers.requires_grad
            and numbers.numel() >= _MANY
            and not torch.is_autocast_enabled(numbers.device.type)
        )


class DeepFM(nn.Module):
    """The deep part: a module over all vectors side by side.

    Args:
        dense_module: takes ``[B, N]``, where ``N`` is the number of columns of all vectors.
    """

    def __init__(self, dense_module: nn.Module) -> None:
        super().__init__()
        self.dense_module = dense_module

    def forward(self, embeddings: list[Tensor]) -> Tensor:
        """Tensors ``[B, vectors, columns]`` or ``[B, columns]`` to what ``dense_module`` gives."""
        out: Tensor = self.dense_module(_side_by_side(embeddings))
        return out


class FactorizationMachine(nn.Module):
    """The sum of the products of all pairs of numbers of a sample."""

    def forward(self, embeddings: list[Tensor]) -> Tensor:
        """Tensors ``[B, vectors, columns]`` or ``[B, columns]`` to ``[B, 1]``."""
        numbers = _side_by_side(embeddings)
        if not is_scripting():  # noqa: SIM102 - TorchScript leaves out the inner one alone
            if not is_traced(numbers):
                if numbers.is_cuda:
                    return _pair_sums_by_powers(numbers)
                if _PairSums.serves(numbers):
                    return _PairSums.of(numbers)
        return _pair_sums(numbers)
