"""The planner that models are given by default.

    topology = Topology(world_size=8, compute_device="cuda")
    planner = EmbeddingShardingPlanner(topology=topology, constraints={...})
    plan = planner.collective_plan(model, sharders, pg)

`types` says how the parts work together; `shard_estimators` what the times and bytes are made of;
`stats.report_text` and `picture.save_picture` show what was decided; `plan_io` keeps plans in
files; `measure` fills in a machine's own bandwidths.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from tessera.training.distributed.comm.leader import invoke_on_rank_and_broadcast_result
from tessera.training.distributed.plan.plan_types import ShardingPlan
from tessera.training.distributed.plan.sharded_module import ModuleSharder
from tessera.training.distributed.planner import constants
from tessera.training.distributed.planner.enumerators import EmbeddingEnumerator
from tessera.training.distributed.planner.misfit import explain_misfit
from tessera.training.distributed.planner.partitioners import GreedyPerfPartitioner
from tessera.training.distributed.planner.perf_models import NoopPerfModel
from tessera.training.distributed.planner.plan_io import to_sharding_plan
from tessera.training.distributed.planner.proposers import (
    DynamicProgrammingProposer,
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from tessera.training.distributed.planner.stats import EmbeddingStats
from tessera.training.distributed.planner.storage_reservations import (
    HeuristicalStorageReservation,
)
from tessera.training.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Partitioner,
    PerfModel,
    PlannerError,
    PlannerErrorType,
    PlanReport,
    Proposer,
    ShardingOption,
    ShardingPlanner,
    Stats,
    StorageReservation,
    Topology,
)

logger = logging.getLogger(__name__)


class EmbeddingShardingPlanner(ShardingPlanner):
    """Enumerates, proposes, partitions, rates, and keeps the best.

    Args:
        topology: the hardware; None: ``WORLD_SIZE`` ranks with GPUs if there are any.
        batch_size: samples per rank and step.
        enumerator: None: `EmbeddingEnumerator`.
        storage_reservation: None: `HeuristicalStorageReservation`.
        proposer: one or several; None: grid search, uniform, greedy and dynamic programming.
        partitioner: None: `GreedyPerfPartitioner`.
        performance_model: None: `NoopPerfModel`.
        stats: told of every plan; None: `EmbeddingStats`, which logs at level INFO.
        constraints: by table name.
        debug: log every proposal's rating at level INFO too.

    Attributes:
        report: what is known of the last plan beyond the plan; None before it.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        proposer: Proposer | list[Proposer] | None = None,
        partitioner: Partitioner | None = None,
        performance_model: PerfModel | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        debug: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
    ) -> None:
        self._topology = topology or Topology(
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            compute_device="cuda" if torch.cuda.is_available() else "cpu",
        )
        self._batch_size = batch_size or constants.BATCH_SIZE
        self._constraints = dict(constraints or {})
        self._enumerator = enumerator or EmbeddingEnumerator(
            self._topology, self._batch_size, self._constraints
        )
        self._reservation = storage_reservation or HeuristicalStorageReservation()
        if proposer is None:
            proposer = [
                GridSearchProposer(),
                UniformProposer(),
                GreedyProposer(),
                DynamicProgrammingProposer(),
            ]
        self._proposers = proposer if isinstance(proposer, list) else [proposer]
        self._partitioner = partitioner or GreedyPerfPartitioner()
        self._model = performance_model or NoopPerfModel(self._topology)
        if stats is None:
            stats = EmbeddingStats()
        self._stats = stats if isinstance(stats, list) else [stats]
        self._debug = debug
        self.report: PlanReport | None = None

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]] | None = None,
        pg: Any = None,
    ) -> ShardingPlan:
        """Plan on rank 0 and send the plan to all ranks.

        Args:
            module: the model.
            sharders: None: the default ones.
            pg: the group; None: the default group, or this process alone if there is none.

        Raises:
            PlannerError: a plan could not be made; every rank raises it.
        """
        if sharders is None:
            from tessera.training.distributed.planner.generators import get_default_sharders  # noqa: PLC0415 - imports every kind of sharded module

            sharders = get_default_sharders()
        if pg is None and dist.is_available() and dist.is_initialized():
            pg = dist.group.WORLD
        if pg is None or dist.get_world_size(pg) == 1:
            return self.plan(module, sharders)

        def plan_or_error() -> ShardingPlan | PlannerError:
            try:
                return self.plan(module, sharders)
            except PlannerError as error:
                return error

        outcome = invoke_on_rank_and_broadcast_result(pg, 0, plan_or_error)
        if isinstance(outcome, PlannerError):
            raise outcome
        return outcome

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> ShardingPlan:
        """Where every table of ``module`` goes.

        Raises:
            PlannerError: nothing fits; the message names the table, what is missing and what
                would help.
        """
        started = time.perf_counter()
        left = self._reservation.reserve(
            self._topology, self._batch_size, module, sharders, self._constraints
        )
        search_space = self._enumerator.enumerate(module, sharders)
        if not search_space:
            raise PlannerError("the model has no module that a sharder takes; give its sharders")
        best, ratings = self._search(search_space, left)
        if best is None:
            raise PlannerError(
                explain_misfit(search_space, self._topology, left),
                PlannerErrorType.INSUFFICIENT_STORAGE,
            )
        fitted = [rating for rating in ratings if rating is not None]
        self.report = PlanReport(
            topology=self._topology,
            left_for_tables=left,
            best=best,
            num_options=len(search_space),
            num_proposals=len(ratings),
            num_plans=len(fitted),
            perf_rating=min(fitted),
            run_time_s=time.perf_counter() - started,
        )
        plan = to_sharding_plan(best, self._topology)
        for stats in self._stats:
            stats.log(plan, self.report)
        return plan

    def _search(
        self, search_space: list[ShardingOption], left: Topology
    ) -> tuple[list[ShardingOption] | None, list[float | None]]:
        """The best plan, and the rating of every proposal; None: it does not fit."""
        best: list[ShardingOption] | None = None
        best_rating = float("inf")
        ratings: dict[tuple[int, ...], float | None] = {}
        for proposer in self._proposers:
            proposer.load(search_space, self._enumerator)
            while (proposal := proposer.propose()) is not None:
                key = tuple(id(option) for option in proposal)
                if key not in ratings:
                    plan, rating = self._try(proposal, left, len(ratings) + 1)
                    ratings[key] = rating
                    if rating is not None and rating < best_rating:
                        best, best_rating = plan, rating
                proposer.feedback(
                    partitionable=ratings[key] is not None,
                    plan=proposal,
                    perf_rating=ratings[key],
                    storage_constraint=left,
                )
        return best, list(ratings.values())

    def _try(
        self, proposal: list[ShardingOption], left: Topology, number: int
    ) -> tuple[list[ShardingOption] | None, float | None]:
        try:
            plan = self._partitioner.partition(proposal, left)
        except PlannerError as error:
            if self._debug:
                logger.info("proposal %d does not fit: %s", number, error)
            return None, None
        rating = self._model.rate(plan)
        if self._debug:
            logger.info("proposal %d: %.3f ms", number, rating)
        return plan, rating
