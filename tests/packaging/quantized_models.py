"""Models of quantized collections, whole and sharded."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tessera.training import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from tessera.training.distributed.plan.plan_types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)
from tessera.training.inference.modules import shard_quant_model

DTYPES = {
    "int8": torch.int8,
    "int4": torch.quint4x2,
    "int2": torch.quint2x4,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
"""The torch type that quantization takes for each row type."""

BATCH = KeyedJaggedTensor(
    ["x", "y", "z"], torch.tensor([1, 2, 9, 0, 4, 3]), lengths=torch.tensor([2, 1, 0, 1, 1, 1])
)


class Pooled(nn.Module):
    """A score of pooled vectors; table ``big`` is averaged and shared by two features."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.tables = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    11, 16, name="big", feature_names=["x", "y"], pooling=PoolingType.MEAN
                ),
                EmbeddingBagConfig(7, 8, name="own", feature_names=["z"]),
            ]
        )
        self.over = nn.Linear(40, 2)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Scores ``[B, 2]`` of each sample."""
        scores: Tensor = self.over(self.tables(features).values())
        return scores


class Unpooled(nn.Module):
    """A score of the sums of unpooled vectors."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.tables = EmbeddingCollection(
            [
                EmbeddingConfig(11, 16, name="big", feature_names=["x", "y"]),
                EmbeddingConfig(7, 16, name="own", feature_names=["z"]),
            ]
        )
        self.over = nn.Linear(48, 2)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Scores ``[B, 2]`` of each sample."""
        found = self.tables(features)
        sums = [
            torch.segment_reduce(j.values(), "sum", lengths=j.lengths()) for j in found.values()
        ]
        scores: Tensor = self.over(torch.cat(sums, dim=1))
        return scores


def sharded(model: nn.Module, kind: str, devices: int) -> nn.Module:
    """The quantized model, its tables sharded one way over so many devices on the CPU."""

    def place(rank: int) -> ParameterSharding:
        if kind == "column_wise":
            return ParameterSharding(kind, "quant", [(rank + k) % devices for k in range(2)])
        return ParameterSharding(kind, "quant", [rank % devices] if kind == "table_wise" else None)

    tables = EmbeddingModuleShardingPlan(big=place(0), own=place(1))
    return shard_quant_model(
        model, devices, "cpu", sharding_plan=ShardingPlan(plan={"tables": tables})
    )[0]
