"""Pipelines that look up ahead or evaluate, against the plain loop."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import distributed as dist
from torch import nn

from tessera.errors import UserError
from tessera.training import KeyedJaggedTensor
from tessera.training.distributed.collections.sharded_collection import VectorsAwaitable
from tessera.training.distributed.comm.awaitable import NoWait
from tessera.training.distributed.sharding_plan import data_parallel
from tessera.training.distributed.train_pipeline import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
)
from tessera.training.distributed.train_pipeline.experimental_pipelines import (
    TrainEvalHybridPipelineBase,
)
from tessera.training.distributed.train_pipeline.train_pipelines import (
    EvalPipelineFusedSparseDist,
    TrainPipelineSparseDistLite,
)
from tests.training.ranks import rank_device, run_on_ranks, uses_cuda
from tests.training.test_train_pipeline import (
    ROWS,
    STEPS,
    Model,
    batches,
    drain,
    plain_loop,
    same_as_plain,
    sharded,
    tables_of,
)

pytestmark = pytest.mark.multi_gpu
LR = 0.1


def assert_equal(found, expected):
    """Bit for bit: the same operations in the same order."""
    assert found.keys() == expected.keys()
    for name, table in found.items():
        torch.testing.assert_close(table, expected[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("world_size", "pipeline_type", "options"),
    [
        (1, TrainPipelineFusedSparseDist, {}),
        (1, TrainPipelineSemiSync, {"start_batch": STEPS}),
        (2, TrainPipelineSparseDistLite, {}),
        (4, TrainPipelineFusedSparseDist, {}),
        (2, TrainPipelineFusedSparseDist, {}),
        (2, TrainPipelineFusedSparseDist, {"embedding_lookup_after_data_dist": True}),
        (2, TrainPipelineSparseDist, {"enqueue_batch_after_forward": True}),
        (2, TrainPipelineSemiSync, {"start_batch": STEPS}),  # as yet in step
        (2, TrainEvalHybridPipelineBase, {}),
    ],
)
def test_a_pipeline_trains_like_the_plain_loop(world_size, pipeline_type, options):
    for count in (0, STEPS) if world_size == 1 else (1, STEPS):
        done = run_on_ranks(world_size, same_as_plain, Model, pipeline_type, count, options)
        assert done == [count] * world_size


# Semi-synchronous training, against whole tables on every rank that are one update behind


def behind_by_one(count, start, *, stashes):
    """Losses of this rank, tables and dense weights: each rank works on the batches of all of them.

    Vectors of a batch are looked up before the batch ahead of it updates the tables, from batch
    ``start`` on; gradients are averaged over the ranks.
    """
    torch.manual_seed(3)
    model = Model()
    world = dist.get_world_size()
    dense = list(model.over.parameters())
    tables = [*model.user.parameters(), *model.item.parameters()]
    every = list(zip(*(list(batches(rank, count)) for rank in range(world)), strict=True))

    def looked_up(step):
        return [(model.user(b.ids["user"]), model.item(b.ids["item"])) for b in every[step]]

    losses, stashed, ahead = [], None, looked_up(0)
    for step in range(count):
        now, ahead = ahead, None
        mine = []
        for batch, (user, item) in zip(every[step], now, strict=True):
            joined = torch.cat([batch.dense, user.values(), item.values()], dim=1)
            logits = model.over(joined).squeeze(1)
            mine.append(nn.functional.binary_cross_entropy_with_logits(logits, batch.labels))
        if step >= start and step + 1 < count:
            ahead = looked_up(step + 1)
        gradients = torch.autograd.grad(sum(mine) / world, [*tables, *dense])
        of_tables, of_dense = gradients[: len(tables)], gradients[len(tables) :]
        if stashes and step >= start:
            of_dense, stashed = stashed, of_dense
        with torch.no_grad():
            for table, gradient in zip(tables, of_tables, strict=True):
                table.sub_(LR * gradient)
            if of_dense is not None:
                for weight, gradient in zip(dense, of_dense, strict=True):
                    weight.sub_(LR * gradient)
        if ahead is None and step + 1 < count:
            ahead = looked_up(step + 1)
        losses.append(mine[dist.get_rank()].item())
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def semi_synchronous(start, stashes):
    expected, weights = behind_by_one(STEPS, start, stashes=stashes)
    dmp, optimizer = sharded(Model, fused_params={"optimizer": sgd()})
    pipeline = TrainPipelineSemiSync(
        dmp, optimizer, rank_device(), start_batch=start, stash_gradients=stashes, strict=True
    )
    losses = drain(pipeline, batches(dist.get_rank()))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    for (name, offsets), part in tables_of(dmp).items():
        whole = weights[name]
        for dim, offset in enumerate(offsets):
            whole = whole.narrow(dim, offset, part.size(dim))
        torch.testing.assert_close(part, whole, rtol=1e-5, atol=1e-6)
    in_step, _ = behind_by_one(STEPS, STEPS, stashes=False)
    return losses != in_step


def sgd():
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    return EmbOptimType.EXACT_SGD


@pytest.mark.parametrize(
    ("world_size", "start", "stashes"),
    [
        (3, 2, True),
        *(
            (world, *how)
            for world in (1, 2)
            for how in ((0, False), (2, False), (0, True), (2, True))
        ),
    ],
)
def test_semi_synchronous_training_is_one_update_behind(world_size, start, stashes):
    assert run_on_ranks(world_size, semi_synchronous, start, stashes) == [True] * world_size


# Modules that run ahead on the batch


class Hashed(Model):
    """Ids go through modules before they are looked up; one of them also gives the dense part."""

    def __init__(self):
        super().__init__()
        self.fold = Fold()
        self.shift = Shift()

    def forward(self, batch):
        folded = self.fold([batch.ids["user"]], batch.ids["item"])
        shifted = self.shift(folded["item"])
        user, item = self.user(folded["user"]), self.item(features=shifted)
        joined = torch.cat([batch.dense, user.values(), item.values()], dim=1)
        logits = self.over(joined).squeeze(1) + 0.1 * shifted.lengths().sum()
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach())


class Fold(nn.Module):
    calls = 0

    def forward(self, users, item):
        Fold.calls += 1
        (user,) = users
        return {"user": moved(user, 3), "item": moved(item, 5)}


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("by", torch.tensor(7))

    def forward(self, ids):
        return moved(ids, int(self.by))


def moved(ids, by):
    values = (ids.values() + by) % ROWS
    return KeyedJaggedTensor(ids.keys(), values, lengths=ids.lengths(), stride=ids.stride())


def run_ahead(pipeline_type):
    expected, tables = plain_loop(Hashed)
    dmp, optimizer = sharded(Hashed)
    names = list(dmp.state_dict())
    pipeline = pipeline_type(dmp, optimizer, rank_device(), pipeline_postproc=True)
    before, iterator = Fold.calls, batches(dist.get_rank())
    losses = [pipeline.progress(iterator)[0].item()]
    sent = sorted(forward.name for forward in pipeline._attached.forwards)
    assert list(dmp.state_dict()) == names
    losses += drain(pipeline, iterator)
    assert losses == expected
    assert_equal(tables_of(dmp), tables)
    assert Fold.calls - before == STEPS
    pipeline.detach()
    assert all("forward" not in vars(module) for module in dmp.modules())
    return sent


@pytest.mark.parametrize(
    "pipeline_type",
    [
        TrainPipelineSparseDist,
        PrefetchTrainPipelineSparseDist,
        TrainPipelineFusedSparseDist,
        TrainPipelineSparseDistLite,
    ],
)
def test_modules_without_weights_run_ahead_on_the_batch(pipeline_type):
    assert run_on_ranks(2, run_ahead, pipeline_type) == [["item", "user"]] * 2


class Learned(Hashed):
    def __init__(self):
        super().__init__()
        self.shift.weight = nn.Parameter(torch.zeros(()))


def not_ahead(model_type, pipeline_postproc):
    expected, tables = plain_loop(model_type)
    dmp, optimizer = sharded(model_type)
    pipeline = TrainPipelineSparseDist(
        dmp, optimizer, rank_device(), pipeline_postproc=pipeline_postproc
    )
    assert drain(pipeline, batches(dist.get_rank())) == expected
    assert_equal(tables_of(dmp), tables)
    return sorted(forward.name for forward in pipeline._attached.forwards)


def test_a_module_with_weights_does_not_run_ahead():
    assert run_on_ranks(1, not_ahead, Learned, True) == [["user"]]
    assert run_on_ranks(1, not_ahead, Hashed, False) == [[]]


# Forward passes of one's own, models that are given back, errors of iterators


def custom_forward():
    expected, _ = plain_loop(Model)
    dmp, optimizer = sharded(Model)
    seen = []

    def forward(batch):
        seen.append(len(batch.labels))
        loss, output = dmp(batch)
        return loss, (*output, len(seen))

    pipeline = TrainPipelineSparseDist(dmp, optimizer, rank_device(), custom_model_fwd=forward)
    iterator = batches(dist.get_rank())
    outputs = [pipeline.progress(iterator) for _ in range(STEPS)]
    assert [output[0].item() for output in outputs] == expected
    return [output[2] for output in outputs]


def test_a_forward_pass_of_ones_own_takes_the_models_place():
    assert run_on_ranks(2, custom_forward) == [list(range(1, STEPS + 1))] * 2


def given_back(pipeline_type, options):
    """The model is called between two steps of a pipeline that holds batches."""
    expected, tables = plain_loop(Model)
    dmp, optimizer = sharded(Model)
    pipeline = pipeline_type(dmp, optimizer, rank_device(), **options)
    iterator, losses = batches(dist.get_rank()), []
    probe = next(batches(7 + dist.get_rank())).to(rank_device())
    for _ in range(STEPS):
        losses.append(pipeline.progress(iterator)[0].item())
        assert pipeline.detach() is dmp
        dmp.eval()
        with torch.no_grad():
            once, again = dmp(probe)[0], dmp(probe)[0]
        assert once == again
        dmp.train()
    assert losses == expected
    assert_equal(tables_of(dmp), tables)


@pytest.mark.parametrize(
    ("pipeline_type", "options"),
    [
        (TrainPipelineSparseDist, {}),
        (TrainPipelineFusedSparseDist, {}),
        (PrefetchTrainPipelineSparseDist, {}),
        (TrainPipelineSemiSync, {"start_batch": STEPS}),
    ],
)
def test_a_model_is_given_back_while_batches_are_in_the_pipeline(pipeline_type, options):
    run_on_ranks(2, given_back, pipeline_type, options)


class Stumbles:
    """Raises once before each batch but the first."""

    def __init__(self, iterator):
        self._iterator = iterator
        self._raises = False

    def __iter__(self):
        return self

    def __next__(self):
        self._raises = not self._raises
        if self._raises:
            return next(self._iterator)
        raise OSError("the disk is away")


def stumbling(pipeline_type, options):
    expected, tables = plain_loop(Model)
    dmp, optimizer = sharded(Model)
    pipeline = pipeline_type(dmp, optimizer, rank_device(), **options)
    losses, source = [], Stumbles(batches(dist.get_rank()))
    for _ in range(STEPS):  # an error before each batch but the first, and before the end
        with pytest.raises(OSError, match="the disk is away"):
            drain(pipeline, source, losses)
    drain(pipeline, source, losses)
    torch.testing.assert_close(losses, expected, rtol=0, atol=0)
    assert_equal(tables_of(dmp), tables)


@pytest.mark.parametrize(
    ("pipeline_type", "options"),
    [
        (TrainPipelineSparseDist, {}),
        (TrainPipelineFusedSparseDist, {}),
        (PrefetchTrainPipelineSparseDist, {}),
        (TrainPipelineSemiSync, {"start_batch": STEPS}),
    ],
)
def test_an_error_of_the_iterator_loses_no_batch(pipeline_type, options):
    run_on_ranks(2, stumbling, pipeline_type, options)


def synchronised(interval):
    """A model of several copies of its tables says how to make them equal."""
    dmp, optimizer = sharded(Model)
    step, calls = 0, []
    dmp.sync = lambda: calls.append(step)
    pipeline = TrainPipelineSparseDist(
        dmp, optimizer, rank_device(), dmp_collection_sync_interval_batches=interval
    )
    source = batches(dist.get_rank())
    for step in range(STEPS):  # noqa: B007 - sync notes it
        pipeline.progress(source)
    return calls


@pytest.mark.parametrize(("interval", "calls"), [(1, [*range(STEPS)]), (3, [0, 3, 6]), (None, [])])
def test_copies_of_tables_are_made_equal_once_in_so_many_batches(interval, calls):
    assert run_on_ranks(1, synchronised, interval) == [calls]


def test_an_interval_of_no_batches_is_refused():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with pytest.raises(UserError, match="dmp_collection_sync_interval_batches=0"):
        TrainPipelineSparseDist(
            model, optimizer, torch.device("cpu"), dmp_collection_sync_interval_batches=0
        )


def replaced():
    """Another model takes over the batches in the pipeline."""
    dmp, optimizer = sharded(Model)
    other, _ = sharded(Model)
    for parameter in other.parameters():
        parameter.data.mul_(0.5)
    every = list(batches(dist.get_rank()))
    with torch.no_grad():
        expected = [
            model(b.to(rank_device()))[0].item()
            for model, b in zip([dmp, *[other] * (STEPS - 1)], every, strict=True)
        ]
    dmp.eval()
    other.eval()
    pipeline = TrainPipelineSparseDist(dmp, optimizer, rank_device())
    source = iter(every)
    with torch.no_grad():
        found = [pipeline.progress(source)[0].item()]
        pipeline.attach(other)
        found += drain(pipeline, source)
    assert all("forward" not in vars(module) for module in dmp.modules())
    assert found == expected


def test_another_model_takes_over_the_batches_in_the_pipeline():
    run_on_ranks(2, replaced)


def replicated():
    dmp, optimizer = sharded(Model, ways=[data_parallel()])
    source = batches(dist.get_rank())
    with pytest.raises(UserError, match="'user' has data-parallel tables"):
        TrainPipelineSemiSync(dmp, optimizer, rank_device()).progress(source)
    strict = TrainPipelineFusedSparseDist(dmp, optimizer, rank_device(), strict=True)
    with pytest.raises(UserError, match="the optimizer holds parameters of module 'user'"):
        strict.progress(source)
    strict.detach()
    with pytest.warns(UserWarning, match="the optimizer holds parameters of module 'user'"):
        TrainPipelineFusedSparseDist(dmp, optimizer, rank_device()).progress(source)


def test_tables_that_the_optimizer_updates_are_not_looked_up_early():
    run_on_ranks(2, replicated)


# Evaluation


def evaluated(pipeline_type, options):
    dmp, optimizer = sharded(Model)
    dmp.eval()
    with torch.no_grad():
        expected = [dmp(b.to(rank_device()))[0].item() for b in batches(dist.get_rank())]
    before = tables_of(dmp)
    pipeline = pipeline_type(dmp, optimizer, rank_device(), **options)
    every = list(batches(dist.get_rank()))
    found = []
    for part in (every[:3], [], every[3:]):  # several iterators, without a reset
        found += drain(pipeline, iter(part))
    pipeline.reset()
    found += drain(pipeline, iter(every[:1]))
    assert found == [*expected, expected[0]]
    assert_equal(tables_of(dmp), before)
    return len(found)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("pipeline_type", "options"),
    [
        (EvalPipelineSparseDist, {}),
        (EvalPipelineFusedSparseDist, {}),
        (EvalPipelineFusedSparseDist, {"enable_embedding_lookup_prefetch": True}),
        (TrainEvalHybridPipelineBase, {}),
    ],
)
def test_evaluation_gives_the_models_outputs(world_size, pipeline_type, options):
    done = run_on_ranks(world_size, evaluated, pipeline_type, options)
    assert done == [STEPS + 1] * world_size


def late():
    """The GPU begins a forward pass when the next batch was looked up long ago."""
    dmp, optimizer = sharded(Model)
    dmp.eval()
    every = list(batches(dist.get_rank()))
    with torch.no_grad():
        expected = [dmp(batch.to(rank_device()))[0] for batch in every]

    def forward(batch):
        torch.cuda._sleep(20_000_000)
        return dmp(batch)

    pipeline = EvalPipelineFusedSparseDist(
        *(dmp, optimizer, rank_device()),
        custom_model_fwd=forward,
        enable_embedding_lookup_prefetch=True,
    )
    source = iter(every)
    found = [pipeline.progress(source)[0] for _ in every]  # nobody waits for the GPU
    assert torch.equal(torch.stack(found), torch.stack(expected))


@pytest.mark.skipif(not uses_cuda(), reason="a CPU has no streams")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_lookup_ahead_leaves_vectors_alone_that_were_not_read_yet(world_size):
    run_on_ranks(world_size, late)


class OnGpu:
    """As much of a vector on a GPU as is asked for."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self):
        self.kept_for = []

    def record_stream(self, stream):
        self.kept_for.append(stream)


def test_vectors_are_kept_for_the_stream_that_joins_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current of {device}")
    parts = [OnGpu(), OnGpu()]
    joined = VectorsAwaitable([NoWait(part) for part in parts], lambda vectors: vectors[::-1])
    assert joined.wait() == parts[::-1]
    assert [part.kept_for for part in parts] == [["current of cuda:0"]] * 2


def abandoned():
    """Another iterator comes while the thread holds a batch of the one before."""
    dmp, optimizer = sharded(Model)
    pipeline = EvalPipelineSparseDist(dmp, optimizer, rank_device())
    every = list(batches(dist.get_rank()))
    with torch.no_grad():
        expected = [dmp(b.to(rank_device()))[0].item() for b in every]
    endless = itertools.cycle(every[:5])
    found = [pipeline.progress(endless)[0].item()]
    found += drain(pipeline, iter(every[5:]))
    # The batches that had been taken come first, however far the thread was.
    assert found[-2:] == expected[5:]
    assert found[:-2] == [*expected[:5], *expected[:5]][: len(found) - 2]
    return len(found)


def test_a_batch_that_the_thread_holds_is_not_lost():
    assert all(5 <= count <= 7 for count in run_on_ranks(1, abandoned))


def in_turns():
    """One pipeline trains and evaluates; it is empty when the mode changes."""
    dmp, optimizer = sharded(Model)
    pipeline = TrainEvalHybridPipelineBase(dmp, optimizer, rank_device())
    every = list(batches(dist.get_rank()))
    plain, plain_optimizer = sharded(Model)
    for part, training in ((every[:3], True), (every[3:5], False), (every[5:], True)):
        dmp.train(training)
        expected = []
        for batch in part:
            plain_optimizer.zero_grad()
            loss, _ = plain(batch.to(rank_device()))
            if training:
                loss.backward()
                plain_optimizer.step()
            expected.append(loss.item())
        assert drain(pipeline, iter(part)) == expected
    assert_equal(tables_of(dmp), tables_of(plain))


def test_training_and_evaluation_in_turns():
    run_on_ranks(2, in_turns)
