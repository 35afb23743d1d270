"""Plans as `plan_steps` follows them, and what it calls the same plan."""

import pytest
import torch
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from tessera.training import EmbeddingBagCollection, EmbeddingBagConfig
from tessera.training.bench.plan_steps import random_model, same, ways
from tessera.training.bench.plans_versus_torchrec import GIB, Model, Tessera, sharding_plan

BANDWIDTHS = {"ddr_mem_bw": 8e9, "intra_host_bw": 1e9}
HALVES = [([0, 0], [50, 8], 0), ([50, 0], [50, 8], 1)]
PLACED = {
    "t0": ("table_wise", "fused", [([0, 0], [100, 8], 1)]),
    "t1": ("row_wise", "fused", HALVES),
}


def test_plans_are_the_same_where_two_ranks_have_changed_places():
    turned = {"t0": ("table_wise", "fused", [([0, 0], [100, 8], 0)])}
    turned["t1"] = ("row_wise", "fused", [(*shard, 1 - rank) for *shard, rank in HALVES])
    assert same(PLACED, dict(PLACED), 2)
    assert same(PLACED, turned, 2)
    assert not same(PLACED, turned, 4)
    assert not same(PLACED, PLACED | {"t0": turned["t0"]}, 2)
    assert not same(PLACED, PLACED | {"t1": ("row_wise", "dense", HALVES)}, 2)


def test_a_whole_table_is_in_the_same_place_whatever_the_way_is_called():
    assert same(PLACED, PLACED | {"t0": ("table_column_wise", *PLACED["t0"][1:])}, 2)
    assert not same(PLACED, PLACED | {"t1": ("row_wise", "fused", HALVES[:1])}, 2)


def test_ways_counts_tables_and_shards():
    assert ways(PLACED) == "1 row_wise, 1 table_wise (1/2)"


def test_a_plan_has_the_shards_and_ranks_that_were_placed():
    model = Model([(100, 8, 1.0)] * 2, 2, GIB, 4, may_leave_hbm=False, device="cpu")
    tables = sharding_plan(PLACED, model).plan[""]
    for name, (kind, kernel, shards) in PLACED.items():
        where = tables[name]
        assert (where.sharding_type, where.compute_kernel) == (kind, kernel)
        assert where.ranks == [rank for _, _, rank in shards]
        assert isinstance(where.sharding_spec, EnumerableShardingSpec)
        assert [
            (each.shard_offsets, each.shard_sizes, each.placement.rank())
            for each in where.sharding_spec.shards
        ] == shards
        assert {str(each.placement.device()) for each in where.sharding_spec.shards} == {"cpu"}
    replicated = sharding_plan({"t0": ("data_parallel", "dense", [([0, 0], [100, 8], 0)])}, model)
    assert replicated.plan[""]["t0"].sharding_spec is None


@pytest.mark.parametrize("may_be_replicated", [False, True])
def test_this_planner_plans_every_table_of_a_model_for_cpus(may_be_replicated):
    model = random_model(3, 2, BANDWIDTHS, may_be_replicated=may_be_replicated)
    assert model == random_model(3, 2, BANDWIDTHS, may_be_replicated=may_be_replicated)
    placed = Tessera(model).plan()
    plan = sharding_plan(placed, model).plan[""]
    tables = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(rows, columns, name=f"t{i}", feature_names=[f"f{i}"])
            for i, (rows, columns, _) in enumerate(model.tables)
        ],
        device=torch.device("meta"),
    )
    assert list(placed) == [config.name for config in tables.embedding_bag_configs()]
    kernels = {kernel for _, kernel, _ in placed.values()}
    assert kernels <= ({"fused", "dense"} if may_be_replicated else {"fused"})
    assert len(plan) == len(model.tables)
