"""What the planner plans is what sharded collections take: every sharding type."""

import pytest
import torch
from torch import distributed as dist

from tessera.training import DistributedModelParallel, EmbeddingBagCollectionSharder
from tessera.training.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from tessera.training.distributed.types import ShardingType
from tessera.training.optim.optimizers import in_backward_optimizer_filter
from tests.training.ranks import rank_device, run_on_ranks
from tests.training.sharded_cases import check, gradient, kjt_of, local_shards, plain_collection
from tests.training.test_sharded_ebc import BATCHES, TABLES, Case

KINDS = [kind.value for kind in ShardingType]


def train(cases):
    return [train_one(case, kind) for kind, case in cases]


def train_one(case, kind):
    rank, device = dist.get_rank(), rank_device()
    sharder = EmbeddingBagCollectionSharder(
        {"optimizer": case.optimizer, "learning_rate": 0.1, "eps": 1e-3}
    )
    module = plain_collection(case)
    planner = EmbeddingShardingPlanner(
        Topology(
            world_size=dist.get_world_size(),
            compute_device=device.type,
            local_world_size=case.local_size,
        ),
        constraints={
            table.name: ParameterConstraints(sharding_types=[kind], min_partition=4)
            for table in case.tables
        },
    )
    plan = planner.collective_plan(module, [sharder], dist.group.WORLD)
    placements = plan.plan[""]
    assert {where.sharding_type for where in placements.values()} == {kind}
    dmp = DistributedModelParallel(module, device=device, plan=plan, sharders=[sharder])
    left = [p for _, p in in_backward_optimizer_filter(dmp.named_parameters())]
    dense = torch.optim.SGD(left, lr=0.1) if left else None
    outputs = []
    for step in range(case.steps):
        out = dmp(kjt_of(case, rank, step, device))
        outputs.append({key: out[key].detach().cpu() for key in dmp.module.embedding_names()})
        values = out.values()
        (values * gradient(case, rank, step, values.size(1)).to(device)).sum().backward()
        if dense is not None:
            dense.step()
            dense.zero_grad()
    kernels = {name: where.compute_kernel for name, where in placements.items()}
    return outputs, local_shards(dmp.module), kernels


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", [2, 4])
def test_three_steps_under_planned_placements_equal_one_ranks_arithmetic(world):
    local = 2 if world == 4 else world
    cases = [
        (
            kind,
            Case(
                TABLES,
                # `check` asks whether a plain optimizer trains the table.
                {table.name: (kind, {}) for table in TABLES},
                BATCHES[world],
                optimizer="exact_sgd",
                seed=seed,
                local_size=local,
            ),
        )
        for seed, kind in enumerate(KINDS)
    ]
    per_rank = run_on_ranks(world, train, cases, local_world_size=local)
    for place, (kind, case) in enumerate(cases):
        check(case, [found[place][:2] for found in per_rank])
        kernels = {name for found in per_rank for name in found[place][2].values()}
        assert kernels <= ({"dense"} if kind == "data_parallel" else {"fused", "dense"})
