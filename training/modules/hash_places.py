"""The places of ids in a table of identities: where an id looks, where it is found, where a new one goes.

A table of identities has an id in each row, or `NO_ID`.  The rows are cut into buckets, and an id belongs to one.
It looks at ``P`` rows one after another (it probes them), from the row that its hash names, and around within the
rows of its bucket that are given to ids; the last rows of a bucket may be reserved for ids that have none.

Hash and probes are those of FBGEMM's ``zero_collision_hash``, so that tables of one program are read by the other.
That operator finds ids on every device; it places new ones on GPUs only, and there in no fixed order.  `find_rows`
uses it; `place` is ours, and gives on every device what a loop over the ids gives.  Where our operators are built it is that loop
on CPUs, and on GPUs the ids' claims for rows all at once.

Shapes: ``Z`` rows here, ``N`` ids, ``U`` different new ids in the order in which they came, ``P`` probes.
Source of the hash: MurmurHash3's 128-bit variant for 64-bit machines (Austin Appleby, public domain), of the
two words ``(id, 0)``; the two words of its result are joined by exclusive or.
"""

# Annotations are not postponed here: torch.fx hands them on to TorchScript, which needs types.

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.kernels import ops
from tessera.training.fbgemm import load_sparse_operators
from tessera.training.modules.hashing import fmix64, unsigned_remainder

NO_ID = -1
"""Stands in the table where there is no id; as an id of a batch it never has a row of its own."""

NO_ROW = -1
"""Stands for the row of an id that got none."""

_NEVER = torch.iinfo(torch.int64).max
_WITHOUT = 2**32  # stands for one id of value `NO_ID` in a sum that has 1 for each new id
_CHUNK = 4096  # new ids that are placed at once: 4 MiB of preferences at 128 probes
# Multipliers of MurmurHash3, as the int64 with the same bits: 0x87C37B91114253D5, 0x4CF5AD432745937F.
_C1, _C2 = -8663945395140668459, 5545529020109919103


def murmur3_words(ids: Tensor) -> Tensor:
    """The hash of each id (int64, any shape), a uint64 in the bits of an int64."""
    word = ids * _C1
    word = ((word << 31) | ((word >> 33) & 0x7FFFFFFF)) * _C2
    word = (word << 27) | ((word >> 37) & 0x7FFFFFF)
    first = word * 5 + 0x52DCE729
    second = (first * 5 + 0x38495AB5) ^ 16
    first = (first ^ 16) + second
    second = fmix64(second + first)
    first = fmix64(first) + second
    return first ^ (second + first)


class TrainInputMapper(nn.Module):
    """The bucket of each id.

    Args:
        input_hash_size: ids are in ``[0, input_hash_size)``, and each bucket is a range of them; 0: any int64 is an
            id, and its bucket is its remainder.
        total_num_buckets: how many buckets the whole table has.
        size_per_rank: ``[buckets]`` int64 rows of each.
        train_rank_offsets: ``[buckets]`` int64, its first row.
        inference_dispatch_div_train_world_size: whether ids are divided by the number of buckets (or taken as
            places in their ranges), which they were not before.
        name: of the table, for messages.

    Raises:
        UserError: fewer than one bucket.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        input_hash_size: int,
        total_num_buckets: int,
        size_per_rank: Tensor,
        train_rank_offsets: Tensor,
        inference_dispatch_div_train_world_size: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        name: str | None = None,
    ) -> None:
        super().__init__()
        if total_num_buckets < 1:
            raise UserError(
                f"total_num_buckets of {name or 'a table'} is {total_num_buckets}; give 1 or more"
            )
        self._input_hash_size, self._buckets = input_hash_size, total_num_buckets
        self._divides = inference_dispatch_div_train_world_size
        self._sizes, self._firsts = size_per_rank.tolist(), train_rank_offsets.tolist()
        size = self._sizes[0] if self._sizes else 0
        even = [size * bucket for bucket in range(len(self._sizes))]
        is_even = self._sizes == [size] * len(even) and self._firsts == even
        self._even_size = (
            size if is_even else None
        )  # of every bucket, where each begins at the end of another
        self.register_buffer("_zch_size_per_training_rank", size_per_rank, persistent=False)
        self.register_buffer("_train_rank_offsets", train_rank_offsets, persistent=False)
        self._zch_size_per_training_rank: Tensor
        self._train_rank_offsets: Tensor

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Write the buckets' sizes and first rows anew."""
        self._zch_size_per_training_rank.copy_(torch.tensor(self._sizes))
        self._train_rank_offsets.copy_(torch.tensor(self._firsts))

    def _range(self) -> int:
        return -(-self._input_hash_size // self._buckets)

    def bucket(self, values: Tensor) -> Tensor:
        """The bucket of each id ``[N]`` int64; for one outside of ``[0, input_hash_size)`` always the same."""
        if self._input_hash_size:
            values = torch.div(values, self._range(), rounding_mode="floor")
        return torch.remainder(values, self._buckets)

    def forward(
        self, values: Tensor, output_offset: Tensor | int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Where ids may be.

        Args:
            values: ``[N]`` int64.
            output_offset: the first row that is here; None: 0.

        Returns:
            The ids, and for each the rows of its bucket and its first one among the rows here; all ``[N]`` int64.
        """
        bucket = self.bucket(values)
        if self._divides and self._input_hash_size:
            values = torch.remainder(values, self._range())
        elif self._divides:
            values = torch.div(values, self._buckets, rounding_mode="floor")
        if self._even_size is None:
            sizes = self._zch_size_per_training_rank.index_select(0, bucket)
            firsts = self._train_rank_offsets.index_select(0, bucket)
        else:
            sizes, firsts = torch.full_like(bucket, self._even_size), bucket * self._even_size
        if output_offset is not None:
            firsts = firsts - output_offset
        return values, sizes, firsts


def even_bounds(rows: int, buckets: int, of: str) -> list[int]:
    """The first row of each of ``buckets`` equal buckets, and the end.

    Raises:
        UserError: they do not divide ``rows``; ``of`` names the table.
    """
    if buckets < 1 or rows < 1 or rows % buckets:
        raise UserError(
            f"zch_size {of} is {rows}, which total_num_buckets={buckets} does not divide; give a number of "
            "buckets that does"
        )
    return [rows // buckets * bucket for bucket in range(buckets + 1)]


def reserved_rows(sizes: list[int], opt_in_prob: int, percent: float, of: str) -> int:
    """How many rows of each bucket are reserved; arguments are those of the module, and ``of`` names the table.

    Raises:
        UserError: none, where there should be some, or all.
    """
    if opt_in_prob == -1:
        if percent:
            raise UserError(
                f"percent_reserved_slots {of} is {percent} without opt_in_prob; give opt_in_prob=100 to let every id in"
            )
        return 0
    reserved = math.floor(min(sizes) * percent / 100)
    if not 0 < opt_in_prob <= 100 or not 0 < reserved < min(sizes):
        raise UserError(
            f"opt_in_prob {of} is {opt_in_prob} and percent_reserved_slots {percent}, of buckets of {min(sizes)} "
            "rows and more; give 1 to 100, and enough percent to reserve a row of each bucket and not all"
        )
    return reserved


@dataclass(frozen=True)
class Buckets:
    """Where the ids of a call may be.

    Attributes:
        sizes: ``[N]`` rows of each id's bucket.
        firsts: ``[N]`` its first row.
        reserved: how many rows at the end of each bucket are for ids without one of their own; 0: none.
        probes: ``P``.
    """

    sizes: Tensor
    firsts: Tensor
    reserved: int
    probes: int

    def of(self, chosen: Tensor) -> "Buckets":
        """The buckets of some of the ids, which are given by index ``[U]``."""
        return Buckets(self.sizes[chosen], self.firsts[chosen], self.reserved, self.probes)


def shared_rows(ids: Tensor, buckets: Buckets) -> Tensor:
    """The row of each id ``[N]`` that has none of its own: a reserved one, or else the first where it looks."""
    words = murmur3_words(ids)
    if not buckets.reserved:
        return unsigned_remainder(words, buckets.sizes) + buckets.firsts
    reserved = torch.full_like(buckets.sizes, buckets.reserved)
    rows = unsigned_remainder(words, reserved)
    return buckets.sizes - buckets.reserved + rows + buckets.firsts


def find_rows(identities: Tensor, ids: Tensor, buckets: Buckets) -> Tensor:
    """The rows ``[N]`` where ids stand, by FBGEMM's operator; for an id that has none its shared one.

    A device is waited for once.

    Args:
        identities: ``[Z, 1]`` int64.
        ids: ``[N]`` int64.
        buckets: of each.

    Raises:
        UserError: FBGEMM is not installed or does not load.
    """
    if not ids.numel():
        return ids
    rows = _rows_of_operator(identities, ids, buckets)
    without = ids == NO_ID
    if bool(without.any()):  # the operator takes `NO_ID` for the id of an open row
        rows = torch.where(without, shared_rows(ids, buckets), rows)
    return rows


def _rows_of_operator(identities: Tensor, ids: Tensor, buckets: Buckets) -> Tensor:
    """As `find_rows`, but for ids `NO_ID`."""
    load_sparse_operators()
    reserved = buckets.reserved
    rows: Tensor = torch.ops.fbgemm.zero_collision_hash(
        input=ids,
        identities=identities,
        max_probe=buckets.probes,
        circular_probe=True,
        readonly=True,
        local_sizes=buckets.sizes,
        offsets=buckets.firsts,
        opt_in_prob=100 if reserved else -1,
        num_reserved_slots=reserved or -1,
    )[0]
    return rows


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
    rows = _rows_of_operator(identities, ids, buckets)
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


@dataclass(frozen=True)
class Expiry:
    """When ids expire.

    Attributes:
        last_hours: ``[Z, 1]`` int32, 0 or more where there is an id: the hour in which each row's id expires.
        hours: ``[U]`` int32, the same of new ids.
        now: the hour; an id has expired if its hour is before it.
        oldest: whether an expired id's row is taken only if no row is open, and then that of the one that expired first.
    """

    last_hours: Tensor
    hours: Tensor
    now: int
    oldest: bool = False


@dataclass(frozen=True)
class Placed:
    """What rows new ids got.

    Attributes:
        rows: ``[U]`` int64 of each id, or `NO_ROW`.
        evicted: ``[E]`` int64, those that another id had before, in the order in which they were given away.
    """

    rows: Tensor
    evicted: Tensor


def takes_repeated_ids(device: torch.device) -> bool:
    """Whether `place` on ``device`` may be given an id several times: each gets what the id gets, with its latest hour."""
    return device.type in {"cpu", "cuda"} and ops.is_built_for("place_ids", device.type)


def place(
    identities: Tensor, ids: Tensor, buckets: Buckets, expiry: Expiry | None = None
) -> Placed:
    """Give new ids rows, one id after another: each takes the first open row among those where it looks.

    A row whose id has expired is as good as an open one, but where `Expiry.oldest` says else.

    Args:
        identities: ``[Z, 1]`` int64, changed in place.
        ids: ``[U]`` int64 that are not in the table, different ones but where `takes_repeated_ids`.
        buckets: of each.
        expiry: when ids expire, its ``last_hours`` changed in place; None: never.
    """
    if not takes_repeated_ids(ids.device):
        return place_at_once(identities, ids, buckets, expiry)
    sizes, firsts, limits = buckets.sizes, buckets.firsts, (buckets.reserved, buckets.probes)
    times = () if expiry is None else (expiry.last_hours, expiry.hours, expiry.now, expiry.oldest)
    operator = torch.ops.tessera.place_ids
    return Placed(*operator(identities, ids.contiguous(), sizes, firsts, *limits, *times))


def place_at_once(
    identities: Tensor, ids: Tensor, buckets: Buckets, expiry: Expiry | None = None
) -> Placed:
    """`place` of different ids in operations of whole tensors, on every device."""
    rows: list[Tensor] = []
    evicted: list[Tensor] = []
    for chunk in torch.split(torch.arange(ids.numel(), device=ids.device), _CHUNK):
        places, outside = _places(ids[chunk], buckets.of(chunk))
        there = identities[:, 0][places]
        probe = torch.arange(buckets.probes, device=ids.device)
        wishes = torch.where((there == NO_ID) & ~outside, probe, _NEVER)
        if expiry is not None:
            before = expiry.last_hours[:, 0][places].long()
            expired = (there != NO_ID) & ~outside & (before < expiry.now)
            expired &= before < expiry.hours[chunk].unsqueeze(1)
            by_age = (before + 1) * buckets.probes + probe  # after every open row
            wishes = torch.where(expired, by_age if expiry.oldest else probe, wishes)
        won = _assigned(wishes, places)
        got = (won >= 0).nonzero().squeeze(1)
        given = won[got]
        rows.append(won)
        evicted.append(given[identities[given, 0] != NO_ID])
        identities[given, 0] = ids[chunk][got]
        if expiry is not None:
            expiry.last_hours[given, 0] = expiry.hours[chunk][got]
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
