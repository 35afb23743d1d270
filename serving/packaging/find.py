"""Find the embedding tables inside any module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn

from tessera.errors import UserError
from tessera.serving.package.schema import Pooling
from tessera.serving.packaging.tables.quantize import FloatTable
from tessera.training.modules.embedding_configs import BaseEmbeddingConfig, PoolingType
from tessera.training.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.training.modules.hashing import FeatureHasher, HashSpec

Collection: TypeAlias = EmbeddingBagCollection | EmbeddingCollection


@dataclass(frozen=True, kw_only=True)
class FoundTable:
    """A table of a collection.

    Attributes:
        stored: its name in the package; two tables with the same weights share one.
        rows: number of rows.
        dim: embedding dimension.
        features: the names of the features that it serves.
        pooling: how a bag becomes one vector; ``none``: it does not.
    """

    stored: str
    rows: int
    dim: int
    features: tuple[str, ...]
    pooling: Pooling


@dataclass(frozen=True, kw_only=True)
class FoundCollection:
    """A collection of a module.

    Attributes:
        path: its qualified name.
        module: the collection itself.
        tables: its tables, in its order.
    """

    path: str
    module: Collection
    tables: tuple[FoundTable, ...]


@dataclass(frozen=True, kw_only=True)
class FoundTables:
    """All collections of a module, and the tables to store."""

    collections: tuple[FoundCollection, ...]
    floats: tuple[FloatTable, ...]


def find_tables(module: nn.Module) -> FoundTables:
    """Find every `EmbeddingBagCollection` and `EmbeddingCollection` of ``module``.

    A table's name in the package is its own; where another table has it already, the
    collection's qualified name is put before it.

    Raises:
        UserError: a collection is still in the trainer's hands or has no values, or there is none.
    """
    collections = []
    names: dict[int, str] = {}
    floats: dict[str, FloatTable] = {}
    for path, part in module.named_modules():
        if isinstance(part, Collection):
            tables = []
            for config, weight in _tables(part):
                if weight.is_meta:
                    raise UserError(
                        f"table {config.name!r} is on the meta device and has no values; load the "
                        "trained weights into a module made on the CPU first"
                    )
                if id(weight) not in names:
                    free = config.name not in floats
                    name = config.name if free else f"{path}.{config.name}"
                    names[id(weight)] = name
                    floats[name] = FloatTable(name=name, weights=weight)
                tables.append(_found(names[id(weight)], config))
            collections.append(FoundCollection(path=path, module=part, tables=tuple(tables)))
        elif _holds_tables(part):
            raise UserError(
                f"{path or 'the module'} is a {type(part).__module__}.{type(part).__name__}, which "
                "cannot be packaged; give the module with plain EmbeddingBagCollection and "
                "EmbeddingCollection tables, neither sharded nor quantized (for what "
                "'tessera train' wrote, load_trained returns it)"
            )
    if not collections:
        raise UserError(
            f"{type(module).__name__} has no EmbeddingBagCollection and no EmbeddingCollection; "
            "a package is for models with embedding tables"
        )
    return FoundTables(collections=tuple(collections), floats=tuple(floats.values()))


def _holds_tables(part: nn.Module) -> bool:
    """Whether it is a collection of another kind, and not one around a plain collection."""
    if not (hasattr(part, "embedding_bag_configs") or hasattr(part, "embedding_configs")):
        return False
    return not any(isinstance(inner, Collection) for inner in part.modules())


def find_hash_specs(module: nn.Module) -> dict[str, HashSpec]:
    """By feature, how the module's own `FeatureHasher`s turn raw ids into rows."""
    hashers = [part for part in module.modules() if isinstance(part, FeatureHasher)]
    return {spec.name: spec for hasher in hashers for spec in hasher.specs}


def _tables(collection: Collection) -> list[tuple[BaseEmbeddingConfig, Tensor]]:
    if isinstance(collection, EmbeddingBagCollection):
        bags = collection.embedding_bags
        return [(c, _weight(bags[c.name])) for c in collection.embedding_bag_configs()]
    tables = collection.embeddings
    return [(c, _weight(tables[c.name])) for c in collection.embedding_configs()]


def _weight(table: nn.Module) -> Tensor:
    weight = table.weight
    assert isinstance(weight, Tensor)
    return weight


def _found(stored: str, config: BaseEmbeddingConfig) -> FoundTable:
    pooling = getattr(config, "pooling", None)
    words: dict[PoolingType, Pooling] = {PoolingType.SUM: "sum", PoolingType.MEAN: "mean"}
    return FoundTable(
        stored=stored,
        rows=config.num_embeddings,
        dim=config.embedding_dim,
        features=tuple(config.feature_names),
        pooling="none" if pooling is None else words[pooling],
    )
