"""``arch: din``: what a user did, weighted by how it bears on the candidate, then an MLP.

Source: Zhou et al., "Deep Interest Network for Click-Through Rate Prediction" (2018).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.training import field_checks as check
from tessera.training.models.config import architecture
from tessera.training.models.inputs import ModelInputs
from tessera.training.models.sequence_lookups import SequenceConfig, SequenceLookups
from tessera.training.models.terms import LogitTerms
from tessera.training.modules.batch_norm import BatchNorm
from tessera.training.modules.sequences import CandidateAttention, Dice
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

Activation = Literal["relu", "prelu", "dice"]


class DIN(nn.Module):
    """Each sequence becomes one vector by the attention of its candidate; an MLP takes the rest.

    Args:
        lookups: the vectors of all features.
        attention: the sequences, each with its candidate.
        attention_sizes: hidden layers of the attention's MLP.
        dense_columns: columns of the dense values.
        over_sizes: columns after each layer of the top MLP; the last is the number of logits.
        activation: of the top MLP.
        dropout: in the top MLP, while training.
        batch_norm: whether the top MLP's hidden layers are normalised over the batch.
        terms: what is added to the logits.
    """

    def __init__(
        self,
        lookups: SequenceLookups,
        attention: dict[str, str],
        attention_sizes: list[int],
        dense_columns: int,
        over_sizes: list[int],
        *,
        activation: Activation,
        dropout: float,
        batch_norm: bool,
        terms: LogitTerms | None,
    ) -> None:
        super().__init__()
        self.lookups = lookups
        self.terms = terms
        self._pairs = list(attention.items())
        self.attention = nn.ModuleList(
            CandidateAttention(lookups.dim, attention_sizes) for _ in self._pairs
        )
        width = dense_columns + lookups.width + len(self._pairs) * lookups.dim
        layers: list[nn.Module] = []
        for columns, size in zip([width, *over_sizes], over_sizes[:-1], strict=False):
            layers.append(nn.Linear(columns, size))
            if batch_norm:
                layers.append(BatchNorm(size))
            layers.append(_ACTIVATIONS[activation](size))
            if dropout:
                layers.append(nn.Dropout(dropout))
        self.hidden = nn.Sequential(*layers)
        self.logit = nn.Linear(over_sizes[-2], over_sizes[-1])

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """``[B, dense columns]`` and the features' rows to logits ``[B, labels]``."""
        sequences, candidates, beside = self.lookups(sparse)
        vectors = [beside]
        for (sequence, candidate), attention in zip(self._pairs, self.attention, strict=True):
            history, known = sequences[sequence]
            vectors.append(attention(history, known, candidates[candidate]))
        logits: Tensor = self.logit(self.hidden(torch.cat([dense, *vectors], dim=1)))
        if self.terms is not None:
            logits = self.terms(logits, dense, sparse, vectors)
        return logits


_ACTIVATIONS = {
    "relu": lambda _columns: nn.ReLU(),
    "prelu": lambda _columns: nn.PReLU(),
    "dice": Dice,
}


@architecture
@dataclass(frozen=True, kw_only=True)
class DINConfig(SequenceConfig):
    """`DIN`; tables of sequences and candidates have one embedding dimension.

    Attributes:
        attention: the features that are sequences, each with the feature that attends to it,
            whose table it shares: ``{history: item}``.
        attention_layers: hidden layers of the attention's MLP.
        activation: of the top MLP: the paper's ``dice``, or ``prelu`` or ``relu``.
    """

    arch: Literal["din"] = "din"
    attention: dict[str, str] = field(default_factory=dict)
    attention_layers: tuple[int, ...] = (80, 40)
    activation: Activation = "dice"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least_one(self, "attention_layers")
        check.one_of(self, "activation", Activation)
        if not self.attention:
            raise UserError(
                "attention is empty; name a sequence and the feature that attends to it, such as"
                " {history: item}"
            )

    def build(self, inputs: ModelInputs) -> nn.Module:
        """See `ModelConfig.build`."""
        return DIN(
            self.lookups(inputs, self.attention),
            self.attention,
            list(self.attention_layers),
            inputs.dense_columns,
            [*self.over_layers, len(inputs.labels)],
            activation=self.activation,
            dropout=self.dropout,
            batch_norm=self.batch_norm,
            terms=self.terms(inputs),
        )

    def logit_layers(self) -> tuple[str, ...]:
        """The last layer of the top MLP."""
        return ("logit",)
