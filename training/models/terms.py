"""First-order and pairwise terms, which any architecture here can add to its logits.

Sources: Cheng et al., "Wide & Deep Learning for Recommender Systems" (2016), whose wide part is the
first-order term; Rendle, "Factorization Machines" (2010), equation 5; Guo et al., "DeepFM" (2017),
which adds both to a deep part.

Shapes: ``B`` samples, ``N`` dense columns, ``F`` sparse features, ``V`` vectors, ``D`` columns of each,
``L`` labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.training.models.inputs import ModelInputs
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


class FirstOrder(nn.Module):
    """One weight per dense column and per id, for each output, summed.

    Args:
        collection: tables of dimension ``L``, one per feature, whose bags are summed.
        dense_columns: ``N``.
        outputs: ``L``.
    """

    def __init__(
        self, collection: EmbeddingBagCollection, dense_columns: int, outputs: int = 1
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = collection
        self.dense = nn.Linear(dense_columns, outputs, bias=False)
        self._outputs = outputs
        self._features = len(collection.embedding_names())

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """``[B, N]`` and the features' rows to ``[B, L]``."""
        weights: Tensor = self.embedding_bag_collection(sparse).values()
        if self._outputs == 1:
            total = weights.sum(dim=1, keepdim=True)
        else:
            total = weights.reshape(-1, self._features, self._outputs).sum(dim=1)
        result: Tensor = self.dense(dense) + total
        return result


class FactorizationMachine(nn.Module):
    """The sum of the dot products of all pairs of vectors."""

    def forward(self, vectors: Tensor) -> Tensor:
        """``[B, V, D]`` to ``[B, 1]``: half of (square of the sum - sum of the squares)."""
        square_of_sum = vectors.sum(dim=1).square()
        sum_of_squares = vectors.square().sum(dim=1)
        return (square_of_sum - sum_of_squares).sum(dim=1, keepdim=True).mul(0.5)


class LogitTerms(nn.Module):
    """What is added to an architecture's logits.

    Args:
        first_order: the first-order term; None: there is none.
        fm_shape: ``V`` and ``D`` of the vectors whose pairs make a term, the same one of every label;
            None: there is none.
    """

    def __init__(self, first_order: FirstOrder | None, fm_shape: tuple[int, int] | None) -> None:
        super().__init__()
        self.first_order = first_order
        self._fm_shape = fm_shape
        self.fm = FactorizationMachine() if fm_shape is not None else None

    def forward(
        self, logits: Tensor, dense: Tensor, sparse: KeyedJaggedTensor, vectors: Sequence[Tensor]
    ) -> Tensor:
        """Add the terms.

        Args:
            logits: ``[B, L]``.
            dense: ``[B, N]``.
            sparse: the features' rows.
            vectors: together ``V`` vectors side by side, each tensor ``[B, some of V times D]``.

        Returns:
            ``[B, L]``.
        """
        if self.fm is not None and self._fm_shape is not None:
            together = torch.cat(list(vectors), dim=1)
            logits = logits + self.fm(together.reshape(-1, *self._fm_shape))
        if self.first_order is not None:
            logits = logits + self.first_order(dense, sparse)
        return logits


@dataclass(frozen=True, kw_only=True)
class TermsConfig:
    """What is added to an architecture's logits; not an architecture by itself.

    Attributes:
        first_order: whether to add a weight of every dense column and every id, one for each label.
        fm: whether to add the dot products of all pairs of vectors, a factorization machine; it
            needs vectors of one dimension.
    """

    first_order: bool = False
    fm: bool = False

    def terms(self, inputs: ModelInputs, own: Mapping[str, int] | None = None) -> LogitTerms | None:
        """The terms that the config asks for; None: none.

        The first-order weights are a second collection of tables, one for each feature, with the rows of
        the first collection's.  They are summed over a bag, whatever the pooling of the vectors, and begin
        at 0.

        Args:
            inputs: the features, each with one vector.
            own: dimensions of the architecture's other vectors, by what makes them.

        Raises:
            UserError: ``fm`` and vectors of several dimensions.
        """
        if not self.first_order and not self.fm:
            return None
        outputs = len(inputs.labels)
        first_order = None
        if self.first_order:
            tables = inputs.collection(
                prefix="first_order_", dim=outputs, init=0.0, own_weights=True
            )
            first_order = FirstOrder(tables, inputs.dense_columns, outputs)
        dims = {**(own or {}), **{feature.name: feature.dim for feature in inputs.features}}
        return LogitTerms(first_order, _one_shape(dims) if self.fm else None)


def _one_shape(dims: Mapping[str, int]) -> tuple[int, int]:
    """How many vectors there are, and their dimension."""
    (first, dim), *others = dims.items()
    for name, other in others:
        if other != dim:
            raise UserError(
                f"fm=True: it needs vectors of one dimension, but that of {first} is {dim} and that"
                f" of {name} is {other}; give all the same dim, or leave fm out"
            )
    return len(dims), dim
