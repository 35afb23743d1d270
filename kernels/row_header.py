"""Generate what C++ and the command line read of the row types (``--write``), or check it.

Written are ``csrc/row_types.h``, with the enum `WeightType`, the sizes of rows and the record of a
plan's row, and ``row_type_names.py``, with the names that the command line offers before torch is
loaded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any, get_type_hints

from tessera.kernels.plan import (
    PLAN_COLUMNS,
    IdRule,
    OutOfRange,
    PlanRow,
    Pooling,
    ScaleType,
)
from tessera.kernels.row_types import ROW_TYPES, RowType, kernel_types

FOLDER = Path(__file__).resolve().parent
REWRITE = "make row-types"
_SCALE_TYPES = {
    ScaleType.NONE: "kNoScale",
    ScaleType.FLOAT16: "kHalfScale",
    ScaleType.FLOAT32: "kFloatScale",
    ScaleType.BOOK: "kScaleBook",
}
_POOLINGS = {Pooling.SUM: "kSum", Pooling.MEAN: "kMean"}
_ID_RULES = {IdRule.NONE: "kIdIsRow", IdRule.MODULO: "kModulo", IdRule.MURMUR3: "kMurmur3"}
_OUT_OF_RANGE = {
    OutOfRange.CLAMP: "kClamp",
    OutOfRange.ZERO: "kZero",
    OutOfRange.HASH: "kHash",
}

_HEADER = Template("""\
// Generated from kernels/row_types.py and kernels/plan.py by
// `$rewrite`; not to be edited.
//
// Plain C++: no torch header, usable in device code.
// clang-format off
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define TESSERA_ANY_DEVICE __host__ __device__
#else
// Files for several instruction sets include this: no copy may be shared by them.
#define TESSERA_ANY_DEVICE [[gnu::always_inline]]
#endif

// X(type) for every weight type, in the order of their numbers.
#define TESSERA_WEIGHT_TYPES(X) $each

namespace tessera {

// How a row's numbers are stored.  The values are part of the package format.
enum WeightType : int64_t {
$types
};
constexpr int64_t kWeightTypes = $count;

// How scale and bias of a row are stored: both absent, both fp16 (4 bytes), both fp32 (8 bytes), or
// as a book of 16 float32 scales per table without biases (rows in blocks and nothing else).
enum ScaleType : int64_t { $scale_types };
constexpr int64_t kScaleTypes = $scale_count;

enum Pooling : int64_t { $poolings };
constexpr int64_t kPoolings = $pooling_count;

// How a raw id becomes a row.
enum IdRule : int64_t { $id_rules };
constexpr int64_t kIdRules = $id_rule_count;

// What becomes of an id outside [0, rows) under kIdIsRow: nearest row, no contribution,
// murmur3(id) mod rows.  All three are counted where the caller asks for counts.
enum OutOfRange : int64_t { $out_of_range };
constexpr int64_t kOutOfRanges = $out_of_range_count;

// Bits of one number.
TESSERA_ANY_DEVICE constexpr int64_t number_bits(int64_t weight_type) {
  switch (static_cast<WeightType>(weight_type)) {
$bits
  }
  return 0;  // not a weight type
}

// Bytes that the data of one row takes, without scale and padding.
TESSERA_ANY_DEVICE constexpr int64_t row_data_bytes(int64_t weight_type, int64_t dim) {
  switch (static_cast<WeightType>(weight_type)) {
$data_bytes
  }
  return 0;  // not a weight type
}

// The scales that a type's rows have in a package.
TESSERA_ANY_DEVICE constexpr ScaleType scale_rule(int64_t weight_type) {
  switch (static_cast<WeightType>(weight_type)) {
$rules
  }
  return kNoScale;  // not a weight type
}

// One row of a plan.
struct FeaturePlan {
$fields
};

constexpr int64_t kPlanColumns = $columns;
static_assert(sizeof(FeaturePlan) == kPlanColumns * sizeof(int64_t), "a plan row is a record");

}  // namespace tessera
""")


def header() -> str:
    """The text of ``csrc/row_types.h``.

    Raises:
        ValueError: the kernel numbers have a gap.
    """
    types = kernel_types()
    if [kind.kernel_number for kind in types] != list(range(len(types))):
        taken = ", ".join(str(kind.kernel_number) for kind in types)
        raise ValueError(f"kernel numbers are {taken}; give them without a gap from 0 on")
    return _HEADER.substitute(
        rewrite=REWRITE,
        each=" ".join(f"X({kind.kernel})" for kind in types),
        types="\n".join(
            f"  {kind.kernel} = {kind.kernel_number},  // {kind.summary}" for kind in types
        ),
        count=len(types),
        scale_types=_enumerators(_SCALE_TYPES),
        scale_count=len(ScaleType),
        poolings=_enumerators(_POOLINGS),
        pooling_count=len(Pooling),
        id_rules=_enumerators(_ID_RULES),
        id_rule_count=len(IdRule),
        out_of_range=_enumerators(_OUT_OF_RANGE),
        out_of_range_count=len(OutOfRange),
        bits=_cases({kind.kernel: str(kind.bits) for kind in types}),
        data_bytes=_cases({kind.kernel: _data_bytes(kind) for kind in types}),
        rules=_cases({kind.kernel: _SCALE_TYPES[kind.scale] for kind in types}),
        fields="\n".join(
            f"  int64_t {name};  // {hint.__metadata__[0]}"
            for name, hint in get_type_hints(PlanRow, include_extras=True).items()
        ),
        columns=PLAN_COLUMNS,
    )


def _enumerators(names: Mapping[Any, str]) -> str:
    return ", ".join(f"{name} = {int(value)}" for value, name in names.items())


def _cases(results: Mapping[str, str]) -> str:
    return "\n".join(f"    case {kernel}: return {text};" for kernel, text in results.items())


def _data_bytes(kind: RowType) -> str:
    group_bytes, group = kind.data_bytes(kind.group_columns), kind.group_columns
    groups = "dim" if group == 1 else f"(dim + {group - 1}) / {group}"
    return groups if group_bytes == 1 else f"{groups} * {group_bytes}"


def names() -> str:
    """The text of ``row_type_names.py``."""
    entries = [f'    "{kind.name}": "{kind.needs}",' for kind in ROW_TYPES.values()]
    return "\n".join(
        [
            '"""Generated from kernels/row_types.py by `' + REWRITE + '`; not to be edited."""',
            "",
            "ROW_TYPE_NEEDS = {",
            *entries,
            "}",
            '"""What each row type needs, by its name; empty where it can be used everywhere."""',
            "",
        ]
    )


def generated() -> dict[Path, str]:
    """The generated files with their texts."""
    return {FOLDER / "csrc" / "row_types.h": header(), FOLDER / "row_type_names.py": names()}


def main() -> None:
    """Write or compare the generated files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the files (default: compare)")
    args = parser.parse_args()
    for path, text in generated().items():
        if args.write:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"{path.name} is not what the row types generate; run {REWRITE}")


if __name__ == "__main__":
    main()
