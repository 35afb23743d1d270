"""`MCHManagedCollisionModule`: a sorted map from ids to rows, changed by an eviction policy.

Shapes: ``Z`` rows of the table, ``K = Z - 1`` ids that can have a row of their own, ``E`` of them that are
replaced, ``N`` ids of a batch.
"""

# Annotations are not postponed here: torch.fx hands them on to TorchScript, which needs types.

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from tessera.errors import UserError
from tessera.training.modules.id_search import find
from tessera.training.modules.mc_base import Features, ManagedCollisionModule, with_values
from tessera.training.modules.mc_evictions import MCHEvictionPolicy, fills_history
from tessera.training.modules.mc_history import Batch, Coalesced, coalesced, in_one, replace_ids

MAX_ID = torch.iinfo(torch.int64).max
"""Stands in the map where there is no id; as an id of a batch it never has a row of its own."""

HashFunction = Callable[[Tensor, int], Tensor]


class MCHManagedCollisionModule(ManagedCollisionModule):
    """Maps ids to rows by search in a sorted array, and gives rows to the ids that a policy chooses.

    In training each call counts its ids, and each ``eviction_interval``-th call changes the map before
    it looks its own ids up: what came since the last change is compared with what is in the map, and the
    ids that score highest have the rows afterwards.  In evaluation the map stays as it is.

    Args:
        zch_size: ``Z``, the rows of the table; the last one is that of ids without a row of their own.
        device: where the map lies.
        eviction_policy: which ids get rows.
        eviction_interval: training steps from one change of the map to the next.
        input_hash_size: see `input_size`; the second argument of ``input_hash_func``.
        input_hash_func: what is done to ids before anything else; None: nothing.
        mch_size, mch_hash_func: of older releases, without effect; a warning tells so.
        name: of the module, for messages.
        output_global_offset: what is added to each row: the table's row at which this part begins.
        output_segments: as of the base class; None: one part.
        buckets: what `buckets` gives.

    A search costs ``log2(Z)`` steps an id; a change of the map a few passes over it.  Memory: 16 bytes a
    row, and 8 more for each number that the policy remembers; until the next change of the map
    the ids of the batches since the last.

    Raises:
        ValueError: ``zch_size`` below 2 or ``eviction_interval`` below 1.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        zch_size: int,
        device: torch.device,
        eviction_policy: MCHEvictionPolicy,
        eviction_interval: int,
        input_hash_size: int = MAX_ID,
        input_hash_func: HashFunction | None = None,
        mch_size: int | None = None,
        mch_hash_func: HashFunction | None = None,
        name: str | None = None,
        output_global_offset: int = 0,
        output_segments: list[int] | None = None,
        buckets: int = 1,
    ) -> None:
        if zch_size < 2:
            raise ValueError(f"zch_size is {zch_size}; give 2 or more, one of them for unknown ids")
        if eviction_interval < 1:
            raise ValueError(f"eviction_interval is {eviction_interval}; give 1 step or more")
        if mch_size is not None or mch_hash_func is not None:
            warnings.warn("mch_size and mch_hash_func have no effect; leave them out", stacklevel=2)
        first = output_global_offset
        super().__init__(torch.device(device), output_segments or [first, first + zch_size])
        self._zch_size, self._input_hash_size = zch_size, input_hash_size
        self._input_hash_func, self._name = input_hash_func, name
        self._eviction_policy, self._eviction_interval = eviction_policy, eviction_interval
        self._output_global_offset, self._buckets = output_global_offset, buckets
        self._metadata = [
            i.metadata_name for i in eviction_policy.metadata_info if i.is_mch_metadata
        ]
        self._in_history = [
            i.metadata_name for i in eviction_policy.metadata_info if i.is_history_metadata
        ]
        for buffer in ("sorted_raw_ids", "remapped_ids_mapping", *self._metadata):
            empty = torch.empty(zch_size, dtype=torch.int64, device=device)
            self.register_buffer(f"_mch_{buffer}", empty)
        self._mch_sorted_raw_ids: Tensor
        self._mch_remapped_ids_mapping: Tensor
        self._history: list[Batch] = []
        self._evicted: list[Tensor] = []
        self._current_iter: int | None = None
        self.register_load_state_dict_post_hook(lambda module, _: module.purge())  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Forget all ids, and how many steps there were."""
        self._reset_map()
        self._current_iter_tensor.zero_()
        self._current_iter = None
        self._history.clear()
        self._evicted.clear()

    def _reset_map(self) -> None:
        self._mch_sorted_raw_ids.fill_(MAX_ID)
        first = self._output_global_offset
        rows = torch.arange(first, first + self._zch_size, device=self.device)
        self._mch_remapped_ids_mapping.copy_(rows)
        for name in self._metadata:
            self.get_buffer(f"_mch_{name}").zero_()

    def preprocess(self, features: Features) -> Features:
        """The ids after ``input_hash_func``, if there is one."""
        hashed = self._input_hash_func
        if hashed is None:
            return features
        return {
            key: with_values(bag, hashed(bag.values().long(), self._input_hash_size))
            for key, bag in features.items()
        }

    @torch.no_grad()
    def profile(self, features: Features) -> Features:
        """Count preprocessed ids, and change the map in each ``eviction_interval``-th call.

        In evaluation nothing happens.

        Returns:
            ``features``.
        """
        if self.training:
            self._count(features)
        return features

    def profile_and_remap(
        self,
        features: Features,
        mutate_miss_lengths: bool = True,  # noqa: FBT001, FBT002 - the signature TorchRec users know
    ) -> Features:
        """`profile` and `remap` in turn; in training each id is looked up once for both."""
        if not self.training or type(self) is not MCHManagedCollisionModule:
            # A subclass may have either of its own.
            return super().profile_and_remap(features, mutate_miss_lengths)
        counts = [bag.values().numel() for bag in features.values()]
        rows = self._count(features).split_with_sizes(counts)
        return {
            key: with_values(bag, own.view_as(bag.values()))
            for (key, bag), own in zip(features.items(), rows, strict=True)
        }

    @torch.no_grad()
    def _count(self, features: Features) -> Tensor:
        """Count ids, and change the map if it is time to; the row of each id afterwards, ``[N]``."""
        if self._current_iter is None:  # new, or loaded
            self._current_iter = int(self._current_iter_tensor.item())
        self._current_iter += 1
        self._current_iter_tensor += 1
        ids = torch.cat([bag.values().long().reshape(-1) for bag in features.values()])
        new = torch.empty_like if fills_history(self._eviction_policy) else torch.zeros_like
        metadata = {name: new(ids) for name in self._in_history}
        self._eviction_policy.record_history_metadata(self._current_iter, ids, metadata)
        batch = self._looked_up(ids, metadata)
        self._history.append(batch)
        if self._current_iter % self._eviction_interval == 0:
            return self._change_map(self._current_iter, ids.numel())
        # The last place is that of unknown ids.
        return self._mch_remapped_ids_mapping.index_select(0, batch.slots)

    def _looked_up(self, ids: Tensor, metadata: dict[str, Tensor]) -> Batch:
        # Behind the K ids that the map can hold stands MAX_ID.
        places = torch.searchsorted(self._mch_sorted_raw_ids, ids)
        known = (self._mch_sorted_raw_ids.index_select(0, places) == ids) & (ids != MAX_ID)
        return Batch(ids, places, torch.where(known, places, self._zch_size - 1), metadata)

    def _change_map(self, step: int, last: int) -> Tensor:
        """Give rows to the ids that the policy chooses among those in the map and in the history.

        Returns:
            ``[last]`` the rows afterwards of so many ids at the history's end.
        """
        policy, K = self._eviction_policy, self._zch_size - 1
        found = coalesced(self._history, K)
        of_one_batch = len(self._history) == 1  # this step's
        self._history.clear()
        known_count = found.known_places.numel()
        counted = self._counted(found)
        fresh = policy.coalesce_history_metadata(
            step, found.metadata, found.counts, found.inverse, threshold_mask=counted
        )
        counts, known_places = found.counts, found.known_places
        new: Tensor | None = None  # which of the new ids are counted; None: all
        if counted is not None:
            counts, known_places = counts[counted], known_places[counted[:known_count]]
            new = counted[known_count:].nonzero().squeeze(1)
        metadata = {name: self.get_buffer(f"_mch_{name}")[:K] for name in self._metadata}
        given_up, chosen = policy.exchange_known_first(
            step, K, counts, known_places, metadata, fresh, of_one_batch=of_one_batch
        )
        rows = self._mch_remapped_ids_mapping
        freed = rows.index_select(0, given_up)
        self._evicted.append(freed)
        row_of_place = rows.index_fill(0, given_up, self._output_global_offset + K)
        row_of_new = rows.new_full((found.new_ids.numel(),), self._output_global_offset + K)
        if given_up.numel():
            chosen = chosen if new is None else new.index_select(0, chosen)
            row_of_new.index_copy_(0, chosen, freed)
            values = [rows[:K], *metadata.values()]
            replace_ids(self._mch_sorted_raw_ids[:K], values, given_up, found, chosen)
        row_of_known = row_of_place.index_select(0, found.known_places)
        asked = found.inverse[found.inverse.numel() - last :]
        return torch.cat([row_of_known, row_of_new]).index_select(0, asked)

    def _counted(self, found: Coalesced) -> Tensor | None:
        """``[V]`` bool, which of the different ids the policy may see; None: all of them."""
        threshold = self._eviction_policy._threshold_filtering_func  # noqa: SLF001 - as TorchRec's policies have it
        counts = found.counts
        counted = threshold(counts)[0] if threshold is not None and counts.numel() else None
        if not found.new_ids.numel() or int(found.new_ids[-1]) != MAX_ID:
            return counted
        is_id = torch.ones_like(counts, dtype=torch.bool)
        is_id[-1] = False  # the greatest number that there is
        return is_id if counted is None else counted & is_id

    def remap(self, features: Features, mutate_miss_lengths: bool = True) -> Features:  # noqa: FBT001, FBT002 - the signature TorchRec users know
        """The row of each preprocessed id, in the same bags; ids without one get the last row.

        ``mutate_miss_lengths`` changes nothing: no id is left out of its bag.
        """
        del mutate_miss_lengths
        return {key: with_values(bag, self._rows(bag.values())) for key, bag in features.items()}

    def _rows(self, values: Tensor) -> Tensor:
        ids = values.long()
        places, known = find(self._mch_sorted_raw_ids, ids)
        known = known & (ids != MAX_ID)
        # The last place is that of unknown ids.
        return self._mch_remapped_ids_mapping[torch.where(known, places, self._zch_size - 1)]

    def forward(self, features: Features, mutate_miss_lengths: bool = True) -> Features:  # noqa: FBT001, FBT002 - the signature TorchRec users know
        """The row of each id ``[N]`` int32 or int64, as int64 in the same bags; counts them in training."""
        return self.profile_and_remap(self.preprocess(features), mutate_miss_lengths)

    def evict(self) -> Tensor | None:
        """The rows that got another id since the last call, ``[E]``; None: the map was not changed."""
        if not self._evicted:
            return None
        rows = in_one(self._evicted)
        self._evicted.clear()
        return rows

    def output_size(self) -> int:
        """``Z``, the rows of this part of the table."""
        return self._zch_size

    def input_size(self) -> int:
        """Ids are in ``[0, input size)``: ranks divide that range among them."""
        return self._input_hash_size

    def buckets(self) -> int:
        """Into how many buckets the ids are divided, as the constructor was told."""
        return self._buckets

    def open_slots(self) -> Tensor:
        """How many rows have no id yet, ``[1]`` int64."""
        return (self._mch_sorted_raw_ids[:-1] == MAX_ID).sum().view(1)

    def validate_state(self) -> None:
        """Refuse a loaded state whose rows are not those of this module.

        Raises:
            UserError: they are not, as where the ranks that trained it had other parts of the table.
        """
        first, Z = self._output_global_offset, self._zch_size
        rows = self._mch_remapped_ids_mapping.sort().values
        whole = torch.equal(rows, torch.arange(first, first + Z, device=self.device))
        known = self._mch_sorted_raw_ids != MAX_ID
        if not whole or bool((known & (self._mch_remapped_ids_mapping == first + Z - 1)).any()):
            raise UserError(
                f"the state of managed collision module {self._name or 'without a name'} does not "
                f"map to rows {first} to {first + Z - 1}, with the last one for unknown ids; load it "
                "on as many ranks as it was saved on, or on a number that divides theirs; a sharded "
                "checkpoint (load_checkpoint) gives ids rows of other ranks"
            )

    def saved_segments(self) -> list[int]:
        """The row at which each part of the table began where the state was saved, and the end."""
        return [row for row in self._output_segments_tensor.tolist() if row >= 0]

    def pairs(self) -> Tensor:
        """The ids in the map, their rows and what the policy remembers of them, ``[P, 2 + M]`` int64."""
        ids = self._mch_sorted_raw_ids
        metadata = [self.get_buffer(f"_mch_{name}") for name in self._metadata]
        return torch.stack([ids, self._mch_remapped_ids_mapping, *metadata], 1)[ids != MAX_ID]

    @torch.no_grad()
    def take_pairs(self, pairs: Tensor) -> Tensor:
        """Put other pairs into the map; rows of other parts of the table are replaced by own ones.

        Of more ids than rows those stay that the policy scores highest; of equal ones the smaller ids.

        Args:
            pairs: as `pairs` gives them, of this and other parts; no id is there twice.

        Returns:
            ``[Z]`` int64: of each row of this part, the row that its id had; of a row without an id the
            row itself.
        """
        first, K = self._output_global_offset, self._zch_size - 1
        pairs = pairs[pairs[:, 0].argsort()]
        if len(pairs) > K:
            metadata = {name: pairs[:, 2 + place] for place, name in enumerate(self._metadata)}
            step = int(self._current_iter_tensor.item())
            scores = self._eviction_policy.scores_of(step, pairs[:, 0], metadata)
            pairs = pairs[scores.argsort(descending=True, stable=True)[:K].sort().values]
        had = pairs[:, 1]
        stays = (had >= first) & (had < first + K)
        is_open = torch.ones(K, dtype=torch.bool, device=had.device)
        is_open[had[stays] - first] = False
        free = is_open.nonzero().flatten() + first
        rows = had.clone()
        rows[~stays] = free[: int((~stays).sum())]
        self._reset_map()
        count = len(pairs)
        source = self._mch_remapped_ids_mapping.clone()
        source[rows - first] = had
        left = free[int((~stays).sum()) :]
        self._mch_sorted_raw_ids[:count] = pairs[:, 0]
        self._mch_remapped_ids_mapping[:K] = torch.cat([rows, left])
        for place, name in enumerate(self._metadata):
            self.get_buffer(f"_mch_{name}")[:count] = pairs[:, 2 + place]
        own = torch.tensor(self._output_segments, device=self.device)
        self._output_segments_tensor.fill_(-1)[: own.numel()] = own
        self._history = [self._looked_up(batch.ids, batch.metadata) for batch in self._history]
        return source

    @torch.no_grad()
    def purge(self) -> None:
        """Forget what followed from the state before another one was put into the buffers.

        Loading calls it, of a state dict or of a checkpoint.  The parts that several ranks saved
        become one sorted map.

        Raises:
            UserError: see `validate_state`.
        """
        self._current_iter = None
        self._history.clear()
        self._evicted.clear()
        if self._mch_sorted_raw_ids.is_meta:
            return
        self.validate_state()
        own = torch.tensor(self._output_segments, device=self.device)
        self._output_segments_tensor.fill_(-1)[: own.numel()] = own
        ids, rows = self._mch_sorted_raw_ids, self._mch_remapped_ids_mapping
        metadata = [self.get_buffer(f"_mch_{name}") for name in self._metadata]
        for values in metadata:
            values[ids == MAX_ID] = 0  # the row of unknown ids of a part becomes an open one
        by_row = rows.argsort()
        order = by_row[ids[by_row].argsort(stable=True)]
        for values in (ids, rows, *metadata):
            values.copy_(values[order])

    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int],
        device: torch.device | None = None,
    ) -> "MCHManagedCollisionModule":
        """A new module, with an empty map, for some of the table's rows; see the base class.

        Raises:
            ValueError: fewer than 2 rows.
        """
        first, end = output_id_range
        return MCHManagedCollisionModule(
            zch_size=end - first,
            device=device or self.device,
            eviction_policy=self._eviction_policy,
            eviction_interval=self._eviction_interval,
            input_hash_size=self._input_hash_size,
            input_hash_func=self._input_hash_func,
            name=self._name,
            output_global_offset=first,
            output_segments=output_segments,
            buckets=self._buckets,
        )
