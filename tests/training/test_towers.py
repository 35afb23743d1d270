"""Towers that live on one node each: values, weights, plans, checkpoints and pipelines, against one rank's plain model."""

import pytest
import torch
from torch import distributed as dist
from torch import nn

from tessera.errors import UserError
from tessera.training import EmbeddingBagCollection
from tessera.training.distributed import sharding_plan
from tessera.training.distributed.checkpoint import (
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from tessera.training.distributed.embedding_tower_sharding import (
    EmbeddingTowerCollectionContext,
    EmbeddingTowerCollectionSharder,
    EmbeddingTowerSharder,
    ShardedEmbeddingTower,
    ShardedEmbeddingTowerCollection,
    TowerLazyAwaitable,
)
from tessera.training.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig
from tessera.training.distributed.planner import EmbeddingShardingPlanner, Topology
from tessera.training.distributed.planner.enumerators import EmbeddingEnumerator
from tessera.training.distributed.planner.partitioners import GreedyPerfPartitioner
from tessera.training.distributed.planner.types import ParameterConstraints, PlannerError
from tessera.training.distributed.train_pipeline import TrainPipelineSparseDist
from tessera.training.distributed.types import ShardingEnv
from tessera.training.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from tessera.training.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from tessera.training.optim.optimizers import in_backward_optimizer_filter
from tests.training import tower_cases as cases
from tests.training.ranks import rank_device, run_on_ranks

pytestmark = pytest.mark.multi_gpu
WORLDS = [(2, 1), (2, 2), (4, 2)]
STEPS = 3


def trained(by_table, steps):
    model = cases.sharded(by_table)
    outputs = cases.train(model, steps)
    return (outputs, cases.state_of(model)), model.plan, list(model.fused_optimizer.params)


def held(world, local):
    """How many ranks hold a tensor: one a part of a table, a node an interaction, all of them the rest."""

    def by(name):
        if name.startswith("over"):
            return world
        return 1 if "embedding" in name else local

    return by


def nodes_of_plan(plan, local):
    """By tower the nodes of its tables."""
    found = {}
    for path, tables in plan.plan.items():
        towers = cases.towers() if path == "arch" else [cases.Model().alone]
        for number, tower in enumerate(towers):
            for table in [name.split(".")[-2] for name, _ in tower.embedding.named_parameters()]:
                nodes = {rank // local for rank in tables[table].ranks}
                found.setdefault((path, number), set()).update(nodes)
    return found


@pytest.mark.parametrize(("world", "local"), WORLDS)
@pytest.mark.parametrize("planned", [False, True])
def test_outputs_and_weights_are_those_of_one_rank(world, local, planned):
    by_table = None if planned else cases.PLANS[world, local]
    results = run_on_ranks(world, trained, by_table, STEPS, local_world_size=local)
    expected = cases.reference(world, STEPS)
    cases.check([own for own, _, _ in results], expected, held(world, local))
    plan = results[0][1]
    nodes = nodes_of_plan(plan, local)
    assert len(nodes) == 4
    assert all(len(own) == 1 for own in nodes.values())
    if world // local > 1:
        # The towers are on both nodes, in the planner's plan too.
        assert set.union(*nodes.values()) == {0, 1}
    for rank, (_, _, names) in enumerate(results):
        here = {name.split(".embedding")[0] for name in names}
        own = {
            f"arch.towers.{number}" if path == "arch" else path
            for (path, number), at in nodes.items()
            if rank // local in at
        }
        assert here <= own


def test_without_a_process_group_all_towers_are_here():
    # The plan of one rank is made of whole tables.
    result, _, names = trained(None, STEPS)
    cases.check([result], cases.reference(1, STEPS), lambda _: 1)
    assert len(names) == 6


def trained_with_codecs(by_table):
    config = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16)
    model = cases.sharded(by_table, codecs=config)
    return cases.train(model, 2), cases.state_of(model)


@pytest.mark.parametrize(("world", "local"), [(2, 1), (4, 2)])
def test_outputs_and_gradients_may_travel_in_half_precision(world, local):
    by_table = cases.PLANS[world, local]
    results = run_on_ranks(world, trained_with_codecs, by_table, local_world_size=local)
    expected = cases.reference(world, 2)
    # A number below 4 is rounded by less than 1e-3, and by more than nothing.
    cases.check(results, expected, held(world, local), bound=5e-3)
    with pytest.raises(AssertionError):
        cases.check(results, expected, held(world, local))


def kinds_of_modules():
    model = cases.sharded(cases.PLANS[2, 1])
    arch, alone = model.module.arch, model.module.alone
    assert isinstance(arch, ShardedEmbeddingTowerCollection)
    assert isinstance(alone, ShardedEmbeddingTower)
    assert arch.unsharded_module_type is EmbeddingTowerCollection
    assert alone.unsharded_module_type is EmbeddingTower
    assert isinstance(arch.create_context(), EmbeddingTowerCollectionContext)
    (batch,) = cases.batches(1)
    assert isinstance(alone(batch.ids), TowerLazyAwaitable)
    names = {
        *arch.sharded_parameter_names("arch"),
        *alone.sharded_parameter_names("alone"),
    }
    own = {n for n, _ in [*model.named_parameters(), *model.named_buffers()] if n[0] == "a"}
    assert names == own
    return sorted(model.state_dict()), sorted(arch.shardings)


def test_names_are_those_of_the_plain_model_on_the_ranks_of_a_towers_node():
    (first, of_first), (second, of_second) = run_on_ranks(2, kinds_of_modules, local_world_size=1)
    assert sorted({*first, *second}) == sorted(cases.Model().state_dict())
    assert {*first} & {*second} == {"over.weight", "over.bias"}
    assert of_first == ["towers.1.embedding.table_wise"]
    assert of_second == [
        "towers.0.embedding.column_wise",
        "towers.0.embedding.row_wise",
        "towers.2.embedding.row_wise",
    ]


def optimizers(model):
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adam(params, lr=0.01),
    )
    return CombinedOptimizer([model.fused_optimizer, dense])


def step_with(model, optimizer, steps):
    for batch in cases.batches(steps):
        optimizer.zero_grad()
        model(batch)[0].backward()
        optimizer.step()


def saved(folder):
    model = cases.sharded(cases.PLANS[4, 2], optimizer="exact_adagrad")
    optimizer = optimizers(model)
    step_with(model, optimizer, 2)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    save_checkpoint(folder, model=model, optimizer=optimizer)
    step_with(model, optimizer, 1)
    return cases.state_of(model)


def loaded(folder):
    model = cases.sharded(cases.OTHER_WAY_ROUND, seed=2, optimizer="exact_adagrad")
    optimizer = optimizers(model)
    load_checkpoint(folder, model=model, optimizer=optimizer)
    rates = {group["lr"] for group in optimizer.param_groups if group["params"]}
    step_with(model, optimizer, 1)
    return cases.state_of(model), rates


def whole(states):
    """The tensors of all ranks' parts."""
    found = {
        name: torch.full_like(value, torch.nan)
        for name, value in cases.Model().state_dict().items()
    }
    for own in states:
        for name, offsets, part in own:
            place = tuple(slice(o, o + s) for o, s in zip(offsets, part.shape, strict=True))
            found[name][place] = part
    return found


def test_a_checkpoint_goes_on_under_a_plan_with_the_towers_on_other_nodes(tmp_path):
    folder = tmp_path / "checkpoint"
    before = whole(run_on_ranks(4, saved, folder, local_world_size=2))
    results = run_on_ranks(4, loaded, folder, local_world_size=2)
    assert all(rates == {cases.LR / 2, 0.005} for _, rates in results)
    after = whole([own for own, _ in results])
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=1e-5, atol=1e-6, msg=name)
    read = read_checkpoint(folder)
    assert set(read.model) == set(before)
    assert sum(len(group["params"]) for group in read.optimizer["param_groups"]) == 6 + 10
    plain = cases.Model()
    plain.load_state_dict(read.model)


def took_whole_state():
    model = cases.sharded(cases.PLANS[2, 1], seed=2)
    found = model.load_state_dict(cases.model_of(1).state_dict())
    assert not found.missing_keys
    assert not found.unexpected_keys
    return cases.state_of(model)


def test_a_plain_models_state_is_loaded_on_ranks_that_hold_a_part_of_it():
    found = whole(run_on_ranks(2, took_whole_state, local_world_size=1))
    for name, value in cases.model_of(1).state_dict().items():
        assert torch.equal(found[name], value)


def through_a_pipeline(by_table):
    model = cases.sharded(by_table)
    pipeline = TrainPipelineSparseDist(model, cases.dense_optimizer(model), rank_device())
    source = iter(cases.batches(STEPS))
    outputs = [pipeline.progress(source).cpu() for _ in range(STEPS)]
    with pytest.raises(StopIteration):
        pipeline.progress(source)
    return outputs, cases.state_of(model)


@pytest.mark.parametrize(("world", "local"), [(2, 1), (4, 2)])
def test_ids_are_sent_ahead_by_a_pipeline(world, local):
    by_table = cases.PLANS[world, local]
    results = run_on_ranks(world, through_a_pipeline, by_table, local_world_size=local)
    cases.check(results, cases.reference(world, STEPS), held(world, local))


class Layer(nn.Module):
    """An interaction without a buffer, which could not get a value of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, looked_up):
        return self.layer(looked_up.values())


def begun_on_meta():
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        collection = EmbeddingBagCollection([cases.pooled("t", 8, "w")], is_weighted=True)
        tower = EmbeddingTower(collection, Layer())
    sharder = EmbeddingTowerSharder()
    plan = sharding_plan.construct_module_sharding_plan(
        tower, {"t": sharding_plan.table_wise(rank=0)}, sharder, device_type=rank_device().type
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    made = sharder.shard(tower, plan, env, rank_device())
    return made.interaction.layer.weight.detach()


def test_a_tower_on_the_meta_device_begins_with_equal_interactions_on_its_nodes_ranks():
    first, second = run_on_ranks(2, begun_on_meta, local_world_size=2)
    assert torch.equal(first, second)
    assert float(first.abs().max()) > 0


def refused(by_table):
    with pytest.raises(ValueError, match="table") as told:
        cases.sharded({**cases.PLANS[4, 2], **by_table})
    return str(told.value)


@pytest.mark.parametrize(
    ("by_table", "message"),
    [
        (
            {"t1": ("table_wise", {"rank": 1})},
            (
                "table 't1' of tower 0 has a shard on rank 1, of node 0, and table 't0' of the same tower is on "
                "node 1; place all tables of a tower on the ranks of one node, such as ranks 2 to 3"
            ),
        ),
        (
            {"t5": ("table_row_wise", {"host_index": 1})},
            (
                "table 't5' of the tower has a shard on rank 2, of node 1, and table 't4' of the same tower is "
                "on node 0; place all tables of a tower on the ranks of one node, such as ranks 0 to 1"
            ),
        ),
        (
            {"t2": ("row_wise", {})},
            (
                "table 't2' of tower 1 is row_wise; the tables of a tower live on one node, so give one of "
                "table_wise, table_row_wise, table_column_wise"
            ),
        ),
    ],
)
def test_a_plan_that_takes_a_tower_apart_is_refused(by_table, message):
    assert run_on_ranks(4, refused, by_table, local_world_size=2) == [message] * 4


def bad_calls():
    model = cases.sharded(cases.PLANS[2, 1]).module
    batch = cases.batch_of(0, 2, 0)
    found = []
    for features, weighted in (
        (None, batch.weighted),
        (batch.ids, None),
        (batch.ids, cases.batch_of(0, 3, 0).weighted),
    ):
        with pytest.raises(ValueError, match=r"give") as told:
            model.arch(features, weighted)
        found.append(str(told.value))
    with pytest.raises(KeyError, match="feature 'a' is missing"):
        model.arch(batch.weighted, batch.weighted)
    with pytest.raises(UserError, match="has no reshard; save a checkpoint"):
        cases.sharded(cases.PLANS[2, 1]).reshard({"arch": (0.0, {})})
    return found


def test_calls_without_what_a_tower_needs_are_refused():
    for found in run_on_ranks(2, bad_calls, local_world_size=1):
        assert found == [
            "a tower of the collection needs features; give them",
            "a tower of the collection needs weighted_features; give them",
            (
                "features of towers have [2, 3] samples, or other numbers of bags per feature; a tower's output "
                "has a row per sample, so give all features the same samples"
            ),
        ]


class Flat(nn.Module):
    def forward(self, looked_up):
        return looked_up.values().flatten()


class Growing(nn.Module):
    columns = 0

    def forward(self, looked_up):
        self.columns += 1
        return looked_up.values()[:, : self.columns]


def alone_in(env, interaction=nn.Identity):
    tower = EmbeddingTower(EmbeddingBagCollection([cases.pooled("t", 8, "b")]), interaction())
    sharder = EmbeddingTowerSharder()
    plan = sharding_plan.construct_module_sharding_plan(
        tower,
        {"t": sharding_plan.table_wise(rank=0)},
        sharder,
        world_size=1,
        local_size=1,
        device_type="cpu",
    )
    return sharder.shard(tower, plan, env)


class OfGroups(ShardingEnv):
    """Ranks of which groups hold copies of all tables, as in 2D parallelism."""

    sharding_pg = "a group"


def test_ranks_among_which_a_tower_cannot_be_placed_are_refused():
    with pytest.raises(UserError, match="world_size is 2 but there is no process group"):
        alone_in(ShardingEnv.from_local(2, 0))
    with pytest.raises(UserError, match="towers in 2D parallelism"):
        alone_in(OfGroups(1, 0))


def outputs_of(interaction):
    made = alone_in(ShardingEnv.from_local(1, 0), interaction)
    for _ in range(2):
        made(cases.batch_of(0, 2, 0).ids).wait()


def test_an_interaction_that_gives_no_row_per_sample_or_other_columns_is_refused():
    with pytest.raises(ValueError, match=r"tower 0 gave \[16\] for 2 samples; let it give"):
        outputs_of(Flat)
    with pytest.raises(ValueError, match=r"towers \[0\] gave \[2\] columns and \[1\] before"):
        outputs_of(Growing)


def test_towers_that_cannot_be_placed_as_one_are_refused():
    sharder = EmbeddingTowerSharder()
    odd = EmbeddingTower(nn.EmbeddingBag(4, 2), nn.Identity())
    with pytest.raises(UserError, match="looks up in a EmbeddingBag; towers of"):
        sharder.shardable_parameters(odd)
    twice = EmbeddingTowerCollection([cases.towers()[0], cases.towers()[0]])
    with pytest.raises(ValueError, match="towers 0 and 1 have a table 't0' each"):
        EmbeddingTowerCollectionSharder().shardable_parameters(twice)
    first, second, _ = cases.towers()
    assert sharder.embedding_feature_names(first) == (["a", "b", "c"], [])
    assert sharder.embedding_feature_names(second) == ([], ["w"])


def test_the_planner_is_told_which_tables_belong_together():
    topology = Topology(world_size=4, local_world_size=2, compute_device="cpu")
    options = EmbeddingEnumerator(topology, 8).enumerate(cases.Model(), cases.sharders())
    told = {
        option.name: (option.dependency, option.is_pooled, option.is_weighted) for option in options
    }
    assert told == {
        "t0": ("arch.tower_0", True, False),
        "t1": ("arch.tower_0", True, False),
        "t2": ("arch.tower_1", True, True),
        "t3": ("arch.tower_2", False, False),
        "t4": ("alone", True, False),
        "t5": ("alone", True, False),
    }
    assert {len(o.input_lengths) for o in options if o.name == "t1"} == {2}
    kinds = {option.sharding_type for option in options}
    assert kinds == {"table_wise", "table_row_wise"}  # few columns are not cut


def test_tables_of_a_tower_may_be_cut_where_there_is_one_host():
    topology = Topology(world_size=2, local_world_size=2, compute_device="cpu")
    options = EmbeddingEnumerator(topology, 8).enumerate(cases.Model(), cases.sharders())
    assert "table_row_wise" in {option.sharding_type for option in options}


def placed_by_planner(memory, **constraints):
    topology = Topology(
        world_size=4, local_world_size=2, compute_device="cuda", hbm_cap=memory, ddr_cap=memory
    )
    planner = EmbeddingShardingPlanner(topology, batch_size=4, constraints=constraints)
    model = nn.Sequential()
    for number in range(3):
        tables = [
            cases.EmbeddingBagConfig(
                10_000, 16, name=f"t{number}{x}", feature_names=[f"f{number}{x}"]
            )
            for x in "ab"
        ]
        with torch.device("meta"):
            model.add_module(
                f"tower_{number}", EmbeddingTower(EmbeddingBagCollection(tables), nn.Identity())
            )
    plan = planner.plan(model, [EmbeddingTowerSharder()])
    return {
        path: {rank // 2 for table in tables.values() for rank in table.ranks}
        for path, tables in plan.plan.items()
    }


def test_the_planner_keeps_towers_together_while_memory_is_short():
    # A table takes some 0.7 MB, a rank's share of three towers 1.1 MB.
    nodes = placed_by_planner(3 * 1024**2)
    assert sorted(len(own) for own in nodes.values()) == [1, 1, 1]
    assert set.union(*nodes.values()) == {0, 1}
    with pytest.raises(PlannerError, match="memory"):
        placed_by_planner(700 * 1024)


def test_tables_that_fit_no_host_together_are_named():
    topology = Topology(
        world_size=2, local_world_size=1, compute_device="cuda", hbm_cap=1024**2, ddr_cap=1024**3
    )
    tables = [
        cases.EmbeddingBagConfig(10_000, 16, name=f"t{x}", feature_names=[f"f{x}"]) for x in "ab"
    ]
    with torch.device("meta"):
        tower = EmbeddingTower(EmbeddingBagCollection(tables), nn.Identity())
    only = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    options = EmbeddingEnumerator(topology, 4, {"ta": only, "tb": only}).enumerate(
        nn.Sequential(tower), [EmbeddingTowerSharder()]
    )
    with pytest.raises(
        PlannerError, match=r"tables 0\.ta, 0\.tb must lie on one host, for '0'; they"
    ):
        GreedyPerfPartitioner().partition(options, topology)
    for option in options:
        option.dependency = None
    placed = GreedyPerfPartitioner().partition(options, topology)
    assert [option.shards[0].rank for option in placed] == [0, 1]
