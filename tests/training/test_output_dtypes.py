"""What ranks send each other is of one dtype, whoever has which tables."""

from dataclasses import replace

import pytest
import torch
from torch import distributed as dist

from tessera.training import EmbeddingCollection, EmbeddingConfig
from tessera.training.distributed.embedding import EmbeddingCollectionSharder
from tessera.training.distributed.types import ShardingEnv
from tests.training.ranks import rank_device, run_on_ranks
from tests.training.sharded_cases import LR, Case, Table, kjt_of, plan_of
from tests.training.sharded_cases import shard as shard_pooled

TABLES = (Table("first", 9, 4, ("a", "b")), Table("second", 5, 4, ("c",)))
PLANS = {
    "all tables on one rank": {name: ("table_wise", {"rank": 1}) for name in ("first", "second")},
    "one table on each rank": {
        "first": ("table_wise", {"rank": 0}),
        "second": ("table_wise", {"rank": 1}),
    },
    "blocks of columns on one rank": {
        name: ("column_wise", {"ranks": [0, 0]}) for name in ("first", "second")
    },
    "dense and fused": {
        "first": ("table_wise", {"rank": 0, "compute_kernel": "dense"}),
        "second": ("table_wise", {"rank": 1}),
    },
}


def _shard_unpooled(case):
    torch.manual_seed(case.seed)
    module = EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                table.rows, table.dim, name=table.name, feature_names=list(table.features)
            )
            for table in case.tables
        ]
    )
    device = rank_device()
    sharder = EmbeddingCollectionSharder({"learning_rate": LR, **case.fused_params})
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return sharder.shard(module, plan_of(case, module, sharder, device), env, device)


def _step(case, *, pooled):
    module = (shard_pooled if pooled else _shard_unpooled)(case)
    out = module(kjt_of(case, dist.get_rank(), 0, rank_device()))
    parts = dict(out.to_dict()) if pooled else {name: own.values() for name, own in out.items()}
    sum(part.float().square().sum() for part in parts.values()).backward()
    tables = module.embedding_bags if pooled else module.embeddings
    shards = [values.detach().cpu() for table in tables.values() for _, values in table.shards]
    return {name: part.detach().cpu() for name, part in parts.items()}, shards


@pytest.mark.multi_gpu
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_half_precision_vectors_travel_from_and_to_ranks_without_tables(plan, variable, pooled):
    case = Case(TABLES, PLANS[plan], (3, 4), optimizer="exact_sgd", variable=variable)
    narrow = replace(case, fused_params={"output_dtype": "fp16"})
    whole, halves = (run_on_ranks(2, _step, each, pooled=pooled) for each in (case, narrow))
    # A dense table gives float32, which all of its sharding's vectors then are.
    dtype = torch.float32 if plan == "dense and fused" else torch.float16
    for (expected, updated), (found, own) in zip(whole, halves, strict=True):
        assert {part.dtype for part in found.values()} == {dtype}
        for name, part in expected.items():
            torch.testing.assert_close(found[name].float(), part, rtol=2**-10, atol=2**-24)
        for after, found_after in zip(updated, own, strict=True):
            # Gradients of a few vectors, halves of them: some units in the eleventh place.
            torch.testing.assert_close(found_after, after, rtol=2**-8, atol=2**-8 * LR)
