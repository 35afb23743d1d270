"""What travels between the stages: a checked request, and its scores on the way back.

Legend: ``B`` samples of the request, ``F`` features of a group, ``N`` ids of a group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
Ids = NDArray[Any]  # int32 or int64, as the client sent them

NO_DEADLINE = math.inf


@dataclass(frozen=True, slots=True)
class JaggedGroup:
    """The ids of one group of features; every size has been checked.

    Attributes:
        lengths: ``[F * B]`` int32, feature-major, none negative.
        values: ``[sum(lengths)]`` int32 or int64, feature-major.
        weights: ``[sum(lengths)]`` float32, or None for a group without weights.
    """

    lengths: I32
    values: Ids
    weights: F32 | None


@dataclass(frozen=True, slots=True)
class DecodedRequest:
    """One request's samples, ready to be merged with others.

    Attributes:
        samples: ``B``.
        ids: ids of both groups together.
        dense: ``[B * F_dense]`` float32, row-major.
        id_list: the group without weights.
        id_score_list: the group with weights.
    """

    samples: int
    ids: int
    dense: F32
    id_list: JaggedGroup
    id_score_list: JaggedGroup


@dataclass(frozen=True, slots=True)
class BatchTimings:
    """How long the stages of one forward pass took (seconds), and who shared it."""

    assemble: float
    transfer: float
    forward: float
    split: float
    requests: int
    samples: int
    ids: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's scores.

    Attributes:
        outputs: by output name, the little-endian float32 bytes of ``[B]`` or ``[B, width]``.
        queue_seconds: from arrival to the worker.
        timings: of the forward pass; summed where the request needed several.
    """

    outputs: Mapping[str, bytes]
    queue_seconds: float
    timings: BatchTimings
