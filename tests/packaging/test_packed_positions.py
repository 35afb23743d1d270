"""Position weights in packages: bags with more ids than there are weights have an answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tessera.serving import package_model
from tessera.serving.package.loading import load_package
from tessera.serving.package.runner import HostBatch
from tessera.training.modules.embedding_configs import PoolingType
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.modules.feature_processor_ import (
    FeatureProcessor,
    FeatureProcessorsCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from tessera.training.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tests.packaging.user_models import bags, table

PLACES = {"title": 3, "text": 7}


class Placed(nn.Module):
    def __init__(self, processors: FeatureProcessorsCollection | dict[str, FeatureProcessor]):
        super().__init__()
        configs = [table("word", ["title"]), table("mean", ["text"])]
        configs[1].pooling = PoolingType.MEAN
        collection = EmbeddingBagCollection(configs, is_weighted=True)
        self.tables = FeatureProcessedEmbeddingBagCollection(collection, processors)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.tables(ids).values()


def placed(*, together: bool) -> Placed:
    torch.manual_seed(9)
    own: FeatureProcessorsCollection | dict[str, FeatureProcessor] = {
        name: PositionWeightedModule(count) for name, count in PLACES.items()
    }
    if together:
        own = PositionWeightedModuleCollection(PLACES)
    module = Placed(own)
    for name, parameter in module.named_parameters():
        if "position_weight" in name:
            parameter.data = torch.rand(parameter.numel())
    return module


def batch(lengths: list[list[int]], values: Tensor) -> HostBatch:
    empty = torch.empty(0)
    return HostBatch(
        float_features=torch.empty(len(lengths[0]), 0),
        id_list_features_lengths=torch.tensor(lengths, dtype=torch.int32).view(-1),
        id_list_features_values=values,
        id_score_list_features_lengths=empty.int(),
        id_score_list_features_values=empty.int(),
        id_score_list_features_weights=empty,
        batch_size=len(lengths[0]),
    )


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("shards", [1, 2])
def test_ids_past_the_last_weight_weigh_nothing(
    *, together: bool, shards: int, tmp_path: Path
) -> None:
    module = placed(together=together)
    cut = {"shards": 2, "sharding": "row_wise"} if shards == 2 else {}
    sample = bags(list(PLACES))
    package_model(module, None, (sample,), out=tmp_path / "m.pt", dtype="fp32", **cut)
    runner = load_package(tmp_path / "m.pt").runner
    lengths = [[3, 4, 0, 60], [7, 8, 60, 1]]
    ids = torch.randint(
        0, 60, (sum(map(sum, lengths)),), generator=torch.Generator().manual_seed(1)
    )
    found = runner.forward(batch(lengths, ids))["default"]
    collection = module.tables
    parameters = dict(collection._feature_processors.named_parameters())
    weights = {
        feature: next(own for name, own in parameters.items() if feature in name)
        for feature in PLACES
    }
    bag_ids = ids.split(lengths[0] + lengths[1])
    expected = []
    for feature, (name, own) in enumerate(weights.items()):
        rows = collection._embedding_bag_collection.embedding_bags[
            "word" if name == "title" else "mean"
        ].weight
        for sample_ids in bag_ids[4 * feature : 4 * feature + 4]:
            kept = sample_ids[: len(own)]
            total = (rows[kept] * own[: len(kept), None]).sum(dim=0)
            expected.append(total / max(1, len(sample_ids)) if name == "text" else total)
    wanted = torch.cat([torch.stack(expected[:4]), torch.stack(expected[4:])], dim=1)
    # Sums of at most 7 terms of magnitude 1, in another order.
    torch.testing.assert_close(found, wanted.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("together", [False, True])
def test_bags_that_fit_answer_as_in_the_module(*, together: bool, tmp_path: Path) -> None:
    module = placed(together=together)
    package_model(module, None, (bags(list(PLACES)),), out=tmp_path / "m.pt", dtype="fp32")
    runner = load_package(tmp_path / "m.pt").runner
    lengths = [[3, 1, 0, 2], [7, 0, 5, 1]]
    ids = torch.arange(sum(map(sum, lengths)))
    features = KeyedJaggedTensor(
        list(PLACES), ids, lengths=torch.tensor(lengths, dtype=torch.int32).view(-1)
    )
    expected = module(features).detach()
    torch.testing.assert_close(
        runner.forward(batch(lengths, ids))["default"], expected, rtol=0, atol=1e-6
    )
