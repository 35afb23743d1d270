"""Tessera's own operators behind `tessera.serving.packaging.lookup.LookupBackend`.

One call hashes the ids, keeps them inside their tables, looks up and pools all features, and
writes each vector to its place in the output; a second one computes DLRM's dot products; a third
is the dense layer.  Each computes a sample's numbers in an order of its own, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, fx, nn

from tessera.errors import UserError
from tessera.kernels.tables import (
    MAX_ROWS,
    FeatureLookup,
    IdRule,
    OutOfRange,
    Pooling,
    WeightType,
    fbgemm_place,
    make_plan,
)
from tessera.serving.packaging.pack import pack_panels
from tessera.serving.packaging.quantize import StoredTables
from tessera.serving.packaging.same_bits import remove_padding
from tessera.serving.schema import FeatureSpec

_WEIGHT_TYPES = {
    "int8": WeightType.INT8,
    "int4": WeightType.INT4,
    "fp16": WeightType.FLOAT16,
    "fp32": WeightType.FLOAT32,
}
_POOLINGS = {"sum": Pooling.SUM, "mean": Pooling.MEAN}
_ID_RULES = {"none": IdRule.NONE, "modulo": IdRule.MODULO, "murmur3": IdRule.MURMUR3}
# A server refuses what is to be rejected; should such an id come here, it takes the nearest row.
_OUT_OF_RANGE = {
    "reject": OutOfRange.CLAMP,
    "clamp": OutOfRange.CLAMP,
    "hash": OutOfRange.HASH,
}


class TesseraBackend:
    """The operators ``torch.ops.tessera.*`` (`tessera.kernels.ops`)."""

    name: str = "tessera"
    operator_libraries: tuple[str, ...] = ("tessera_ops",)

    def lookup(
        self, tables: StoredTables, features: Sequence[FeatureSpec], names: Sequence[str]
    ) -> nn.Module:
        """See `LookupBackend.lookup`."""
        return TesseraLookup(tables, features, names)

    def interaction(self) -> nn.Module | None:
        """See `LookupBackend.interaction`."""
        return TesseraInteraction()

    def pack(self, graph: fx.GraphModule) -> None:
        """All layers become ``tessera::linear``; nothing then needs a padded batch."""
        pack_panels(graph)
        remove_padding(graph)


class TesseraLookup(nn.Module):
    """One call of ``tessera::lookup`` for everything between raw ids and pooled vectors.

    Args:
        tables: the stored rows, read where they are.
        features: in the order of the ids.
        names: the same features in the order of the output's columns.

    Raises:
        UserError: a table of more than `MAX_ROWS` rows.
    """

    def __init__(
        self, tables: StoredTables, features: Sequence[FeatureSpec], names: Sequence[str]
    ) -> None:
        super().__init__()
        dims = {feature.name: feature.dim for feature in features}
        ends = list(accumulate(dims[name] for name in names))
        columns = {name: end - dims[name] for name, end in zip(names, ends, strict=True)}
        self._width = ends[-1]
        self.rows: Tensor
        self.plan: Tensor
        self.register_buffer("rows", tables.data)
        self.register_buffer(
            "plan",
            make_plan([_feature(tables, feature, columns[feature.name]) for feature in features]),
        )

    def forward(self, ids: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
        """See `LookupBackend.lookup`."""
        pooled: Tensor = torch.ops.tessera.lookup(
            self.rows, self.plan, ids, lengths, self._width, weights
        )
        return pooled


def _feature(tables: StoredTables, feature: FeatureSpec, column: int) -> FeatureLookup:
    if feature.rows > MAX_ROWS:
        raise UserError(
            f"table {feature.table!r} has {feature.rows} rows; the tessera backend takes up to "
            f"{MAX_ROWS}: package with --backend fbgemm"
        )
    stored = tables.table(feature.table)
    return FeatureLookup(
        table=fbgemm_place(
            offset=stored.offset,
            row_stride=stored.row_bytes,
            rows=feature.rows,
            dim=feature.dim,
            weight_type=_WEIGHT_TYPES[tables.kind.name],
        ),
        out_column=column,
        pooling=_POOLINGS[feature.pooling],
        id_rule=_ID_RULES[feature.hashing],
        out_of_range=_OUT_OF_RANGE[feature.out_of_range],
    )


class TesseraInteraction(nn.Module):
    """DLRM's dot interaction as one operator: no stacking, no square product, no gather."""

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """``[B, D]`` and ``[B, F, D]`` to ``[B, D + P]``, as `InteractionArch`."""
        vectors: Tensor = torch.ops.tessera.dot_interaction(
            dense_features, sparse_features.flatten(1)
        )
        return vectors
