"""``arch: dlrm``: bottom MLP, dot products of every pair of vectors, top MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from tessera.training.models.config import MLPModelConfig, architecture
from tessera.training.models.dlrm import DLRM
from tessera.training.models.inputs import ModelInputs
from tessera.training.models.terms import TermsConfig


@architecture
@dataclass(frozen=True, kw_only=True)
class DLRMConfig(TermsConfig, MLPModelConfig):
    """`tessera.training.models.dlrm.DLRM`; every feature has the same embedding dimension.

    Attributes:
        concat: whether the top MLP is given the looked-up vectors beside their products.
    """

    arch: Literal["dlrm"] = "dlrm"
    concat: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_one_dim()

    def build(self, inputs: ModelInputs) -> nn.Module:
        """See `ModelConfig.build`."""
        dense_sizes = self.dense_sizes(inputs)
        return DLRM(
            inputs.collection(),
            inputs.dense_columns,
            dense_sizes,
            [*self.over_layers, len(inputs.labels)],
            dropout=self.dropout,
            embedding_dropout=self.embedding_dropout,
            batch_norm=self.batch_norm,
            concat=self.concat,
            terms=self.terms(inputs, {"the bottom MLP": dense_sizes[-1]}),
        )
