"""Multi-probe managed collisions (MPZCH): ids find their rows by hashing, and rows are given in the step itself.

Where `MCHManagedCollisionModule` compares what came in several steps and searches a sorted map, this module asks at
few rows, named by the id's hash, whether they are the id's or open (`tessera.training.modules.hash_places`).  A step
costs time by its ids and not by the table.  The table is cut into buckets, and where an id is depends on its bucket
alone: parts of a table that hold whole buckets, on any number of ranks, are put together and cut anew freely.

Which ids give up their rows is told by `tessera.training.modules.hash_mc_evictions`.

Shapes: ``Z`` rows of the table here, ``N`` ids of a batch.
"""

# Annotations are not postponed here: torch.fx hands them on to TorchScript, which needs types.

import warnings
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.training.modules import hash_places
from tessera.training.modules.hash_learning import StepsInTensors
from tessera.training.modules.hash_mc_evictions import (
    EvictedRows,
    HashZchEvictionConfig,
    HashZchEvictionModule,
    HashZchEvictionPolicyName,
    current_hour,
    get_kernel_from_policy,
)
from tessera.training.modules.hash_places import (
    NO_ID,
    Hours,
    Layout,
    TrainInputMapper,
    even_bounds,
    reserved_rows,
)
from tessera.training.modules.id_search import find
from tessera.training.modules.mc_base import Features, ManagedCollisionModule, with_values
from tessera.training.sparse.checks import values_are_unknown


class HashZchManagedCollisionModule(ManagedCollisionModule):
    """Maps ids to rows by hashing with several probes, and gives open and expired rows to new ids.

    In training each call gives its new ids rows, one after another in the order in which they come, and then looks
    its ids up; an id of the call does not give up its row in it.  An id for which no row is left shares one: one of
    the reserved rows of its bucket, or without such the first row where it looks.  In evaluation nothing changes.
    Id -1 never has a row of its own.

    Args:
        zch_size: ``Z``.
        device: where the table of identities lies.
        total_num_buckets: of the whole table; ranks have an equal number each.
        max_probe: at how many rows an id looks.
        input_hash_size: see `TrainInputMapper`.
        output_segments: where each bucket of the whole table begins, and the end; None: they are equally large.
        is_inference: whether the module begins in the mode of `reset_inference_mode`.
        name: of the table, for messages.
        tb_logging_frequency: without effect; a warning tells so.
        eviction_policy_name: which ids give up their rows; None: none does.
        eviction_config: how long ids live; needed with a policy.
        inference_dispatch_div_train_world_size: see `TrainInputMapper`.
        start_bucket, end_bucket: those here, as `rebuild_with_output_id_range` gives them; None: the last.
        opt_in_prob: percent of an id's occurrences that let it have a row; -1: every one, and no reserved rows.
        percent_reserved_slots: percent of each bucket's rows that ids without one of their own share; with
            ``opt_in_prob``.
        read_only_suffix: features of which the names end so are looked up and get no new rows.
        persist_hash_zch_bucket: whether the number of buckets is part of the state.

    A call costs up to ``max_probe`` comparisons an id.  Memory: 8 bytes a row, with a policy 12.  The host does not wait
    for a GPU for which our operators are built, but in `evict` after a step in which an id may have expired.

    Raises:
        UserError: a number that does not fit the others, or a policy without times to live.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        zch_size: int,
        device: torch.device,
        total_num_buckets: int,
        max_probe: int = 128,
        input_hash_size: int = 0,
        output_segments: list[int] | None = None,
        is_inference: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        name: str | None = None,
        tb_logging_frequency: int = 0,
        eviction_policy_name: HashZchEvictionPolicyName | None = None,
        eviction_config: HashZchEvictionConfig | None = None,
        inference_dispatch_div_train_world_size: bool = False,  # noqa: FBT001, FBT002 - as above
        start_bucket: int = 0,
        end_bucket: int | None = None,
        opt_in_prob: int = -1,
        percent_reserved_slots: float = 0,
        *,
        read_only_suffix: str = "_readonly",
        persist_hash_zch_bucket: bool = True,
    ) -> None:
        device = torch.device(device)
        of = f"of {name}" if name else "of a table without a name"
        bounds = output_segments or even_bounds(zch_size, total_num_buckets, of)
        end_bucket = total_num_buckets if end_bucket is None else end_bucket
        super().__init__(device, bounds, skip_state_validation=True)
        sizes = [end - first for first, end in pairwise(bounds)]
        self._reserved = reserved_rows(sizes, opt_in_prob, percent_reserved_slots, of)
        if len(sizes) != total_num_buckets or bounds[end_bucket] - bounds[start_bucket] != zch_size:
            raise UserError(
                f"zch_size {of} is {zch_size}, its {total_num_buckets} buckets have bounds {bounds}; give "
                "output_segments that fit, or leave them out"
            )
        if max_probe < 1:
            raise UserError(f"max_probe {of} is {max_probe}; give 1 or more")
        if tb_logging_frequency:
            warnings.warn("tb_logging_frequency has no effect; leave it out", stacklevel=2)
        self._rebuilt: dict[str, Any] = {
            "total_num_buckets": total_num_buckets,
            "max_probe": max_probe,
            "input_hash_size": input_hash_size,
            "output_segments": bounds,
            "is_inference": is_inference,
            "name": name,
            "eviction_policy_name": eviction_policy_name,
            "eviction_config": eviction_config,
            "inference_dispatch_div_train_world_size": inference_dispatch_div_train_world_size,
            "opt_in_prob": opt_in_prob,
            "percent_reserved_slots": percent_reserved_slots,
            "read_only_suffix": read_only_suffix,
            "persist_hash_zch_bucket": persist_hash_zch_bucket,
        }
        self._zch_size, self._buckets, self._name = zch_size, total_num_buckets, name
        self._start_bucket, self._end_bucket = start_bucket, end_bucket
        self._first_row, self._input_hash_size = bounds[start_bucket], input_hash_size
        self._max_probe, self._opt_in_prob = min(max_probe, max(sizes)), opt_in_prob
        self._read_only_suffix = read_only_suffix
        self._eviction_policy_name, self._eviction_config = eviction_policy_name, eviction_config
        self._eviction_module = (
            None
            if eviction_policy_name is None
            else HashZchEvictionModule(eviction_policy_name, device, eviction_config)
        )
        self._is_inference = False
        empty = torch.empty(zch_size, 1, dtype=torch.int64, device=device)
        self.register_buffer("_hash_zch_identities", empty)
        self._hash_zch_identities: Tensor
        self.register_buffer(
            "_hash_zch_metadata", None if eviction_policy_name is None else empty.int()
        )
        self._hash_zch_metadata: Tensor | None
        self.register_buffer(
            "_hash_zch_bucket",
            torch.empty(1, 1, dtype=torch.int64, device=device),
            persistent=persist_hash_zch_bucket,
        )
        self._hash_zch_bucket: Tensor
        # The table by id, for graphs, which cannot loop over probes; filled when a graph is made.
        self.register_buffer("_sorted_ids", empty.new_empty(0), persistent=False)
        self.register_buffer("_sorted_rows", empty.new_empty(0), persistent=False)
        self._sorted_ids: Tensor
        self._sorted_rows: Tensor
        self.input_mapper = TrainInputMapper(
            input_hash_size,
            total_num_buckets,
            torch.tensor(sizes, device="cpu"),
            torch.tensor(bounds[:-1], device="cpu"),
            inference_dispatch_div_train_world_size,
            name,
        ).to(device)
        self._evicted = EvictedRows()
        self._in_tensors = StepsInTensors()
        self.register_load_state_dict_pre_hook(_without_metadata)  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.register_load_state_dict_post_hook(lambda module, _: module.purge())  # type: ignore[no-untyped-call] # as above
        self.reset_parameters()
        if is_inference:
            self.reset_inference_mode()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Forget all ids."""
        self._hash_zch_identities.fill_(NO_ID)
        if self._hash_zch_metadata is not None:
            self._hash_zch_metadata.fill_(-1)
        self._hash_zch_bucket.fill_(self._buckets)
        self._evicted.clear()

    @property
    def device(self) -> torch.device:
        """Where the table of identities lies."""
        return self._hash_zch_identities.device

    def reset_inference_mode(self) -> None:
        """Evaluate from now on, and forget when ids came; `reset_training_mode` ends it."""
        self.eval()
        self._is_inference, self._hash_zch_metadata = True, None
        self._evicted.clear()

    def reset_training_mode(self) -> None:
        """Train from now on; ids of which it was forgotten when they came have come now."""
        self.train()
        self._is_inference = False
        if self._eviction_module is not None and self._hash_zch_metadata is None:
            taken = self._hash_zch_identities != NO_ID
            self._hash_zch_metadata = torch.where(taken, current_hour(), -1).int()

    def preprocess(self, features: Features) -> Features:
        """The ids as they are."""
        return features

    def profile(self, features: Features) -> Features:
        """The ids as they are: `remap` gives new ones rows."""
        return features

    def remap(self, features: Features, mutate_miss_lengths: bool = True) -> Features:  # noqa: FBT001, FBT002 - as above
        """The row of each id, in the same bags; in training new ids get rows first.

        ``mutate_miss_lengths`` changes nothing: no id is left out of its bag.
        """
        del mutate_miss_lengths
        known: dict[str, Tensor] = {}
        if self.training and not self._is_inference:
            known = self._learn(
                {
                    name: bag
                    for name, bag in features.items()
                    if not name.lower().endswith(self._read_only_suffix)
                }
            )
        return {
            key: with_values(bag, known[key] if key in known else self._rows(bag.values()))
            for key, bag in features.items()
        }

    def forward(self, features: Features, mutate_miss_lengths: bool = True) -> Features:  # noqa: FBT001, FBT002 - as above
        """As `remap`."""
        return self.remap(features, mutate_miss_lengths)

    def _layout(self) -> Layout:
        return Layout(self.input_mapper, self._first_row, self._reserved, self._max_probe)

    def _rows(self, values: Tensor) -> Tensor:
        values = values.long()
        if values_are_unknown(values) or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call] # torch leaves it untyped and unexported
            return self._rows_in_graph(values)
        if hash_places.has_operators(values.device):
            return hash_places.find(self._hash_zch_identities, values, self._layout())
        ids, buckets = self._layout().of_ids(values)
        rows = hash_places.find_rows(self._hash_zch_identities, ids, buckets)
        return self._of_whole_table(rows)

    def _rows_in_graph(self, values: Tensor) -> Tensor:
        ids, buckets = self._layout().of_ids(values)
        self._sort_ids()
        places, known = find(self._sorted_ids, ids)
        known = known & (ids != NO_ID)
        shared = hash_places.shared_rows(ids, buckets)
        return torch.where(known, self._sorted_rows[places], shared) + self._first_row

    @torch.no_grad()
    def _sort_ids(self) -> None:
        """Fill the table by id."""
        self._sorted_ids, self._sorted_rows = self._hash_zch_identities[:, 0].sort(stable=True)

    @torch.no_grad()
    def _learn(self, features: Features) -> dict[str, Tensor]:
        """Give new ids rows, and note when ids came; the rows of all ids by feature."""
        given = {name: bag.values().long().reshape(-1) for name, bag in features.items()}
        if not any(ids.numel() for ids in given.values()):
            return given
        hours = None
        if self._eviction_module is None or self._hash_zch_metadata is None:
            names, parts = [*given], [*given.values()]
            values = parts[0] if len(parts) == 1 else torch.cat(parts)
        else:
            names = self._eviction_module.order_of(given)
            values, of_ids, now = self._eviction_module.of_features(given)
            oldest = bool(get_kernel_from_policy(self._eviction_policy_name))
            hours = Hours(self._hash_zch_metadata, of_ids, now, oldest)
        may_come = hours is not None and self._evicted.begin(self._hash_zch_identities, hours)
        rows, evicted = self._learn_all(values, hours)
        if hours is not None:
            self._evicted.add(evicted, self._hash_zch_identities, hours, may_come=may_come)
        if len(names) == 1:
            return {names[0]: rows}
        sizes = [given[name].numel() if name in given else 0 for name in names]
        return dict(zip(names, torch.split(rows, sizes), strict=True))

    def _learn_all(self, values: Tensor, hours: Hours | None) -> tuple[Tensor, Tensor]:
        """The rows of ids ``[N]`` in the whole table, and those that another id had before."""
        let_in = None
        if 0 < self._opt_in_prob < 100:  # each occurrence is a draw
            draws = torch.rand(values.numel(), device=values.device)
            let_in = draws * 100 < self._opt_in_prob
        if hash_places.has_operators(values.device):
            return hash_places.learn(
                self._hash_zch_identities, values, self._layout(), hours, let_in
            )
        own, buckets = self._layout().of_ids(values)
        placed = self._in_tensors.learn(
            self._hash_zch_identities, values, own, buckets, hours=hours, let_in=let_in
        )
        return self._of_whole_table(placed.rows), self._of_whole_table(placed.evicted)

    def _of_whole_table(self, rows: Tensor) -> Tensor:
        """Rows counted from the first one of the whole table, of rows here."""
        return rows + self._first_row if self._first_row else rows

    def evict(self) -> Tensor | None:
        """The rows that got another id since the last call, ``[E]`` ascending; None: there was no such call."""
        return self._evicted.take(self.device)

    def output_size(self) -> int:
        """``Z``, the rows of this part of the table."""
        return self._zch_size

    def input_size(self) -> int:
        """Ids are in ``[0, input size)``; 0: any int64 is an id."""
        return self._input_hash_size

    def buckets(self) -> int:
        """How many buckets the whole table has."""
        return self._buckets

    def open_slots(self) -> Tensor:
        """How many rows have no id yet, ``[1]`` int64; reserved ones are not counted."""
        reserved = self._reserved * (self._end_bucket - self._start_bucket)
        return ((self._hash_zch_identities == NO_ID).sum() - reserved).view(1)

    def holds_ids(self) -> bool:
        """Whether an id has a row of its own."""
        table = self._hash_zch_identities
        return not table.is_meta and bool((table != NO_ID).any())

    def range_key(self, ids: Tensor) -> Tensor:
        """The bucket of each id ``[N]``."""
        return self.input_mapper.bucket(ids.long())

    def range_bounds(self, row_bounds: list[int]) -> list[int]:
        """The first bucket of each rank, and the end; ``row_bounds`` are its first row, and the end."""
        return [self._output_segments.index(row) for row in row_bounds]

    def validate_state(self) -> None:
        """Refuse a loaded state of another number of buckets.

        Raises:
            UserError: it is, so that its ids would not be found.
        """
        saved = int(self._hash_zch_bucket)
        if saved != self._buckets:
            raise UserError(
                f"the state of {self._name or 'a table without a name'} has {saved} buckets; give the module "
                f"total_num_buckets={saved} in the place of {self._buckets}"
            )

    def purge(self) -> None:
        """Forget what followed from the state before another one was put into the buffers.

        Raises:
            UserError: see `validate_state`.
        """
        self._evicted.clear()
        if self.device.type != "meta":
            self.validate_state()

    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int] | None = None,
        device: torch.device | None = None,
    ) -> "HashZchManagedCollisionModule":
        """A new module, with an empty table, for some of the buckets.

        Args:
            output_id_range: the first row, and the one behind the last.
            output_segments: not needed here: the buckets are those of this module.
            device: None: as this one.

        Raises:
            UserError: the rows are not those of whole buckets.
        """
        del output_segments
        bounds = self._output_segments
        if any(row not in bounds for row in output_id_range):
            raise UserError(
                f"rows {output_id_range[0]} to {output_id_range[1] - 1} of table {self._name or 'without a name'} "
                f"are not whole buckets; give it a total_num_buckets that is a multiple of the ranks, which "
                f"divides its rows (it is {self._buckets})"
            )
        first, end = (bounds.index(row) for row in output_id_range)
        return HashZchManagedCollisionModule(
            zch_size=output_id_range[1] - output_id_range[0],
            device=device or self.device,
            start_bucket=first,
            end_bucket=end,
            **self._rebuilt,
        )


def _without_metadata(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """In inference mode a state is loaded without the hours of its ids."""
    assert isinstance(module, HashZchManagedCollisionModule)
    if module._is_inference:  # noqa: SLF001 - its own hook
        state_dict.pop(f"{prefix}_hash_zch_metadata", None)
