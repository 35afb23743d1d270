"""``arch: dlrm_dcn``: bottom MLP, low-rank cross network over all vectors, top MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from tessera.training import field_checks as check
from tessera.training.models.config import MLPModelConfig, architecture
from tessera.training.models.dlrm import DLRM_DCN
from tessera.training.models.inputs import ModelInputs
from tessera.training.models.terms import TermsConfig


@architecture
@dataclass(frozen=True, kw_only=True)
class DLRMDCNConfig(TermsConfig, MLPModelConfig):
    """`tessera.training.models.dlrm.DLRM_DCN`; embedding dimensions may differ.

    Attributes:
        dcn_num_layers: layers of the cross network.
        dcn_low_rank_dim: rank of its matrices.
        concat: whether the top MLP is given the vectors beside the cross network's output.
    """

    arch: Literal["dlrm_dcn"] = "dlrm_dcn"
    dcn_num_layers: int = 3
    dcn_low_rank_dim: int = 64
    concat: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least_one(self, "dcn_num_layers dcn_low_rank_dim")

    def build(self, inputs: ModelInputs) -> nn.Module:
        """See `ModelConfig.build`."""
        dense_sizes = self.dense_sizes(inputs)
        return DLRM_DCN(
            inputs.collection(),
            inputs.dense_columns,
            dense_sizes,
            [*self.over_layers, len(inputs.labels)],
            self.dcn_num_layers,
            self.dcn_low_rank_dim,
            dropout=self.dropout,
            embedding_dropout=self.embedding_dropout,
            batch_norm=self.batch_norm,
            concat=self.concat,
            terms=self.terms(inputs, {"the bottom MLP": dense_sizes[-1]}),
        )
