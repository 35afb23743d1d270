"""What sharded collections share, pooled or not: ids travel, are looked up, and vectors return.

Legend: ``D`` columns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from tessera.errors import UserError, unknown_name
from tessera.training.distributed.collections.fused_groups import FusedGroups
from tessera.training.distributed.collections.parts import ShardedTables, keep_caches_in_step
from tessera.training.distributed.collections.resharding import moved_parts
from tessera.training.distributed.collections.sharding_part import ShardingPart
from tessera.training.distributed.comm.awaitable import Awaitable, LazyAwaitable
from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.plan.plan_types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
)
from tessera.training.distributed.plan.sharded_module import (
    CompIn,
    DistOut,
    Out,
    ShardedModule,
    ShrdCtx,
)
from tessera.training.distributed.sharding.creation import (
    create_sharding_infos_by_sharding,
    pooled_infos_served_together,
    tables_of,
)
from tessera.training.distributed.sharding.embedding_sharding import TableSharding
from tessera.training.distributed.sharding.interfaces import (
    EmbeddingShardingContext,
    EmbeddingShardingInfo,
    ModuleShardingMixIn,
)
from tessera.training.distributed.tables.batched_kernels import Kernel
from tessera.training.distributed.tables.interfaces import BaseGroupedFeatureProcessor
from tessera.training.distributed.tables.table_shards import ShardedEmbeddingTable
from tessera.training.distributed.travel.feature_router import FeatureRouter
from tessera.training.distributed.travel.features_awaitable import KJTListSplitsAwaitable
from tessera.training.distributed.travel.kjt_list import KJTList
from tessera.training.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.training.optim.fused import FusedOptimizerModule
from tessera.training.optim.keyed import CombinedOptimizer
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.training.streamable import Multistreamable


class ShardedEmbeddingModule(
    ShardedModule[CompIn, DistOut, Out, ShrdCtx],
    ModuleShardingMixIn,
    Generic[CompIn, DistOut, Out, ShrdCtx],
):
    """A collection whose tables are spread over ranks.

    Inputs and outputs are each rank's own samples.  Its lookups and distributions live in plain
    lists: their parameters appear once, under the unsharded names.
    """

    def __init__(self, qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None) -> None:
        super().__init__(qcomm_codecs_registry)
        self._input_dists: list[nn.Module] = []
        self._lookups: list[nn.Module] = []
        self._output_dists: list[nn.Module] = []

    def prefetch(self, dist_input: KJTList, forward_stream: torch.Stream | None = None) -> None:
        """Bring the rows of a later batch into the caches of the tables that have one."""
        for lookup, features in zip(self._lookups, dist_input, strict=True):
            while isinstance(lookup, nn.parallel.DistributedDataParallel):
                lookup = lookup.module  # noqa: PLW2901 - unwrapped step by step
            prefetch = getattr(lookup, "prefetch", None)
            if prefetch is not None:
                prefetch(sparse_features=features, forward_stream=forward_stream)

    def extra_repr(self) -> str:
        """The lookups and distributions, which the module's own print would leave out."""
        parts = (
            ("lookups", self._lookups),
            ("_input_dists", self._input_dists),
            ("_output_dists", self._output_dists),
        )
        return "\n".join(
            "\n ".join([f"({name}): ", *[str(m).replace("\n", "\n ") for m in modules]])
            for name, modules in parts
            if modules
        )


class CollectionContext(Multistreamable):
    """Holds what the steps of one batch share."""

    sharding_contexts: list[Any]  # one per sharding
    # What was sent, and which of the collection's plans it was sent under.
    sent: tuple[KeyedJaggedTensor, int] | None = None


Ctx = TypeVar("Ctx", bound=CollectionContext)


@dataclass(frozen=True)
class _Origin:
    """What a collection was made of, without its tables' memory; apart from it, so that nothing gets a name."""

    plain: EmbeddingBagCollection | EmbeddingCollection
    fused_params: Mapping[str, Any] | None
    codecs: dict[str, QuantizedCommCodecs] | None
    feature_processor: BaseGroupedFeatureProcessor | None


class VectorsAwaitable(LazyAwaitable[Out]):
    """Waits for the vectors of all shardings and joins them.

    Pipelines look vectors up on a stream of their own.  Those that no collective has carried were made there, and their
    memory is kept until the stream that waits has joined them: the next lookup would be given it otherwise.

    Args:
        awaitables: one per sharding.
        join: makes the collection's output of what they give.
    """

    def __init__(
        self, awaitables: list[Awaitable[Tensor]], join: Callable[[list[Tensor]], Out]
    ) -> None:
        super().__init__()
        self._awaitables, self._join = awaitables, join

    def _wait_impl(self) -> Out:
        vectors = [awaitable.wait() for awaitable in self._awaitables]
        for part in vectors:
            if part.is_cuda:
                part.record_stream(torch.cuda.current_stream(part.device))
        return self._join(vectors)


class ShardedCollection(
    ShardedEmbeddingModule[KJTList, list[Tensor], Out, Ctx],
    FusedOptimizerModule,
    Generic[Out, Ctx],
):
    """A collection of tables that live where a plan puts them.

    Input and output are those of the plain collection, for this rank's own samples.  Parameters
    and state dicts have the plain collection's names (``<holder>.<table>.weight``); with a
    process group the state's tables are ``ShardedTensor``s.  Fused tables are updated by the
    backward pass, so no gradient of them ever exists.

    A subclass names the types of its contexts and output, and says what it sends (`_prepared`)
    and what it makes of the vectors that return (`_joined`).

    Args:
        module: the plain collection.  Each rank takes its shards from it; from the ``meta``
            device they get first values here, so that a table need never exist whole.
        table_name_to_parameter_sharding: the plan.
        env: who takes part; without a process group all tables are here.
        fused_params: the tables' optimizer (`FusedParams`).
        device: where this rank computes; None: the CPU.
        qcomm_codecs_registry: how vectors are written for the network, by `CommOp` name.
        feature_processor: puts weights on ids where they are looked up.

    Raises:
        ValueError: a plan that does not fit the tables or the ranks.

    Memory: this rank's shards, their optimizer's state, and until ``module`` is dropped its
    tables too.
    """

    _holder: ClassVar[str]
    _is_sequence: ClassVar[bool] = False
    _context: Callable[[], Ctx]
    _sharding_context: type[EmbeddingShardingContext] = EmbeddingShardingContext
    _awaitable: Callable[
        [list[Awaitable[Tensor]], Callable[[list[Tensor]], Out]], LazyAwaitable[Out]
    ]

    def __init__(  # noqa: PLR0917 - its subclasses have the signatures TorchRec users know
        self,
        module: EmbeddingBagCollection | EmbeddingCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        *,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> None:
        super().__init__(qcomm_codecs_registry)
        self._device = device or torch.device("cpu")
        self._env = env
        self._origin = _Origin(
            _without_memory(module), fused_params, qcomm_codecs_registry, feature_processor
        )
        self.module_sharding_plan = EmbeddingModuleShardingPlan(table_name_to_parameter_sharding)
        self._plan_number = 0
        self._parts = {
            kind: self._part(kind, own)
            for kind, own in self._infos_of(self.module_sharding_plan).items()
        }
        self._install()
        self._tables.fill(tables_of(module.get_submodule(self._holder)))
        self._groups = FusedGroups(self._all_shards(), self._tables.kernels())
        self._fused_optimizer = CombinedOptimizer(
            self._groups.parts(self._holder, self._tables.kernels())
        )
        keep_caches_in_step(self, lambda: self._tables)

    def _infos_of(
        self, plan: Mapping[str, ParameterSharding]
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        plain = self._origin.plain
        by_type = create_sharding_infos_by_sharding(
            plain,
            plan,
            fused_params=self._origin.fused_params,
            world_size=self._env.world_size,
            device=self._device,
            has_feature_processor=self._origin.feature_processor is not None,
        )
        if self._is_sequence:
            return by_type
        names = list(tables_of(plain.get_submodule(self._holder)))
        return pooled_infos_served_together(by_type, names, self._origin.codecs)

    def _part(self, kind: str, infos: list[EmbeddingShardingInfo]) -> ShardingPart:
        return ShardingPart.made(
            kind,
            infos,
            self._env,
            self._device,
            self._origin.codecs,
            is_sequence=self._is_sequence,
            feature_processor=self._origin.feature_processor,
        )

    def _all_shards(self) -> list[ShardedEmbeddingTable]:
        parts = self._parts.values()
        return [shard for part in parts for shard in part.sharding.embedding_tables()]

    def _install(self) -> None:
        """Take the parts of `_parts` into use."""
        parts, plain = list(self._parts.values()), self._origin.plain
        self._shardings: dict[str, TableSharding] = {
            kind: part.sharding for kind, part in self._parts.items()
        }
        self._tables = ShardedTables(
            list(tables_of(plain.get_submodule(self._holder))),
            [part.lookup for part in parts],
            self._all_shards(),
            self._env.sharding_pg,
            self._env.process_group,
        )
        self.add_module(self._holder, nn.ModuleDict(self._tables.modules))
        # In place: a module around this one shows the same lists.
        self._lookups[:] = [part.as_called for part in parts]
        self._input_dists[:] = [part.input_dist for part in parts]
        self._output_dists[:] = [part.output_dist for part in parts]
        weighted = isinstance(plain, EmbeddingBagCollection) and plain.is_weighted()
        self._router = FeatureRouter(
            [part.sharding.feature_names() for part in parts],
            # A processor makes the weights where the rows are.
            is_weighted=weighted and self._origin.feature_processor is None,
        )
        self._prepare_output(plain)

    def update_shards(
        self,
        changed_sharding_params: Mapping[str, ParameterSharding],
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Move tables, with their optimizers' states, to where another plan puts them.

        Every rank calls it, between two steps.  Batches that were sent before are sent once more when
        they are looked up, so a pipeline may go on.  Learning rates and numbers of steps stay as they
        are.  `fused_optimizer` stays the same object, and so do its groups, which schedulers hold.
        Parameters of the moved tables are new ones.

        Args:
            changed_sharding_params: new placements by table; other tables stay where they are.
            env: who takes part: the same as before.
            device: where this rank computes: the same as before.

        Raises:
            UserError: a table that is not there, other ranks or another device, a placement that does
                not fit, a table whose ordinary parameters an optimizer of the user's trains, or one
                whose trained rows are being tracked.

        Memory: until it is done, the old and the new shards of all tables whose sharding has a changed
        table; and what this rank sends and receives of them.  Pooled tables that are table-wise and
        column-wise have one sharding.
        """
        if env is not None and env.sharding_pg is not self._env.sharding_pg:
            raise UserError(
                "env has other ranks than the collection; move tables among those it has"
            )
        if device is not None and torch.device(device) != self._device:
            raise UserError(
                f"device is {device} and the collection is on {self._device}; give that"
            )
        for name in changed_sharding_params:
            if name not in self.module_sharding_plan:
                raise unknown_name(
                    "changed_sharding_params", name, sorted(self.module_sharding_plan)
                )
        plan = EmbeddingModuleShardingPlan({**self.module_sharding_plan, **changed_sharding_params})
        self._parts = moved_parts(
            self._parts, self._infos_of(plan), self._part, self._env, self._device
        )
        self.module_sharding_plan = plan
        self._plan_number += 1
        self._install()
        kernels = self._tables.kernels()
        self._groups.take(kernels)
        self._fused_optimizer.replace_parts(self._groups.parts(self._holder, kernels))

    @abstractmethod
    def _prepare_output(self, module: Any) -> None:
        """Make what `_joined` needs, of the plain collection."""

    @property
    def shardings(self) -> Mapping[str, TableSharding]:
        """Return the shardings by sharding type.

        One that serves tables of several types is there once, see `pooled_infos_served_together`.
        """
        return self._shardings

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizer of the fused tables here, which works in the backward pass."""
        return self._fused_optimizer

    def table_kernels(self) -> list[Kernel]:
        """What holds the shards of this rank."""
        return self._tables.kernels()

    def reset_parameters(self) -> None:
        """Give every table new first values."""
        self._tables.fill()

    def create_context(self) -> Ctx:
        """Return a new context, which holds what the steps of one batch share."""
        return self._context()

    @abstractmethod
    def _prepared(self, ctx: Ctx, features: KeyedJaggedTensor) -> list[KeyedJaggedTensor]:
        """Return the features that each sharding sends; what `_joined` needs is put into ``ctx``."""

    def input_dist(self, ctx: Ctx, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Begin to send ids to the ranks that hold their rows.

        Args:
            ctx: filled here.
            features: at least the features of all tables; others are ignored.

        Raises:
            IndexError: an id is not a row of its table (where ids are sent once).
            KeyError: a feature is missing.
            ValueError: the values are not int32 or int64, weights are missing, or the batch of a
                pooled collection varies per feature without inverse indices.
        """
        ctx.sent = features, self._plan_number
        with torch.no_grad():
            sent = self._prepared(ctx, features)
            awaitables = [dist(part) for dist, part in zip(self._input_dists, sent, strict=True)]
        ctx.sharding_contexts = [
            self._sharding_context.of(part, dist)
            for dist, part in zip(self._input_dists, sent, strict=True)
        ]
        return KJTListSplitsAwaitable(awaitables, ctx)

    @abstractmethod
    def _joined(self, ctx: Ctx, outputs: list[Tensor]) -> Out:
        """Return the collection's output, of the vectors that each sharding gave."""

    def _arriving(self, ctx: Ctx, awaitables: list[Awaitable[Tensor]]) -> LazyAwaitable[Out]:
        return self._awaitable(awaitables, lambda outputs: self._joined(ctx, outputs))

    def _as_planned_now(self, ctx: Ctx, dist_input: KJTList) -> KJTList:
        """``dist_input``; where the tables were moved after it was sent, the same sent once more."""
        if ctx.sent is None or ctx.sent[1] == self._plan_number:
            return dist_input
        return self.input_dist(ctx, ctx.sent[0]).wait().wait()

    def compute(self, ctx: Ctx, dist_input: KJTList) -> list[Tensor]:
        """Look up the received ids; return per sharding their vectors, as rows or flat."""
        dist_input = self._as_planned_now(ctx, dist_input)
        return [
            lookup(features) for lookup, features in zip(self._lookups, dist_input, strict=True)
        ]

    def output_dist(self, ctx: Ctx, output: list[Tensor]) -> LazyAwaitable[Out]:
        """Begin to send vectors to the ranks that asked for them."""
        return self._arriving(
            ctx,
            [
                dist(vectors, context)
                for dist, vectors, context in zip(
                    self._output_dists, output, ctx.sharding_contexts, strict=True
                )
            ],
        )

    def compute_and_output_dist(
        self,
        ctx: Ctx,
        input: KJTList,  # noqa: A002 - the reference's name
    ) -> LazyAwaitable[Out]:
        """Both; each sharding's vectors travel while the next one's are looked up."""
        input = self._as_planned_now(ctx, input)  # noqa: A001 - the reference's name
        return self._arriving(
            ctx,
            [
                dist(lookup(features), context)
                for lookup, dist, features, context in zip(
                    self._lookups, self._output_dists, input, ctx.sharding_contexts, strict=True
                )
            ],
        )

    def _apply(
        self,
        fn: Callable[..., Any],
        recurse: bool = True,  # noqa: FBT001, FBT002 - torch's signature
    ) -> ShardedCollection[Out, Ctx]:
        """Let only pass what leaves the tables where they are."""
        del recurse
        probe = torch.empty(0, device=self._device)
        moved = fn(probe)
        if moved.device != probe.device or moved.dtype != probe.dtype:
            # The operators would keep the old tables and drift apart.
            raise ValueError(
                f"sharded tables stay float32 on {probe.device}; asked for {moved.dtype} on "
                f"{moved.device}.  Move the state_dict into a plain collection instead"
            )
        return self

    def __deepcopy__(self, memo: Any) -> ShardedCollection[Out, Ctx]:
        raise ValueError(
            "sharded tables cannot be deep-copied: copies of the parameters would be cut off from "
            "the operator.  Build a second model and load the state_dict"
        )


def _without_memory(
    module: EmbeddingBagCollection | EmbeddingCollection,
) -> EmbeddingBagCollection | EmbeddingCollection:
    """The collection on the ``meta`` device, with what was said of its tables' optimizers."""
    meta = torch.device("meta")
    plain: EmbeddingBagCollection | EmbeddingCollection
    if isinstance(module, EmbeddingCollection):
        plain = EmbeddingCollection(
            module.embedding_configs(), device=meta, need_indices=module.need_indices()
        )
    else:
        plain = EmbeddingBagCollection(
            module.embedding_bag_configs(), is_weighted=module.is_weighted(), device=meta
        )
    given = dict(module.named_parameters())
    for name, parameter in plain.named_parameters():
        parameter.__dict__.update(given[name].__dict__)
        parameter.data = parameter.data.to(given[name].dtype)
        parameter.requires_grad_(given[name].requires_grad)
    return plain
