"""Bags as parts of one array."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def bag_places(starts: npt.NDArray[np.int64], lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The places ``starts[i]`` to ``starts[i] + lengths[i] - 1`` of every ``i``, one after the other."""
    filled = lengths > 0
    if not filled.all():
        starts, lengths = starts[filled], lengths[filled]
    if not len(starts):
        return np.empty(0, np.int64)
    # Steps of one, but from the end of a bag to the beginning of the next.
    ends = np.cumsum(lengths, dtype=np.int64)
    places = np.ones(ends[-1], np.int64)
    places[0] = starts[0]
    places[ends[:-1]] = starts[1:] - (starts[:-1] + lengths[:-1] - 1)
    return np.cumsum(places, out=places)
