"""Managed collisions in packages: the map is part of the graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.serving import FeatureRule, ModelInputs, package_model
from tessera.serving.package.loading import load_package
from tessera.serving.package.runner import HostBatch
from tessera.training.modules.embedding_configs import EmbeddingConfig
from tessera.training.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.training.modules.hash_mc_modules import HashZchManagedCollisionModule
from tessera.training.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from tessera.training.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tests.packaging.user_models import table

FEATURES = ["title", "text", "shop", "brand", "maker"]
HASHED = {
    "brand": {"input_hash_size": 2**62},
    "maker": {"opt_in_prob": 100, "percent_reserved_slots": 20},
}


def halved(ids: Tensor, size: int) -> Tensor:
    return torch.div(ids, 2, rounding_mode="floor") % size


def maps(configs: list, **rest: object) -> ManagedCollisionCollection:
    return ManagedCollisionCollection(
        {
            own.name: MCHManagedCollisionModule(
                own.num_embeddings, torch.device("cpu"), DistanceLFU_EvictionPolicy(), 1, **rest
            )
            for own in configs
        },
        configs,
    )


class Mapped(nn.Module):
    """Pooled bags of two features that share a map, and the sum of one feature's vectors."""

    def __init__(self) -> None:
        super().__init__()
        pooled = [table("word", ["title", "text"], rows=9)]
        single = [EmbeddingConfig(7, 8, name="shop", feature_names=["shop"])]
        self.pooled = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(pooled), maps(pooled)
        )
        self.single = ManagedCollisionEmbeddingCollection(
            EmbeddingCollection(single),
            maps(single, input_hash_size=1000, input_hash_func=halved),
            return_remapped_features=True,
        )

        hashed = [table(name, [name], rows=10) for name in HASHED]
        self.hashed = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(hashed),
            ManagedCollisionCollection(
                {
                    name: HashZchManagedCollisionModule(10, torch.device("cpu"), 2, 3, **rest)
                    for name, rest in HASHED.items()
                },
                hashed,
            ),
            return_remapped_features=True,
        )

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        vectors, _ = self.single(ids)
        shops = vectors["shop"].to_padded_dense(3).sum(dim=1)
        pooled = [self.pooled(ids)[0].values(), self.hashed(ids)[0].values()]
        return torch.cat([*pooled, shops], dim=1)


def drawn(seed: int, samples: int = 6) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(FEATURES) * samples,), generator=generator)
    known = torch.tensor(
        [0, 5, -9, -1, 10**15, 10**15 + 1, 77, 2**63 - 1, -(2**63), 3, 4, 6, 8, 12, 13]
    )
    places = torch.randint(0, len(known), (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(FEATURES, known[places], lengths=lengths)


def trained() -> Mapped:
    torch.manual_seed(4)
    module = Mapped()
    for seed in range(3):
        module(drawn(seed))
    return module.eval()


def host(ids: KeyedJaggedTensor) -> HostBatch:
    none, empty = torch.empty(0, dtype=torch.int32), torch.empty(0)
    return HostBatch(
        float_features=torch.empty(ids.stride(), 0),
        id_list_features_lengths=ids.lengths().int(),
        id_list_features_values=ids.values(),
        id_score_list_features_lengths=none,
        id_score_list_features_values=none.long(),
        id_score_list_features_weights=empty,
        batch_size=ids.stride(),
    )


@pytest.mark.parametrize("backend", ["tessera", "fbgemm"])
def test_a_package_has_the_rows_that_the_module_has(tmp_path: Path, backend: str) -> None:
    module, path = trained(), tmp_path / "maps.pt"
    package_model(module, None, (drawn(0),), out=path, dtype="fp32", backend=backend)
    package = load_package(path)
    assert {f.hashing for f in package.manifest.schema.features} == {"vocabulary"}
    known = brands = shared = 0
    for seed in range(3, 9):
        ids = drawn(seed)
        with torch.no_grad():
            expected = module(ids)
            rows = module.single(ids)[1]["shop"].values()
            hashed = module.hashed(ids)[1]
        known += int((rows < 6).sum())
        brands += int((hashed["brand"].values() >= 0).sum())
        shared += int((hashed["maker"].values() % 5 == 4).sum())
        (found,) = package.runner.forward(host(ids)).values()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert known > 3
    assert brands > 10
    assert shared > 3


def test_a_rule_for_mapped_ids_is_refused(tmp_path: Path) -> None:
    inputs = ModelInputs(features={"text": FeatureRule(hashing="modulo")})
    with pytest.raises(UserError, match="managed collision module maps its ids; leave the rule"):
        package_model(trained(), inputs, (drawn(0),), out=tmp_path / "x.pt")
