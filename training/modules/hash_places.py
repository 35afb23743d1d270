"""The places of ids in a table of identities: where an id looks, where it is found, where a new one goes.

A table of identities has an id in each row, or `NO_ID`.  The rows are cut into buckets, and an id belongs to one.
It looks at ``P`` rows one after another (it probes them), from the row that its hash names, and around within the
rows of its bucket that are given to ids; the last rows of a bucket may be reserved for ids that have none.

Hash and probes are those of FBGEMM's ``zero_collision_hash``, so that tables of one program are read by the other.
That operator finds ids on every device; it places new ones on GPUs only, and there in no fixed order.  Our operators
``find_ids`` and ``learn_ids`` do both on CPUs and GPUs, with the rows that a loop over the ids gives.  Where they
are not built, `find_rows` uses FBGEMM's, and new ids are placed in `tessera.training.modules.hash_learning`.

Shapes: ``Z`` rows here, ``N`` ids, ``B`` buckets of the whole table, ``P`` probes.
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

    def rule(self) -> tuple[int, bool]:
        """How many ids one after another a bucket has, 0 if it has those of one remainder; and whether ids are divided."""
        return (self._range() if self._input_hash_size else 0), self._divides

    def buckets(self) -> tuple[Tensor, Tensor]:
        """The rows of each bucket of the whole table and its first one, ``[B]`` int64."""
        return self._zch_size_per_training_rank, self._train_rank_offsets

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


@dataclass(frozen=True)
class Layout:
    """How ids lie in the rows that are here.

    Attributes:
        mapper: gives each id its bucket.
        first_row: the first row of the whole table that is here.
        reserved: how many rows at the end of each bucket are for ids without one of their own; 0: none.
        probes: ``P``.
    """

    mapper: TrainInputMapper
    first_row: int
    reserved: int
    probes: int

    def of_operators(self) -> tuple[Tensor, Tensor, int, int, bool, int, int]:
        """The same as arguments of our operators, after the ids."""
        return (*self.mapper.buckets(), self.first_row, *self.mapper.rule(), self.reserved, self.probes)  # fmt: skip

    def of_ids(self, values: Tensor) -> "tuple[Tensor, Buckets]":
        """The ids ``[N]`` int64 as they stand in the table, and where they may be among the rows here."""
        ids, sizes, firsts = self.mapper(values, self.first_row or None)
        return ids, Buckets(sizes, firsts, self.reserved, self.probes)


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
    rows = rows_of_fbgemm(identities, ids, buckets)
    without = ids == NO_ID
    if bool(without.any()):  # the operator takes `NO_ID` for the id of an open row
        rows = torch.where(without, shared_rows(ids, buckets), rows)
    return rows


def rows_of_fbgemm(identities: Tensor, ids: Tensor, buckets: Buckets) -> Tensor:
    """As `find_rows`, but for ids `NO_ID`, which have the first open row where they look."""
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


def state_of(*tables: Tensor) -> tuple[int, ...]:
    """Numbers that are others after tables were written, or replaced."""
    return tuple(n for table in tables for n in (table.data_ptr(), table._version))  # noqa: SLF001 - torch has no public name


def has_operators(device: torch.device) -> bool:
    """Whether `find` and `learn` may be used on ``device``."""
    return device.type in {"cpu", "cuda"} and ops.is_built_for("learn_ids", device.type)


def find(identities: Tensor, values: Tensor, layout: Layout) -> Tensor:
    """The row of each id in the whole table, for one that has none its shared one, by our operator.

    Args:
        identities: ``[Z, 1]`` int64.
        values: ``[N]`` int64.
        layout: of the rows here.

    Returns:
        ``[N]`` int64; on a GPU, which is not waited for, -1 for an id of which the bucket is not here.

    Raises:
        RuntimeError: an id's bucket is not here, on a CPU.
    """
    rows: Tensor = torch.ops.tessera.find_ids(
        identities, values.contiguous(), *layout.of_operators()
    )
    return rows


@dataclass(frozen=True)
class Hours:
    """When the ids of a map expire.

    Attributes:
        last: ``[Z, 1]`` int32, 0 or more where there is an id: the hour in which each row's id expires.
        given: ``[N]`` int32, the same of the ids of a batch, or one hour for all of them.
        now: the hour; an id has expired if its hour is before it.
        oldest: whether an expired id's row is taken only if no row is open, and then that of the one that expired first.
    """

    last: Tensor
    given: Tensor | int
    now: int
    oldest: bool = False

    def of_each(self, ids: Tensor) -> Tensor:
        """`given` as a tensor, for these ids ``[N]``."""
        if isinstance(self.given, Tensor):
            return self.given
        return torch.full_like(ids, self.given, dtype=torch.int32)


def learn(
    identities: Tensor,
    values: Tensor,
    layout: Layout,
    hours: Hours | None = None,
    let_in: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Give new ids rows, note when ids came, and look them up, by our operator; a GPU is not waited for.

    New ids take rows one after another, in the order in which they came first: each the first open row among those
    where it looks.  A row whose id has expired is as good as an open one, but where `Hours.oldest` says else.

    Args:
        identities: ``[Z, 1]`` int64, changed in place.
        values: ``[N]`` int64.
        layout: of the rows here.
        hours: when ids expire, its ``last`` changed in place; None: never.
        let_in: ``[N]`` bool: an id may get a row if one of its occurrences says so; None: all say so.

    Returns:
        The row of each id in the whole table, ``[N]`` as of `find`; and the rows that another id had before, ``[E]``
        in the order in which they were given away, on a GPU with -1 between them.

    Raises:
        RuntimeError: an id's bucket is not here, on a CPU.
    """
    times: tuple[Tensor | int | bool | None, ...] = (None, None, 0, 0, False)
    if hours is not None and isinstance(hours.given, int):
        times = (hours.last, None, hours.given, hours.now, hours.oldest)
    elif hours is not None:
        times = (hours.last, hours.given, 0, hours.now, hours.oldest)
    rows, evicted = torch.ops.tessera.learn_ids(
        identities, values.contiguous(), *layout.of_operators(), *times, let_in
    )
    return rows, evicted
