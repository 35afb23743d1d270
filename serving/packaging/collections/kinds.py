"""What the packager knows of a kind of module that holds embedding tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tessera.serving.package.schema import FeatureSpec, Hashing, OutOfRange, Pooling
from tessera.serving.packaging.lookups.backends import LookupBackend
from tessera.serving.packaging.tables.stored import StoredTables
from tessera.serving.packaging.tables.taken_over import QuantizedTable
from tessera.training.modules.embedding_configs import BaseEmbeddingConfig
from tessera.training.modules.tables import embedding_names


@dataclass(frozen=True, kw_only=True)
class IdTreatment:
    """How a feature's ids become rows in the lookup; see `FeatureSpec`."""

    hashing: Hashing = "none"
    out_of_range: OutOfRange = "clamp"


Treatments = Mapping[str, IdTreatment]
"""By feature; a feature that is not there has rows for ids already."""


@dataclass(frozen=True, kw_only=True)
class FoundTable:
    """A table of a collection."""

    stored: str  # its name in the package; two tables with the same weights share one
    config: BaseEmbeddingConfig
    pooling: Pooling  # how a bag becomes one vector; ``none``: it does not


@dataclass(frozen=True, kw_only=True)
class FoundCollection:
    """A collection of a module."""

    path: str  # its qualified name
    module: nn.Module
    kind: CollectionKind
    tables: tuple[FoundTable, ...]

    def lookups(self, treatments: Treatments) -> list[tuple[str, FeatureSpec]]:
        """Feature and lookup of every vector of the collection's output, in the output's order."""
        names = iter(embedding_names([table.config for table in self.tables]))
        specs = []
        for table in self.tables:
            for feature in table.config.feature_names:
                treatment = treatments.get(feature, IdTreatment())
                spec = FeatureSpec(
                    name=next(names),
                    group="id_list",
                    table=table.stored,
                    rows=table.config.num_embeddings,
                    dim=table.config.embedding_dim,
                    pooling=table.pooling,
                    hashing=treatment.hashing,
                    out_of_range=treatment.out_of_range,
                )
                specs.append((feature, spec))
        return specs


@dataclass(frozen=True, kw_only=True)
class CollectionKind:
    """One kind of module that holds embedding tables.

    Attributes:
        module: the class; its subclasses count as well.
        tables: the configs of such a module's tables, in its order, each with its weights
            ``[rows, dim]`` or with the rows that are stored already.
        packed: what stands in for such a module.  It takes and gives what the module does, in Python
            as well as while ``torch.fx`` traces it, and looks rows up in `StoredTables`.
        only_looks_up: whether what stands in does nothing with ids but look them up, so that the
            lookup may hash them.
    """

    module: type[nn.Module]
    tables: Callable[[Any], Sequence[tuple[BaseEmbeddingConfig, Tensor | QuantizedTable]]]
    packed: Callable[[FoundCollection, StoredTables, Treatments, LookupBackend], nn.Module]
    only_looks_up: Callable[[Any], bool] = lambda _: True
