"""Towers over nodes: the tables of a tower live on one node, and so does the module that takes their vectors.

A node is the ranks of one host (`tessera.training.distributed.comm.nodes`); the ranks of the same place on
all nodes are peers.

* How ids travel: each rank sends a tower's features to its peer on the tower's node, by one all-to-all among
  the peers for all towers.  The ranks of that node then have the samples of all ranks among them, and go on as
  for any sharded collection, whose ranks are those of the node.  A feature that several towers of a node take is
  sent once.
* Which rows are here: those that the plan gives to this rank (`tower_places`).  The ranks of other nodes hold
  nothing of a tower, neither rows nor parameters of its interaction.
* What travels back: each rank computes the interactions of its node's towers for the samples of its peers, and
  sends each peer the outputs of its samples, by one all-to-all.  The looked-up vectors never leave the node.
  Outputs stand in the order of the towers, whichever nodes they live on.

Gradients are those of one rank that has all samples, where the loss is a mean over the samples of each rank:
on their way to the interactions they are divided by the number of nodes, and averaged over the ranks of the
node, as the rest of the model is averaged over all ranks.

The idea is TorchRec's (`torchrec.distributed.embedding_tower_sharding`), which keeps outputs in the order of the
nodes; towers that match the network's topology are described in arXiv:2403.00877.

Legend: ``B`` samples of this rank, ``S`` samples of this rank and its peers, ``C_t`` columns of
tower t's output.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.training.distributed.collections.sharded_collection import (
    CollectionContext,
    ShardedCollection,
    ShardedEmbeddingModule,
    VectorsAwaitable,
)
from tessera.training.distributed.collections.tower_places import TowerPlace, tower_tables
from tessera.training.distributed.comm.awaitable import Awaitable, LazyAwaitable, NoWait
from tessera.training.distributed.comm.codec_types import CommOp, QuantizedCommCodecs
from tessera.training.distributed.comm.column_order import ColumnOrder
from tessera.training.distributed.comm.environment import ShardingEnv, without_group
from tessera.training.distributed.comm.replicas import replicas
from tessera.training.distributed.plan.first_values import init_parameters
from tessera.training.distributed.plan.sharded_module import ModuleSharder
from tessera.training.distributed.sharding.ids import LocalSparseFeaturesDist
from tessera.training.distributed.sharding.interfaces import (
    EmbeddingShardingContext,
    FeatureShardingMixIn,
)
from tessera.training.distributed.travel.feature_router import FeatureRouter
from tessera.training.distributed.travel.features_awaitable import KJTListSplitsAwaitable
from tessera.training.distributed.travel.kjt_all_to_all import KJTAllToAll
from tessera.training.distributed.travel.kjt_list import KJTList
from tessera.training.distributed.travel.pooled_vectors import PooledEmbeddingsAllToAll
from tessera.training.modules.embedding_tower import EmbeddingTower, tower_input_params
from tessera.training.optim.fused import EmptyFusedOptimizer, FusedOptimizerModule
from tessera.training.optim.keyed import CombinedOptimizer
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.training.streamable import Multistreamable


@dataclass
class EmbeddingTowerCollectionContext(Multistreamable):
    """Holds what the steps of one batch share.

    Attributes:
        embedding_contexts: of the sharded collections here, one per tower of this node.
        sharding_contexts: of the exchanges of ids among peers: one for ids without weights, one for ids
            with weights, of those that the towers take.
    """

    embedding_contexts: list[CollectionContext] = field(default_factory=list)
    sharding_contexts: list[EmbeddingShardingContext] = field(default_factory=list)


class TowerLazyAwaitable(VectorsAwaitable[Tensor]):
    """Waits for the outputs of towers, ``[B, sum of C_t]``.

    Args:
        awaitable: gives them.
    """

    def __init__(self, awaitable: Awaitable[Tensor]) -> None:
        super().__init__([awaitable], lambda outputs: outputs[0])


@dataclass(frozen=True)
class PlannedTower:
    """Says where a tower goes, and who shards its tables.

    Attributes:
        tower: the plain tower.
        place: its node and plan.
        sharder: of its collection.
    """

    tower: EmbeddingTower
    place: TowerPlace
    sharder: ModuleSharder[Any]

    @property
    def is_weighted(self) -> bool:
        """Whether it takes ids with weights; otherwise it takes ids without."""
        return tower_input_params(self.tower.embedding)[1]

    def features(self) -> Iterator[str]:
        """The features that it takes."""
        for names in tower_tables(self.tower.embedding).values():
            yield from names


@dataclass(frozen=True)
class _Here:
    """A tower of this node: its sharded collection, and its interaction as it is called."""

    number: int  # among all towers
    is_weighted: bool
    embedding: ShardedCollection[Any, Any]
    interaction: nn.Module


class _Elsewhere(nn.Module):
    """Stands for a part of a tower on the ranks of other nodes; whatever is loaded into it is left out."""

    def _load_from_state_dict(self, *_: Any) -> None:
        """Take nothing of a whole state dict."""


class ShardedTowers(
    ShardedEmbeddingModule[KJTList, Tensor, Tensor, EmbeddingTowerCollectionContext],
    FusedOptimizerModule,
):
    """What one sharded tower and several have in common.

    A subclass gives the parts of each tower their names (`_keep`) and says what it is called with.

    Args:
        towers: in the order of their outputs.
        env: who takes part; without a process group all towers are here.
        device: where this rank computes; None: the CPU.
        qcomm_codecs_registry: how outputs are written for the network, by `CommOp` name.

    Raises:
        UserError: tables are spread over a part of the ranks (2D parallelism), or several ranks have no
            process group.
        ValueError: a plan that does not fit the tables or the node's ranks.

    Memory: of the towers of this node, this rank's shards with their optimizer's state, and the interaction.
    """

    def __init__(
        self,
        towers: Sequence[PlannedTower],
        env: ShardingEnv,
        device: torch.device | None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None,
    ) -> None:
        super().__init__(qcomm_codecs_registry)
        if env.process_group is None and env.world_size > 1:
            raise without_group(env.world_size)
        if env.sharding_pg is not env.process_group:
            raise UserError(
                "towers in 2D parallelism: interactions are not averaged over the groups of ranks; leave the "
                "sharders of towers out, or train in a DistributedModelParallel"
            )
        self._device = device or torch.device("cpu")
        node_pg: dist.ProcessGroup | None = None
        self._peers: dist.ProcessGroup | None = None
        inside = env
        if env.process_group is not None:
            node_pg, self._peers = env.node_groups(self._device)
            assert node_pg is not None, "ranks compute on real devices"
            inside = ShardingEnv.from_process_group(node_pg)
        self._nodes = [planned.place.node for planned in towers]
        here = env.rank // env.ranks_per_node
        self._here = [
            self._sharded(number, planned, inside, node_pg)
            for number, planned in enumerate(towers)
            if planned.place.node == here
        ]
        parts: dict[int, tuple[nn.Module, nn.Module]] = {
            own.number: (own.embedding, towers[own.number].tower.interaction) for own in self._here
        }
        for number in range(len(towers)):
            embedding, interaction = parts.get(number, (_Elsewhere(), _Elsewhere()))
            self._keep(number, embedding, interaction)
        # Ids without weights and ids with weights travel apart, if there are towers that take them.
        self._kinds = sorted({planned.is_weighted for planned in towers})
        self._routers: list[FeatureRouter] = []
        for is_weighted in self._kinds:
            sent = self._features_per_node(towers, is_weighted=is_weighted)
            names = [name for own in sent for name in own]
            self._routers.append(FeatureRouter([names], is_weighted=is_weighted))
            self._input_dists.append(
                LocalSparseFeaturesDist()
                if self._peers is None
                else KJTAllToAll(self._peers, [len(own) for own in sent])
            )
        fused = [(self._path(own.number), own.embedding.fused_optimizer) for own in self._here]
        self._fused_optimizer = CombinedOptimizer(fused or [EmptyFusedOptimizer()])
        self._columns_here: list[int] = []
        self._way_back: PooledEmbeddingsAllToAll | None = None

    def _sharded(
        self,
        number: int,
        planned: PlannedTower,
        inside: ShardingEnv,
        node_pg: dist.ProcessGroup | None,
    ) -> _Here:
        tower = planned.tower
        embedding = planned.sharder.shard(tower.embedding, planned.place.plan, inside, self._device)
        assert isinstance(embedding, ShardedCollection), "sharders of collections give such"
        init_parameters(tower.interaction, self._device)
        as_called = tower.interaction.to(self._device)
        trained = any(parameter.requires_grad for parameter in as_called.parameters())
        if node_pg is not None and node_pg.size() > 1 and trained:
            as_called = replicas(as_called, node_pg, self._device, static_graph=True)
        return _Here(number, planned.is_weighted, embedding, as_called)

    def _features_per_node(
        self, towers: Sequence[PlannedTower], *, is_weighted: bool
    ) -> list[list[str]]:
        nodes = 1 if self._peers is None else self._peers.size()
        return [
            list(
                dict.fromkeys(
                    feature
                    for planned in towers
                    if planned.is_weighted == is_weighted and planned.place.node == node
                    for feature in planned.features()
                )
            )
            for node in range(nodes)
        ]

    @abstractmethod
    def _keep(self, number: int, embedding: nn.Module, interaction: nn.Module) -> None:
        """Register the parts of a tower under the plain module's names."""

    @abstractmethod
    def _path(self, number: int) -> str:
        """The name of a tower's collection."""

    @property
    def shardings(self) -> Mapping[str, FeatureShardingMixIn]:
        """Return the shardings of this node's towers, by collection and sharding type."""
        return {
            f"{self._path(own.number)}.{kind}": sharding
            for own in self._here
            for kind, sharding in own.embedding.shardings.items()
        }

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizer of the fused tables here, which works in the backward pass."""
        return self._fused_optimizer

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """The names of the parameters and buffers that only the ranks of a tower's node have."""
        for name, _ in self.named_parameters(prefix=prefix):
            yield name
        for name, _ in self.named_buffers(prefix=prefix):
            yield name

    def create_context(self) -> EmbeddingTowerCollectionContext:
        """Return a new context, which holds what the steps of one batch share."""
        return EmbeddingTowerCollectionContext()

    def prefetch(self, dist_input: KJTList, forward_stream: torch.Stream | None = None) -> None:
        """Do nothing: ids reach the ranks that hold their rows in `compute`, which fills the caches."""
        del dist_input, forward_stream

    def _send(
        self,
        ctx: EmbeddingTowerCollectionContext,
        given: Mapping[bool, KeyedJaggedTensor],
    ) -> Awaitable[Awaitable[KJTList]]:
        """Begin to send ids to the peers on the towers' nodes.

        Args:
            ctx: filled here.
            given: ids without weights (False) and ids with weights (True), of those that are needed.

        Raises:
            KeyError: a feature is missing.
            ValueError: the batch varies per feature or between the two, the values are not int32 or int64,
                or weights are missing.
        """
        sizes = {features.stride() for features in given.values()}
        if len(sizes) > 1 or any(own.variable_stride_per_key() for own in given.values()):
            raise ValueError(
                f"features of towers have {sorted(sizes)} samples, or other numbers of bags per feature; a "
                "tower's output has a row per sample, so give all features the same samples"
            )
        with torch.no_grad():
            sent = [
                part
                for is_weighted, router in zip(self._kinds, self._routers, strict=True)
                for part in router.route(given[is_weighted])
            ]
            awaitables = [way(part) for way, part in zip(self._input_dists, sent, strict=True)]
        ctx.sharding_contexts = [
            EmbeddingShardingContext.of(part, way)
            for way, part in zip(self._input_dists, sent, strict=True)
        ]
        return KJTListSplitsAwaitable(awaitables, ctx)

    def compute(self, ctx: EmbeddingTowerCollectionContext, dist_input: KJTList) -> Tensor:
        """The outputs of this node's towers for the samples of this rank and its peers.

        The ids go on to the node's ranks here: those of all towers at once, then all lookups, then the
        interactions, so that each tower's vectors travel while others are worked on.

        Returns:
            ``[S, sum of the C_t of the node's towers]`` float32; without columns where it has no towers.

        Raises:
            ValueError: an interaction's output is not ``[S, C_t]``, or has another number of columns than
                before.
        """
        samples = (
            dist_input[0].stride()
            if self._peers is None
            else sum(ctx.sharding_contexts[0].batch_size_per_rank)
        )
        if not self._here:
            return torch.empty((samples, 0), device=self._device)
        ctx.embedding_contexts = [own.embedding.create_context() for own in self._here]
        sizes = [
            own.embedding.input_dist(inner, dist_input[self._kinds.index(own.is_weighted)])
            for own, inner in zip(self._here, ctx.embedding_contexts, strict=True)
        ]
        ids = [awaitable.wait() for awaitable in sizes]
        vectors = [
            own.embedding.compute_and_output_dist(inner, awaitable.wait())
            for own, inner, awaitable in zip(self._here, ctx.embedding_contexts, ids, strict=True)
        ]
        outputs = [
            self._checked(own, own.interaction(arriving.wait()), samples)
            for own, arriving in zip(self._here, vectors, strict=True)
        ]
        columns = [output.size(1) for output in outputs]
        if self._columns_here not in ([], columns):
            raise ValueError(
                f"the interactions of towers {[own.number for own in self._here]} gave {columns} columns and "
                f"{self._columns_here} before; the output of a tower has the same columns for every batch"
            )
        self._columns_here = columns
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    @staticmethod
    def _checked(own: _Here, output: Any, samples: int) -> Tensor:
        """The output as float32, which other ranks receive without having seen it.

        Raises:
            ValueError: it is not one row per sample.
        """
        if not isinstance(output, Tensor) or output.dim() != 2 or output.size(0) != samples:
            found = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"the interaction of tower {own.number} gave {found} for {samples} samples; let it give a "
                "tensor [samples, columns]"
            )
        return output.float()

    def output_dist(
        self, ctx: EmbeddingTowerCollectionContext, output: Tensor
    ) -> LazyAwaitable[Tensor]:
        """Begin to send the outputs to the ranks of their samples; they arrive as ``[B, sum of C_t]``."""
        if self._peers is None:
            return TowerLazyAwaitable(NoWait(output))
        if self._way_back is None:
            self._way_back = self._learned_way_back(self._peers)
        batch_sizes = ctx.sharding_contexts[0].batch_size_per_rank
        return TowerLazyAwaitable(self._way_back(output, batch_sizes))

    def _learned_way_back(self, peers: dist.ProcessGroup) -> PooledEmbeddingsAllToAll:
        """How outputs travel, once all nodes know how many columns each tower's has: from the first batch."""
        columns = torch.zeros(len(self._nodes), dtype=torch.int64)
        for own, width in zip(self._here, self._columns_here, strict=True):
            columns[own.number] = width
        columns = columns.to(self._device)
        dist.all_reduce(columns, group=peers)
        widths: list[int] = columns.tolist()
        per_node = [
            [width if at == node else 0 for at, width in zip(self._nodes, widths, strict=True)]
            for node in range(peers.size())
        ]
        firsts = [list(accumulate(own, initial=0)) for own in per_node]
        sums = [own[-1] for own in firsts]
        pieces = [
            (node, firsts[node][number], width)
            for number, (node, width) in enumerate(zip(self._nodes, widths, strict=True))
        ]
        order = ColumnOrder(sums, pieces)
        return PooledEmbeddingsAllToAll(
            peers,
            sums,
            self._device,
            codecs=self.qcomm_codecs_registry[CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name],
            order=None if order.is_rank_by_rank else order,
        )
