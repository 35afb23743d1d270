"""``arch: dlrm_dcn``: bottom MLP, low-rank cross network over all vectors, top MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from tessera.training import field_checks as check
from tessera.training.models.config import MLPModelConfig, architecture
from tessera.training.models.dlrm import DLRM_DCN
from tessera.training.models.inputs import ModelInputs


@architecture
@dataclass(frozen=True, kw_only=True)
class DLRMDCNConfig(MLPModelConfig):
    """`tessera.training.models.dlrm.DLRM_DCN`; embedding dimensions may differ.

    Attributes:
        dcn_num_layers: layers of the cross network.
        dcn_low_rank_dim: rank of its matrices.
    """

    arch: Literal["dlrm_dcn"] = "dlrm_dcn"
    dcn_num_layers: int = 3
    dcn_low_rank_dim: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least_one(self, "dcn_num_layers dcn_low_rank_dim")

    def build(self, inputs: ModelInputs) -> nn.Module:
        """See `ModelConfig.build`."""
        return DLRM_DCN(
            inputs.collection(),
            inputs.dense_columns,
            [*self.dense_layers, self.embedding_dim],
            [*self.over_layers, len(inputs.labels)],
            self.dcn_num_layers,
            self.dcn_low_rank_dim,
            dropout=self.dropout,
            embedding_dropout=self.embedding_dropout,
            batch_norm=self.batch_norm,
        )
