"""The words of a lookup's plan: its columns, and the numbers that stand in them.

A plan is an int64 tensor ``[F, PLAN_COLUMNS]`` with one row for each feature.  The C++ record
``FeaturePlan`` is generated from `PlanRow` (``kernels/row_header.py``), and the numbers of the
enums below are those of ``csrc/plan.h``.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, NamedTuple

from torch import Tensor


class PlanRow(NamedTuple):
    """One feature's row of a plan; each column has its unit or its meaning."""

    data_offset: Annotated[int, "bytes"]
    row_stride: Annotated[int, "bytes"]
    rows: Annotated[int, "1 to 2^31 - 1"]
    dim: Annotated[int, "columns, >= 1"]
    weight_type: Annotated[int, "WeightType"]
    scale_offset: Annotated[int, "bytes; unused under kNoScale"]
    scale_stride: Annotated[int, "bytes"]
    scale_type: Annotated[int, "ScaleType"]
    out_column: Annotated[int, "first output column, elements"]
    pooling: Annotated[int, "Pooling"]
    id_rule: Annotated[int, "IdRule"]
    out_of_range: Annotated[int, "OutOfRange"]
    reciprocal: Annotated[int, "floor((2^64 - 1) / rows), its bits as int64"]
    scale_shift: Annotated[int, "row r uses scale number r >> scale_shift; 0: a scale per row"]
    launch_order: Annotated[int, "of plan row k: the feature that a GPU starts k-th; a permutation"]


PLAN_COLUMNS = len(PlanRow._fields)


def plan_column(name: str) -> int:
    """The number of the column that `PlanRow` calls ``name``."""
    return PlanRow._fields.index(name)


def plan_rows(plan: Tensor) -> list[PlanRow]:
    """The rows of a plan ``[F, PLAN_COLUMNS]``."""
    return [PlanRow(*row) for row in plan.tolist()]


BOOK_SCALES = 16
"""Scales of a table whose rows are blocks."""


class ScaleType(IntEnum):
    """How a row's scale and bias are stored, side by side."""

    NONE = 0
    FLOAT16 = 1
    FLOAT32 = 2
    BOOK = 3
    """16 float32 scales per table, no bias; each block of a row tells its scale"""


class Pooling(IntEnum):
    """How the vectors of a bag become one."""

    SUM = 0
    MEAN = 1


class IdRule(IntEnum):
    """How a raw id becomes a row (the rules of `tessera.serving.package.schema.FeatureSpec`)."""

    NONE = 0
    MODULO = 1
    MURMUR3 = 2


class OutOfRange(IntEnum):
    """What becomes of an id outside ``[0, rows)`` under `IdRule.NONE`."""

    CLAMP = 0
    ZERO = 1
    """contributes nothing; under mean pooling it still counts as an id"""
    HASH = 2


# By what a feature's description says.
ID_RULES = {"none": IdRule.NONE, "modulo": IdRule.MODULO, "murmur3": IdRule.MURMUR3}
# A server refuses what is to be rejected; should such an id come here, it takes the nearest row.
OUT_OF_RANGE = {
    "reject": OutOfRange.CLAMP,
    "clamp": OutOfRange.CLAMP,
    "hash": OutOfRange.HASH,
}


def scale_bytes(scale_type: ScaleType) -> int:
    """Bytes of one pair of scale and bias, or of a table's book."""
    return 4 * BOOK_SCALES if scale_type is ScaleType.BOOK else 4 * int(scale_type)
