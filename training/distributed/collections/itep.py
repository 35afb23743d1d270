"""Collections that are pruned while they are trained, spread over ranks.

A batch goes the way of any batch, but for two things: where rows are cut into blocks, ids travel by equal ranges of
the table's ids, one for each block, and where they arrive they become rows before the lookup.

* Table-wise, and column-wise: the ranks that hold a table, or columns of it, see all of its ids, and come to the same
  addresses.
* Row-wise, and table-row-wise: each rank prunes among the ids of its range, which share its block of rows.

Legend: ``U`` ids of a table, ``k`` column shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

from tessera.errors import UserError
from tessera.training.distributed.collections.pooled import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from tessera.training.distributed.collections.pooled_output import EmbeddingBagCollectionContext
from tessera.training.distributed.collections.sharded_collection import ShardedEmbeddingModule
from tessera.training.distributed.collections.sharders import BaseEmbeddingSharder
from tessera.training.distributed.collections.unpooled import (
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from tessera.training.distributed.comm.awaitable import Awaitable, LazyAwaitable
from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.plan.plan_types import EmbeddingModuleShardingPlan, ShardingType
from tessera.training.distributed.plan.shard_sizes import even_rows
from tessera.training.distributed.sharding.embedding_sharding import TableSharding
from tessera.training.distributed.sharding.ids import RwSparseFeaturesDist
from tessera.training.distributed.tables.batched_kernels import Kernel
from tessera.training.distributed.tables.shard_state import sharded_tensor
from tessera.training.distributed.tables.table_shards import ShardedEmbeddingTable
from tessera.training.distributed.travel.kjt_list import KJTList
from tessera.training.modules.itep_embedding_modules import (
    ITEPEmbeddingBagCollection,
    ITEPEmbeddingCollection,
)
from tessera.training.modules.itep_modules import ADDRESS, USE, GenericITEPModule, rows_of_kernels
from tessera.training.optim.fused import FusedOptimizerModule
from tessera.training.optim.keyed import CombinedOptimizer
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

M = TypeVar("M", ITEPEmbeddingBagCollection, ITEPEmbeddingCollection)
SHARDING_TYPES = (
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_WISE.value,
)


@dataclass
class ITEPEmbeddingBagCollectionContext(EmbeddingBagCollectionContext):
    """Holds what the steps of one batch share."""


@dataclass
class ITEPEmbeddingCollectionContext(EmbeddingCollectionContext):
    """Holds what the steps of one batch share."""


def _id_bounds(ids: int, blocks: int) -> list[int]:
    """Where the ids of each block begin, and the end."""
    return list(accumulate(even_rows(ids, blocks), initial=0))


def _id_range(shard: ShardedEmbeddingTable, own: ShardMetadata | None, ids: int) -> list[int]:
    """The first id, and the end, of the ``ids`` of a table that share the rows of its shard ``own``."""
    if shard.global_metadata is None or own is None:
        return [0, ids]
    column = own.shard_offsets[1]
    blocks = [
        place for place in shard.global_metadata.shards_metadata if place.shard_offsets[1] == column
    ]
    place = [block.placement == own.placement for block in blocks].index(True)
    return _id_bounds(ids, len(blocks))[place : place + 2]


class _ShardedITEP(ShardedEmbeddingModule[KJTList, list[Tensor], Any, Any], FusedOptimizerModule):
    """A pruned collection whose tables live where a plan puts them.

    Input and output are those of the plain module, for this rank's own samples; parameters and state dicts have
    its names.  With a process group the addresses and uses of ids are ``ShardedTensor``s, ``[U]``, or ``[U, k]`` of
    a table in ``k`` column shards.  They may be loaded on as many ranks as they were saved on, and in one process.

    Args:
        module: the plain module, whose ids were not pruned yet.
        table_name_to_parameter_sharding: the plan.
        ebc_sharder: shards the tables.
        env: who takes part.
        device: where this rank computes.

    Raises:
        UserError: a module whose ids were counted already, a table that is placed in another way than
            `SHARDING_TYPES` names, or ids without any row on a rank.
    """

    _holder: ClassVar[str]
    _context: ClassVar[type[Any]]
    _iter: Tensor

    def __init__(
        self,
        module: ITEPEmbeddingBagCollection | ITEPEmbeddingCollection,
        table_name_to_parameter_sharding: EmbeddingModuleShardingPlan,
        ebc_sharder: EmbeddingBagCollectionSharder | EmbeddingCollectionSharder,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(ebc_sharder.qcomm_codecs_registry)
        if env.sharding_pg is not env.process_group:
            raise UserError(
                "a collection that is pruned in 2D parallelism: each sharding group would give rows to other "
                "ids; train it in a DistributedModelParallel"
            )
        plain: GenericITEPModule = module._itep_module  # noqa: SLF001 - the plain form of this class
        if not plain.is_new():
            raise UserError(
                "the uses of ids were counted already, and sharded ones begin anew; shard first, then load the state"
            )
        for table, where in table_name_to_parameter_sharding.items():
            if where.sharding_type not in SHARDING_TYPES:
                raise UserError(
                    f"table {table!r} is {where.sharding_type}; a collection that is pruned is one of "
                    f"{', '.join(SHARDING_TYPES)}"
                )
        self.register_buffer("_iter", module._iter.detach().clone().cpu())  # noqa: SLF001 - as above
        tables = ebc_sharder.shard(
            getattr(module, self._holder), table_name_to_parameter_sharding, env, device
        )
        assert isinstance(tables, (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection))
        if isinstance(tables, ShardedEmbeddingCollection):
            # Ids that are sent once each are told apart as rows, which they are not yet.
            tables._deduplicators = [None] * len(tables._input_dists)  # noqa: SLF001 - this module's own
        self.add_module(self._holder, tables)
        self._pg, self._rank = env.process_group, env.rank
        self._itep_module = GenericITEPModule(
            plain.table_name_to_unpruned_hash_sizes,
            enable_pruning=plain.enable_pruning,
            pruning_interval=plain.pruning_interval,
        )
        self._itep_module.hold(rows_of_kernels(tables.table_kernels(), self._span))
        self._places = self._places_of_features()
        self._send_by_ids(device or torch.device("cpu"))
        self._input_dists = tables._input_dists  # noqa: SLF001 - shown as this module's
        self._lookups = tables._lookups  # noqa: SLF001 - as above
        self._output_dists = tables._output_dists  # noqa: SLF001 - as above
        if self._pg is not None:
            self.register_state_dict_post_hook(_whole_states)  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.register_load_state_dict_pre_hook(_own_states)  # type: ignore[no-untyped-call] # as above

    @property
    def _tables(self) -> ShardedEmbeddingBagCollection | ShardedEmbeddingCollection:
        tables = getattr(self, self._holder)
        assert isinstance(tables, (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection))
        return tables

    def _ids_of(self, shard: ShardedEmbeddingTable) -> int | None:
        return self._itep_module.ids_of(shard.name, shard.num_embeddings)

    def _span(self, shard: ShardedEmbeddingTable) -> tuple[int, int] | None:
        """The first row of a shard here, and how many ids share its rows; None: it is not pruned."""
        ids, own = self._ids_of(shard), shard.local_metadata
        if ids is None:
            return None
        first, end = _id_range(shard, own, ids)
        return 0 if own is None else own.shard_offsets[0], end - first

    def _places_of_features(self) -> list[list[int | None]]:
        """For each sharding, for each of its features here, which of the pruned rows its ids have."""
        count = 0
        places: list[list[int | None]] = []
        for sharding in self.shardings.values():
            own: list[int | None] = []
            for group in sharding.layout.groups_per_rank[self._rank]:
                for shard in group.embedding_tables:
                    pruned = self._span(shard) is not None
                    own += [count if pruned else None] * len(shard.feature_names)
                    count += pruned
            places.append(own)
        return places

    def _send_by_ids(self, device: torch.device) -> None:
        """Have ids travel by ranges of ids where rows are cut into blocks."""
        pg, tables = self._pg, self._tables
        if pg is None:
            return
        for number, sharding in enumerate(self.shardings.values()):
            layout = sharding.layout
            if not sharding.strategy.splits_bags:
                continue
            bounds = list(layout.row_bounds)
            firsts = [
                shard
                for team in layout.teams
                for group in layout.groups_per_rank[team[0]]
                for shard in group.embedding_tables
                for _ in shard.feature_names
            ]
            for place, shard in enumerate(firsts):
                ids = self._ids_of(shard)
                if ids is not None:
                    bounds[place] = _id_bounds(ids, len(bounds[place]) - 1)
            tables._input_dists[number] = RwSparseFeaturesDist(  # noqa: SLF001 - shown as this module's
                pg,
                layout.teams,
                layout.features_per_team(),
                bounds,
                device,
                is_sequence=isinstance(tables, ShardedEmbeddingCollection),
            )

    @property
    def shardings(self) -> Mapping[str, TableSharding]:
        """The shardings of the tables by sharding type."""
        return self._tables.shardings

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizer of the fused tables here, which works in the backward pass."""
        return CombinedOptimizer([(self._holder, self._tables.fused_optimizer)])

    def table_kernels(self) -> list[Kernel]:
        """What holds the shards of this rank."""
        return self._tables.table_kernels()

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """The names of what differs from rank to rank: the tables' shards, and addresses and uses of ids."""
        dot = f"{prefix}." if prefix else ""
        yield from self._tables.sharded_parameter_names(f"{dot}{self._holder}")
        for name, _ in self._itep_module.named_buffers(prefix=f"{dot}_itep_module"):
            yield name

    def create_context(self) -> Any:
        """Return a new context, which holds what the steps of one batch share."""
        return self._context()

    def prefetch(self, dist_input: KJTList, forward_stream: torch.Stream | None = None) -> None:
        """Refuse to bring rows of a later batch into caches: its ids may have other rows by then.

        Raises:
            UserError: always.
        """
        del dist_input, forward_stream
        raise UserError(
            "rows of a collection that is pruned are not prefetched; train it with TrainPipelineSparseDist"
        )

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Begin to send ids to the ranks that hold their rows.

        Raises:
            KeyError: a feature is missing.
            ValueError: the values are not int32 or int64, or what the collection says.
        """
        return self._tables.input_dist(ctx, features)

    def compute(self, ctx: Any, dist_input: KJTList) -> list[Tensor]:
        """Turn the received ids into rows, and look those up; in training rows may change their ids first."""
        step, itep = int(self._iter), self._itep_module
        if self.training:
            itep.prune(step)
            self._iter += 1
        rows = [
            itep.remap(features, places, step)
            for features, places in zip(dist_input, self._places, strict=True)
        ]
        return self._tables.compute(ctx, KJTList(rows))

    def output_dist(self, ctx: Any, output: list[Tensor]) -> LazyAwaitable[Any]:
        """Begin to send vectors to the ranks of their ids."""
        return self._tables.output_dist(ctx, output)

    def _shards_by_table(self) -> dict[str, list[ShardedEmbeddingTable]]:
        """The shards of all ranks of each table that is pruned."""
        found: dict[str, list[ShardedEmbeddingTable]] = {}
        for sharding in self.shardings.values():
            for shard in sharding.embedding_tables():
                if self._ids_of(shard) is not None:
                    found.setdefault(shard.name, []).append(shard)
        return found

    def _here(self) -> dict[str, list[tuple[str, ShardMetadata]]]:
        """By table the names of its buffers here, with their places among all ids and column shards."""
        names = iter(self._itep_module.buffer_names)
        found: dict[str, list[tuple[str, ShardMetadata]]] = {}
        for kernel in self.table_kernels():
            for shard in kernel.tables:
                if self._span(shard) is not None:
                    own = shard.local_metadata
                    assert own is not None, "shards of a group of ranks have places"
                    found.setdefault(shard.name, []).append((next(names), self._place(shard, own)))
        return found

    def _place(self, shard: ShardedEmbeddingTable, own: ShardMetadata) -> ShardMetadata:
        """The place of the ids of a shard among ``[U]``, or ``[U, k]``."""
        whole, ids = shard.global_metadata, self._ids_of(shard)
        assert whole is not None, "shards of a group of ranks have places"
        assert ids is not None, "it is pruned"
        columns = sorted({place.shard_offsets[1] for place in whole.shards_metadata})
        first, end = _id_range(shard, own, ids)
        offsets, sizes = [first, columns.index(own.shard_offsets[1])], [end - first, 1]
        dims = 1 if len(columns) == 1 else 2
        return ShardMetadata(offsets[:dims], sizes[:dims], own.placement)


def _whole_states(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """Put the addresses and uses of all ranks together in a state dict."""
    del local_metadata
    assert isinstance(module, _ShardedITEP)
    here, pg = module._here(), module._pg  # noqa: SLF001 - its own hook
    assert pg is not None, "registered with a process group alone"
    for table, shards in module._shards_by_table().items():  # noqa: SLF001 - as above
        whole = shards[0].global_metadata
        assert whole is not None, "shards of a group of ranks have places"
        places = [module._place(shards[0], place) for place in whole.shards_metadata]  # noqa: SLF001 - as above
        ends = [
            max(p.shard_offsets[dim] + p.shard_sizes[dim] for p in places)
            for dim in range(len(places[0].shard_offsets))
        ]
        for kind, dtype in ((ADDRESS, torch.int64), (USE, torch.float32)):
            own = []
            for name, place in here.get(table, []):
                live = state_dict.pop(f"{prefix}_itep_module.{name}{kind}")
                own.append((place, live if len(ends) == 1 else live.unsqueeze(1)))
            metadata = ShardedTensorMetadata(
                places, torch.Size(ends), TensorProperties(dtype=dtype)
            )
            key = f"{prefix}_itep_module.{table}{kind}"
            state_dict[key] = sharded_tensor(own, metadata, pg)


def _own_states(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take this rank's addresses and uses out of a state dict that is to be loaded."""
    assert isinstance(module, _ShardedITEP)
    if module._pg is None:  # noqa: SLF001 - its own hook
        return
    here = module._here()  # noqa: SLF001 - as above
    for table in module._shards_by_table():  # noqa: SLF001 - as above
        for kind in (ADDRESS, USE):
            value = state_dict.pop(f"{prefix}_itep_module.{table}{kind}", None)
            if value is None:
                continue
            for name, place in here.get(table, []):
                found = _part(value, place)
                if found is not None:
                    state_dict[f"{prefix}_itep_module.{name}{kind}"] = found


def _part(value: Any, place: ShardMetadata) -> Tensor | None:
    """The part ``[ids]`` of a loaded tensor at a place; None: the tensor has no such part here."""
    first, count = place.shard_offsets[0], place.shard_sizes[0]
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            same = shard.metadata.shard_offsets == place.shard_offsets
            if same and shard.metadata.shard_sizes == place.shard_sizes:
                return shard.tensor.flatten()
        return None
    assert isinstance(value, Tensor)
    return value.view(value.size(0), -1)[first : first + count, 0]


class ShardedITEPEmbeddingBagCollection(_ShardedITEP):
    """The sharded form of `ITEPEmbeddingBagCollection`."""

    _holder = "_embedding_bag_collection"
    _context = ITEPEmbeddingBagCollectionContext

    @property
    def unsharded_module_type(self) -> type[ITEPEmbeddingBagCollection]:
        """The type of module that this is the sharded form of."""
        return ITEPEmbeddingBagCollection


class ShardedITEPEmbeddingCollection(_ShardedITEP):
    """The sharded form of `ITEPEmbeddingCollection`; each id is sent as often as it comes."""

    _holder = "_embedding_collection"
    _context = ITEPEmbeddingCollectionContext

    @property
    def unsharded_module_type(self) -> type[ITEPEmbeddingCollection]:
        """The type of module that this is the sharded form of."""
        return ITEPEmbeddingCollection


class _ITEPSharder(BaseEmbeddingSharder[M]):
    """Turns a pruned collection into its sharded form."""

    _sharded: type[_ShardedITEP]

    def __init__(
        self,
        ebc_sharder: EmbeddingBagCollectionSharder | EmbeddingCollectionSharder,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None,
    ) -> None:
        super().__init__(ebc_sharder.fused_params, qcomm_codecs_registry)
        self._ebc_sharder = ebc_sharder

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """The weights of the tables by table name."""
        plain = getattr(module, self._sharded._holder)  # noqa: SLF001 - the sharded form of this file
        return self._ebc_sharder.shardable_parameters(plain)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The strategies that keep all ids of a row together."""
        del compute_device_type
        return list(SHARDING_TYPES)

    def shard(
        self,
        module: M,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> _ShardedITEP:
        """The sharded form of ``module``, with its weights and new addresses.

        Raises:
            UserError: the plan or the module does not fit; see the sharded form.
        """
        return self._sharded(module, params, self._ebc_sharder, env, device)


class ITEPEmbeddingBagCollectionSharder(_ITEPSharder[ITEPEmbeddingBagCollection]):
    """Turns `ITEPEmbeddingBagCollection` into its sharded form.

    Args:
        ebc_sharder: shards the tables; None: one with the next argument.
        qcomm_codecs_registry: how vectors are written for the network.
    """

    _plain = ITEPEmbeddingBagCollection
    _sharded = ShardedITEPEmbeddingBagCollection

    def __init__(
        self,
        ebc_sharder: EmbeddingBagCollectionSharder | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        registry = qcomm_codecs_registry
        super().__init__(
            ebc_sharder or EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry), registry
        )


class ITEPEmbeddingCollectionSharder(_ITEPSharder[ITEPEmbeddingCollection]):
    """Turns `ITEPEmbeddingCollection` into its sharded form.

    Args:
        ebc_sharder: shards the tables; None: one with the next argument.
        qcomm_codecs_registry: how vectors are written for the network.

    Raises:
        UserError: ``ebc_sharder`` sends each id once, which takes rows in the place of ids.
    """

    _plain = ITEPEmbeddingCollection
    _sharded = ShardedITEPEmbeddingCollection

    def __init__(
        self,
        ebc_sharder: EmbeddingCollectionSharder | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        if ebc_sharder is not None and ebc_sharder.use_index_dedup:
            raise UserError(
                "ebc_sharder has use_index_dedup=True, which goes by rows, and ids become rows where they "
                "arrive; leave it out"
            )
        registry = qcomm_codecs_registry
        super().__init__(
            ebc_sharder or EmbeddingCollectionSharder(qcomm_codecs_registry=registry), registry
        )
