"""Tables that move to another plan while they are trained: as arithmetic that knows no plan, or bit for bit."""

from dataclasses import replace

import pytest
import torch
from torch import distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from tessera.errors import UserError
from tessera.training import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbOptimType,
    ShardingEnv,
    ShardingPlan,
    in_backward_optimizer_filter,
)
from tessera.training.datasets.utils import Batch
from tessera.training.distributed import sharding_plan
from tessera.training.distributed.embedding import EmbeddingCollectionSharder
from tessera.training.distributed.fp_embeddingbag import (
    FeatureProcessedEmbeddingBagCollectionSharder,
)
from tessera.training.distributed.model_parallel import DMPCollection
from tessera.training.distributed.sharding.dynamic_sharding import (
    output_sharding_plan_delta_single,
    output_sharding_plans_delta,
)
from tessera.training.distributed.tables.delta_tracker import DeltaTracker
from tessera.training.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDist
from tests.training import test_model_parallel as whole_models
from tests.training import test_sharded_ec as unpooled
from tests.training import test_sharded_fp as processed
from tests.training.ranks import rank_device, run_on_ranks, whole_on_each_rank
from tests.training.sharded_cases import (
    EPS,
    LR,
    Case,
    Reference,
    check_close,
    check_shards,
    gradient,
    kjt_of,
    local_shards,
    placed,
    plan_of,
    shard,
)
from tests.training.test_sharded_ebc import BATCHES, TABLES, plans

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning"),
]

KINDS = [kind.value for kind in EmbOptimType]


def chain(world):
    """Plans one after the other: every sharding type into another, some tables alone, and uneven blocks."""
    every, last = plans(world), world - 1
    uneven = {
        "big": ("row_wise", {"sizes": [19 - 3 * last] + [3] * last}),
        "mean": ("column_wise", {"ranks": [0, last], "size_per_rank": [4, 8]}),
        "small": ("table_wise", {"rank": last}),
    }
    return [
        every["table_wise"],
        every["column_wise"],
        {**every["column_wise"], "big": ("table_wise", {"rank": last})},
        every["row_wise"],
        uneven,
        {**uneven, "mean": ("column_wise", {"ranks": [last, 0], "size_per_rank": [8, 4]})},
        every["grid_shard"],
        every["table_row_wise"],
        every["table_column_wise"],
        every["table_wise"],
    ]


def places(case, module, device):
    """The placements of a case's plan, for a module that is sharded already."""
    plain = module._origin.plain
    return plan_of(case, plain, type(SHARDERS[type(plain).__name__])(), device)


SHARDERS = {
    "EmbeddingBagCollection": EmbeddingBagCollectionSharder(),
    "EmbeddingCollection": EmbeddingCollectionSharder(),
}


def blocks_of(plan):
    """Where the column shards of each table begin and end."""
    return {
        name: sorted(
            {
                (place.shard_offsets[1], place.shard_offsets[1] + place.shard_sizes[1])
                for place in where.sharding_spec.shards
            }
        )
        for name, where in plan.items()
    }


def train_along(case, moves):
    """The outputs of a step under each plan in turn, the shards in the end, and the plans' columns."""
    rank, device = dist.get_rank(), rank_device()
    module = shard(case)
    optimizer, outputs, blocks = module.fused_optimizer, [], []
    for step, plan in enumerate(moves):
        if step:
            before = module.module_sharding_plan
            new = places(replace(case, plan=plan), module, device)
            _, changed = output_sharding_plan_delta_single(before, new)
            module.update_shards(changed)
            assert module.module_sharding_plan == new
        blocks.append(blocks_of(module.module_sharding_plan))
        out = module(kjt_of(case, rank, step, device))
        outputs.append(torch.cat([out[key] for key in module.embedding_names()], 1).detach())
        values = out.values()
        (values * gradient(case, rank, step, values.size(1)).to(device)).sum().backward()
    assert module.fused_optimizer is optimizer
    held = {
        name: [place.shard_offsets for place in where.sharding_spec.shards]
        for name, where in module.module_sharding_plan.items()
    }
    assert {name.split(".")[1] for name in optimizer.params} <= set(held)
    return outputs, local_shards(module), blocks


def move_states(reference, blocks):
    """The states of a reference whose columns are cut otherwise from now on."""
    states = {}
    for table in reference.case.tables:
        old = [(start, end) for (start, end) in reference.blocks[table.name]]
        for start, end in blocks[table.name]:
            states[table.name, start] = []
            for number in range(len(reference.states[table.name, old[0][0]])):
                parts = [(o, e, reference.states[table.name, o][number]) for o, e in old]
                if parts[0][2].size(1) == 1:
                    shares = [max(0, min(e, end) - max(o, start)) for o, e, _ in parts]
                    mean = sum(
                        share * own for share, (_, _, own) in zip(shares, parts, strict=True)
                    )
                    states[table.name, start].append(mean / (end - start))
                else:
                    whole = torch.cat([own for _, _, own in parts], 1)
                    states[table.name, start].append(whole[:, start:end].clone())
    reference.states, reference.blocks = states, blocks


# Every optimizer moves alike on any number of ranks.
SOME = ("exact_sgd", "exact_row_wise_adagrad", "partial_row_wise_adam")


@pytest.mark.parametrize(
    ("world", "kind"),
    [(2, kind) for kind in KINDS] + [(world, kind) for world in (1, 4) for kind in SOME],
)
def test_tables_move_through_every_plan_with_their_optimizers(world, kind):
    moves = chain(world)
    if world == 1:  # without others a rank holds whole tables and columns
        moves = [
            plan for plan in moves if plan in (plans(1)["table_wise"], plans(1)["column_wise"])
        ]
    case = Case(
        TABLES,
        moves[0],
        BATCHES[world],
        weighted=KINDS.index(kind) % 2 == 0,
        optimizer=kind,
        seed=5,
        local_size=min(world, 2),
    )
    per_rank = run_on_ranks(world, train_along, case, moves, local_world_size=min(world, 2))
    phases = per_rank[0][2]
    reference = Reference(case, phases[0])
    for step, blocks in enumerate(phases):
        move_states(reference, blocks)
        for rank, expected in enumerate(reference.step(step)):
            values = torch.cat(list(expected.values()), 1)
            what = f"step {step} of {kind}, rank {rank}"
            # As of sharded_cases.check, over more steps.
            check_close(per_rank[rank][0][step], values, what, rtol=5e-4, atol=5e-4)
    ends = [(None, shards) for _, shards, _ in per_rank]
    check_shards(replace(case, plan=moves[-1]), ends, reference.weights, rtol=5e-4, atol=5e-4)


def train_unpooled(case, moves, *, dedup):
    rank, device = dist.get_rank(), rank_device()
    sharder = EmbeddingCollectionSharder(
        {"optimizer": case.optimizer, "learning_rate": LR, "eps": EPS}, use_index_dedup=dedup
    )
    plain = unpooled.plain(case)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    module = sharder.shard(plain, plan_of(case, plain, sharder, device), env, device)
    outputs = []
    for step, plan in enumerate(moves):
        if step:
            new = places(replace(case, plan=plan), module, device)
            _, changed = output_sharding_plan_delta_single(module.module_sharding_plan, new)
            sharder.reshard(module, changed, env, device)
        found = module(kjt_of(case, rank, step, device))
        values = torch.cat([own.values().flatten() for own in found.values()])
        outputs.append(values.detach().clone())
        (values * values + values).sum().backward()
    tables = module.state_dict()
    return outputs, {name: whole_on_each_rank(value) for name, value in tables.items()}


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("kind", ["exact_adagrad", "adam"])
@pytest.mark.parametrize("world", [2, 4])
def test_unpooled_tables_move_and_what_is_trained_does_not_change(world, kind, dedup):
    every = unpooled.plans(world)
    case = Case(
        unpooled.TABLES,
        every["table_wise"],
        BATCHES[world],
        optimizer=kind,
        seed=2,
        local_size=min(world, 2),
    )
    names = ["table_wise", "row_wise", "column_wise", "grid_shard", "table_row_wise", "table_wise"]
    how = {"dedup": dedup, "local_world_size": min(world, 2)}
    moved = run_on_ranks(world, train_unpooled, case, [every[name] for name in names], **how)
    still = run_on_ranks(world, train_unpooled, case, [case.plan] * len(names), **how)
    for (found, tables), (expected, same_tables) in zip(moved, still, strict=True):
        # The optimizers work on single numbers; gradients of a row are summed in other orders.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(tables, same_tables, rtol=1e-4, atol=1e-5)


def train_processed(case, moves):
    rank, device = dist.get_rank(), rank_device()
    sharder = FeatureProcessedEmbeddingBagCollectionSharder(
        EmbeddingBagCollectionSharder({"optimizer": case.optimizer, "learning_rate": LR})
    )
    plans_of_moves = [
        plan_of(
            replace(case, plan=plan),
            processed.processed_collection(case, each=True),
            sharder,
            device,
        )
        for plan in moves
    ]
    plain = processed.processed_collection(case, each=True)
    plan = ShardingPlan({"": plans_of_moves[0]})
    model = DistributedModelParallel(plain, None, device, plan, [sharder])
    left = dict(in_backward_optimizer_filter(model.named_parameters()))
    weights = torch.optim.SGD(left.values(), lr=LR)
    outputs = []
    for step, new in enumerate(plans_of_moves):
        model.reshard(output_sharding_plans_delta(model.plan.plan, {"": new}))
        values = model(processed.unweighted(case, rank, step, device)).values()
        outputs.append(values.detach().clone())
        weights.zero_grad()
        (values * gradient(case, rank, step, values.size(1)).to(device)).sum().backward()
        weights.step()
    return outputs, sorted(model.state_dict())


def test_tables_behind_position_weights_move():
    every = plans(2)
    case = Case(
        TABLES,
        every["table_wise"],
        BATCHES[2],
        weighted=True,
        optimizer="exact_adagrad",
        local_size=2,
    )
    names = ["table_wise", "row_wise", "column_wise", "grid_shard", "table_wise"]
    moved = run_on_ranks(2, train_processed, case, [every[name] for name in names])
    still = run_on_ranks(2, train_processed, case, [case.plan] * len(names))
    for (found, keys), (expected, same_keys) in zip(moved, still, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert keys == same_keys


def whole_plans(plain, sharder, device):
    """Plans of a whole model's tables: they differ in ranks, and in kinds."""
    return [
        ShardingPlan(
            {
                whole_models.PATH: sharding_plan.construct_module_sharding_plan(
                    plain.get_submodule(whole_models.PATH),
                    {f"t_{key}": placed(*where) for key, where in tables.items()},
                    sharder,
                    world_size=2,
                    local_size=2,
                    device_type=device.type,
                )
            }
        )
        for tables in (
            {
                key: ("table_wise", {"rank": rank})
                for key, rank in zip("abc", (0, 1, 1), strict=True)
            },
            {
                key: ("table_wise", {"rank": rank})
                for key, rank in zip("abc", (1, 1, 0), strict=True)
            },
            {
                "a": ("table_wise", {"rank": 0}),
                "b": ("row_wise", {}),
                "c": ("table_wise", {"rank": 0}),
            },
        )
    ]


def train_whole(numbers, *, pipelined, groups=False):
    """Losses of a model whose tables move before some steps (plan number by step), and its state."""
    rank, device = dist.get_rank(), rank_device()
    sharder = EmbeddingBagCollectionSharder({"optimizer": "adam", "learning_rate": LR, "eps": EPS})
    plain = whole_models.model().to(device)
    choices = whole_plans(plain, sharder, device)
    start = ShardingPlan(dict(choices[0].plan))
    if groups:
        model = DMPCollection(plain, device, start, 4, 2, dist.group.WORLD, sharders=[sharder])
    else:
        model = DistributedModelParallel(plain, None, device, start, [sharder])
    left = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = torch.optim.SGD(left.values(), lr=LR)
    fused, plan = model.fused_optimizer, model.plan
    scheduler = LambdaLR(fused, lambda step: 0.8**step)
    steps, losses = 7, []
    batches = iter([Batch(*whole_models.batch(rank, step)) for step in range(steps)])
    pipeline = TrainPipelineSparseDist(Loss(model), dense, device) if pipelined else None
    for step in range(steps):
        if step in numbers:
            delta = output_sharding_plans_delta(plan.plan, choices[numbers[step]].plan, True)
            path = whole_models.PATH if step % 2 else None
            assert model.reshard(delta, path) == delta[whole_models.PATH][0] > 0
            assert model.plan is plan
            assert plan.plan == choices[numbers[step]].plan
            assert model.fused_optimizer is fused
        if pipeline is not None:
            losses.append(pipeline.progress(batches)[0].item())
        else:
            dense.zero_grad()
            loss = whole_models.loss_of(model, rank, step, device)
            loss.backward()
            dense.step()
            losses.append(loss.item())
        fused.step()
        scheduler.step()
        if groups:
            model.sync()
    assert all(abs(group["lr"] - LR * 0.8**steps) < 1e-9 for group in fused.param_groups)
    return losses, {
        name: [
            (shard.metadata.shard_offsets, shard.tensor.clone()) for shard in value.local_shards()
        ]
        if hasattr(value, "local_shards")
        else value.detach().clone()
        for name, value in model.state_dict().items()
    }


class Loss(torch.nn.Module):
    """A model with its loss, as training pipelines call it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        logits = self.model(batch.dense_features, batch.sparse_features).flatten()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(),)


def states_of(results):
    """Whole tables and other tensors, of the parts that all ranks of a group have."""
    found = {}
    for _, state in results:
        for name, value in state.items():
            if not isinstance(value, list):
                found[name] = value.cpu()
                continue
            for offsets, part in value:
                found[(name, *offsets)] = part.cpu()
    return found


@pytest.mark.parametrize("pipelined", [False, True])
def test_whole_tables_that_change_ranks_are_trained_bit_for_bit(pipelined):
    still = run_on_ranks(2, train_whole, {}, pipelined=False)
    moved = run_on_ranks(2, train_whole, {2: 1, 3: 0, 5: 1}, pipelined=pipelined)
    assert [losses for losses, _ in moved] == [losses for losses, _ in still]
    expected, found = states_of(still), states_of(moved)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_pipeline_goes_on_while_sharding_types_change():
    still = run_on_ranks(2, train_whole, {}, pipelined=False)
    moved = run_on_ranks(2, train_whole, {1: 2, 3: 1, 4: 2, 6: 0}, pipelined=True)
    for (losses, _), (expected, _) in zip(moved, still, strict=True):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(states_of(moved), states_of(still), rtol=1e-4, atol=1e-5)


def test_tables_move_within_groups_of_ranks():
    still = run_on_ranks(4, train_whole, {}, pipelined=False, groups=True)
    moved = run_on_ranks(4, train_whole, {2: 1, 5: 0}, pipelined=False, groups=True)
    assert [losses for losses, _ in moved] == [losses for losses, _ in still]


def refused():
    case = Case(TABLES, plans(2)["mixed"], BATCHES[2], local_size=2)
    device, env = rank_device(), ShardingEnv.from_process_group(dist.group.WORLD)
    module = shard(case)
    own = module.module_sharding_plan
    with pytest.raises(UserError, match=r"changed_sharding_params is 'bog'; .*did you mean big"):
        module.update_shards({"bog": own["big"]})
    with pytest.raises(UserError, match="device is meta and the collection is on"):
        module.update_shards({}, env, torch.device("meta"))
    with pytest.raises(UserError, match="env has other ranks"):
        module.update_shards({}, ShardingEnv(2, 0), device)
    rows = places(replace(case, plan=plans(2)["row_wise"]), module, device)
    with pytest.raises(
        UserError, match="table 'small' is data_parallel with compute_kernel 'dense'"
    ):
        module.update_shards({"small": rows["small"]})
    before = local_shards(module)
    module.update_shards({"mean": rows["mean"]})  # others of its type move along
    DeltaTracker.of(module)
    with pytest.raises(UserError, match=r"trained rows of table '(big|mean)' are being tracked"):
        module.update_shards({"mean": own["mean"]})
    assert torch.equal(local_shards(module)["small"][0][2], before["small"][0][2])
    with pytest.raises(UserError, match="give plans of the same tables"):
        output_sharding_plan_delta_single(own, {"big": own["big"]})
    with pytest.raises(UserError, match="new_plan has no module 'a'"):
        output_sharding_plans_delta({"a": own}, {})
    model = DistributedModelParallel(whole_models.model().to(device), None, device)
    with pytest.raises(UserError, match="sharded_module_fqn is 'a'"):
        model.reshard({whole_models.PATH: (0.0, own)}, "a")
    with pytest.raises(UserError, match="changed_shard_to_params is 'a'"):
        model.reshard({"a": (0.0, own)})


def test_what_cannot_be_moved_is_refused():
    run_on_ranks(2, refused)
