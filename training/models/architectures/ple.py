"""``arch: ple``: levels of experts, shared ones and each label's own, and a tower for each label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tessera.training import field_checks as check
from tessera.training.models.config import architecture
from tessera.training.models.experts import PLE
from tessera.training.models.multi_task import MultiTaskConfig


@architecture
@dataclass(frozen=True, kw_only=True)
class PLEConfig(MultiTaskConfig):
    """`tessera.training.models.experts.PLE`; embedding dimensions may differ.

    Attributes:
        levels: levels of experts.
        own_experts: experts of each label, on each level.
        shared_experts: experts of all labels, on each level.
    """

    arch: Literal["ple"] = "ple"
    levels: int = 2
    own_experts: int = 2
    shared_experts: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least_one(self, "levels own_experts shared_experts")

    def mixture(self, in_features: int, labels: int) -> PLE:
        """See `MultiTaskConfig.mixture`."""
        return PLE(
            in_features,
            labels,
            levels=self.levels,
            own_experts=self.own_experts,
            shared_experts=self.shared_experts,
            expert_sizes=list(self.expert_layers),
            dropout=self.dropout,
            batch_norm=self.batch_norm,
        )
