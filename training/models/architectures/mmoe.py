"""``arch: mmoe``: experts that all labels share, a gate and a tower for each label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tessera.training import field_checks as check
from tessera.training.models.config import architecture
from tessera.training.models.experts import MMoE
from tessera.training.models.multi_task import MultiTaskConfig


@architecture
@dataclass(frozen=True, kw_only=True)
class MMoEConfig(MultiTaskConfig):
    """`tessera.training.models.experts.MMoE`; embedding dimensions may differ.

    Attributes:
        experts: how many experts the labels share.
    """

    arch: Literal["mmoe"] = "mmoe"
    experts: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least_one(self, "experts")

    def mixture(self, in_features: int, labels: int) -> MMoE:
        """See `MultiTaskConfig.mixture`."""
        return MMoE(
            in_features,
            labels,
            experts=self.experts,
            expert_sizes=list(self.expert_layers),
            dropout=self.dropout,
            batch_norm=self.batch_norm,
        )
