"""Lookups of models that read sequences id by id, and what their configs have in common.

Shapes: ``B`` samples, ``T`` places of a sequence, ``D`` columns of a vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.training import field_checks as check
from tessera.training.models.config import DeepModelConfig
from tessera.training.models.inputs import ModelInputs
from tessera.training.models.terms import TermsConfig
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.modules.sequences import latest, pooled
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


class SequenceLookups(nn.Module):
    """The vectors of all features; of some, one for each of the last ids.

    A table is looked up either pooled or unpooled, so every feature that shares a table with a
    sequence or a candidate is looked up unpooled, and pooled afterwards.

    Args:
        inputs: the features and their tables.
        pairs: the sequences, each with its candidate, whose vector is that of its last id.
        places: ``T``, the ids of a sequence (or of another bag that shares its table) that count.
        dropout: share of the vectors' numbers that training sets to zero.

    Raises:
        UserError: a pair does not fit the features.
    """

    def __init__(
        self, inputs: ModelInputs, pairs: Mapping[str, str], places: int, *, dropout: float
    ) -> None:
        super().__init__()
        tables = {
            table
            for sequence, candidate in pairs.items()
            for table in _tables(inputs, sequence, candidate)
        }
        shared = [feature for feature in inputs.features if feature.table in tables]
        for feature in shared:
            if feature.group == "id_score_list":
                raise UserError(
                    f"feature {feature.name} has weighted ids and shares table {feature.table!r}"
                    " with a sequence; give it a table of its own"
                )
        names = [feature.name for feature in shared]
        self.dim = shared[0].dim
        for feature in shared:
            if feature.dim != self.dim:
                raise UserError(
                    f"the tables of sequences need one embedding dimension, but that of"
                    f" {shared[0].name} is {self.dim} and that of {feature.name} is {feature.dim};"
                    " give both the same model.tables.*.dim"
                )
        self._places = places
        self.dropout = nn.Dropout(dropout)
        self._sequences = list(pairs)
        self._candidates = list(dict.fromkeys(pairs.values()))
        self._others = {
            feature.name: feature.pooling == "mean"
            for feature in shared
            if feature.name not in {*self._sequences, *self._candidates}
        }
        self.embedding_collection = inputs.unpooled(names)
        rest = [feature for feature in inputs.features if feature.name not in names]
        self.embedding_bag_collection: EmbeddingBagCollection | None = None
        if rest:
            self.embedding_bag_collection = inputs.collection(without=names)
        self.width = sum(feature.dim for feature in rest) + self.dim * (
            len(self._candidates) + len(self._others)
        )

    def forward(
        self, sparse: KeyedJaggedTensor
    ) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor], Tensor]:
        """Look all features up.

        Returns:
            The sequences by name, each as `latest` gives it; the candidates' vectors ``[B, D]`` by
            name; and the vectors of all features but the sequences side by side, ``[B, width]``.
        """
        vectors = self.embedding_collection(sparse)
        sequences = {}
        for name in self._sequences:
            padded, known = latest(vectors[name], self._places)
            sequences[name] = self.dropout(padded), known
        candidates = {
            name: self.dropout(latest(vectors[name], 1)[0].squeeze(1)) for name in self._candidates
        }
        beside = []
        for name, mean in self._others.items():
            beside.append(pooled(vectors[name], self._places, mean=mean))
        if self.embedding_bag_collection is not None:
            beside.append(self.embedding_bag_collection(sparse).values())
        vectors_of_others = [self.dropout(part) for part in beside]
        return sequences, candidates, torch.cat([*candidates.values(), *vectors_of_others], dim=1)


def _tables(inputs: ModelInputs, sequence: str, candidate: str) -> set[str]:
    """The table that both share."""
    pair = inputs.feature(sequence, "the model"), inputs.feature(candidate, "the model")
    if sequence == candidate:
        raise UserError(
            f"{sequence} is named as sequence and as its own candidate; give two features"
        )
    if pair[0].table != pair[1].table:
        raise UserError(
            f"sequence {sequence} and candidate {candidate} look up different tables,"
            f" {pair[0].table!r} and {pair[1].table!r}; give both the same model.tables.*.table"
        )
    return {pair[0].table}


@dataclass(frozen=True, kw_only=True)
class SequenceConfig(TermsConfig, DeepModelConfig):
    """What architectures over sequences share; not an architecture by itself.

    Attributes:
        sequence_length (ids): how many of a sequence's ids count, the latest ones.
        over_layers: hidden layers of the top MLP; its last layer, the logit, is added.
    """

    sequence_length: int = 50
    over_layers: tuple[int, ...] = (128, 64)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least_one(self, "sequence_length over_layers")
        if not self.over_layers:
            raise UserError("over_layers is empty; give at least one hidden layer")

    def lookups(self, inputs: ModelInputs, pairs: Mapping[str, str]) -> SequenceLookups:
        """The lookups of these sequences, each with its candidate."""
        return SequenceLookups(inputs, pairs, self.sequence_length, dropout=self.embedding_dropout)
