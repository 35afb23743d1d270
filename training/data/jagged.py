"""Bags of ids as parts of one long array."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def gather_bags(
    values: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int32],
) -> npt.NDArray[np.int64]:
    """``values[starts[i] : starts[i] + lengths[i]]`` for every ``i``, one after the other.

    Args:
        values: ``[N]``.
        starts: ``[B]``, where each bag begins in ``values``.
        lengths: ``[B]``.

    Returns:
        ``[sum(lengths)]``.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    shifts = starts - (ends - lengths)  # from a place in the result to a place in `values`
    places = np.arange(ends[-1] if len(ends) else 0, dtype=np.int64)
    gathered: npt.NDArray[np.int64] = values[places + np.repeat(shifts, lengths)]
    return gathered
