"""2D parallelism: copies of sharded tables that train apart are averaged as plain arithmetic averages them."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch import nn

from tessera.errors import UserError
from tessera.training import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    ShardingPlan,
    in_backward_optimizer_filter,
)
from tessera.training.distributed import sharding_plan
from tessera.training.distributed.checkpoint import (
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from tessera.training.distributed.comm import get_node_group_size, intra_and_cross_node_pg_2D
from tessera.training.distributed.comm.environment_2d import replica_mesh
from tessera.training.distributed.embedding import EmbeddingCollectionSharder
from tessera.training.distributed.embeddingbag import ShardedEmbeddingBagCollection
from tessera.training.distributed.model import replicated
from tessera.training.distributed.model_parallel import DMPCollection
from tessera.training.distributed.types import DMPCollectionConfig
from tests.training import test_model_parallel as whole_models
from tests.training import test_sharded_mc as collisions
from tests.training.ranks import rank_device, run_on_ranks, whole_on_each_rank
from tests.training.sharded_cases import (
    EPS,
    LR,
    Case,
    Reference,
    check_close,
    gradient,
    kjt_of,
    placed,
    plain_collection,
)
from tests.training.test_sharded_ebc import TABLES, every, plans

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning"),
]

WORLD, GROUP = 4, 2
SEED = 3


def case_of(plan, **more):
    """A case of one sharding group of two ranks; each group has batches of its own."""
    return Case(TABLES, plan, (3, 5), seed=SEED, steps=4, local_size=1, **more)


def data_of(case, group):
    return replace(case, seed=case.seed + 50 * (group + 1))


def groups_of(size, *, successive):
    if successive:
        return [list(range(first, first + size)) for first in range(0, WORLD, size)]
    return [list(range(group, WORLD, WORLD // size)) for group in range(WORLD // size)]


def collection_plan(case, sharder, module, size, node):
    tables = sharding_plan.construct_module_sharding_plan(
        module,
        {name: placed(kind, arguments) for name, (kind, arguments) in case.plan.items()},
        sharder,
        local_size=node,
        world_size=size,
        device_type=rank_device().type,
    )
    return ShardingPlan({"": tables})


def built(case, *, size=GROUP, node=1, successive=False):
    sharder = EmbeddingBagCollectionSharder(
        {"optimizer": case.optimizer, "learning_rate": LR, "eps": EPS, **case.fused_params}
    )
    module = plain_collection(case)
    # Copies begin alike, whatever the values of the others were.
    if dist.get_rank() not in groups_of(size, successive=successive)[0]:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
    return DMPCollection(
        module,
        rank_device(),
        collection_plan(case, sharder, module, size, node),
        WORLD,
        size,
        dist.group.WORLD,
        node_group_size=node,
        sharders=[sharder],
        use_inter_host_allreduce=successive,
    )


def parts_here(value):
    """The parts of a tensor that are on this rank, with where they begin."""
    if not hasattr(value, "local_shards"):
        return [([0] * value.dim(), value.detach().clone())]
    return [(s.metadata.shard_offsets, s.tensor.detach().clone()) for s in value.local_shards()]


def whole(value, pg):
    """All of a table, of the shards that this rank's sharding group has."""
    if not hasattr(value, "local_shards"):
        return value.detach().clone()
    parts = [None] * pg.size()
    dist.all_gather_object(parts, parts_here(value), group=pg)
    found = torch.full(tuple(value.metadata().size), float("nan"))
    for offsets, tensor in (part for rank in parts for part in rank):
        found[tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))] = tensor
    return found


def train_case(case, *, sync_every, with_states, size, node, successive):
    """The outputs of each step on this rank, then its parts of the tables and optimizer states."""
    model = built(case, size=size, node=node, successive=successive)
    left = [p for _, p in in_backward_optimizer_filter(model.named_parameters())]
    dense = torch.optim.SGD(left, lr=LR) if left else None
    groups = groups_of(size, successive=successive)
    group = next(place for place, ranks in enumerate(groups) if dist.get_rank() in ranks)
    own, rank = data_of(case, group), groups[group].index(dist.get_rank())
    outputs = []
    for step in range(case.steps):
        out = model(kjt_of(own, rank, step, rank_device())).values()
        outputs.append(out.detach().clone())
        if dense is not None:
            dense.zero_grad()
        (out * gradient(own, rank, step, out.size(1))).sum().backward()
        if dense is not None:
            dense.step()
        if step % sync_every == sync_every - 1:
            model.sync(with_states)
    states = model.fused_optimizer.state_dict()["state"] if fused_somewhere(case) else {}
    return (
        outputs,
        {name.split(".")[1]: parts_here(value) for name, value in model.state_dict().items()},
        {
            (name.split(".")[1], key): parts_here(value)
            for name, own_states in states.items()
            for key, value in own_states.items()
            if key != "step"
        },
    )


def fused_somewhere(case):
    return any(
        kind != "data_parallel" and arguments.get("compute_kernel") != "dense"
        for kind, arguments in case.plan.values()
    )


def train_cases(cases, **how):
    """Train each case on one grid of ranks, as making the groups takes longer than training a case."""
    with mock.patch.object(replicated, "replica_mesh") as mesh:
        grid = replica_mesh(
            rank_device().type, groups_of(how["size"], successive=how["successive"])
        )
        mesh.side_effect = lambda device_type, groups: (
            grid if (device_type, groups) == (grid.device_type, grid.mesh.tolist()) else None
        )
        return [train_case(case, **how) for case in cases]


def averaged(references, names, with_states):
    for name in names:
        mean = sum(reference.weights[name] for reference in references) / len(references)
        for reference in references:
            reference.weights[name].copy_(mean)
    if not with_states:
        return
    for key in [key for key in references[0].states if key[0] in names]:
        for number in range(len(references[0].states[key])):
            each = [reference.states[key][number] for reference in references]
            mean = sum(each) / len(each)
            for state in each:
                state.copy_(mean)


def column_blocks(case):
    """Where the column shards of each table begin and end under its plan."""
    blocks = {}
    for table in case.tables:
        kind, arguments = case.plan[table.name]
        if kind == "column_wise":
            widths = arguments.get("size_per_rank") or [table.dim // 2] * 2
        elif kind == "grid_shard" and len(arguments["host_indexes"]) == 2:
            widths = [table.dim // 2] * 2
        else:
            widths = [table.dim]
        ends = torch.tensor(widths).cumsum(0).tolist()
        blocks[table.name] = list(zip([0, *ends[:-1]], ends, strict=True))
    return blocks


def check_case(case, per_rank, *, sync_every, with_states, size, successive):
    groups = groups_of(size, successive=successive)
    blocks = column_blocks(case)
    references = [Reference(data_of(case, group), blocks) for group in range(len(groups))]
    first = Reference(case, blocks)
    for reference in references:
        reference.weights = {name: value.clone() for name, value in first.weights.items()}
    replicated = [name for name, (kind, _) in case.plan.items() if kind == "data_parallel"]
    spread = [name for name in case.plan if name not in replicated]
    bounds = {"rtol": 1e-4, "atol": 1e-4}  # see sharded_cases.check
    for step in range(case.steps):
        for ranks, reference in zip(groups, references, strict=True):
            for rank, expected in zip(ranks, reference.step(step), strict=True):
                values = torch.cat(list(expected.values()), dim=1)
                check_close(per_rank[rank][0][step], values, f"step {step} {case.plan}", **bounds)
        # What is not sharded is averaged over all ranks in every step.
        averaged(references, replicated, with_states=False)
        if step % sync_every == sync_every - 1:
            averaged(references, spread, with_states)
    for ranks, reference in zip(groups, references, strict=True):
        check_group(reference, [per_rank[rank] for rank in ranks], replicated, bounds)


def check_group(reference, results, replicated, bounds):
    """Hold what the ranks of a group have against whole tables and states."""
    wanted = dict(reference.weights)
    for name, own in reference.blocks.items():
        for number in range(len(reference.states[name, 0])):
            parts = [reference.states[name, start][number] for start, _ in own]
            state = torch.cat(parts, 1)  # one number per row is a column here
            key = name, f"momentum{number + 1}"
            wanted[key] = state.flatten() if state.size(1) == 1 else state
    held = dict.fromkeys(wanted, 0)
    for _, tables, states in results:
        for key, parts in {**tables, **states}.items():
            for offsets, found in parts:
                places = zip(offsets, found.shape, strict=True)
                expected = wanted[key][tuple(slice(o, o + size) for o, size in places)]
                check_close(found, expected, f"{key} {reference.case.plan}", **bounds)
                held[key] += found.numel()
    # Every number is in the group, once; and on every rank of what is not spread.
    for key, value in wanted.items():
        table = key if isinstance(key, str) else key[0]
        assert held[key] == value.numel() * (len(results) if table in replicated else 1)


@pytest.mark.parametrize(
    "optimizer", ["exact_sgd", "exact_adagrad", "exact_row_wise_adagrad", "adam"]
)
@pytest.mark.parametrize("successive", [False, True])
def test_copies_are_averaged_as_plain_ones(optimizer, successive):
    every_plan = plans(GROUP)
    every_plan["table_row_wise"] = every("table_row_wise", host_index=1)
    every_plan["grid_shard"] = every("grid_shard", host_indexes=[1, 0])
    every_plan["table_column_wise"] = every("table_column_wise", host_index=1)
    cases = [case_of(plan, optimizer=optimizer) for plan in every_plan.values()]
    if optimizer == "exact_sgd":
        dense = {"compute_kernel": "dense"}
        cases.append(case_of(every("table_wise", rank=1, **dense), optimizer=optimizer))
    how = {"sync_every": 2, "with_states": successive, "size": GROUP, "successive": successive}
    results = run_on_ranks(WORLD, train_cases, cases, node=1, **how)
    for place, case in enumerate(cases):
        check_case(case, [own[place] for own in results], **how)


def test_strategies_that_know_nodes_find_them_within_a_group():
    case = replace(
        case_of(plans(WORLD)["table_row_wise"], optimizer="exact_sgd"), batch_sizes=(2, 0, 4, 3)
    )
    how = {"sync_every": 1, "with_states": True, "size": WORLD, "successive": False}
    results = run_on_ranks(WORLD, train_cases, [case], node=2, **how)
    check_case(case, [own[0] for own in results], **how)


def node_groups(successive):
    case = case_of(every("row_wise"))
    model = built(case, node=2, successive=successive)
    groups = intra_and_cross_node_pg_2D(model._env, rank_device())
    assert intra_and_cross_node_pg_2D(model._env) == groups
    assert intra_and_cross_node_pg_2D(model._env, torch.device("meta")) == (None, None)
    assert get_node_group_size() == 2
    mesh = model.device_mesh
    assert mesh.mesh_dim_names == ("replicate", "shard")
    assert model._env.num_sharding_groups() == WORLD // GROUP
    return (
        mesh.mesh.tolist(),
        [dist.get_process_group_ranks(group) for group in groups],
        dist.get_process_group_ranks(model._env.replica_pg),
    )


def test_groups_are_those_of_the_documented_example():
    for successive, grid in ((False, [[0, 2], [1, 3]]), (True, [[0, 1], [2, 3]])):
        for rank, (mesh, nodes, copies) in enumerate(run_on_ranks(WORLD, node_groups, successive)):
            own = next(group for group in grid if rank in group)
            assert mesh == grid
            assert nodes == [own, [rank]]
            assert copies == sorted(group[own.index(rank)] for group in grid)


def train_whole_model(steps, folder, group):
    """A model with dense layers in groups, and the same in none; after ``steps`` syncs each."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), rank_device()
    sharder = EmbeddingBagCollectionSharder({"optimizer": "exact_sgd", "learning_rate": LR})
    models = {}
    for name, size in (("groups", group), ("one", world)):
        plain = whole_models.model().to(device)
        tables = sharding_plan.construct_module_sharding_plan(
            plain.get_submodule(whole_models.PATH),
            {
                "t_a": placed("row_wise", {}),
                "t_b": placed("data_parallel", {}),
                "t_c": placed("column_wise", {"ranks": [min(1, size - 1), 0]}),
            },
            sharder,
            world_size=size,
            local_size=size,
            device_type=device.type,
        )
        plan = ShardingPlan({whole_models.PATH: tables})
        if name == "one":
            model = DistributedModelParallel(plain, None, device, plan, [sharder])
        else:
            model = DMPCollection(
                plain, device, plan, world, size, dist.group.WORLD, sharders=[sharder]
            )
        left = dict(in_backward_optimizer_filter(model.named_parameters()))
        dense = torch.optim.SGD(left.values(), lr=LR)
        losses = []
        for step in range(steps):
            dense.zero_grad()
            loss = whole_models.loss_of(model, rank, step, device)
            loss.backward()
            dense.step()
            if name == "groups":
                model.sync()
            losses.append(loss.item())
        models[name] = (model, losses)
    model, _ = models["groups"]
    save_checkpoint(folder / "ours", model=model)
    dcp.save(model.state_dict(), checkpoint_id=str(folder / "torch"))
    # What was saved comes back into groups too.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_checkpoint(folder / "ours", model=model)
    pg = model._env.sharding_pg
    return (
        [losses for _, losses in models.values()],
        {name: whole(value, pg) for name, value in model.state_dict().items()},
        {
            name: whole(value, dist.group.WORLD)
            for name, value in models["one"][0].state_dict().items()
        },
    )


def load_whole_model(folder):
    device = rank_device()
    found = []
    for kind in ("ours", "torch"):
        model = DistributedModelParallel(whole_models.model().to(device), None, device)
        if kind == "ours":
            load_checkpoint(folder / kind, model=model)
        else:
            state = model.state_dict()
            dcp.load(state, checkpoint_id=str(folder / kind))
            model.load_state_dict(state)
        found.append(
            {
                name: whole_on_each_rank(value) if hasattr(value, "local_shards") else value
                for name, value in model.state_dict().items()
            }
        )
    return found


@pytest.mark.parametrize(("world", "group"), [(WORLD, GROUP), (2, 1)])
def test_with_sgd_and_a_sync_each_step_groups_train_as_one_model_and_are_saved_as_one(
    tmp_path, world, group
):
    results = run_on_ranks(world, train_whole_model, 4, tmp_path, group)
    for losses, in_groups, in_one in results:
        # Sums of float32 in another order, over four steps of SGD.
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
        for name, value in in_one.items():
            torch.testing.assert_close(in_groups[name], value, rtol=1e-5, atol=1e-6)
    expected = results[0][1]
    saved = read_checkpoint(tmp_path / "ours").model
    assert set(saved) == set(expected)
    for name, value in expected.items():
        assert torch.equal(saved[name], value)
    for states in run_on_ranks(2, load_whole_model, tmp_path):
        for state in states:
            for name, value in expected.items():
                assert torch.equal(state[name], value)


class TwoCollections(nn.Module):
    """A pooled and an unpooled collection of the same feature."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(SEED)
        self.pooled = plain_collection(case_of(every("row_wise")))
        self.unpooled = EmbeddingCollection(
            [EmbeddingConfig(num_embeddings=9, embedding_dim=4, name="own", feature_names=["x"])]
        )

    def forward(self, bags, ids):
        return self.pooled(bags).values().sum() + self.unpooled(ids)["x"].values().sum()


def own_groups(hooked):
    device = rank_device()
    sharders = [
        EmbeddingBagCollectionSharder({"optimizer": "exact_sgd", "learning_rate": LR}),
        EmbeddingCollectionSharder({"optimizer": "exact_sgd", "learning_rate": LR}),
    ]
    module = TwoCollections()
    case = case_of(every("row_wise"))
    whole_plan = collection_plan(case, sharders[0], module.pooled, WORLD, WORLD)
    own_plan = sharding_plan.construct_module_sharding_plan(
        module.unpooled,
        {"own": sharding_plan.row_wise(compute_kernel="fused")},
        sharders[1],
        local_size=GROUP,
        world_size=GROUP,
        device_type=device.type,
    )
    averaged_lists = []
    model = DMPCollection(
        module,
        device,
        ShardingPlan({"pooled": whole_plan.plan[""]}),
        WORLD,
        WORLD,
        dist.group.WORLD,
        sharders=sharders,
        submodule_configs=[
            DMPCollectionConfig(
                EmbeddingCollection,
                ShardingPlan({"unpooled": own_plan}),
                GROUP,
                use_inter_host_allreduce=True,
            )
        ],
    )
    if hooked:
        model.set_all_reduce_hook(averaged_lists.append)
    rank = dist.get_rank()
    ids = KeyedJaggedTensor(["x"], torch.tensor([rank, 8]), lengths=torch.tensor([2]))
    model(kjt_of(replace(case, batch_sizes=(3, 5, 2, 1)), rank, 0, device), ids).backward()
    model.sync()
    return whole(model.state_dict()["unpooled.embeddings.own.weight"], group_of(model)), len(
        averaged_lists
    )


def group_of(model):
    return model._env_for(model.module.unpooled).sharding_pg


def test_a_type_of_module_has_groups_of_its_own_and_a_hook_takes_the_average_over():
    torch.manual_seed(SEED)
    before = TwoCollections().unpooled.embeddings["own"].weight.detach()
    for table, _ in run_on_ranks(WORLD, own_groups, hooked=False):
        expected = before.clone()
        # Each of two groups takes the mean over its two ranks; then the mean of both is taken.
        for row, share in {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25, 8: 1.0}.items():
            expected[row] -= LR * share
        torch.testing.assert_close(table, expected, rtol=0, atol=1e-6)
    for rank, (table, calls) in enumerate(run_on_ranks(WORLD, own_groups, hooked=True)):
        expected = before.clone()
        for row in (0, 1) if rank < GROUP else (2, 3):
            expected[row] -= LR / 2
        expected[8] -= LR
        torch.testing.assert_close(table, expected, rtol=0, atol=1e-6)
        assert calls == 2  # the weights of each of the two kinds of groups; SGD has no state


def refused():
    case = case_of(every("row_wise"))
    module = plain_collection(case)
    with pytest.raises(UserError, match="sharding_group_size is 3 and world_size 4; give a div"):
        DMPCollection(module, rank_device(), None, WORLD, 3, dist.group.WORLD)
    with pytest.raises(UserError, match="world_size is 2, global_pg has 4 ranks"):
        DMPCollection(module, rank_device(), None, 2, 2, dist.group.WORLD)
    with pytest.raises(ValueError, match="node_group_size is 3 in sharding groups of 2 ranks"):
        DMPCollection(module, rank_device(), None, WORLD, GROUP, dist.group.WORLD, 3)
    behind_maps = collisions.plain(True, torch.device("meta"))
    with pytest.raises(UserError, match="managed collisions in 2D parallelism"):
        DMPCollection(behind_maps, rank_device(), None, WORLD, GROUP, dist.group.WORLD)
    model = DMPCollection(module, rank_device(), None, WORLD, GROUP, dist.group.WORLD)
    ranks = {rank for own in model.plan.plan[""].values() for rank in own.ranks}
    assert ranks <= set(range(GROUP))


def test_what_does_not_fit_is_refused_and_a_plan_is_made_for_one_group():
    run_on_ranks(WORLD, refused)
    with pytest.raises(ValueError, match="module is Sharded"):
        DMPCollectionConfig(ShardedEmbeddingBagCollection, ShardingPlan({}), 2)
