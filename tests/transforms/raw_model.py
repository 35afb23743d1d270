"""A ranking model with every kind of transform, fitted to random raw rows."""

from __future__ import annotations

import torch

from tessera.training.models.config import ModelConfig, TableConfig
from tessera.training.models.ranking import RankingModel, build_ranking_model
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.training.transforms.crosses import Cross
from tessera.training.transforms.description import Transforms, dense_column, id_column
from tessera.training.transforms.fitting import fit
from tessera.training.transforms.target_statistics import TargetStatistic
from tests.transforms.harness import Rows

NAMES = ("country", "device", "item", "tags")

TRANSFORMS = Transforms(
    dense=(
        dense_column("price", [{"missing": 1}, {"clip": [0, 1000]}, "log1p", "standardize"]),
        dense_column("views", ["log1p"]),
        dense_column("clicks", [{"log_odds": "views"}]),
        dense_column("age", [{"quantile": {"buckets": 8, "to": "id"}}]),
        dense_column("score", [{"quantile": 16}]),
        dense_column("plain", []),
    ),
    sparse=(
        id_column("country", [{"vocabulary": {"min_count": 2}}]),
        id_column("device", []),
        id_column("item", ["vocabulary"], table="item"),
        id_column("tags", ["vocabulary"], table="item"),
    ),
    labels=("click",),
    crosses={"country_x_device": Cross(of=("country", "device"))},
    target_statistics={"rate": TargetStatistic(key=("country", "device"))},
)


def raw_rows(count: int, seed: int = 0) -> Rows:
    """Rows whose values lie beyond what the transforms know, in part."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(count, len(TRANSFORMS.dense), generator=generator) * 100
    dense[torch.rand(dense.shape, generator=generator) < 0.1] = float("nan")
    lengths = torch.randint(0, 3, (len(NAMES) * count,), generator=generator, dtype=torch.int32)
    ids = torch.randint(-20, 20, (int(lengths.sum()),), generator=generator)
    return Rows(
        dense,
        KeyedJaggedTensor(list(NAMES), ids * 123456789123, lengths=lengths, stride=count),
        torch.randint(0, 2, (count,), generator=generator).float(),
        torch.arange(count),
    )


def raw_model(*, weighted: bool = False, arch: str = "dlrm") -> RankingModel:
    """An untrained float32 model whose scores spread over (0, 1)."""
    torch.manual_seed(0)
    fitted = fit(TRANSFORMS, lambda: [raw_rows(500)])
    config = ModelConfig(
        arch=arch,
        embedding_dim=8,
        rows=100,
        dense_layers=(16,),
        over_layers=(16,),
        embedding_init=1.0,
        tables={"device": TableConfig(weighted=weighted)},
    )
    dense = [column.name for column in TRANSFORMS.dense]
    model = build_ranking_model(
        config, dense, list(NAMES), transforms=TRANSFORMS, sizes=fitted.sizes
    )
    model.preprocessor.load_state_dict(fitted.state)
    return model.eval()
