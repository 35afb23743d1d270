"""Find the embedding tables inside any module."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from tessera.errors import UserError
from tessera.serving.package.schema import Pooling
from tessera.serving.packaging.collections.kinds import CollectionKind, FoundCollection, FoundTable
from tessera.serving.packaging.collections.packed import POOLED, UNPOOLED
from tessera.serving.packaging.collections.quantized import QUANTIZED
from tessera.serving.packaging.tables.quantize import FloatTable, SourceTable
from tessera.training.modules.embedding_configs import BaseEmbeddingConfig, PoolingType
from tessera.training.modules.mc_modules import ManagedCollisionCollection

KINDS: tuple[CollectionKind, ...] = (POOLED, UNPOOLED, *QUANTIZED)
"""The kinds of modules whose tables can be packaged; the first that fits a module counts.

A new kind is one `CollectionKind`, in a file of its own beside this one, and its name here.
"""


@dataclass(frozen=True, kw_only=True)
class FoundTables:
    """All collections of a module, and the tables to store."""

    collections: tuple[FoundCollection, ...]
    sources: tuple[SourceTable, ...]


def kind_of(module: nn.Module) -> CollectionKind | None:
    """The kind of a module that holds tables itself; None of any other module."""
    return next((kind for kind in KINDS if isinstance(module, kind.module)), None)


def find_tables(module: nn.Module) -> FoundTables:
    """Find every collection of ``module`` that `KINDS` knows.

    A table's name in the package is its own; where another table has it already, the
    collection's qualified name is put before it.

    Raises:
        UserError: a collection is still in the trainer's hands or has no values, or there is none.
    """
    collections = []
    names: dict[object, str] = {}
    sources: dict[str, SourceTable] = {}
    for path, part in module.named_modules():
        kind = kind_of(part)
        if kind is not None:
            tables = []
            for config, given in kind.tables(part):
                rows = [given] if isinstance(given, Tensor) else [b.rows for b in given.blocks]
                if any(tensor.is_meta for tensor in rows):
                    raise UserError(
                        f"table {config.name!r} is on the meta device and has no values; load the "
                        "trained weights into a module made on the CPU first"
                    )
                # What two tables with the same values in memory have in common.
                memory = id(given) if isinstance(given, Tensor) else ("rows", rows[0].data_ptr())
                if memory not in names:
                    free = config.name not in sources
                    name = config.name if free else f"{path}.{config.name}"
                    names[memory] = name
                    sources[name] = (
                        FloatTable(name=name, weights=given)
                        if isinstance(given, Tensor)
                        else replace(given, name=name)
                    )
                tables.append(
                    FoundTable(stored=names[memory], config=config, pooling=_pooling(config))
                )
            collections.append(
                FoundCollection(path=path, module=part, kind=kind, tables=tuple(tables))
            )
        elif _holds_tables(part):
            raise UserError(
                f"{path or 'the module'} is a {type(part).__module__}.{type(part).__name__}, which "
                "cannot be packaged; give the module with plain EmbeddingBagCollection and "
                "EmbeddingCollection tables, or with quantized ones (for what 'tessera train' "
                "wrote, load_trained returns it)"
            )
    if not collections:
        raise UserError(
            f"{type(module).__name__} has no EmbeddingBagCollection and no EmbeddingCollection; "
            "a package is for models with embedding tables"
        )
    return FoundTables(collections=tuple(collections), sources=tuple(sources.values()))


def _holds_tables(part: nn.Module) -> bool:
    """Whether it is a collection of another kind, and not one around a plain collection."""
    if isinstance(part, ManagedCollisionCollection):  # it holds maps of ids
        return False
    if not (hasattr(part, "embedding_bag_configs") or hasattr(part, "embedding_configs")):
        return False
    return all(kind_of(inner) is None for inner in part.modules())


def _pooling(config: BaseEmbeddingConfig) -> Pooling:
    pooling = getattr(config, "pooling", None)
    words: dict[PoolingType, Pooling] = {PoolingType.SUM: "sum", PoolingType.MEAN: "mean"}
    return "none" if pooling is None else words[pooling]
