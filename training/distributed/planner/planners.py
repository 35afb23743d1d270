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
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from tessera.training.distributed.comm.leader import invoke_on_rank_and_broadcast_result
from tessera.training.distributed.plan.plan_types import ShardingPlan
from tessera.training.distributed.plan.sharded_module import ModuleSharder
from tessera.training.distributed.planner import constants
from tessera.training.distributed.planner.context_hash import hash_sha256_str, topology_parts
from tessera.training.distributed.planner.enumerators import EmbeddingEnumerator
from tessera.training.distributed.planner.hardware import positive
from tessera.training.distributed.planner.misfit import explain_misfit
from tessera.training.distributed.planner.partitioners import GreedyPerfPartitioner
from tessera.training.distributed.planner.perf_models import NoopPerfModel
from tessera.training.distributed.planner.plan_checks import (
    validate_compute_kernels,
    validate_modules_inclusion_in_sharding_plan,
)
from tessera.training.distributed.planner.plan_io import to_sharding_plan
from tessera.training.distributed.planner.plan_loaders import extract_plan
from tessera.training.distributed.planner.proposers import (
    DynamicProgrammingProposer,
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from tessera.training.distributed.planner.refine import neighbours, trials_for
from tessera.training.distributed.planner.search import options_by_table
from tessera.training.distributed.planner.stats import EmbeddingStats
from tessera.training.distributed.planner.storage_reservations import (
    HeuristicalStorageReservation,
)
from tessera.training.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Partitioner,
    PerfModel,
    PlanLoader,
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
        proposer: one or several; None: grid search, uniform, greedy and dynamic programming, and then
            other ways for single tables of the busiest rank, see `refine`.
        partitioner: None: `GreedyPerfPartitioner`.
        performance_model: None: `NoopPerfModel`.
        stats: told of every plan; None: `EmbeddingStats`, which logs at level INFO.
        constraints: by table name.
        debug: log every proposal's rating at level INFO too.
        callbacks: called in turn with the placed options that were chosen; each returns those that
            are used.
        timeout_seconds: time for the search; the best plan so far is taken then.
        plan_loader: brings a plan of an earlier run; where it has one, nothing is searched.

    Attributes:
        report: what is known of the last plan beyond the plan; None before it.

    Raises:
        ValueError: ``timeout_seconds`` is not positive.
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
        callbacks: list[Callable[[list[ShardingOption]], list[ShardingOption]]] | None = None,
        timeout_seconds: float | None = None,
        plan_loader: PlanLoader | None = None,
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
        self._refines = proposer is None
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
        self._callbacks = list(callbacks or [])
        if timeout_seconds is not None:
            positive("timeout_seconds", timeout_seconds)
        self._timeout_s = timeout_seconds
        self.plan_loader = plan_loader
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
                would help.  Nothing was found to fit in ``timeout_seconds``, the loaded plan is of
                other inputs, or a callback left no table of a module.
        """
        started = time.perf_counter()
        left = self._reservation.reserve(
            self._topology, self._batch_size, module, sharders, self._constraints
        )
        search_space = self._enumerator.enumerate(module, sharders)
        if not search_space:
            raise PlannerError("the model has no module that a sharder takes; give its sharders")
        best, ratings = self._loaded(search_space)
        if best is None:
            best, ratings = self._search(search_space, left)
        if best is None:
            raise PlannerError(
                explain_misfit(search_space, self._topology, left),
                PlannerErrorType.INSUFFICIENT_STORAGE,
            )
        for callback in self._callbacks:
            best = callback(best)
        validate_compute_kernels(best)
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
        validate_modules_inclusion_in_sharding_plan(plan, module, sharders)
        for stats in self._stats:
            stats.log(plan, self.report)
        return plan

    def hash_planner_context_inputs_str(self) -> str:
        """A text that is the same for planners that would make the same plan of a model.

        Of the topology, the batch size, the constraints and the classes of the parts.
        """
        parts = [self._enumerator, self._reservation, self._partitioner, self._model]
        names = [type(part).__qualname__ for part in [*parts, *self._proposers]]
        constraints = sorted(self._constraints.items())
        topology = topology_parts(self._topology)
        return hash_sha256_str([topology, self._batch_size, constraints, names])

    def hash_planner_context_inputs(self) -> int:
        """`hash_planner_context_inputs_str` as a number."""
        return int(self.hash_planner_context_inputs_str(), 16)

    def _loaded(
        self, search_space: list[ShardingOption]
    ) -> tuple[list[ShardingOption] | None, list[float | None]]:
        """The plan of the loader and its rating; None: there is none.

        Raises:
            PlannerError: it is of other inputs.
        """
        if self.plan_loader is None:
            return None, []
        known = self.plan_loader.plan_context_hash()
        if known is not None and known != self.hash_planner_context_inputs_str():
            raise PlannerError(
                "the loaded plan was made for another topology, batch size, constraints or parts of the "
                "planner; give the same ones, or leave plan_loader out to make a plan",
                PlannerErrorType.PLANNER_INPUT_CONTEXT_MISMATCH,
            )
        options = self.plan_loader.load()
        if options is None:
            return None, []
        plan = extract_plan(search_space, options)
        return plan, [self._model.rate(plan)]

    def _search(
        self, search_space: list[ShardingOption], left: Topology
    ) -> tuple[list[ShardingOption] | None, list[float | None]]:
        """The best plan, and the rating of every proposal; None: it does not fit.

        Raises:
            PlannerError: the time was over before a proposal fitted.
        """
        until = math.inf if self._timeout_s is None else time.monotonic() + self._timeout_s
        best: list[ShardingOption] | None = None
        best_proposal: list[ShardingOption] = []
        best_rating = float("inf")
        ratings: dict[tuple[int, ...], float | None] = {}
        for proposer in self._proposers:
            proposer.load(search_space, self._enumerator)
            while (proposal := proposer.propose()) is not None:
                if time.monotonic() > until:
                    return self._in_time(best, ratings.values())
                key = tuple(id(option) for option in proposal)
                if key not in ratings:
                    plan, rating = self._try(proposal, left, len(ratings) + 1)
                    ratings[key] = rating
                    if rating is not None and rating < best_rating:
                        best, best_rating, best_proposal = plan, rating, proposal
                proposer.feedback(
                    partitionable=ratings[key] is not None,
                    plan=proposal,
                    perf_rating=ratings[key],
                    storage_constraint=left,
                )
        if best is not None and self._refines:
            best = self._refined(best_proposal, best, search_space, left, ratings, until)
        return best, list(ratings.values())

    def _refined(  # noqa: PLR0917 - a step of the search, with what the search knows
        self,
        proposal: list[ShardingOption],
        best: list[ShardingOption],
        search_space: list[ShardingOption],
        left: Topology,
        ratings: dict[tuple[int, ...], float | None],
        until: float,
    ) -> list[ShardingOption]:
        """The plan after tables of its busiest rank were given other ways, as long as that is better."""
        tables, trials = options_by_table(search_space), trials_for(best)
        rating = self._model.rate(best)
        improved = True
        while improved:
            improved = False
            for near in neighbours(proposal, best, tables, left.world_size):
                key = tuple(id(option) for option in near)
                if key in ratings:
                    continue
                if trials == 0 or time.monotonic() > until:
                    return best
                trials -= 1
                plan, ratings[key] = self._try(near, left, len(ratings) + 1)
                found = ratings[key]
                if plan is not None and found is not None and found < rating:
                    proposal, best, rating, improved = near, plan, found, True
                    break
        return best

    def _in_time(
        self, best: list[ShardingOption] | None, ratings: Iterable[float | None]
    ) -> tuple[list[ShardingOption], list[float | None]]:
        tried = list(ratings)
        if best is None:
            raise PlannerError(
                f"none of {len(tried)} proposals fitted in timeout_seconds={self._timeout_s}; give the "
                "search more time, or ranks with more memory"
            )
        logger.info("the search ended after %s s with %d proposals", self._timeout_s, len(tried))
        return best, tried

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
