"""FBGEMM's lookup operator behind `tessera.serving.packaging.lookups.backends.LookupBackend`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.serving.package.schema import FeatureSpec
from tessera.serving.packaging.lookups.tessera_plan import columns_of
from tessera.serving.packaging.tables.stored import StoredTables
from tessera.training.modules.hashing import FeatureHasher, HashSpec
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

_FBGEMM_HOST = 3  # fbgemm's EmbeddingLocation.HOST
_FBGEMM_FLOAT32 = 0  # fbgemm's SparseType of the output
_FBGEMM_SUM = 0
_FBGEMM_MEAN = 1
_FBGEMM_NONE = 2


class _FbgemmTables(nn.Module):
    """The operator's many arguments that follow from features and tables, each in one piece."""

    def __init__(self, tables: StoredTables, features: Sequence[FeatureSpec]) -> None:
        super().__init__()
        if len(tables.buffers) > 1:
            raise UserError("--shards needs the tessera backend; package with --backend tessera")
        stored = [tables.table(feature.table) for feature in features]
        dims = [feature.dim for feature in features]
        offsets, codes = [], []
        for table in stored:
            (piece,) = table.pieces
            offsets.append(piece.data_offset - table.kind.header_bytes)
            codes.append(table.kind.fbgemm_code)
        self._names = [feature.name for feature in features]
        self._total_dim = sum(dims)
        self.hasher = FeatureHasher([HashSpec.of(feature) for feature in features])
        self._largest_dim = {
            bits: max([table.info.dim for table in stored if table.kind.bits == bits], default=0)
            for bits in (2, 4, 8, 16, 32)
        }
        self.register_buffer("rows", tables.buffers[0])
        self.register_buffer("no_rows", torch.empty(0, dtype=torch.uint8))
        self.register_buffer("table_offsets", torch.tensor(offsets))
        self.register_buffer("column_bounds", torch.tensor([0, *accumulate(dims)]).int())
        self.register_buffer("row_types", torch.tensor(codes, dtype=torch.uint8))
        self.register_buffer(
            "locations", torch.full((len(features),), _FBGEMM_HOST, dtype=torch.int32)
        )

    def call(
        self, raw: KeyedJaggedTensor, offsets: Tensor, weights: Tensor | None, pooling: int
    ) -> Tensor:
        """Hash the raw ids and look them up."""
        found: Tensor = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
            dev_weights=self.rows,
            uvm_weights=self.no_rows,
            weights_placements=self.locations,
            weights_offsets=self.table_offsets,
            weights_tys=self.row_types,
            D_offsets=self.column_bounds,
            total_D=self._total_dim,
            max_int2_D=self._largest_dim[2],
            max_int4_D=self._largest_dim[4],
            max_int8_D=self._largest_dim[8],
            max_float16_D=self._largest_dim[16],
            max_float32_D=self._largest_dim[32],
            indices=self.hasher(raw).values(),
            offsets=offsets,
            pooling_mode=pooling,
            indice_weights=weights,
            output_dtype=_FBGEMM_FLOAT32,
            row_alignment=1,
        )
        return found


class FbgemmLookup(_FbgemmTables):
    """One call of FBGEMM's operator for all features.

    The operator pools all features alike.  Where some are summed and some averaged, it sums,
    and the averaged features' columns are divided by their bags' lengths afterwards.  It writes
    the features in the order of the ids; where another is asked for, the columns are gathered.
    """

    def __init__(
        self, tables: StoredTables, features: Sequence[FeatureSpec | None], names: Sequence[str]
    ) -> None:
        wanted = [feature for feature in features if feature is not None]
        super().__init__(tables, wanted)
        dims = {feature.name: feature.dim for feature in wanted}
        averaged = [feature.pooling == "mean" for feature in wanted]
        self._pooling = _FBGEMM_MEAN if all(averaged) else _FBGEMM_SUM
        self._mixed = any(averaged) and not all(averaged)
        # The ids' names, and the places of those that are looked up.
        self._given = [str(place) if f is None else f.name for place, f in enumerate(features)]
        self._places = [place for place, f in enumerate(features) if f is not None]
        self.averaged: Tensor
        self.feature_of_column: Tensor
        if self._mixed:
            widths = torch.tensor(list(dims.values()))
            self.register_buffer("averaged", torch.tensor(averaged).unsqueeze(1))
            self.register_buffer(
                "feature_of_column", torch.arange(len(dims)).repeat_interleave(widths)
            )
        self.columns: Tensor
        self._reorder = list(names) != self._names
        if self._reorder:
            begins = columns_of(wanted, self._names)
            columns = [torch.arange(begins[name], begins[name] + dims[name]) for name in names]
            self.register_buffer("columns", torch.cat(columns))

    def forward(self, ids: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
        """See `LookupBackend.lookup`."""
        if self._given != self._names:
            every = KeyedJaggedTensor(self._given, ids, weights, lengths)
            wanted = every.permute(self._places)
            ids, lengths, weights = wanted.values(), wanted.lengths(), wanted.weights_or_none()
        # The operator wants ids and offsets of one type, and rows are int64.
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.long())
        raw = KeyedJaggedTensor(self._names, ids, lengths=lengths, offsets=offsets)
        pooled = self.call(raw, offsets, weights, self._pooling)
        if self._mixed:
            lengths_FB = lengths.reshape(len(self._names), -1).clamp(min=1)
            divisors = torch.where(self.averaged, lengths_FB, 1).float()
            pooled = pooled / divisors.t().index_select(1, self.feature_of_column)
        return pooled.index_select(1, self.columns) if self._reorder else pooled


class FbgemmRows(_FbgemmTables):
    """One call of FBGEMM's operator for the vectors of each id, unpooled."""

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """See `LookupBackend.lookup_rows`."""
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.long())
        raw = KeyedJaggedTensor(self._names, ids, lengths=lengths, offsets=offsets)
        return self.call(raw, offsets, None, _FBGEMM_NONE)
