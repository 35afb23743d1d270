"""Which ids of a map give their places up to which new ones, by the scores of both."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_FEW_SCORES = 1500  # a CPU sorts so many in the time of the operations that part them


def exchanged(scores_K: Tensor, scores_N: Tensor) -> tuple[Tensor, Tensor]:
    """Which of ``K`` that have a place give it up to which of ``N`` that have none.

    As many of all ``K + N`` as there are places keep or get one: those with the highest scores; of
    equal scores the ``K`` before the ``N``, and the lower index first.

    Returns:
        ``[E]`` indices among the ``K`` and ``[E]`` among the ``N``, both in that order.
    """
    K, N = scores_K.numel(), scores_N.numel()
    if K == 0 or N == 0:
        nothing = torch.empty(0, dtype=torch.int64, device=scores_K.device)
        return nothing, nothing
    parts = scores_K.device.type == "cpu" and K + N > _FEW_SCORES
    return (
        exchanged_by_parts(scores_K, scores_N) if parts else exchanged_by_sort(scores_K, scores_N)
    )


def exchanged_by_sort(scores_K: Tensor, scores_N: Tensor) -> tuple[Tensor, Tensor]:
    """`exchanged` of at least one each, in one sort; a device is waited for once."""
    K = scores_K.numel()
    order = by_falling(torch.cat([scores_K, scores_N]))
    of_N = order >= K
    crossed = torch.cat([of_N[:K], ~of_N[K:]])
    chosen_E, places_E = order.masked_select(crossed).view(2, -1).unbind(0)
    return places_E, chosen_E - K


def exchanged_by_parts(scores_K: Tensor, scores_N: Tensor) -> tuple[Tensor, Tensor]:
    """`exchanged` of at least one each on the CPU, where a sort of all takes longer than parting them."""
    N = scores_N.numel()
    # As many as there are new ones go.  Whatever scores below the last of them goes, too; of those that score
    # as it does first the new ones, then those that have a place, the higher index first.
    bound = _nth_lowest(torch.cat([scores_K, scores_N]), N)
    goes_K, goes_N = scores_K < bound, scores_N < bound
    equal_N = (scores_N == bound).nonzero().squeeze(1)
    left = N - int(goes_K.sum()) - int(goes_N.sum())
    from_N = min(left, equal_N.numel())
    goes_N[equal_N[equal_N.numel() - from_N :]] = True
    if left > from_N:
        equal_K = (scores_K == bound).nonzero().squeeze(1)
        goes_K[equal_K[equal_K.numel() - left + from_N :]] = True
    places_E = goes_K.nonzero().squeeze(1)
    chosen_E = (~goes_N).nonzero().squeeze(1)
    return (
        places_E.index_select(0, by_falling(scores_K.index_select(0, places_E))),
        chosen_E.index_select(0, by_falling(scores_N.index_select(0, chosen_E))),
    )


def _nth_lowest(scores: Tensor, n: int) -> Tensor:
    """The ``n``-th lowest of at least ``n`` scores on the CPU, from 1; a tensor without dimensions."""
    # Ten times as fast as torch's kthvalue.
    return torch.from_numpy(np.partition(scores.numpy(), n - 1))[n - 1]


def by_falling(scores: Tensor) -> Tensor:
    """The order that sorts scores, the highest first, equal ones by index.

    On the CPU it sorts by rising negative scores: there torch sorts falling integers by comparison, rising ones by
    their digits.
    """
    if scores.device.type == "cpu":
        return scores.neg().argsort(stable=True)
    return scores.argsort(descending=True, stable=True)
