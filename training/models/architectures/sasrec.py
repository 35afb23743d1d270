"""``arch: sasrec``: a transformer over the history, whose state is multiplied by the candidate.

Source: Kang and McAuley, "Self-Attentive Sequential Recommendation" (2018).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.training import field_checks as check
from tessera.training.models.config import architecture
from tessera.training.models.dlrm_parts import OverArch
from tessera.training.models.inputs import ModelInputs
from tessera.training.models.sequence_lookups import SequenceConfig, SequenceLookups
from tessera.training.models.terms import LogitTerms
from tessera.training.modules.sequences import SequenceTransformer
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


class SASRec(nn.Module):
    """The relevance of the candidate after the history, and an MLP over all features.

    The paper ranks items by the dot product of the transformer's state and the item's vector.  To
    make a calibrated logit of it and to use the other features, the output of an MLP over
    ``[dense values, vectors, state]`` is added.

    Args:
        lookups: the vectors of all features.
        sequence: the history.
        candidate: the item in question, of the same table.
        transformer: from the history's vectors to a state.
        dense_columns: columns of the dense values.
        over_sizes: columns after each layer of the MLP; the last is the number of logits.
        dropout: in the MLP, while training.
        batch_norm: whether the MLP's hidden layers are normalised over the batch.
        terms: what is added to the logits besides.
    """

    def __init__(
        self,
        lookups: SequenceLookups,
        sequence: str,
        candidate: str,
        transformer: SequenceTransformer,
        *,
        dense_columns: int,
        over_sizes: list[int],
        dropout: float,
        batch_norm: bool,
        terms: LogitTerms | None,
    ) -> None:
        super().__init__()
        self.lookups = lookups
        self.terms = terms
        self._sequence, self._candidate = sequence, candidate
        self.transformer = transformer
        width = dense_columns + lookups.width + lookups.dim
        self.over_arch = OverArch(width, over_sizes, dropout=dropout, batch_norm=batch_norm)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """``[B, dense columns]`` and the features' rows to logits ``[B, labels]``."""
        sequences, candidates, beside = self.lookups(sparse)
        state = self.transformer(*sequences[self._sequence])
        relevance = (state * candidates[self._candidate]).sum(dim=1, keepdim=True)
        logits: Tensor = relevance + self.over_arch(torch.cat([dense, beside, state], dim=1))
        if self.terms is not None:
            logits = self.terms(logits, dense, sparse, [beside, state])
        return logits


@architecture
@dataclass(frozen=True, kw_only=True)
class SASRecConfig(SequenceConfig):
    """`SASRec`; the tables of history and candidate are one.

    Attributes:
        sequence: the feature that is the history, the latest id last.
        candidate: the feature that is ranked; it shares the history's table.
        blocks: blocks of the transformer.
        heads: of each block's attention; they divide the embedding dimension.
    """

    arch: Literal["sasrec"] = "sasrec"
    sequence: str = ""
    candidate: str = ""
    blocks: int = 2
    heads: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least_one(self, "blocks heads")
        for name in ("sequence", "candidate"):
            if not getattr(self, name):
                raise UserError(f"{name} is empty; name a feature of the data")

    def build(self, inputs: ModelInputs) -> nn.Module:
        """See `ModelConfig.build`."""
        lookups = self.lookups(inputs, {self.sequence: self.candidate})
        if lookups.dim % self.heads:
            raise UserError(
                f"heads={self.heads}: they must divide the history's embedding dimension,"
                f" {lookups.dim}"
            )
        return SASRec(
            lookups,
            self.sequence,
            self.candidate,
            SequenceTransformer(
                lookups.dim,
                self.sequence_length,
                blocks=self.blocks,
                heads=self.heads,
                dropout=self.dropout,
            ),
            dense_columns=inputs.dense_columns,
            over_sizes=[*self.over_layers, len(inputs.labels)],
            dropout=self.dropout,
            batch_norm=self.batch_norm,
            terms=self.terms(inputs),
        )

    def logit_layers(self) -> tuple[str, ...]:
        """The last layer of the MLP."""
        return ("over_arch.model.1",)
