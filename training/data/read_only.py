"""Arrays that are only read, as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def read_only_tensor(array: NDArray[Any]) -> Tensor:
    """A view of memory that is only read; torch would warn that it is not writable."""
    return torch.from_numpy(np.asarray(_Writable(array)))


class _Writable:
    """An array as one that may be written to, for numpy, which keeps this and so the array."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
