"""Quantized rows of several tables on one device, looked up in one operator call.

Legend: ``T`` features (one per looked-up column block), ``B`` samples, ``N`` ids, ``D`` columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tessera.errors import refuse_unknown
from tessera.training.fbgemm import import_inference_tables
from tessera.training.modules.embedding_configs import DataType
from tessera.training.quant.rows import (
    DEFAULT_ROW_ALIGNMENT,
    STORED_TYPES,
    aligned_row_bytes,
    check_stored,
)

_TABLE_ALIGNMENT = 128  # bytes; as FBGEMM begins its tables
_DEVICE, _HOST = 0, 3  # FBGEMM's EmbeddingLocation
_SUM, _NONE = 0, 2  # FBGEMM's PoolingMode
_OUTPUT_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 5}  # FBGEMM's SparseType


@dataclass(frozen=True)
class RowsOf:
    """A table, or the part of one, that is stored."""

    name: str
    rows: int
    dim: int
    data_type: DataType
    features: int  # how many look up here


@dataclass(frozen=True, kw_only=True)
class StoredPart:
    """A block of a table where it is stored.

    Attributes:
        rows: ``[rows, row bytes]`` uint8: the whole row's scale and bias, the numbers of the
            block's columns, and padding.
    """

    table: str
    device: int  # from 0 on
    row: int  # the first, in the table
    column: int  # the first
    columns: int
    rows: Tensor


class QuantizedRows:
    """The rows and the one operator call.

    It is not a module: the collection that owns it registers `tables` as its buffers, so that its
    state dict has one entry per table.

    Args:
        tables: the parts, in the order of the output's columns.
        pooled: whether the vectors of a bag are added up.
        output_dtype: of the vectors: float32, float16 or bfloat16.
        device: where the rows live.
        row_alignment: bytes that the length of a row is a multiple of.

    Attributes:
        output_dtype, row_alignment: as given.
        row_counts: ``[T]`` int64, rows of each feature's part.

    Raises:
        UserError: a type or width that is not stored, or an output type that is not written.
    """

    def __init__(
        self,
        tables: Sequence[RowsOf],
        *,
        pooled: bool,
        output_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        row_alignment: int = DEFAULT_ROW_ALIGNMENT,
    ) -> None:
        refuse_unknown("quantized lookups: output dtype", output_dtype, _OUTPUT_CODES)
        import_inference_tables()
        self._parts = list(tables)
        self._pooling = _SUM if pooled else _NONE
        self.output_dtype = output_dtype
        self.row_alignment = row_alignment
        kinds = [check_stored(part.name, part.dim, part.data_type) for part in tables]
        self._row_bytes = [
            aligned_row_bytes(kind, part.dim, row_alignment)
            for kind, part in zip(kinds, tables, strict=True)
        ]
        sizes = [
            -(-part.rows * row // _TABLE_ALIGNMENT) * _TABLE_ALIGNMENT
            for part, row in zip(tables, self._row_bytes, strict=True)
        ]
        self._starts = [0, *accumulate(sizes)]
        features = [index for index, part in enumerate(tables) for _ in range(part.features)]
        self._columns = [tables[index].dim for index in features]
        self._widest = {
            kind: max([part.dim for part in tables if part.data_type is kind], default=0)
            for kind in STORED_TYPES
        }
        self._feature_parts = features
        self._rows = torch.zeros(self._starts[-1], dtype=torch.uint8, device=device)
        self._describe()

    def _describe(self) -> None:
        """What the operator wants to know of the rows, where they are now."""
        device = self._rows.device
        parts = [self._parts[index] for index in self._feature_parts]
        starts = [self._starts[index] for index in self._feature_parts]
        codes = [STORED_TYPES[part.data_type].fbgemm_code for part in parts]
        location = _HOST if device.type == "cpu" else _DEVICE
        int32, int64, uint8 = torch.int32, torch.int64, torch.uint8
        self._no_rows = torch.empty(0, dtype=uint8, device=device)
        # FBGEMM's cache has two dimensions, also where there is none.
        self._no_cache = torch.empty(0, 0, dtype=uint8, device=device)
        self._no_locations = torch.empty(0, dtype=int32, device=device)
        self._offsets = torch.tensor(starts, dtype=int64, device=device)
        self._codes = torch.tensor(codes, dtype=uint8, device=device)
        self._locations = torch.full((len(parts),), location, dtype=int32, device=device)
        bounds = [0, *accumulate(self._columns)]
        self._bounds = torch.tensor(bounds, dtype=int32, device=device)
        row_counts = [part.rows for part in parts]
        self.row_counts = torch.tensor(row_counts, dtype=int64, device=device)
        self._warnings = torch.zeros(1, dtype=int64, device=device)

    @property
    def device(self) -> torch.device:
        """Where the rows live."""
        return self._rows.device

    def parts(self) -> list[RowsOf]:
        """What is stored."""
        return self._parts

    def tables(self) -> list[Tensor]:
        """The stored rows of each part, ``[rows, row bytes]`` uint8 views."""
        return [
            self._rows[start : start + part.rows * row].view(part.rows, row)
            for start, part, row in zip(self._starts, self._parts, self._row_bytes, strict=False)
        ]

    def apply(self, change: Callable[[Tensor], Tensor]) -> None:
        """Move the rows as ``nn.Module.to`` and its relatives ask."""
        self._rows = change(self._rows)
        self._describe()

    def checked(self, ids: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and offsets that the operator can read without harm; see `checked_ids`."""
        found: tuple[Tensor, Tensor] = checked_ids(self.row_counts, ids, offsets, self._warnings)
        return found[0], found[1]

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Look up, and add up what is pooled.

        Args:
            ids: ``[N]`` int64, features in the parts' order; -1 has no vector.
            offsets: ``[T * B + 1]`` int64.
            weights: ``[N]`` float32, or None for ones.

        Returns:
            ``[B, sum of D]`` pooled, ``[N, D]`` not pooled.
        """
        found: Tensor = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
            dev_weights=self._rows,
            uvm_weights=self._no_rows,
            weights_placements=self._locations,
            weights_offsets=self._offsets,
            weights_tys=self._codes,
            D_offsets=self._bounds,
            total_D=sum(self._columns),
            max_int2_D=self._widest[DataType.INT2],
            max_int4_D=self._widest[DataType.INT4],
            max_int8_D=self._widest[DataType.INT8],
            max_float16_D=self._widest[DataType.FP16],
            max_float32_D=self._widest[DataType.FP32],
            indices=ids,
            offsets=offsets,
            pooling_mode=self._pooling,
            indice_weights=weights,
            output_dtype=_OUTPUT_CODES[self.output_dtype],
            lxu_cache_weights=self._no_cache,
            lxu_cache_locations=self._no_locations,
            row_alignment=self.row_alignment,
        )
        return found


def ids_are_rows(row_counts: Tensor, ids: Tensor, offsets: Tensor) -> bool:
    """Whether every id is a row or -1, in one pass over ids on the CPU; see `checked_ids`."""
    fatal = 0  # FBGEMM's BoundsCheckMode.FATAL
    try:
        torch.ops.fbgemm.bounds_check_indices(
            row_counts, ids, offsets, fatal, torch.zeros(1, dtype=torch.int64), None
        )
    except RuntimeError:
        return False
    return True


def checked_ids(
    row_counts: Tensor, ids: Tensor, offsets: Tensor, warnings: Tensor
) -> tuple[Tensor, Tensor]:
    """Copies of ids and offsets without those that would read past the tables.

    For devices and graphs, where nothing is raised: row 0 takes the place of an id that is
    not a row, with one warning.  -1 stays, and has no vector.

    Args:
        row_counts: ``[T]`` int64, rows of each feature's table.
        ids: ``[N]`` int64.
        offsets: ``[T * B + 1]`` int64.
        warnings: ``[1]`` int64, counts the ids that were replaced.
    """
    own_ids, own_offsets = ids.clone(), offsets.clone()
    warn = 1  # FBGEMM's BoundsCheckMode.WARNING
    torch.ops.fbgemm.bounds_check_indices(row_counts, own_ids, own_offsets, warn, warnings, None)
    return own_ids, own_offsets


# One step of a traced graph, whose result is used: nothing can take it for dead code.
torch.fx.wrap("checked_ids")
