"""Models of users, none of them a DLRM: each factory is what ``--factory`` calls."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tessera.serving import FeatureRule, ModelInputs
from tessera.serving.packaging.source import Source
from tessera.training.modules.embedding_configs import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from tessera.training.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.training.modules.feature_processor_ import PositionWeightedModuleCollection
from tessera.training.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from tessera.training.modules.hashing import FeatureHasher, HashSpec
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

HISTORY = 12


def bags(keys: list[str], *, weighted: bool = False) -> KeyedJaggedTensor:
    """Three samples whose bags hold 0, 1 and 2 ids."""
    lengths = torch.tensor([0, 1, 2] * len(keys))
    count = int(lengths.sum())
    values = torch.arange(count) % 5
    weights = torch.linspace(0.5, 1.5, count) if weighted else None
    return KeyedJaggedTensor(keys, values, weights, lengths)


def table(name: str, features: list[str], *, rows: int = 60, dim: int = 8) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name,
        num_embeddings=rows,
        embedding_dim=dim,
        feature_names=features,
        weight_init_max=1.0,
        weight_init_min=-1.0,
    )


class TwoTower(nn.Module):
    """A user's tower that attends to the user's history, an item's tower, their product."""

    def __init__(self) -> None:
        super().__init__()
        self.user = EmbeddingBagCollection([table("user", ["user", "city"])])
        self.items = EmbeddingCollection(
            [
                EmbeddingConfig(
                    name="item",
                    num_embeddings=90,
                    embedding_dim=16,
                    feature_names=["item", "history"],
                    weight_init_max=1.0,
                    weight_init_min=-1.0,
                )
            ]
        )
        self.query = nn.Linear(16, 16)
        self.user_tower = nn.Sequential(nn.Linear(32 + 3, 24), nn.ReLU(), nn.Linear(24, 16))
        self.item_tower = nn.Linear(16, 16)

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> dict[str, Tensor]:
        vectors = self.items(ids)
        item = vectors["item"].to_padded_dense(1).squeeze(1)
        history = vectors["history"].to_padded_dense(HISTORY)
        places = torch.arange(HISTORY, device=dense.device)
        known = places.unsqueeze(0) < vectors["history"].lengths().unsqueeze(1)
        match = torch.matmul(history, self.query(item).unsqueeze(2)).squeeze(2)
        attention = torch.softmax(match.masked_fill(~known, -1e9), dim=1) * known
        past = (attention.unsqueeze(2) * history).sum(dim=1)
        user = self.user_tower(torch.cat([dense, self.user(ids).values(), past], dim=1))
        logit = (user * self.item_tower(item)).sum(dim=1, keepdim=True)
        return {"probability": torch.sigmoid(logit), "user": user}


class MultiTask(nn.Module):
    """Two tasks over one bottom; two collections share a table, and one feature has two tables."""

    def __init__(self) -> None:
        super().__init__()
        averaged = table("brand", ["brand", "seen"], rows=40, dim=4)
        averaged.pooling = PoolingType.MEAN
        self.first = EmbeddingBagCollection(
            [table("item", ["item", "bought"]), averaged, table("item_again", ["item"], dim=6)]
        )
        self.second = EmbeddingBagCollection([table("item", ["seen_items"])])
        self.second.embedding_bags["item"].weight = self.first.embedding_bags["item"].weight
        norm = nn.BatchNorm1d(32)
        norm.running_mean.uniform_(-1.0, 1.0)
        norm.running_var.uniform_(0.5, 2.0)
        self.bottom = nn.Sequential(nn.Linear(8 * 2 + 4 * 2 + 6 + 8 + 2, 32), norm, nn.ReLU())
        self.click = nn.Linear(32, 1)
        self.minutes = nn.Linear(32, 1)

    def forward(self, ids: KeyedJaggedTensor, dense: Tensor) -> dict[str, Tensor]:
        pooled = self.first(ids)
        seen = self.second(ids)["seen_items"]
        shared = self.bottom(torch.cat([pooled.values(), seen, dense], dim=1))
        return {
            "click": torch.sigmoid(self.click(shared)).squeeze(1),
            "minutes": torch.nn.functional.softplus(self.minutes(shared)),
            "item": pooled["item@item_again"],
        }


class CrossNetwork(nn.Module):
    """DCNv2's cross layers: ``x0 * (W x + b) + x``."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x0: Tensor) -> Tensor:
        x = x0
        for layer in self.layers:
            x = x0 * layer(x) + x
        return x


class Dcn(nn.Module):
    """DCNv2 with a deep part beside the cross network."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            [table("a", ["a"], dim=8), table("b", ["b"], dim=4), table("c", ["c"], dim=12)]
        )
        self.norm = nn.LayerNorm(24 + 5)
        self.cross = CrossNetwork(24 + 5, 3)
        self.deep = nn.Sequential(nn.Linear(24 + 5, 40), nn.ReLU(), nn.Dropout(0.1))
        self.over = nn.Linear(24 + 5 + 40, 1)

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        x0 = self.norm(torch.cat([dense, self.tables(ids).values()], dim=1))
        return torch.sigmoid(self.over(torch.cat([self.cross(x0), self.deep(x0)], dim=1)))


class Wide(nn.Module):
    """A linear model: one weight per id, times the request's own, and a learnt one per place."""

    def __init__(self) -> None:
        super().__init__()
        self.scored = EmbeddingBagCollection(
            [table("word", ["title", "text"], dim=1), table("tag", ["tag"], rows=7, dim=1)],
            is_weighted=True,
        )
        self.placed = EmbeddingBagCollection([table("query", ["query"], dim=1)], is_weighted=True)
        self.places = nn.Parameter(torch.linspace(1.0, 0.1, 20))
        self.bias = nn.Parameter(torch.tensor([0.25]))

    def forward(self, scored: KeyedJaggedTensor, ids: KeyedJaggedTensor) -> Tensor:
        starts = ids.offsets()[:-1]
        place = torch.arange(ids.values().size(0), device=starts.device)
        place = place - torch.repeat_interleave(starts, ids.lengths())
        weights = self.places.index_select(0, place.clamp(max=19))
        query = KeyedJaggedTensor(ids.keys(), ids.values(), weights, ids.lengths())
        parts = [self.scored(scored).values(), self.placed(query).values()]
        return torch.sigmoid(torch.cat(parts, dim=1).sum(dim=1) + self.bias)


class Tutorial(nn.Module):
    """The module of the tutorial's inference part."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc_ = EmbeddingBagCollection(
            [
                table("product_table", ["product"], rows=4096, dim=64),
                table("user_table", ["user"], rows=4096, dim=64),
            ]
        )

    def forward(self, ids: KeyedJaggedTensor) -> KeyedTensor:
        return self.ebc_(ids)


class Positioned(nn.Module):
    """Position weights by the library's own modules, around a weighted collection."""

    def __init__(self) -> None:
        super().__init__()
        collection = EmbeddingBagCollection(
            [table("word", ["title", "text"]), table("tag", ["tag"], rows=9, dim=4)],
            is_weighted=True,
        )
        weights = PositionWeightedModuleCollection({"title": 64, "text": 64})
        for number, parameter in enumerate(weights.parameters()):
            parameter.data = torch.linspace(1.0, 0.2 * (number + 1), 64)
        self.tables = FeatureProcessedEmbeddingBagCollection(collection, weights)
        self.over = nn.Linear(8 + 8 + 4, 2)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.over(self.tables(ids).values())


class Reshuffled(nn.Module):
    """Splits, joins and permutes its features by every means there is."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            [table("a", ["a"], dim=4), table("rest", ["b", "c"], dim=12)]
        )

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> dict[str, Tensor]:
        first, rest = ids.split([1, 2])
        turned = KeyedJaggedTensor.concat([rest, first]).permute([2, 0, 1])
        parts = turned.to_dict()
        some = KeyedJaggedTensor.from_jt_dict({key: parts[key] for key in ("c", "b", "a")})
        pooled = self.tables(some)
        mixed, alone = KeyedTensor.regroup([pooled], [["c", "a"], ["b"]])
        return {
            "mixed": mixed * dense,
            "alone": alone.sum(dim=1),
            "count": parts["a"].lengths() + rest.lengths().view(2, -1).sum(dim=0),
        }


class Hashed(nn.Module):
    """Hashes one feature itself; another reaches it as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.hasher = FeatureHasher([HashSpec(name="user", rows=50, hashing="murmur3")])
        self.tables = EmbeddingBagCollection([table("user", ["user"], rows=50)])
        self.hours = nn.Embedding(24, 8)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        hours = ids["hour"]
        last = hours.to_padded_dense(1).long().squeeze(1)
        return (self.tables(self.hasher(ids)).values() * self.hours(last)).sum(dim=1)


class Branches(nn.Module):
    """Python that looks at values: it must be refused."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection([table("a", ["a"])])

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        pooled = self.tables(ids).values()
        if dense.sum() > 0:
            pooled = pooled * 2
        return pooled.sum(dim=1)


def two_tower() -> Source:
    torch.manual_seed(1)
    ids = bags(["city", "history", "item", "user"])
    inputs = ModelInputs(dense_features=["age", "price", "hour"])
    return TwoTower(), inputs, (torch.randn(3, 3), ids)


def multi_task() -> Source:
    torch.manual_seed(2)
    ids = bags(["seen_items", "brand", "item", "seen", "bought"])
    rules = {name: FeatureRule(hashing="murmur3") for name in ("bought", "seen_items")}
    return MultiTask(), ModelInputs(features=rules), (ids, torch.randn(3, 2))


def dcn() -> Source:
    torch.manual_seed(3)
    rules = {"a": FeatureRule(out_of_range="clamp"), "b": FeatureRule(hashing="modulo")}
    inputs = ModelInputs(features=rules, output="ctr")
    return Dcn(), inputs, (torch.randn(3, 5), bags(["a", "b", "c"]))


def wide() -> Source:
    torch.manual_seed(4)
    return Wide(), None, (bags(["text", "tag", "title"], weighted=True), bags(["query"]))


def tutorial() -> Source:
    torch.manual_seed(5)
    return Tutorial(), None, (bags(["product", "user"]),)


def positioned() -> Source:
    torch.manual_seed(7)
    return Positioned(), None, (bags(["tag", "title", "text"]),)


def reshuffled() -> Source:
    torch.manual_seed(8)
    return Reshuffled(), None, (torch.randn(3, 16), bags(["a", "b", "c"]))


def hashed() -> Source:
    torch.manual_seed(6)
    inputs = ModelInputs(features={"hour": FeatureRule(rows=24)})
    return Hashed(), inputs, (bags(["user", "hour"]),)


def branches() -> Source:
    return Branches(), None, (torch.randn(3, 2), bags(["a"]))


FACTORIES = {
    factory.__name__: factory
    for factory in (two_tower, multi_task, dcn, wide, tutorial, positioned, reshuffled, hashed)
}
