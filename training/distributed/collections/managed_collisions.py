"""Managed collisions over ranks: each rank maps its range of the ids to its block of the rows.

Ids travel by the range of `ManagedCollisionModule.input_size` in which they lie, cut into as many equal parts as
there are ranks, to the rank that holds their part of the map; that part gives rows of the rank's own block of the
table.  So the table is row-wise, and from there on a batch is any row-wise batch: rows are looked up where they
are, and vectors travel back.

* How ids travel: as in row-wise sharding, with ranges of ids in the place of blocks of rows.
* Which ids are here: one range of each table's, and the block of rows that they share.
* How rows travel back, if they are asked for: as the vectors of single ids do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

from tessera.errors import UserError
from tessera.training.distributed.collections.mc_moves import fits_without_moves, spread_map
from tessera.training.distributed.comm.awaitable import Awaitable, NoWait
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.plan.plan_types import ShardingType
from tessera.training.distributed.sharding.embedding_sharding import TableSharding
from tessera.training.distributed.sharding.ids import LocalSparseFeaturesDist, RwSparseFeaturesDist
from tessera.training.distributed.sharding.sequence_sharding import SequenceShardingContext
from tessera.training.distributed.tables.batched_kernels import Kernel
from tessera.training.distributed.tables.shard_state import sharded_tensor
from tessera.training.distributed.travel.sequence_vectors import SequenceEmbeddingsAllToAll
from tessera.training.modules.mc_base import Features, ManagedCollisionModule
from tessera.training.modules.mc_modules import (
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from tessera.training.modules.tables import flat_names
from tessera.training.sparse import selection
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

_OF_ALL_RANKS = {"_output_segments_tensor", "_current_iter_tensor"}


class ShardedManagedCollisionCollection(nn.Module):
    """The parts of a `ManagedCollisionCollection`'s maps that are this rank's.

    State dicts have the plain collection's names; with a process group the maps in them are
    ``ShardedTensor``s.

    Args:
        module: the plain collection; the maps here begin empty.
        env: who takes part.
        embedding_shardings: of the tables that the maps are before: one, row-wise; of one rank also
            table-wise.
        device: where this rank computes; None: the CPU.

    Raises:
        UserError: a table that is placed otherwise, a rank with fewer than 2 rows of a table, or a map of
            ``module`` that holds ids already.
    """

    def __init__(
        self,
        module: ManagedCollisionCollection,
        env: ShardingEnv,
        embedding_shardings: Sequence[TableSharding],
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if env.sharding_pg is not env.process_group:
            raise UserError(
                "managed collisions in 2D parallelism: each sharding group would map ids to rows of its own, "
                "whose averages belong to no id; train the collection in a DistributedModelParallel"
            )
        self._device, self._pg = device or torch.device("cpu"), env.process_group
        self.need_preprocess = module.need_preprocess
        (sharding,) = _only_by_rows(embedding_shardings, env)
        self._sharding, self._world_size = sharding, env.world_size
        self._bounds = _row_bounds(sharding)
        whole = dict(module._managed_collision_modules.items())  # noqa: SLF001 - the plain form of this class
        parts: dict[str, ManagedCollisionModule] = {}
        for name, bounds in self._bounds.items():
            plain = whole[name]
            assert isinstance(plain, ManagedCollisionModule)
            parts[name] = _part(name, plain, bounds, env.rank, self._device)
        self._managed_collision_modules = nn.ModuleDict(parts)
        self._table_features = [
            (table.name, list(table.feature_names))
            for group in sharding.layout.groups_per_rank[env.rank]
            for table in group.embedding_tables
        ]
        self._features, self._by_place = flat_names([names for _, names in self._table_features])
        self.register_state_dict_post_hook(_whole_maps)  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.register_load_state_dict_pre_hook(_own_parts)  # type: ignore[no-untyped-call] # torch leaves it untyped

    @property
    def unsharded_module_type(self) -> type[ManagedCollisionCollection]:
        """The type of module that this is the sharded form of."""
        return ManagedCollisionCollection

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """The names of the maps' tensors, which differ from rank to rank."""
        for name, _ in self.named_buffers(prefix=prefix):
            yield name

    def create_input_dist(self) -> nn.Module:
        """How ids travel to the ranks that map them."""
        if self._pg is None:
            return LocalSparseFeaturesDist()
        ranks = self._world_size
        bounds: list[list[int]] = []
        for table, features in self._table_features:
            own = self._part_of(table).range_bounds(self._bounds[table])
            bounds += [own] * len(features)
        parts = [self._part_of(table) for table in self._bounds]
        by_id = all(type(p).range_key is ManagedCollisionModule.range_key for p in parts)
        return RwSparseFeaturesDist(
            self._pg,
            [range(ranks)],
            [len(bounds)],
            bounds,
            self._device,
            is_sequence=True,
            keep_original_indices=True,
            keys=None if by_id else self._range_keys,
        )

    def _range_keys(self, features: KeyedJaggedTensor) -> Tensor:
        """By whose ranges the ids of all tables' features are sent, ``[N]``."""
        return torch.cat(
            [
                self._part_of(table).range_key(bag.values())
                for table, bags in self._by_table(features)
                for bag in bags.values()
            ]
        )

    def _by_table(self, features: KeyedJaggedTensor) -> Iterator[tuple[str, Features]]:
        """Each table's features, which came in the tables' order; two tables may have one of a name."""
        bags = selection.bags_of(features, self._features, self._by_place)
        first = 0
        for table, names in self._table_features:
            yield table, dict(zip(names, bags[first : first + len(names)], strict=True))
            first += len(names)

    def _part_of(self, table: str) -> ManagedCollisionModule:
        part = self._managed_collision_modules[table]
        assert isinstance(part, ManagedCollisionModule)
        return part

    def preprocess(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The ids of all tables' features as the maps know them, before they travel.

        Raises:
            KeyError: a feature is missing.
        """
        features = selection.select_features(features, self._features)
        if not self.need_preprocess:
            return features
        ids: list[Tensor] = []
        for table, bags in self._by_table(features):
            own = self._part_of(table).preprocess(bags)
            ids += [own[name].values() for name in bags]
        return features.with_values(torch.cat(ids))

    def remap(self, received: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The rows, among those of the whole table, of the ids that came here; counts them in training."""
        rows: list[Tensor] = []
        for table, bags in self._by_table(received):
            part = self._part_of(table)
            remapped = part.profile_and_remap(bags)
            rows += [remapped[name].values() for name in bags]
        return received.with_values(torch.cat(rows))

    def local_rows(self, remapped: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The same as rows of the blocks that are here."""
        counts = remapped.length_per_key()
        firsts = [self._first_row(table) for table, names in self._table_features for _ in names]
        parts = remapped.values().split_with_sizes(counts)
        own = [part - first for part, first in zip(parts, firsts, strict=True)]
        return remapped.with_values(torch.cat(own))

    def _first_row(self, table: str) -> int:
        return self._bounds[table][self._sharding.layout.world.rank]

    def spread(self, kernels: Sequence[Kernel]) -> None:
        """Give ids rows of the ranks that they belong to, where a loaded state was saved on other ranks.

        Every rank calls it, after the maps and the tables were loaded whole.

        Args:
            kernels: hold the tables' blocks of this rank.

        Raises:
            UserError: see `spread_map`.
        """
        for table, bounds in self._bounds.items():
            part = self._part_of(table)
            if (
                self._pg is None
                or not isinstance(part, MCHManagedCollisionModule)
                or fits_without_moves(part, bounds)
            ):
                continue
            places = [
                (kernel, place)
                for kernel in kernels
                for place, shard in enumerate(kernel.tables)
                if shard.name == table
            ]
            ((kernel, place),) = places
            spread_map(part, kernel, place, bounds, self._pg)

    def evict(self) -> dict[str, Tensor | None]:
        """By table the rows, among those that are here, that got another id."""
        found: dict[str, Tensor | None] = {}
        for table in self._bounds:
            rows = self._part_of(table).evict()
            found[table] = None if rows is None else rows - self._first_row(table)
        return found

    def open_slots(self) -> dict[str, Tensor]:
        """By table how many rows that are here have no id yet, ``[1]`` int64."""
        return {table: self._part_of(table).open_slots() for table in self._bounds}


def _only_by_rows(shardings: Sequence[TableSharding], env: ShardingEnv) -> list[TableSharding]:
    allowed = {ShardingType.ROW_WISE.value}
    if env.world_size == 1:
        allowed.add(ShardingType.TABLE_WISE.value)
    kinds = [sharding.strategy.name for sharding in shardings]
    if len(kinds) != 1 or kinds[0] not in allowed:
        raise UserError(
            f"tables behind managed collisions are {', '.join(sorted(kinds))}; place all of a collection "
            "row-wise, so that each rank maps ids to rows of its own"
        )
    return list(shardings)


def _row_bounds(sharding: TableSharding) -> dict[str, list[int]]:
    """By table the first row of each rank's block, and the end."""
    bounds: dict[str, list[int]] = {}
    for shard in sharding.embedding_tables():
        own = bounds.setdefault(shard.name, [0])
        own.append(own[-1] + shard.local_rows)
    return bounds


def _part(
    name: str, plain: ManagedCollisionModule, bounds: list[int], rank: int, device: torch.device
) -> ManagedCollisionModule:
    if plain.holds_ids():
        raise UserError(
            f"the map of table {name!r} holds ids already, and sharded ones begin empty; shard first, then "
            "load the state"
        )
    small = [r for r in range(len(bounds) - 1) if bounds[r + 1] - bounds[r] < 2]
    if small:
        raise UserError(
            f"table {name!r} has {bounds[small[0] + 1] - bounds[small[0]]} rows on rank {small[0]}; a map "
            "needs 2 or more, so give the table more rows or train it on fewer ranks"
        )
    span = bounds[rank], bounds[rank + 1]
    return plain.rebuild_with_output_id_range(span, bounds, device)


def _by_row(part: ManagedCollisionModule) -> list[str]:
    """The buffers that have a number for each row."""
    rows = part.output_size()
    return [
        name
        for name, own in part.state_dict().items()
        if name not in _OF_ALL_RANKS and own.size(0) == rows
    ]


def _whole_maps(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """Put the maps' parts of all ranks together in a state dict."""
    del local_metadata
    assert isinstance(module, ShardedManagedCollisionCollection)
    if module._pg is None:  # noqa: SLF001 - its own hook
        return
    for table, bounds in module._bounds.items():  # noqa: SLF001 - as above
        for name in _by_row(module._part_of(table)):  # noqa: SLF001 - as above
            key = f"{prefix}_managed_collision_modules.{table}.{name}"
            own = state_dict[key]
            rest = list(own.shape[1:])
            places = [
                ShardMetadata([first] + [0] * len(rest), [end - first, *rest], f"rank:{rank}/cpu")
                for rank, (first, end) in enumerate(pairwise(bounds))
            ]
            metadata = ShardedTensorMetadata(
                places, torch.Size([bounds[-1], *rest]), TensorProperties(dtype=own.dtype)
            )
            here = places[module._pg.rank()]  # noqa: SLF001 - as above
            state_dict[key] = sharded_tensor([(here, own)], metadata, module._pg)  # noqa: SLF001 - as above


def _own_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take this rank's parts of the maps out of a state dict that is to be loaded."""
    assert isinstance(module, ShardedManagedCollisionCollection)
    for table, bounds in module._bounds.items():  # noqa: SLF001 - its own hook
        first = module._first_row(table)  # noqa: SLF001 - as above
        part = module._part_of(table)  # noqa: SLF001 - as above
        for name in _by_row(part):
            key = f"{prefix}_managed_collision_modules.{table}.{name}"
            value = state_dict.get(key)
            if isinstance(value, ShardedTensor):
                shards = value.local_shards()
                own = [s.tensor for s in shards if s.metadata.shard_offsets[0] == first]
                if own:
                    state_dict[key] = own[0]
            elif isinstance(value, Tensor) and value.size(0) == bounds[-1]:
                state_dict[key] = value[first : first + part.output_size()]


class RowsBack:
    """Sends the rows of ids to the ranks that asked, in the order of their ids.

    Args:
        sharding: of the tables.
        device: where this rank computes.
    """

    def __init__(self, sharding: TableSharding, device: torch.device) -> None:
        pg = sharding.layout.pg
        features = [len(own) for own in sharding.feature_names_per_rank()]
        self._dist = (
            None
            if pg is None
            else SequenceEmbeddingsAllToAll(pg=pg, features_per_rank=features, device=device)
        )

    @torch.no_grad()
    def __call__(
        self, remapped: KeyedJaggedTensor, ctx: SequenceShardingContext
    ) -> Awaitable[Tensor]:
        """Begin to send; the wait gives ``[ids sent, 1]`` int64."""
        rows = remapped.values().unsqueeze(1)
        if self._dist is None:
            return NoWait(rows)
        assert ctx.lengths_after_input_dist is not None
        varies = ctx.variable_batch_per_feature
        return self._dist(  # type: ignore[no-any-return] # nn.Module's call is untyped
            rows,
            lengths=ctx.lengths_after_input_dist,
            input_splits=ctx.input_splits,
            output_splits=ctx.output_splits,
            unbucketize_permute_tensor=ctx.unbucketize_permute_tensor,
            batch_size_per_rank=None if varies else ctx.batch_size_per_rank,
            batch_size_per_rank_per_feature=(
                ctx.batch_size_per_rank_per_feature if varies else None
            ),
        )
