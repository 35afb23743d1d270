"""What the sharded forms of both quantized collections share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, cast

import torch
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from typing_extensions import Self

from tessera.errors import UserError, refuse_unknown
from tessera.training.distributed.collections.sharders import BaseQuantEmbeddingSharder
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.inference.lookup import OUTPUT_DTYPE, ROW_ALIGNMENT
from tessera.training.distributed.inference.sharding import InferSharding, Route
from tessera.training.distributed.plan.plan_types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingType,
)
from tessera.training.distributed.plan.sharded_module import M
from tessera.training.distributed.sharding.by_hand import placement
from tessera.training.distributed.sharding.creation import table_config
from tessera.training.distributed.sharding.interfaces import (
    EmbeddingShardingInfo,
    FeatureShardingMixIn,
    ModuleShardingMixIn,
)
from tessera.training.distributed.sharding.registry import ShardingStrategy, strategy_of
from tessera.training.distributed.tables.table_shards import GroupedEmbeddingConfig
from tessera.training.distributed.travel.kjt_list import ListOfKJTList
from tessera.training.modules.tables import embedding_names
from tessera.training.quant.lookup import QuantizedRows, StoredPart
from tessera.training.quant.stored_collection import (
    Config,
    StoredCollection,
    refuse_varying,
    refuse_wrong_ids,
)
from tessera.training.sparse import selection
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.training.streamable import Multistreamable


@dataclass
class QuantCollectionContext(Multistreamable):
    """What the steps of one batch share."""

    features: KeyedJaggedTensor | None = None  # the collection's, in its order
    routes: list[Route] = field(default_factory=list)  # per sharding, where each id went
    sent: ListOfKJTList | None = None  # per sharding, the features on their devices


class ShardedQuantEbcInputDist(nn.Module):
    """Sends each sharding, one per type, its features."""

    def __init__(self, shardings: Sequence[InferSharding]) -> None:
        super().__init__()
        self._shardings = nn.ModuleList(shardings)

    def forward(self, features: KeyedJaggedTensor) -> tuple[ListOfKJTList, list[Route]]:
        """Each sharding's features on their devices, and where each id went."""
        shardings = cast("list[InferSharding]", list(self._shardings))
        begun = [sharding.input_dist(features) for sharding in shardings]
        return ListOfKJTList([sent for sent, _ in begun]), [route for _, route in begun]


def create_infer_embedding_bag_sharding(
    sharding_type: str,
    sharding_infos: Sequence[EmbeddingShardingInfo],
    env: ShardingEnv,
    device: torch.device | None = None,
    *,
    pooled: bool = True,
) -> InferSharding:
    """The tables of one sharding type on the devices of this process.

    Args:
        sharding_type: ``table_wise``, ``column_wise`` or ``row_wise``.
        sharding_infos: the tables; ``param`` holds their stored rows ``[rows, row bytes]`` uint8,
            which are copied.
        env: how many devices.
        device: the devices' type; None: ``cuda`` where there is one, else ``cpu``.
        pooled: whether the vectors of a bag are added up.

    Raises:
        UserError: inference has no such strategy, or the plan cannot be followed.
        ValueError: a placement that does not fit the table or the devices.
    """
    strategy, offered = strategy_of(sharding_type), _SHARDER.sharding_types("cpu")
    refuse_unknown("quantized tables: sharding_type", strategy.name, offered)
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    infos = [_listed(info, strategy, env.world_size, device.type) for info in sharding_infos]
    return InferSharding(strategy, infos, env, device, pooled=pooled)


def _listed(
    info: EmbeddingShardingInfo, strategy: ShardingStrategy, world_size: int, device_type: str
) -> EmbeddingShardingInfo:
    """``info`` with all shards in its placement's list; without one, those that its ranks make."""
    config, where = info.embedding_config, info.param_sharding
    spec = where.sharding_spec
    if not isinstance(spec, EnumerableShardingSpec):
        chosen: dict[str, Any] = {"compute_kernel": "quant"}
        if strategy.name == ShardingType.TABLE_WISE.value:
            chosen["rank"] = (where.ranks or [0])[0]
        elif strategy.name == ShardingType.COLUMN_WISE.value:
            chosen["ranks"] = where.ranks
        table = torch.empty(config.num_embeddings, config.embedding_dim, device="meta")
        try:
            place = strategy.by_hand(**chosen)
            where = place(table, world_size, world_size, device_type, _SHARDER)
        except ValueError as error:
            raise UserError(f"table {config.name!r}: {error}") from error
    elif strategy.splits_bags:
        # Every device looks all tables up: one without rows has an empty block.
        blocks = {shard.placement.rank(): shard for shard in spec.shards if shard.placement}
        shards, row = list(spec.shards), 0
        for rank in range(world_size):
            if rank in blocks:
                row = blocks[rank].shard_offsets[0] + blocks[rank].shard_sizes[0]
            else:
                where_to = placement(device_type, rank, world_size)
                shards.append(ShardMetadata([row, 0], [0, config.embedding_dim], where_to))
        where = replace(where, sharding_spec=EnumerableShardingSpec(shards))
    return replace(info, param_sharding=where)


class ShardedQuantCollection(nn.Module, ModuleShardingMixIn, Generic[Config]):
    """Tables of a quantized collection on the devices of this process.

    Args:
        module: the quantized collection; its rows are copied to the devices.
        table_name_to_parameter_sharding: the plan.
        env: how many devices: ``ShardingEnv.from_local``.
        fused_params: ``output_dtype`` and ``row_alignment``; None: the module's own.
        device: the devices' type; None: ``cuda`` where there is one, else ``cpu``.

    Attributes:
        configs: the tables.

    Raises:
        UserError: the plan leaves a table out, or cannot be followed.
    """

    def __init__(
        self,
        module: StoredCollection[Config],
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        plan = table_name_to_parameter_sharding
        self.configs = tables = list(module.configs)
        missing = [table.name for table in tables if table.name not in plan]
        if missing:
            raise UserError(f"the plan says nothing of table {missing[0]!r}")
        settings = {
            OUTPUT_DTYPE: module.output_dtype(),
            ROW_ALIGNMENT: module.rows.row_alignment,
            **(fused_params or {}),
        }
        self._output_dtype: torch.dtype = settings[OUTPUT_DTYPE]
        self._embedding_names = embedding_names(tables)
        names = iter(self._embedding_names)
        self._infos: dict[str, list[EmbeddingShardingInfo]] = {}
        for table, rows in zip(tables, module.rows.tables(), strict=True):
            where = plan[table.name]
            config = table_config(table, names, is_weighted=module.weighted)
            self._infos.setdefault(where.sharding_type, []).append(
                EmbeddingShardingInfo(config, where, rows, settings)
            )
        self._shardings = {
            kind: create_infer_embedding_bag_sharding(
                kind, infos, env, device, pooled=module.pooled
            )
            for kind, infos in self._infos.items()
        }
        for infos in self._infos.values():
            for info in infos:
                # The rows are copied; the unsharded ones may go.
                info.param = info.param.to("meta")
        self._feature_names = [name for table in tables for name in table.feature_names]
        self._row_counts = torch.tensor(
            [table.num_embeddings for table in tables for _ in table.feature_names]
        )
        self._lookups = nn.ModuleList(s.lookup() for s in self._shardings.values())
        self._input_dist_module = ShardedQuantEbcInputDist(list(self._shardings.values()))
        self._name_buffers(module.holder)
        self._prepare_output(module)

    @abstractmethod
    def _prepare_output(self, module: Any) -> None:
        """Make what `output_dist` needs, of the quantized collection."""

    def _name_buffers(self, holder: str) -> None:
        """Make every block a buffer: ``<holder>.<table>.weight``, or ``weight_<i>`` of several."""
        tables = nn.ModuleDict({table.name: nn.Module() for table in self.configs})
        self.add_module(holder, tables)
        blocks: dict[str, list[Tensor]] = {}
        for sharding in self._shardings.values():
            for block in sharding.blocks():
                blocks.setdefault(block.table, []).append(block.rows)
        for name, own in blocks.items():
            for index, rows in enumerate(own):
                buffer = "weight" if len(own) == 1 else f"weight_{index}"
                tables.get_submodule(name).register_buffer(buffer, rows)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:  # noqa: FBT001, FBT002 - torch's signature
        # The tables are spread over devices of one type, and hold no float that a cast changes.
        del recurse
        device = next(iter(self._shardings.values())).output_device
        wanted = fn(torch.empty(0, dtype=torch.uint8, device=device)).device
        if wanted.type != device.type:
            raise UserError(
                f"a sharded quantized collection stays on its devices ({device.type}); move the "
                f"collection to {wanted.type} before sharding it, or shard it with that device"
            )
        return self

    def copy(self, device: torch.device) -> Self:
        """Itself: the tables are too large to exist twice.

        Raises:
            UserError: ``device`` is of another type than the collection's.
        """
        return self.to(device)

    def sharding_type_to_sharding_infos(self) -> dict[str, list[EmbeddingShardingInfo]]:
        """The tables by `ShardingType` name; their ``param`` has a shape, and no memory."""
        return self._infos

    @property
    def shardings(self) -> Mapping[str, FeatureShardingMixIn]:
        """By `ShardingType` name."""
        return self._shardings

    def tbes_configs(self) -> dict[QuantizedRows, list[GroupedEmbeddingConfig]]:
        """The operators of all devices, and the shards that each serves."""
        each = [own.lookup().get_tbes_to_register() for own in self._shardings.values()]
        return {rows: configs for own in each for rows, configs in own.items()}

    def blocks(self) -> list[StoredPart]:
        """What is stored, device by device."""
        return [block for sharding in self._shardings.values() for block in sharding.blocks()]

    def output_dtype(self) -> torch.dtype:
        """The type of the vectors."""
        return self._output_dtype

    def create_context(self) -> QuantCollectionContext:
        """What the steps of one batch share."""
        return QuantCollectionContext()

    def input_dist(self, ctx: QuantCollectionContext, features: KeyedJaggedTensor) -> ListOfKJTList:
        """Each sharding's features on their devices.

        Raises:
            IndexError: an id on the CPU is not a row of its table.
            KeyError: a feature is missing.
            ValueError: the batch varies per key.
        """
        if isinstance(features, KeyedJaggedTensor):
            refuse_varying(features)
        ctx.features = selection.select_features(features, self._feature_names)
        if isinstance(ctx.features.values(), Tensor) and ctx.features.values().device.type == "cpu":
            refuse_wrong_ids(ctx.features, self._row_counts, self.configs)
        sent: ListOfKJTList
        sent, ctx.routes = self._input_dist_module(features)
        ctx.sent = sent
        return sent

    def compute(self, ctx: QuantCollectionContext, dist_input: ListOfKJTList) -> list[list[Tensor]]:
        """Look up: per sharding, per device."""
        del ctx
        lookups = enumerate(self._lookups)
        return [lookup(dist_input[index]) for index, lookup in lookups]

    @abstractmethod
    def output_dist(self, ctx: QuantCollectionContext, output: list[list[Tensor]]) -> Any:
        """The vectors on the first device, in the unsharded module's order."""

    def compute_and_output_dist(
        self,
        ctx: QuantCollectionContext,
        input: ListOfKJTList,  # noqa: A002 - the reference's name
    ) -> Any:
        """`compute`, then `output_dist`."""
        return self.output_dist(ctx, self.compute(ctx, input))


class QuantCollectionSharder(BaseQuantEmbeddingSharder[M]):
    """Base of the sharders: a plan sees the tables' logical sizes.

    Args:
        fused_params: ``output_dtype`` and ``row_alignment`` of the lookups.
        shardable_params: names of the tables that may be sharded; None: all.
    """

    _sharded: ClassVar[type[ShardedQuantCollection[Any]]]

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """By table name ``[rows, columns]`` uint8 on the ``meta`` device.

        The stored rows hold scales and padding besides; where a column block begins is counted
        in columns of the table.
        """
        assert isinstance(module, StoredCollection)
        return self._shardable(
            {
                part.name: torch.empty(part.rows, part.dim, dtype=torch.uint8, device="meta")
                for part in module.rows.parts()
            }
        )

    def shard(
        self,
        module: M,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> ShardedQuantCollection[Any]:
        """The sharded form of ``module``; see `ShardedQuantCollection`."""
        assert isinstance(module, StoredCollection)
        return self._sharded(module, params, env, self.fused_params, device)


_SHARDER: QuantCollectionSharder[Any] = QuantCollectionSharder()
