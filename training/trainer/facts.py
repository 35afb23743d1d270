"""Facts of a finished run, by which it is compared with others."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from torch import nn

from tessera.training.data.dataset import View

HASH_LETTERS = 16


def label_hash(view: View) -> str:
    """A hash of the names, the tasks and the values of the labels of a split, in the order of its rows.

    Two runs whose hashes are the same were evaluated on the same labels; on the same rows, too, unless
    the rows' labels agree one by one by chance.
    """
    digest = hashlib.sha256()
    for label in view.dataset.columns.labels:
        digest.update(f"{label.name}:{label.task};".encode())
    digest.update(np.ascontiguousarray(view.labels(), dtype="<f4").tobytes())
    return digest.hexdigest()[:HASH_LETTERS]


def count_parameters(model: nn.Module) -> int:
    """How many numbers are trained, over all ranks: tables that are spread over them count once.

    Every rank must call it.
    """
    buffers = {name for name, _ in model.named_buffers()}
    return sum(
        math.prod(value.size()) for name, value in model.state_dict().items() if name not in buffers
    )
