"""The registry of sharding strategies, and strategies of a program's own."""

import re
import sys
import types
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tessera.errors import UserError
from tessera.training.distributed import sharding_plan
from tessera.training.distributed.plan.shard_sizes import TableToCut
from tessera.training.distributed.planner import ParameterConstraints
from tessera.training.distributed.planner.stats import report_text
from tessera.training.distributed.sharding import by_hand, registry
from tessera.training.distributed.sharding.registry import register, strategies, strategy_of
from tessera.training.distributed.sharding.strategies import grid_shard, row_wise
from tessera.training.distributed.types import ShardingType
from tessera.training.trainer import placement
from tests.training import sharded_cases, test_planned_sharding, test_sharded_ec
from tests.training.ranks import run_on_ranks
from tests.training.sharded_cases import Case, Table
from tests.training.test_sharded_ebc import BATCHES, TABLES

ROOT = Path(__file__).resolve().parents[2]
DOCS = (ROOT / "docs" / "extending.md").read_text()
FOLDER = ROOT / "training" / "distributed" / "sharding" / "strategies"


def test_every_file_registers_one_strategy_and_torchrecs_types_are_there():
    names = [strategy.name for strategy in strategies()]
    assert sorted(names) == sorted(f.stem for f in FOLDER.glob("[a-z]*.py"))
    assert sorted(names) == sorted(kind.value for kind in ShardingType)
    assert len({strategy.short_name for strategy in strategies()}) == len(names)
    for kind in ShardingType:
        assert strategy_of(kind) is strategy_of(kind.value)
        assert sharding_plan.get_sharding_constructor_from_type(kind) is getattr(
            sharding_plan, kind.value
        )


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"is 'colum_wise'; give .*; did you mean column_wise\?"):
        strategy_of("colum_wise")
    with pytest.raises(UserError, match=r"entry of sharding_types is 'gridshard'; .* grid_shard\?"):
        ParameterConstraints(sharding_types=["table_wise", "gridshard"])
    assert ParameterConstraints(sharding_types=[ShardingType.ROW_WISE]).sharding_types == [
        "row_wise"
    ]


def test_a_run_takes_any_strategy_and_auto_those_that_leave_rows_whole():
    assert placement._strategies("auto") == ["table_wise", "row_wise", "table_row_wise"]
    assert placement._strategies("grid_shard") == ["grid_shard"]
    with pytest.raises(
        UserError, match=r"train\.sharding is 'rowwise'; .* did you mean row_wise\?"
    ):
        placement._strategies("rowwise")


def test_a_name_is_taken_once():
    assert register(row_wise.STRATEGY) is row_wise.STRATEGY
    with pytest.raises(ValueError, match="a strategy named 'row_wise' is registered"):
        register(replace(row_wise.STRATEGY, short_name="R"))


@pytest.mark.parametrize("strategy", strategies(), ids=lambda strategy: strategy.name)
def test_a_hand_written_plan_and_the_planner_cut_alike(strategy):
    """A plan without sizes of its own has the shards that the planner proposes."""
    table = TableToCut(rows=21, columns=16, world_size=4, local_size=2, min_partition=4)
    arguments = {
        "table_wise": {"rank": 3},
        "column_wise": {"ranks": [0, 1, 2, 3]},
        "table_row_wise": {"host_index": 1},
        "table_column_wise": {"host_index": 1},
        "grid_shard": {"host_indexes": [0, 1]},
    }.get(strategy.name, {})

    class Sharder:
        def compute_kernels(self, sharding_type, device_type):
            return strategy_of(sharding_type).kernels(device_type)

    class Parameter:
        shape = (table.rows, table.columns)

    placed = strategy.by_hand(**arguments)(Parameter, 2, 4, "cpu", Sharder())
    pieces = strategy.cut(table)
    assert len(placed.ranks) == len(pieces)
    if strategy.replicated:
        assert placed.sharding_spec is None
        return
    shards = placed.sharding_spec.shards
    assert [(list(s.shard_sizes), list(s.shard_offsets)) for s in shards] == pieces
    assert [shard.placement.rank() for shard in shards] == placed.ranks


# Strategies of a program's own


@contextmanager
def offered(strategy):
    """Make hand-written plans of the tests' cases know a strategy for a while, then forget it."""
    setattr(sharding_plan, strategy.name, strategy.by_hand)
    try:
        yield
    finally:
        delattr(sharding_plan, strategy.name)
        registry._REGISTERED.pop(strategy.name)


def trained(pooled, unpooled, planned):
    return (
        sharded_cases.run_cases(pooled),
        test_sharded_ec.run_cases(unpooled, False),
        test_planned_sharding.train(planned),
    )


def check_training(name, world, make, *arguments):
    """Train pooled and unpooled tables on ranks by ``make``'s strategy, and compare with one rank."""
    pooled_plan = {table.name: (name, {}) for table in TABLES}
    long = (Table("long", 100, 8, ("u",)), Table("mean", 30, 4, ("u", "v"), mean=True))
    pooled = [
        Case(TABLES, pooled_plan, BATCHES[world], weighted=weighted, variable=variable)
        for weighted, variable in ((False, False), (True, False), (False, True))
    ]
    pooled.append(Case(long, {table.name: (name, {}) for table in long}, BATCHES[world]))
    unpooled_plan = {table: (name, {}) for table in test_sharded_ec.NAMES}
    unpooled = [Case(test_sharded_ec.TABLES, unpooled_plan, BATCHES[world])]
    planned = [(name, replace(pooled[0], local_size=world, optimizer="exact_sgd"))]
    per_rank = run_on_ranks(world, make, *arguments, pooled, unpooled, planned)
    for place, case in enumerate(pooled):
        sharded_cases.check(case, [found[0][place] for found in per_rank])
    for place, case in enumerate(unpooled):
        test_sharded_ec.check(case, [found[1][place] for found in per_rank])
    sharded_cases.check(planned[0][1], [found[2][0][:2] for found in per_rank])
    return per_rank


def blocks():
    section = DOCS[DOCS.index("## A sharding strategy") : DOCS.index("## A row type")]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def documented(code, use, *cases):
    """Train by the strategy of docs/extending.md; also what its second example makes."""
    module = types.ModuleType("skewed_row_wise")
    exec(compile(code, "docs/extending.md", "exec"), module.__dict__)
    with offered(module.STRATEGY):
        sys.modules["skewed_row_wise"] = module
        names = {}
        exec(compile(use, "docs/extending.md", "exec"), names)
        del sys.modules["skewed_row_wise"]
        report = report_text(names["planner"].report)
        shown = str(names["by_hand"]), str(names["planned"].plan[""]), report
        return (*trained(*cases), shown)


@pytest.mark.multi_gpu
def test_the_documented_strategy_trains_as_one_rank_does():
    per_rank = check_training("skewed_row_wise", 2, documented, *blocks())
    by_hand_text, planned_text, report = per_rank[0][3]
    assert by_hand_text == planned_text
    assert "words | [0, 0]        | [100, 16]   | rank:0/cpu" in planned_text
    assert "words | [100, 0]      | [9900, 16]  | rank:1/cpu" in planned_text
    assert re.search(r"words +SRW +fused +10000 +16", report)
    # Both ranks hold a part: the second example's tables were cut by it.
    assert {len(found[0][3][1]["long"]) for found in per_rank} == {1}
    assert [found[0][3][1]["long"][0][2].size(0) for found in per_rank] == [10, 90]


def reversed_rows(*cases):
    """The last rank holds the first rows; nodes' ranks are in the order of the rows too."""
    blocks_of = row_wise.STRATEGY.cut

    def shards(table):
        return by_hand.one_per_rank(blocks_of(table)[::-1])

    strategy = replace(
        row_wise.STRATEGY,
        name="reversed_row_wise",
        short_name="WR",
        cut=lambda table: blocks_of(table)[::-1],
        by_hand=lambda compute_kernel: by_hand.placed_by(strategy, compute_kernel, shards),
        teams=lambda world: [range(world.size)[::-1]],
    )
    with offered(register(strategy)):
        return trained(*cases)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", [2, 4])
def test_the_ranks_of_a_team_may_stand_in_another_order(world):
    per_rank = check_training("reversed_row_wise", world, reversed_rows)
    first_rows = [found[0][3][1]["long"][0][0] for found in per_rank]
    assert first_rows == sorted(first_rows, reverse=True)


def test_a_strategy_without_a_kernel_on_a_device_is_not_offered_there():
    sharder = sharding_plan.get_default_sharders()[0]
    strategy = replace(
        grid_shard.STRATEGY,
        name="grid_on_gpus",
        kernels=lambda device_type: ["fused"] if device_type == "cuda" else [],
    )
    with offered(register(strategy)):
        assert "grid_on_gpus" in sharder.sharding_types("cuda")
        assert "grid_on_gpus" not in sharder.sharding_types("cpu")
        assert sharder.compute_kernels("grid_on_gpus", "cuda") == ["fused"]
