"""What architectures with experts for several labels have in common."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.training import field_checks as check
from tessera.training.models.config import DeepModelConfig
from tessera.training.models.dlrm_parts import SparseArch
from tessera.training.models.experts import PLE, MMoE, Towers
from tessera.training.models.inputs import ModelInputs
from tessera.training.models.terms import LogitTerms, TermsConfig
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


class MultiTask(nn.Module):
    """Lookups, then a mixture of experts over all values side by side, then a tower per label.

    Args:
        tables: one vector per feature; embedding dimensions may differ.
        mixture: from ``[B, N]``, the dense values and all vectors, to ``[B, H]`` per label.
        towers: from these to logits ``[B, L]``.
        embedding_dropout: of the looked-up vectors, while training.
        terms: what is added to the logits.
    """

    def __init__(
        self,
        tables: EmbeddingBagCollection,
        mixture: MMoE | PLE,
        towers: Towers,
        *,
        embedding_dropout: float,
        terms: LogitTerms | None,
    ) -> None:
        super().__init__()
        self.terms = terms
        self.sparse_arch = SparseArch(tables, dropout=embedding_dropout)
        self.mixture = mixture
        self.towers = towers

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """``[B, dense columns]`` and the features' rows to logits ``[B, L]``."""
        vectors = self.sparse_arch.pooled(sparse)
        logits: Tensor = self.towers(self.mixture(torch.cat([dense, vectors], dim=1)))
        if self.terms is not None:
            logits = self.terms(logits, dense, sparse, [vectors])
        return logits


@dataclass(frozen=True, kw_only=True)
class MultiTaskConfig(TermsConfig, DeepModelConfig):
    """What ``mmoe`` and ``ple`` share; not an architecture by itself.

    Attributes:
        expert_layers (columns): columns after each layer of an expert.
        tower_layers (columns): hidden layers of a label's tower; its last layer, the logit, is added.
    """

    expert_layers: tuple[int, ...] = (128, 64)
    tower_layers: tuple[int, ...] = (64,)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least_one(self, "expert_layers tower_layers")
        for name in ("expert_layers", "tower_layers"):
            if not getattr(self, name):
                raise UserError(f"{name} is empty; give at least one layer")

    def mixture(self, in_features: int, labels: int) -> MMoE | PLE:
        """The experts and gates over ``in_features`` columns."""
        raise NotImplementedError

    def build(self, inputs: ModelInputs) -> nn.Module:
        """See `ModelConfig.build`."""
        width = inputs.dense_columns + sum(feature.dim for feature in inputs.features)
        labels = len(inputs.labels)
        return MultiTask(
            inputs.collection(),
            self.mixture(width, labels),
            Towers(
                self.expert_layers[-1],
                labels,
                list(self.tower_layers),
                dropout=self.dropout,
                batch_norm=self.batch_norm,
            ),
            embedding_dropout=self.embedding_dropout,
            terms=self.terms(inputs),
        )

    def logit_layers(self) -> tuple[str, ...]:
        """The last layer of every tower."""
        return ("towers.towers.*.model.1",)
