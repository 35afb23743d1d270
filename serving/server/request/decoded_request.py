"""What travels between the stages: a checked request, and its scores on the way back.

None of these objects changes once it is made; they are not declared frozen because that
triples what making one costs, and every request makes several.

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

_DEADLINE_SLACK_SECONDS = 0.005
_DEADLINE_ROUNDING = 0.01


def ended_by_deadline(now: float, began: float, deadline: float) -> bool:
    """Whether a call that its client ended, ended because its deadline passed.

    The client's timer and our clock do not strike at the same instant, and gRPC tells us the time
    that the client gives in three digits, rounded up.

    Args:
        now: the clock when the call ended (seconds).
        began: when it came.
        deadline: as far as we know, or `NO_DEADLINE`.
    """
    timeout = deadline - began
    return now - began >= min(timeout - _DEADLINE_SLACK_SECONDS, timeout * (1 - _DEADLINE_ROUNDING))


@dataclass(slots=True, eq=False)
class JaggedGroup:
    """The ids of one group of features; every size has been checked.

    Attributes:
        lengths: ``[F * B]`` int32, feature-major, none negative; a feature of `SharedRows` has ``R``
            lengths instead of ``B``.
        values: ``[sum(lengths)]`` int32 or int64, feature-major.
        weights: ``[sum(lengths)]`` float32, or None for a group without weights.
    """

    lengths: I32
    values: Ids
    weights: F32 | None


@dataclass(slots=True, eq=False)
class SharedRows:
    """Which ``id_list`` features a request gives once for several of its samples.

    Attributes:
        features: ``[S]`` their places in the group, ascending; at least one.
        rows: ``R``, how many bags each of them has.
        index: ``[B]`` int32, the row of each sample, in ``[0, R)``.
    """

    features: tuple[int, ...]
    rows: int
    index: I32


@dataclass(slots=True, eq=False)
class DecodedRequest:
    """One request's samples, ready to be merged with others.

    Attributes:
        samples: ``B``.
        ids: ids of both groups together, as they are looked up.
        dense: ``[B * F_dense]`` float32, row-major.
        id_list: the group without weights.
        id_score_list: the group with weights.
        shared: features of ``id_list`` that samples share; None where every sample has its own.
    """

    samples: int
    ids: int
    dense: F32
    id_list: JaggedGroup
    id_score_list: JaggedGroup
    shared: SharedRows | None = None


@dataclass(slots=True, eq=False)
class PassTimings:
    """How long the stages of one forward pass took (seconds), who shared it, and the commit that it saw."""

    assemble: float
    transfer: float
    forward: float
    split: float
    requests: int
    samples: int
    ids: int
    commit: int = 0


@dataclass(slots=True, eq=False)
class Answer:
    """One request's scores.

    Attributes:
        outputs: by output name, the little-endian float32 bytes of ``[B]`` or ``[B, width]``.
        queue_seconds: from arrival to the worker.
        timings: of the forward pass; summed where the request needed several.
    """

    outputs: Mapping[str, bytes]
    queue_seconds: float
    timings: PassTimings
