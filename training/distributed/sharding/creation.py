"""From a collection and its plan to the shardings of its tables, one per strategy."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.distributed.remote_device import _remote_device

from tessera.training.distributed.comm.codec_types import CommOp, QuantizedCommCodecs
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.plan.plan_types import ParameterSharding, ShardingType
from tessera.training.distributed.sharding.embedding_sharding import (
    EmbeddingSharding,
    TableSharding,
)
from tessera.training.distributed.sharding.interfaces import EmbeddingShardingInfo
from tessera.training.distributed.sharding.registry import ShardingStrategy, strategy_of
from tessera.training.distributed.tables.grouped_lookup import output_dtype_of
from tessera.training.distributed.tables.kernels.choice import FBGEMM_COLUMNS_MULTIPLE
from tessera.training.distributed.tables.table_shards import kernel_named
from tessera.training.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    EmbeddingTableConfig,
    PoolingType,
)
from tessera.training.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.training.modules.tables import embedding_names
from tessera.training.optim.apply_optimizer_in_backward import fused_params_of as optimizer_of

# Settings that say how a table is stored, whatever its optimizer is.
_STORAGE = frozenset(
    {
        "bounds_check_mode",
        "cache_algorithm",
        "cache_load_factor",
        "cache_precision",
        "cache_reserved_memory",
        "enforce_hbm",
        "gradient_clipping",
        "max_gradient",
        "output_dtype",
        "prefetch_pipeline",
        "stochastic_rounding",
    }
)


def _fused_params_of(
    sharder_params: Mapping[str, Any] | None, placement: ParameterSharding, parameter: Tensor
) -> dict[str, Any]:
    """The settings of one table's kernel.

    The placement's go before the sharder's, and an optimizer that ``apply_optimizer_in_backward``
    gave the parameter before both.
    """
    own = optimizer_of(parameter) if isinstance(parameter, nn.Parameter) else None
    params = dict(sharder_params or {})
    if own is not None:
        params = {name: value for name, value in params.items() if name in _STORAGE} | own
    return params | placement_params(placement)


def placement_params(placement: ParameterSharding) -> dict[str, Any]:
    """The settings of a table's kernel that its placement gives, as ``fused_params`` have them."""
    settings: dict[str, Any] = {}
    for name, value in vars(placement.cache_params).items() if placement.cache_params else ():
        settings[name if name == "prefetch_pipeline" else f"cache_{name}"] = value
    for name in ("enforce_hbm", "stochastic_rounding", "bounds_check_mode", "output_dtype"):
        settings[name] = getattr(placement, name)
    return {name: value for name, value in settings.items() if value is not None}


def _completed(
    placement: ParameterSharding, parameter: Tensor, world_size: int | None, device: torch.device
) -> ParameterSharding:
    """``placement`` with its shards listed; a whole table needs no list to be understood."""
    strategy = strategy_of(placement.sharding_type)
    if placement.sharding_spec is not None or strategy.replicated:
        return placement
    ranks = placement.ranks or ([0] if world_size == 1 else [])
    if placement.sharding_type != ShardingType.TABLE_WISE.value or len(ranks) != 1:
        return placement
    where = f"rank:{ranks[0]}/{device}"
    spec = EnumerableShardingSpec([ShardMetadata([0, 0], list(parameter.shape), where)])
    return replace(placement, ranks=ranks, sharding_spec=spec)


def table_config(
    table: BaseEmbeddingConfig,
    names: Iterator[str],
    *,
    is_weighted: bool,
    has_feature_processor: bool = False,
) -> EmbeddingTableConfig:
    """A collection's table with what the collection says of all; ``names`` gives its outputs' names."""
    own = {own.name: getattr(table, own.name) for own in fields(BaseEmbeddingConfig)}
    return EmbeddingTableConfig(
        **{**own, "feature_names": list(table.feature_names)},
        pooling=getattr(table, "pooling", PoolingType.NONE),
        is_weighted=is_weighted,
        has_feature_processor=has_feature_processor,
        embedding_names=[next(names) for _ in table.feature_names],
    )


def create_sharding_infos_by_sharding(
    module: EmbeddingBagCollection | EmbeddingCollection,
    table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
    prefix: str | None = None,
    fused_params: Mapping[str, Any] | None = None,
    suffix: str = "weight",
    *,
    world_size: int | None = None,
    device: torch.device | None = None,
    has_feature_processor: bool = False,
) -> dict[str, list[EmbeddingShardingInfo]]:
    """The tables of a collection by strategy, in the collection's order.

    Args:
        module: the collection; its parameters are called ``<prefix><table>.<suffix>``.
        table_name_to_parameter_sharding: where each table lives.
        prefix: see ``module``; None: ``embedding_bags.``, of an unpooled collection ``embeddings.``.
        fused_params: the tables' optimizer.
        suffix: see ``module``.
        world_size: number of ranks; None: unknown, and every placement must list its shards.
        device: where this rank computes; None: the CPU.
        has_feature_processor: whether the lookups put weights on ids.

    Raises:
        ValueError: a plan that is of other tables, or names an unknown strategy.
    """
    plan = table_name_to_parameter_sharding
    tables: Sequence[EmbeddingBagConfig] | Sequence[EmbeddingConfig]
    if isinstance(module, EmbeddingCollection):
        tables, is_weighted, own_prefix = module.embedding_configs(), False, "embeddings."
    else:
        tables, is_weighted = module.embedding_bag_configs(), module.is_weighted()
        own_prefix = "embedding_bags."
    names = iter(embedding_names(tables))
    if set(plan) != {table.name for table in tables}:
        raise ValueError(
            f"the plan places tables {sorted(plan)}, the module has "
            f"{sorted(table.name for table in tables)}"
        )
    parameters = dict(module.named_parameters())
    by_type: dict[str, list[EmbeddingShardingInfo]] = {}
    for table in tables:
        name = own_prefix if prefix is None else prefix
        parameter = parameters[f"{name}{table.name}.{suffix}"]
        placement = _completed(
            plan[table.name], parameter, world_size, device or torch.device("cpu")
        )
        config = table_config(
            table, names, is_weighted=is_weighted, has_feature_processor=has_feature_processor
        )
        settings = _fused_params_of(fused_params, placement, parameter)
        by_type.setdefault(placement.sharding_type, []).append(
            EmbeddingShardingInfo(config, placement, parameter, settings)
        )
    return by_type


def _output_dtype(infos: Sequence[EmbeddingShardingInfo]) -> torch.dtype:
    """The type in which the vectors of tables travel that are sent together."""
    kinds = (
        output_dtype_of(
            kernel_named(info.embedding_config.name, info.param_sharding.compute_kernel),
            info.embedding_config.data_type,
            info.fused_params,
        )
        for info in infos
    )
    return reduce(torch.promote_types, kinds)


def _fit_fbgemm(infos: Sequence[EmbeddingShardingInfo]) -> bool:
    """Whether the widths of all shards are such that FBGEMM's operators take them."""
    specs = [info.param_sharding.sharding_spec for info in infos]
    shards = [
        shard for spec in specs if isinstance(spec, EnumerableShardingSpec) for shard in spec.shards
    ]
    return not any(shard.shard_sizes[1] % FBGEMM_COLUMNS_MULTIPLE for shard in shards)


def _encodes_numbers_one_by_one(codecs: QuantizedCommCodecs | None) -> bool:
    """Whether what becomes of a number on its way does not depend on its neighbours."""
    return codecs is None or codecs.forward.row_dim == codecs.backward.row_dim == 1


def pooled_infos_served_together(
    infos_by_type: Mapping[str, Sequence[EmbeddingShardingInfo]],
    table_names: Sequence[str],
    qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
) -> dict[str, list[EmbeddingShardingInfo]]:
    """The tables of a pooled collection, by the sharding that serves them.

    A sharding has a lookup, an exchange of ids and two of vectors in every step, and each of them costs
    the same time of the host for one table as for many.  A table-wise table is a column-wise one with a
    single block of all columns, so one sharding serves both: tables of all types whose strategies are
    alike in what travels (`ShardingStrategy.sent_as`).  It has the name of the type that is listed last
    (`ShardingStrategy.preference`): of table-wise and column-wise tables ``column_wise``.

    What is computed is the same: vectors are sent as they are, and each row is updated by itself.
    Therefore types stay apart whose vectors travel in different dtypes, or of which one has shards that
    FBGEMM's operators do not take; and so do all where a codec of ``qcomm_codecs_registry`` encodes
    several numbers together.

    Args:
        infos_by_type: as `create_sharding_infos_by_sharding` gives them.
        table_names: of the collection, in its order, in which the tables of a sharding come too.
        qcomm_codecs_registry: how vectors are written for the network, by `CommOp` name.
    """
    place = {name: number for number, name in enumerate(table_names)}
    codecs = (qcomm_codecs_registry or {}).get(CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name)
    together_at_all = _encodes_numbers_one_by_one(codecs)
    sent_as = {name: strategy_of(name).sent_as for name in infos_by_type}
    alike: dict[Hashable, list[ShardingStrategy]] = {}
    for name, infos in infos_by_type.items():
        key: Hashable = name
        others = [own for other, own in sent_as.items() if other != name]
        if together_at_all and sent_as[name] is not None and sent_as[name] in others:
            key = (sent_as[name], _output_dtype(infos), _fit_fbgemm(infos))
        alike.setdefault(key, []).append(strategy_of(name))
    together: dict[str, list[EmbeddingShardingInfo]] = {}
    for own in alike.values():
        infos = [info for strategy in own for info in infos_by_type[strategy.name]]
        serving = max(own, key=lambda strategy: strategy.preference)
        together[serving.name] = sorted(infos, key=lambda info: place[info.embedding_config.name])
    return together


def create_embedding_bag_sharding(  # noqa: PLR0917 - the signature TorchRec users know
    sharding_type: str,
    sharding_infos: Sequence[EmbeddingShardingInfo],
    env: ShardingEnv,
    device: torch.device | None = None,
    permute_embeddings: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
) -> TableSharding:
    """The sharding of pooled tables of one strategy, which is named; see `EmbeddingSharding`.

    Raises:
        ValueError: an unknown strategy, or placements that do not fit it.
    """
    return EmbeddingSharding(
        strategy_of(sharding_type),
        sharding_infos,
        env,
        device,
        qcomm_codecs_registry,
        permute_embeddings=permute_embeddings,
    )


def create_embedding_sharding(
    sharding_type: str,
    sharding_infos: Sequence[EmbeddingShardingInfo],
    env: ShardingEnv,
    device: torch.device | None = None,
    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
) -> TableSharding:
    """The sharding of unpooled tables of one strategy; see `create_embedding_bag_sharding`."""
    return EmbeddingSharding(
        strategy_of(sharding_type),
        sharding_infos,
        env,
        device,
        qcomm_codecs_registry,
        is_sequence=True,
    )


def replace_placement_with_meta_device(sharding_infos: Sequence[EmbeddingShardingInfo]) -> None:
    """Move the placements of tables on the ``meta`` device there: nothing of them is anywhere."""
    for info in sharding_infos:
        spec = info.param_sharding.sharding_spec
        if info.param.is_meta and isinstance(spec, EnumerableShardingSpec):
            for shard in spec.shards:
                if shard.placement is not None:
                    shard.placement = _remote_device(f"rank:{shard.placement.rank()}/meta")


def tables_of(tables: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a collection's tables by table name, of the module that holds them."""
    return {name.split(".")[0]: parameter for name, parameter in tables.named_parameters()}
