"""EmbeddingBagCollection in its fused form, and the sharder that makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tessera.training.distributed.batched_embedding_kernel import BatchedFusedEmbeddingBag
from tessera.training.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ShardingEnv,
    check_one_rank,
)
from tessera.training.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from tessera.training.modules.embedding_modules import EmbeddingBagCollection, check_ids
from tessera.training.optim.fused import FusedOptimizer, FusedParams
from tessera.training.optim.optimizers import IN_BACKWARD_OPTIMIZERS
from tessera.training.sparse.checks import check_id_dtype
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor


class _Lookup:
    """The tables of one pooling, and which features of the input are theirs."""

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        *,
        mean: bool,
        is_weighted: bool,
        fused_params: FusedParams,
    ) -> None:
        self.tables = tables
        self.features = [feature for table in tables for feature in table.feature_names]
        self.table_of = [table for table in tables for _ in table.feature_names]
        self.dims = [table.embedding_dim for table in self.table_of]
        self.kernel = BatchedFusedEmbeddingBag(
            tables, mean=mean, is_weighted=is_weighted, fused_params=fused_params
        )
        self._is_weighted = is_weighted

    def select(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """This lookup's features, in its order."""
        if features.keys() == self.features:
            return features
        places = features.index_per_key()
        missing = [feature for feature in self.features if feature not in places]
        if missing:
            raise KeyError(f"feature {missing[0]!r} is missing; the input has {features.keys()}")
        if len(set(self.features)) == len(self.features):
            return features.permute([places[feature] for feature in self.features])
        # A feature that several tables serve is looked up once for each.
        parts = features.split([1] * len(places))
        repeated = [parts[places[feature]] for feature in self.features]
        weights = [part.weights_or_none() for part in repeated]
        return KeyedJaggedTensor(
            keys=[str(index) for index in range(len(repeated))],
            values=torch.cat([part.values() for part in repeated]),
            weights=torch.cat([w for w in weights if w is not None]) if self._is_weighted else None,
            lengths=torch.cat([part.lengths() for part in repeated]),
            stride=features.stride(),
        )

    def forward(self, features: KeyedJaggedTensor, weight_decay: float) -> Tensor:
        """``[B, sum of D]`` of this lookup's features."""
        own = self.select(features)
        weights = own.weights() if self._is_weighted else None
        ids, offsets = own.values().long(), own.offsets().long()
        try:
            return self.kernel.forward(ids, offsets, weights, weight_decay)
        except RuntimeError:
            # FBGEMM has refused something: look again, slowly, and say what.
            for feature, table, start, stop in zip(
                self.features,
                self.table_of,
                own.offset_per_key(),
                own.offset_per_key()[1:],
                strict=False,
            ):
                check_ids(feature, table, ids[start:stop])
            raise


class ShardedEmbeddingBagCollection(nn.Module):
    """The fused form of an `EmbeddingBagCollection`, all tables in this process.

    The tables of one pooling are one operator.  Its backward pass also updates the rows that
    the batch touched, so no gradient of a table ever exists.  Parameters have the names and
    shapes of the plain collection's (``embedding_bags.<table>.weight``): state dicts go either
    way.

    Ids are checked by the operator at each forward pass.

    Args:
        module: the plain collection; on the ``meta`` device it is built here from its configs.
        fused_params: the optimizer.

    Memory: the tables, the optimizer's state, and until ``module`` is dropped its tables too.
    """

    def __init__(self, module: EmbeddingBagCollection, fused_params: FusedParams) -> None:
        super().__init__()
        self._configs = module.embedding_bag_configs()
        self._is_weighted = module.is_weighted()
        self._embedding_names = module.embedding_names()
        self._length_per_key = [
            table.embedding_dim for table in self._configs for _ in table.feature_names
        ]
        self._lookups = [
            _Lookup(tables, mean=mean, is_weighted=self._is_weighted, fused_params=fused_params)
            for mean in (False, True)
            if (tables := [t for t in self._configs if (t.pooling is PoolingType.MEAN) == mean])
        ]
        self._order = self._output_order()
        self.embedding_bags = nn.ModuleDict()
        self._fused_optimizer = self._register_tables(fused_params)
        self._take_weights(module)

    def _output_order(self) -> list[int] | None:
        """Where the lookups' vectors go in the output; None where they are in order already."""
        if len(self._lookups) == 1:
            return None
        found = [
            (table.name, feature)
            for lookup in self._lookups
            for table, feature in zip(lookup.table_of, lookup.features, strict=True)
        ]
        wanted = [(table.name, name) for table in self._configs for name in table.feature_names]
        return [found.index(pair) for pair in wanted]

    def _register_tables(self, fused_params: FusedParams) -> FusedOptimizer:
        views = {
            table.name: (weight, states)
            for lookup in self._lookups
            for table, weight, states in zip(
                lookup.tables, lookup.kernel.weights, lookup.kernel.states, strict=True
            )
        }
        parameters: dict[str, Tensor] = {}
        state: dict[Tensor, dict[str, Tensor]] = {}
        for table in self._configs:
            view, states = views[table.name]
            parameter = nn.Parameter(view)
            holder = nn.Module()
            holder.weight = parameter
            self.embedding_bags[table.name] = holder
            parameters[f"embedding_bags.{table.name}.weight"] = parameter
            state[parameter] = {f"momentum{index + 1}": s for index, s in enumerate(states)}
        group = {
            "params": list(parameters.values()),
            "lr": fused_params.learning_rate,
            "eps": fused_params.eps,
            "weight_decay": fused_params.weight_decay,
        }
        optimizer = FusedOptimizer(parameters, state, [group])
        for registered in parameters.values():
            setattr(registered, IN_BACKWARD_OPTIMIZERS, [optimizer])
        return optimizer

    @torch.no_grad()
    def _take_weights(self, module: EmbeddingBagCollection) -> None:
        if module.device.type == "meta":
            self.reset_parameters()
            return
        for name, bag in module.embedding_bags.items():
            assert isinstance(bag, nn.EmbeddingBag)
            self._weight(name).copy_(bag.weight)

    def _weight(self, table: str) -> Tensor:
        weight = self.embedding_bags[table].weight
        assert isinstance(weight, Tensor)
        return weight

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give every table its first values."""
        for table in self._configs:
            table.init_weights(self._weight(table.name))

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """The optimizer that works in the backward pass."""
        return self._fused_optimizer

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables."""
        return self._configs

    def embedding_names(self) -> list[str]:
        """The output's keys."""
        return self._embedding_names

    def is_weighted(self) -> bool:
        """Whether ids carry weights."""
        return self._is_weighted

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up and pool.

        Args:
            features: at least the features of all tables; others are ignored.

        Returns:
            ``[B, sum of D]`` float32; an empty bag gives zeros.

        Raises:
            IndexError: an id is not a row of its table.
            KeyError: a feature is missing.
            ValueError: the values are not int32 or int64, or the collection is weighted and the
                features are not.
        """
        check_id_dtype(features.values())
        group = self._fused_optimizer.param_groups[0]
        pooled = []
        for lookup in self._lookups:
            lookup.kernel.set_hyper_parameters(group["lr"], group["eps"])
            pooled.append(lookup.forward(features, group["weight_decay"]))
        if self._order is None:
            values = pooled[0]
        else:
            vectors = [
                vector
                for lookup, part in zip(self._lookups, pooled, strict=True)
                for vector in torch.split(part, lookup.dims, dim=1)
            ]
            values = torch.cat([vectors[place] for place in self._order], dim=1)
        return KeyedTensor(self._embedding_names, self._length_per_key, values)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ShardedEmbeddingBagCollection:  # noqa: FBT001, FBT002 - torch's signature
        """Refuse moves and casts: the operator would keep the old tables and drift apart."""
        del recurse
        probe = torch.empty(0)
        moved = fn(probe)
        if moved.device != probe.device or moved.dtype != probe.dtype:
            raise ValueError(
                f"fused tables stay float32 on the CPU; asked for {moved.dtype} on {moved.device}. "
                "Move the state_dict into a plain EmbeddingBagCollection instead"
            )
        return self

    def __deepcopy__(self, memo: Any) -> ShardedEmbeddingBagCollection:
        raise ValueError(
            "fused tables cannot be deep-copied: copies of the parameters would be cut off from "
            "the operator.  Build a second model and load the state_dict"
        )


class EmbeddingBagCollectionSharder(ModuleSharder):
    """Turns `EmbeddingBagCollection` into its fused form.

    Args:
        fused_params: keys of `FusedParams`.

    Raises:
        ValueError: an unknown key or value.
    """

    def __init__(self, fused_params: Mapping[str, Any] | None = None) -> None:
        self.fused_params = FusedParams.from_dict(fused_params or {})

    @property
    def module_type(self) -> type[EmbeddingBagCollection]:
        """The type that this sharder takes."""
        return EmbeddingBagCollection

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The tables' weights by table name."""
        assert isinstance(module, EmbeddingBagCollection)
        return {
            name.split(".")[0]: parameter
            for name, parameter in module.embedding_bags.named_parameters()
        }

    def shard(
        self,
        module: nn.Module,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> ShardedEmbeddingBagCollection:
        """The fused form of ``module``, with its weights.

        Raises:
            ValueError: more than one rank, a plan that does not name exactly the module's
                tables, or a device other than the CPU.
        """
        assert isinstance(module, EmbeddingBagCollection)
        check_one_rank(env, params)
        tables = {table.name for table in module.embedding_bag_configs()}
        if set(params) != tables:
            raise ValueError(
                f"the plan places tables {sorted(params)}, the module has {sorted(tables)}"
            )
        if device is not None and device.type != "cpu":
            raise ValueError(f"device is {device}; fused tables are trained on the CPU")
        return ShardedEmbeddingBagCollection(module, self.fused_params)
