"""The two interactions of DeepFM over vectors of any sizes, as TorchRec defines them.

Source: Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction" (2017).
The factorization machine of the paper, over the dot products of whole vectors of one size, is
`tessera.training.models.terms.FactorizationMachine`; the one here takes every number for a vector of
its own.
"""

# Annotations are not postponed: a graph that torch.fx traces has them, and TorchScript reads them there.

import torch
from torch import Tensor, nn


def _side_by_side(embeddings: list[Tensor]) -> Tensor:
    """Tensors ``[B, ...]`` as one, ``[B, all columns]``."""
    return torch.cat([vectors.flatten(1) for vectors in embeddings], dim=1)


# One step of a traced graph: the number of vectors is not known while it is traced.
torch.fx.wrap("_side_by_side")


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
        total = numbers.sum(dim=1, keepdim=True)
        # The gradient of a product takes half the time of the gradient of a power.
        square_of_sum = total * total
        sum_of_squares = (numbers * numbers).sum(dim=1, keepdim=True)
        return (square_of_sum - sum_of_squares) * 0.5
