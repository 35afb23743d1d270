"""Memory that is used again, window after window."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class Room:
    """Memory that windows of an epoch use one after the other.

    Memory that is new to the process has to be cleared by the system page by page, which took longer
    than all else that is done to a shuffled window.
    """

    def __init__(self) -> None:
        self._blocks: list[npt.NDArray[np.uint8]] = []
        self._used = 0

    def array(self, count: int, dtype: Any) -> npt.NDArray[Any]:
        """A one-dimensional array of anything, until `begin` is called."""
        size = count * np.dtype(dtype).itemsize
        if self._used == len(self._blocks):
            self._blocks.append(np.empty(0, np.uint8))
        if len(self._blocks[self._used]) < size:
            self._blocks[self._used] = np.empty(0, np.uint8)  # before the larger one is made
            self._blocks[self._used] = np.empty(size, np.uint8)
        block = self._blocks[self._used]
        self._used += 1
        return block[:size].view(dtype)

    def begin(self) -> None:
        """All arrays that were given out are free again."""
        self._used = 0
