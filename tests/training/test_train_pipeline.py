"""Pipelines against the plain loop: the same batches give the same losses and the same tables."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import distributed as dist
from torch import nn

from tessera.errors import UserError
from tessera.training import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    KeyedOptimizerWrapper,
    ShardingEnv,
    ShardingPlan,
    in_backward_optimizer_filter,
)
from tessera.training.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from tessera.training.distributed.train_pipeline import (
    ArgInfo,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    types,
)
from tessera.training.distributed.train_pipeline.tracing import (
    ArgInfoStepFactory,
    pipelineable_modules,
    trace,
)
from tessera.training.streamable import Pipelineable
from tests.training.ranks import rank_device, run_on_ranks, uses_cuda

ROWS, DIM, DENSE, STEPS = 40, 8, 3, 7


@dataclass
class Samples(Pipelineable):
    """A batch with two groups of ids."""

    dense: torch.Tensor
    ids: dict[str, KeyedJaggedTensor]
    labels: torch.Tensor

    def to(self, device, non_blocking=False):  # noqa: FBT002 - as of torch.Tensor
        return Samples(
            self.dense.to(device, non_blocking=non_blocking),
            {k: v.to(device, non_blocking=non_blocking) for k, v in self.ids.items()},
            self.labels.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream):
        self.dense.record_stream(stream)
        self.labels.record_stream(stream)
        for kjt in self.ids.values():
            kjt.record_stream(stream)


def collection(features, prefix):
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(ROWS + i, DIM, name=f"{prefix}{i}", feature_names=[feature])
            for i, feature in enumerate(features)
        ]
    )


class Model(nn.Module):
    """Two collections that depend on the batch alone, one whose ids are computed."""

    def __init__(self):
        super().__init__()
        self.user = collection(["u0", "u1"], "user")
        self.item = collection(["i0", "i1", "i2"], "item")
        self.over = nn.Sequential(nn.Linear(5 * DIM + DENSE, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch):
        user = self.user(batch.ids["user"])
        item = self.item(features=batch.ids["item"])
        joined = torch.cat([batch.dense, user.values(), item.values()], dim=1)
        logits = self.over(joined).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach())


class ComputedIds(Model):
    """The item ids depend on what the user tables gave: nothing of them can be sent ahead."""

    def forward(self, batch):
        user = self.user(batch.ids["user"])
        shifted = shift(batch.ids["item"], user.values())
        item = self.item(shifted)
        joined = torch.cat([batch.dense, user.values(), item.values()], dim=1)
        logits = self.over(joined).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach())


@torch.fx.wrap
def shift(ids, vectors):
    """The ids moved by one where the first vector is positive."""
    moved = (ids.values() + (vectors[0, 0] > 0).long()) % ROWS
    return KeyedJaggedTensor(ids.keys(), moved, lengths=ids.lengths(), stride=ids.stride())


def batches(rank, count=STEPS):
    generator = torch.Generator().manual_seed(100 + rank)

    def ids(names, size):
        lengths = torch.randint(0, 4, (len(names) * size,), generator=generator)
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        return KeyedJaggedTensor(names, values, lengths=lengths, stride=size)

    for step in range(count):
        size = 3 + (step + rank) % 4
        yield Samples(
            torch.rand(size, DENSE, generator=generator),
            {"user": ids(["u0", "u1"], size), "item": ids(["i0", "i1", "i2"], size)},
            torch.randint(0, 2, (size,), generator=generator).float(),
        )


def sharded(model_type, kernel="fused", fused_params=None, ways=None):
    torch.manual_seed(3)
    model = model_type()
    world = dist.get_world_size()
    ways = ways or [
        table_wise(world - 1, kernel),
        row_wise(compute_kernel=kernel),
        column_wise([0, world - 1], compute_kernel=kernel),
    ]
    sharder = EmbeddingBagCollectionSharder({"learning_rate": 0.1, **(fused_params or {})})
    plan = ShardingPlan(
        {
            name: construct_module_sharding_plan(
                module,
                {
                    table: ways[i % len(ways)]
                    for i, table in enumerate(sharder.shardable_parameters(module))
                },
                sharder,
                local_size=world,
                world_size=world,
                device_type=rank_device().type,
            )
            for name, module in (("user", model.user), ("item", model.item))
        }
    )
    dmp = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=rank_device(),
        plan=plan,
        sharders=[sharder],
    )
    optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    return dmp, optimizer


def tables_of(dmp):
    tables = {}
    for name, value in dmp.state_dict().items():
        if hasattr(value, "local_shards"):
            for shard in value.local_shards():
                tables[name, tuple(shard.metadata.shard_offsets)] = shard.tensor.cpu().clone()
        else:
            tables[name, ()] = value.detach().cpu().clone()
    return tables


def plain_loop(model_type, count=STEPS, kernel="fused"):
    dmp, optimizer = sharded(model_type, kernel)
    losses = []
    for batch in batches(dist.get_rank(), count):
        moved = batch.to(rank_device())
        optimizer.zero_grad()
        loss, _ = dmp(moved)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, tables_of(dmp)


def drain(pipeline, iterator, losses=None):
    losses = [] if losses is None else losses
    while True:
        try:
            loss, _ = pipeline.progress(iterator)
        except StopIteration:
            return losses
        losses.append(loss.item())


def same_as_plain(model_type, pipeline_type, count, options, kernel="fused"):
    expected_losses, expected_tables = plain_loop(model_type, count, kernel)
    dmp, optimizer = sharded(model_type, kernel)
    pipeline = pipeline_type(dmp, optimizer, rank_device(), **options)
    losses = drain(pipeline, batches(dist.get_rank(), count))
    # The same operations in the same order: the same bits on a CPU.  On a GPU the order in which
    # gradients of one row are added is not fixed.
    tolerance = {} if rank_device().type == "cuda" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected_losses), **tolerance)
    found = tables_of(dmp)
    assert found.keys() == expected_tables.keys()
    for name, table in found.items():
        torch.testing.assert_close(table, expected_tables[name], **tolerance)
    assert count == 0 or any(value.abs().sum() > 0 for value in found.values())
    return len(losses)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    "pipeline_type",
    [TrainPipelineBase, TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist],
)
def test_a_pipeline_trains_like_the_plain_loop(world_size, pipeline_type):
    done = run_on_ranks(world_size, same_as_plain, Model, pipeline_type, STEPS, {})
    assert done == [STEPS] * world_size


def prefetched(cache_load_factor):
    """Tables in host memory behind a cache, against the same tables in the device's."""
    expected_losses, expected_tables = plain_loop(Model)
    settings = {"prefetch_pipeline": True, "cache_load_factor": cache_load_factor}
    dmp, optimizer = sharded(Model, "fused_uvm_caching", settings)
    pipeline = PrefetchTrainPipelineSparseDist(dmp, optimizer, rank_device())
    losses = drain(pipeline, batches(dist.get_rank()))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected_losses))
    found = tables_of(dmp)
    assert found.keys() == expected_tables.keys()
    for name, table in found.items():
        torch.testing.assert_close(table, expected_tables[name])
    return len(losses)


@pytest.mark.multi_gpu
@pytest.mark.skipif(not uses_cuda(), reason="set TESSERA_TEST_DEVICE=cuda on a GPU host")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("cache_load_factor", [0.3, 1.0])
def test_rows_prefetched_into_a_cache_train_like_the_plain_loop(world_size, cache_load_factor):
    assert run_on_ranks(world_size, prefetched, cache_load_factor) == [STEPS] * world_size


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_few_batches_do_not_fill_the_pipeline(count):
    for pipeline_type in (TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist):
        assert run_on_ranks(2, same_as_plain, Model, pipeline_type, count, {}) == [count] * 2


def test_modules_whose_ids_are_computed_run_in_their_place():
    assert (
        run_on_ranks(2, same_as_plain, ComputedIds, TrainPipelineSparseDist, STEPS, {})
        == [STEPS] * 2
    )


def test_scripted_parts_train_alike():
    done = run_on_ranks(
        2, same_as_plain, Model, TrainPipelineSparseDist, STEPS, {"apply_jit": True}
    )
    assert done == [STEPS] * 2


def attached_modules(model_type):
    dmp, optimizer = sharded(model_type)
    pipeline = TrainPipelineSparseDist(dmp, optimizer, rank_device())
    pipeline.progress(batches(dist.get_rank()))
    names = sorted(forward.name for forward in pipeline._attached.forwards)
    waiting = pipeline.contexts[0].input_dist_tensors_requests
    held, pipeline.contexts[0].input_dist_tensors_requests = waiting, {}
    with pytest.raises(UserError, match=r"called without the pipeline .* detach"):
        dmp(next(batches(dist.get_rank())))
    pipeline.contexts[0].input_dist_tensors_requests = held
    while pipeline.batches:
        pipeline.progress(iter(()))
    pipeline.detach()
    restored = all("forward" not in vars(module) for module in dmp.modules())
    return names, restored


def test_which_modules_are_sent_ahead():
    assert run_on_ranks(2, attached_modules, Model) == [(["item", "user"], True)] * 2
    assert run_on_ranks(2, attached_modules, ComputedIds) == [(["user"], True)] * 2


def kept_for_the_next_iterator():
    dmp, optimizer = sharded(Model)
    pipeline = TrainPipelineSparseDist(dmp, optimizer, rank_device(), execute_all_batches=False)
    all_batches = list(batches(dist.get_rank()))
    first = len(drain(pipeline, iter(all_batches[:4])))
    second = len(drain(pipeline, iter(all_batches[4:])))
    waiting = len(pipeline.batches)
    return first, second, waiting


def test_batches_left_over_wait_for_the_next_iterator():
    for first, second, waiting in run_on_ranks(2, kept_for_the_next_iterator):
        assert first + second + waiting == STEPS
        assert first < 4
        assert waiting > 0


def in_turns(pipeline_type, turns, options):
    """Several iterators one after the other, some left before they end."""
    expected_losses, _ = plain_loop(Model)
    dmp, optimizer = sharded(Model)
    pipeline = pipeline_type(dmp, optimizer, rank_device(), **options)
    every = batches(dist.get_rank())
    losses = []
    for count, calls in turns:
        iterator = iter(list(itertools.islice(every, count)))
        for _ in range(calls):
            try:
                loss, _ = pipeline.progress(iterator)
            except StopIteration:
                break
            losses.append(loss.item())
    torch.testing.assert_close(losses, expected_losses[: len(losses)])
    return len(losses)


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    "pipeline_type", [TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist]
)
@pytest.mark.parametrize("execute_all", [False, True])
@pytest.mark.parametrize(
    "turns",
    [
        [(3, 2), (4, 9)],  # one batch is left in the pipeline
        [(3, 1), (4, 9)],  # two are
        [(1, 1), (1, 1), (2, 2), (3, 9)],
        [(0, 1), (6, 9), (0, 9)],
    ],
)
def test_batches_of_the_next_iterator_follow_those_left_over(pipeline_type, execute_all, turns):
    options = {"execute_all_batches": execute_all}
    for done in run_on_ranks(2, in_turns, pipeline_type, turns, options):
        total = sum(count for count, calls in turns if calls)
        assert done == total if execute_all else total - 3 < done <= total


def evaluated():
    dmp, optimizer = sharded(Model)
    before = tables_of(dmp)
    dmp.eval()
    pipeline = TrainPipelineSparseDist(dmp, optimizer, rank_device())
    with torch.no_grad():
        losses = drain(pipeline, batches(dist.get_rank()))
    after = tables_of(dmp)
    return len(losses), all(torch.equal(before[name], after[name]) for name in before)


def test_evaluation_changes_nothing():
    assert run_on_ranks(2, evaluated) == [(STEPS, True)] * 2


# Without ranks


class Branches(Model):
    def forward(self, batch):
        if batch.labels.sum() > 0:
            return self.user(batch.ids["user"])
        return self.item(batch.ids["item"])


def test_a_model_that_cannot_be_traced_is_refused_with_a_way_out():
    with pytest.raises(UserError, match=r"Branches cannot be traced.*TrainPipelineBase"):
        trace(Branches())


class TwoArguments(Model):
    def forward(self, batch, labels):
        return labels, self.user(batch)


def test_a_model_of_two_arguments_is_refused():
    model = TwoArguments()
    with pytest.raises(UserError, match="takes 2 arguments"):
        pipelineable_modules(model, trace(model))


def test_arguments_are_taken_from_the_batch():
    batch = next(batches(0))
    assert ArgInfo(["ids", "user"], [False, True], None).take(batch) is batch.ids["user"]
    assert ArgInfo([], [], None).take(batch) is batch
    make = ArgInfoStepFactory
    way = types.ArgInfo([make.get_item("user")]).add_step(make.get_attr("ids"))
    assert way.process_steps(batch) is batch.ids["user"]
    flags = types.ArgInfo([]).append_step(make.from_scalar(7))
    call = types.CallArgs(
        [way, types.ArgInfo([make.from_list((way, 1))])],
        {"flag": flags, "all": types.ArgInfo([make.from_dict({"u": way, "n": 2})])},
    )
    args, kwargs = call.build_args_kwargs(batch)
    user = batch.ids["user"]
    assert args[0] is user
    assert args[1] == (user, 1)
    assert kwargs == {"flag": 7, "all": {"u": user, "n": 2}}
    assert make.noop() == make.noop() != make.get_item(0) != make.get_item(1)
    assert types.ArgInfo([]).process_steps(batch) is None


class Recorder(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))
        self.seen = []

    def forward(self, batch):
        self.seen.append(batch.clone())
        return self.scale * batch.sum(), batch


def test_the_base_pipeline_takes_batches_one_ahead_and_in_order():
    model = Recorder()
    pipeline = TrainPipelineBase(
        model, torch.optim.SGD(model.parameters(), lr=1.0), torch.device("cpu")
    )
    taken = itertools.count()
    source = (torch.full((2,), float(next(taken))) for _ in range(5))
    assert pipeline.progress(source)[0] == 0.0
    assert next(taken) == 2  # batches 0 and 1 were taken
    outputs = [pipeline.progress(source)[0].item() for _ in range(4)]
    assert outputs == [1.0, 3.0, 4.0, 5.0]
    with pytest.raises(StopIteration):
        pipeline.progress(source)
    assert model.scale.item() == -(0 + 2 + 6 + 8 + 10)


def test_a_batch_that_cannot_be_moved_is_refused():
    model = Recorder()
    pipeline = TrainPipelineBase(
        model, torch.optim.SGD(model.parameters(), lr=1.0), torch.device("cpu")
    )
    with pytest.raises(UserError, match=r"a batch is a list; .* see Pipelineable"):
        pipeline.progress(iter([[1, 2]]))
