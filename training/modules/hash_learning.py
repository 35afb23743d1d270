"""Training steps of a hash-based map in operations of whole tensors, on devices for which our operators are not built.

A step gives the rows that our operator ``learn_ids`` gives, see `tessera.training.modules.hash_places`, and waits for
a GPU several times.  Tests hold the operator against it.

Shapes: ``Z`` rows here, ``N`` ids of a batch, ``U`` different new ids in the order in which they came, ``P`` probes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from tessera.training.modules.hash_places import (
    NO_ID,
    NO_ROW,
    Buckets,
    Hours,
    murmur3_words,
    rows_of_fbgemm,
    shared_rows,
    state_of,
)
from tessera.training.modules.hashing import unsigned_remainder

_NEVER = torch.iinfo(torch.int64).max
_WITHOUT = 2**32  # stands for one id of value `NO_ID` in a sum that has 1 for each new id
_CHUNK = 4096  # new ids that are placed at once: 4 MiB of preferences at 128 probes
_REFUSED_IDS = 2**18  # so many ids without a row are remembered, or as many as there are rows


@dataclass(frozen=True)
class Placed:
    """What rows new ids got.

    Attributes:
        rows: ``[U]`` int64 of each id, or `NO_ROW`.
        evicted: ``[E]`` int64, those that another id had before, in the order in which they were given away.
    """

    rows: Tensor
    evicted: Tensor


class Refused:
    """Ids for which there was no row.

    Args:
        values: ``[R]`` int64, at least one, each once.
    """

    def __init__(self, values: Tensor) -> None:
        ids = values.sort().values
        # What is above all of them is looked for behind them, where the least stands again.
        self._ids = torch.cat([ids, ids[:1]])

    @property
    def values(self) -> Tensor:
        """The ids ``[R]``, ascending."""
        return self._ids[:-1]

    def holds(self, values: Tensor) -> Tensor:
        """Whether each of ``values`` ``[N]`` int64 is one of them, ``[N]`` bool."""
        places = torch.searchsorted(self.values, values)
        return self._ids.index_select(0, places) == values


@dataclass(frozen=True)
class Found:
    """Where the ids of a batch stand.

    Attributes:
        rows: ``[N]``, for an id that has none its shared one.
        known: ``[N]`` bool, whether it has one of its own.
        new: ``[N]`` bool, whether it is to get one; None: none is.
        new_count: how many are to get one.
    """

    rows: Tensor
    known: Tensor
    new: Tensor | None
    new_count: int


def look_up(
    identities: Tensor,
    ids: Tensor,
    buckets: Buckets,
    values: Tensor | None = None,
    refused: Refused | None = None,
) -> Found:
    """`find_rows`, and which ids are new; a device is waited for once where none is, and else twice.

    Args:
        identities: ``[Z, 1]`` int64.
        ids: ``[N]`` int64.
        buckets: of each.
        values: ``[N]`` int64, the ids as they were given; needed with ``refused``.
        refused: values that are not new, as there is no row for them.

    Raises:
        UserError: FBGEMM is not installed or does not load.
    """
    if not ids.numel():
        return Found(ids, ids == NO_ID, None, 0)
    rows = rows_of_fbgemm(identities, ids, buckets)
    without = ids == NO_ID
    known = identities[:, 0].index_select(0, rows) == ids
    settled = torch.gt(known, without)
    if refused is not None and values is not None:
        settled |= refused.holds(values)
    if bool(settled.all()):
        return Found(rows, known, None, 0)
    new = ~(settled | without)
    counts = int(
        torch.where(without, _WITHOUT, new).sum()
    )  # of those without an id and of new ones
    if counts >= _WITHOUT:  # the operator takes `NO_ID` for the id of an open row
        rows = torch.where(without, shared_rows(ids, buckets), rows)
        known = known & ~without
    return Found(rows, known, new, counts % _WITHOUT)


def place(identities: Tensor, ids: Tensor, buckets: Buckets, hours: Hours | None = None) -> Placed:
    """Give new ids rows, one id after another: each takes the first open row among those where it looks.

    A row whose id has expired is as good as an open one, but where `Hours.oldest` says else.

    Args:
        identities: ``[Z, 1]`` int64, changed in place.
        ids: ``[U]`` int64, different ones that are not in the table.
        buckets: of each.
        hours: when ids expire, its ``last`` changed in place; None: never.
    """
    rows: list[Tensor] = []
    evicted: list[Tensor] = []
    of_ids = None if hours is None else hours.of_each(ids)
    for chunk in torch.split(torch.arange(ids.numel(), device=ids.device), _CHUNK):
        places, outside = _places(ids[chunk], buckets.of(chunk))
        there = identities[:, 0][places]
        probe = torch.arange(buckets.probes, device=ids.device)
        wishes = torch.where((there == NO_ID) & ~outside, probe, _NEVER)
        if hours is not None and of_ids is not None:
            before = hours.last[:, 0][places].long()
            expired = (there != NO_ID) & ~outside & (before < hours.now)
            expired &= before < of_ids[chunk].unsqueeze(1)
            by_age = (before + 1) * buckets.probes + probe  # after every open row
            wishes = torch.where(expired, by_age if hours.oldest else probe, wishes)
        won = _assigned(wishes, places)
        got = (won >= 0).nonzero().squeeze(1)
        given = won[got]
        rows.append(won)
        evicted.append(given[identities[given, 0] != NO_ID])
        identities[given, 0] = ids[chunk][got]
        if hours is not None and of_ids is not None:
            hours.last[given, 0] = of_ids[chunk][got]
    nothing = ids.new_empty(0)
    return Placed(torch.cat([nothing, *rows]), torch.cat([nothing, *evicted]))


def _places(ids: Tensor, buckets: Buckets) -> tuple[Tensor, Tensor]:
    """The rows where ids look, ``[N, P]`` in their order, and which of them come a second time."""
    sizes = (buckets.sizes - buckets.reserved).unsqueeze(1)
    first = unsigned_remainder(murmur3_words(ids), sizes.squeeze(1)).unsqueeze(1)
    probe = torch.arange(buckets.probes, device=ids.device)
    return (first + probe) % sizes + buckets.firsts.unsqueeze(1), probe >= sizes


def _assigned(wishes: Tensor, places: Tensor) -> Tensor:
    """One of its places for each of ``C`` ids, ``[C]``, or `NO_ROW`: what they get if they choose one after another.

    All ask at once for the place that they want most, the earliest id of each place keeps it for now, and the
    others ask for the next on their lists.  Since every place prefers earlier ids, this ends with what a loop
    over the ids gives (D. Gale, L. Shapley, College admissions and the stability of marriage, 1962).

    Args:
        wishes: ``[C, P]`` int64, the smallest is wanted most; `_NEVER`: not at all.  Changed.
        places: ``[C, P]`` rows.
    """
    best = wishes.argmin(1)
    asking = torch.arange(len(wishes), device=wishes.device)
    rows = torch.full_like(best, NO_ROW)
    while asking.numel():
        choice = best[asking]
        wanted = wishes[asking, choice] != _NEVER
        rows[asking] = torch.where(wanted, places[asking, choice], NO_ROW)
        having = (rows >= 0).nonzero().squeeze(1)
        sorted_rows, order = rows[having].sort(stable=True)
        asking = having[order[1:][sorted_rows[1:] == sorted_rows[:-1]]]
        wishes[asking, best[asking]] = _NEVER
        best[asking] = wishes[asking].argmin(1)
    return rows


class StepsInTensors:
    """The training steps of one map, which remembers ids for which there was no row.

    No id gives up its row but when an hour has passed, so these ids are not tried again in the same hour.
    """

    def __init__(self) -> None:
        self.refused: Refused | None = None
        self._state: tuple[int, ...] = ()

    @torch.no_grad()
    def learn(
        self,
        identities: Tensor,
        values: Tensor,
        own: Tensor,
        buckets: Buckets,
        *,
        hours: Hours | None = None,
        let_in: Tensor | None = None,
    ) -> Placed:
        """Give new ids rows, and note when ids came.

        Args:
            identities: ``[Z, 1]`` int64, changed in place.
            values: ``[N]`` int64, the ids as they were given.
            own: ``[N]`` the same as they stand in the table.
            buckets: of each.
            hours: when ids expire, its ``last`` changed in place; None: never.
            let_in: ``[N]`` bool: an id may get a row if one of its occurrences says so; None: all say so.

        Returns:
            The row of each id, for one that has none its shared one, and the rows that another id had before.

        Raises:
            UserError: FBGEMM is not installed or does not load.
        """
        refused = self._refused_now(identities, hours)
        found = look_up(identities, own, buckets, values, refused)
        if hours is not None:
            hours = replace(hours, given=hours.of_each(values))
            came = hours.of_each(values)
            if found.new is not None or refused is not None:
                came = torch.where(found.known, came, torch.iinfo(torch.int32).min)
            hours.last[:, 0].scatter_reduce_(0, found.rows, came, "amax")
        rows, evicted = found.rows, own.new_empty(0)
        if found.new is not None and found.new_count:
            new = torch.nonzero_static(found.new, size=found.new_count).squeeze(1)
            chosen, number, times = _chosen(values, new, hours, let_in)
            placed = place(identities, own[chosen], buckets.of(chosen), times)
            got = functional.pad(placed.rows, (0, 1), value=NO_ROW).index_select(0, number)
            rows = rows.index_copy(0, new, torch.where(got == NO_ROW, rows[new], got))
            evicted = placed.evicted
            if let_in is None:  # else each occurrence is a draw
                without = values[chosen][placed.rows == NO_ROW]
                refused = _with_more(refused, without, max(identities.size(0), _REFUSED_IDS))
        self.refused, self._state = refused, _state_of(identities, hours)
        return Placed(rows, evicted)

    def _refused_now(self, identities: Tensor, hours: Hours | None) -> Refused | None:
        """Ids for which there was no row, and still is none."""
        return self.refused if self._state == _state_of(identities, hours) else None


def _state_of(identities: Tensor, hours: Hours | None) -> tuple[int, ...]:
    """Tells whether the table was written, or an hour has passed."""
    return (0, *state_of(identities)) if hours is None else (hours.now, *state_of(identities, hours.last))  # fmt: skip


def _with_more(refused: Refused | None, more: Tensor, most: int) -> Refused | None:
    """Ids for which there is no row, the newest alone if there are too many of them."""
    if not more.numel():
        return refused
    if refused is not None and refused.values.numel() + more.numel() <= most:
        more = torch.cat([refused.values, more])
    return Refused(more)


def _chosen(
    values: Tensor, new: Tensor, hours: Hours | None, let_in: Tensor | None
) -> tuple[Tensor, Tensor, Hours | None]:
    """Which new ids are to get rows.

    Args:
        values: ``[N]`` ids.
        new: ``[n]`` the places of those that are new, ascending.
        hours: of all ids, or None.
        let_in: as of `StepsInTensors.learn`.

    Returns:
        The places of ids that are to get rows, each where it came first, in that order; for each of ``new`` the number
        of its id among those, ``[n]``, or how many there are if it is to get none; and the latest hour of each id.
    """
    ids, inverse = torch.unique(values[new], return_inverse=True)
    came = torch.full_like(ids, values.numel()).scatter_reduce_(0, inverse, new, "amin")
    order = came.argsort()
    if let_in is not None:
        may = torch.zeros_like(ids).scatter_reduce_(0, inverse, let_in[new].long(), "amax")
        order = order[may[order] > 0]
    if hours is not None:
        given = hours.of_each(values)
        latest = given.new_zeros(ids.size()).scatter_reduce_(0, inverse, given[new], "amax")
        hours = replace(hours, given=latest[order])
    numbers = torch.full_like(ids, order.numel())
    numbers[order] = torch.arange(order.numel(), device=ids.device)
    return came[order], numbers.index_select(0, inverse), hours
