"""What `tessera schema` shows of a column: its range, lengths and examples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tessera.training.data.table.settle import is_list


def is_number(kind: Any) -> bool:
    """Whether a column of this Arrow type holds numbers."""
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
    )


def seen(known: Any, items: Any) -> str:
    """The range of the values, or how long the lists are; ``items`` are those of all lists."""
    if is_list(known.type) or pa.types.is_map(known.type):
        lengths = np.array([len(cell) for cell in known.to_pylist()] or [0])
        return f"lengths {lengths.min()} to {lengths.max()}, {lengths.mean():.1f} on average"
    if not len(items) or not (is_number(items.type) or pa.types.is_temporal(items.type)):
        return ""
    ends = pc.min_max(items)
    low, high = ends["min"].as_py(), ends["max"].as_py()
    if isinstance(low, float) and not (math.isfinite(low) and math.isfinite(high)):
        return "with infinite values"
    shown = [f"{end:.6g}" if isinstance(end, float) else str(end) for end in (low, high)]
    return f"{shown[0]} to {shown[1]}"


def examples(known: Any) -> str:
    """The first values, each cut to what fits into a table."""
    shown = [str(cell.as_py())[:24] for cell in known[:3]]
    return ", ".join(shown)
