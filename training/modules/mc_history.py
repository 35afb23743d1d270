"""What came since the last change of a sorted map: the ids of the batches, and where they stand in the map.

The ids of a batch are looked up once, when the batch comes.  What a change of the map needs follows from the
places found then: an id that the map holds is known by its place, so that only the ids that it does not hold
have to be sorted, and the place of such an id says where it belongs among the others.

Shapes: ``N`` ids of a batch, ``H`` of the history, ``K`` ids in the map; ``V`` different ids of the history, the
``V_known`` that the map holds before the ``V_new`` others, both ascending.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """The ids of one batch.

    Attributes:
        ids: ``[N]`` int64.
        places: ``[N]`` int64, at how many ids of the map each is not below or equal: its place in the map, or
            the one where it would stand; from 0 to ``K``.
        slots: ``[N]`` int64, the place in the map; ``K`` where it does not hold the id.
        metadata: by name ``[N]`` int64, what a policy remembers of each.
    """

    ids: Tensor
    places: Tensor
    slots: Tensor
    metadata: dict[str, Tensor]


@dataclass(frozen=True)
class Coalesced:
    """The different ids of a history.

    Attributes:
        known_places: ``[V_known]`` the places of those that the map holds.
        new_ids: ``[V_new]`` the others.
        new_places: ``[V_new]`` how many ids of the map are below each of them; None where the map is sorted
            when it changes, see `merges`.
        counts: ``[V]`` how often each came.
        inverse: ``[H]`` which of the ``V`` each id of the history is.
        metadata: by name ``[H]`` int64.
    """

    known_places: Tensor
    new_ids: Tensor
    new_places: Tensor | None
    counts: Tensor
    inverse: Tensor
    metadata: dict[str, Tensor]


def in_one(parts: Sequence[Tensor]) -> Tensor:
    """Parts ``[n]`` behind one another; one part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def coalesced(history: Sequence[Batch], size: int) -> Coalesced:
    """The different ids of batches, at least one, that were looked up in a map of ``size`` (``K``) ids."""
    slots = in_one([batch.slots for batch in history])
    at = (slots == size).nonzero().squeeze(1)
    ids = in_one([batch.ids for batch in history]).index_select(0, at)
    new_ids, new_inverse = torch.unique(ids, return_inverse=True)
    new_places = None
    if merges(slots.device, size):
        places = in_one([batch.places for batch in history]).index_select(0, at)
        new_places = torch.empty_like(new_ids).scatter_(0, new_inverse, places)
    seen = torch.zeros(size + 1, dtype=torch.bool, device=slots.device).scatter_(
        0, slots, value=True
    )
    known_places = seen[:size].nonzero().squeeze(1)
    # What the last place gives is replaced below.
    inverse = (seen.cumsum(0) - 1).index_select(0, slots)
    inverse.scatter_(0, at, new_inverse.add_(known_places.numel()))
    return Coalesced(
        known_places,
        new_ids,
        new_places,
        _counts(inverse, known_places.numel() + new_ids.numel()),
        inverse,
        {name: in_one([batch.metadata[name] for batch in history]) for name in history[0].metadata},
    )


def _counts(places: Tensor, size: int) -> Tensor:
    """How often each of ``size`` places comes, int64 ``[size]``."""
    if places.device.type == "cpu":
        return torch.bincount(places, minlength=size)
    # An accelerator would be waited for twice, for the least and the greatest place.
    return places.new_zeros(size).scatter_add_(0, places, torch.ones_like(places))


_FEW_IDS = 4096  # a CPU sorts so many in the time of a merge's operations


def merges(device: torch.device, size: int) -> bool:
    """Whether a map of ``size`` ids is merged with new ones when it changes, and not sorted."""
    return device.type == "cpu" and size > _FEW_IDS


def replace_ids(
    sorted_ids: Tensor, others: Sequence[Tensor], replaced: Tensor, found: Coalesced, chosen: Tensor
) -> None:
    """Replace ids of a sorted map in place, and sort it again.

    Args:
        sorted_ids: ``[K]`` int64, ascending.
        others: each ``[K]`` int64, what belongs to the ids; moved along with their places.
        replaced: ``[E]`` the places of ids that are given up, each once.
        found: has the new ids.
        chosen: ``[E]`` which of them stand there instead, each once.
    """
    if found.new_places is not None:
        place_of_new = torch.full_like(found.new_ids, -1).index_copy_(0, chosen, replaced)
        ascending = (place_of_new >= 0).nonzero().squeeze(1)
        merge(
            sorted_ids,
            others,
            place_of_new[ascending],
            found.new_ids[ascending],
            found.new_places[ascending],
        )
    else:
        sort_with(sorted_ids, others, replaced, found.new_ids.index_select(0, chosen))


def sort_with(
    sorted_ids: Tensor, others: Sequence[Tensor], replaced: Tensor, new_ids: Tensor
) -> None:
    """`merge` of new ids in any order by a sort, which is a third of its operations."""
    sorted_ids.index_copy_(0, replaced, new_ids)
    in_order, places = sorted_ids.sort(stable=True)
    sorted_ids.copy_(in_order)
    for values in others:
        values.copy_(values.index_select(0, places))


def merge(
    sorted_ids: Tensor,
    others: Sequence[Tensor],
    replaced: Tensor,
    new_ids: Tensor,
    new_places: Tensor,
) -> None:
    """Replace ids of a sorted map in place, and sort it again, in a few passes where a sort takes many.

    Args:
        sorted_ids: ``[K]`` int64, ascending.
        others: each ``[K]`` int64, what belongs to the ids; moved along with their places.
        replaced: ``[E]`` the places of ids that are given up, each once.
        new_ids: ``[E]`` ascending, what stands there instead; none is in the map.
        new_places: ``[E]`` how many of ``sorted_ids`` are below each.
    """
    kept = torch.ones(sorted_ids.numel() + 1, dtype=torch.int64, device=sorted_ids.device)
    kept.index_fill_(0, replaced, 0)
    kept_before = kept.cumsum(0) - kept
    moved = kept_before.index_select(0, new_places)
    moved += torch.arange(new_ids.numel(), device=new_ids.device)
    new_before = torch.bincount(new_places, minlength=kept.numel()).cumsum(0)
    order = (kept_before + new_before)[:-1]
    order.index_copy_(0, replaced, moved)
    sorted_ids.index_copy_(0, replaced, new_ids)
    for values in (sorted_ids, *others):
        values.copy_(torch.empty_like(values).scatter_(0, order, values))
