"""Bags as parts of one array."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def bag_places(starts: npt.NDArray[np.int64], lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The places ``starts[i]`` to ``starts[i] + lengths[i] - 1`` of every ``i``, one after the other."""
    ends = np.cumsum(lengths, dtype=np.int64)
    shifts = starts - (ends - lengths)  # from a place in the result to a place in the array
    places = np.arange(ends[-1] if len(ends) else 0, dtype=np.int64)
    found: npt.NDArray[np.int64] = places + np.repeat(shifts, lengths)
    return found
