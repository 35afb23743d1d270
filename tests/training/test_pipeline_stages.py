"""Pipelines that accumulate, compile, are listed in stages, and the thread that loads."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import distributed as dist
from torch import nn

from tessera.errors import UserError
from tessera.training.distributed.sharding_plan import data_parallel
from tessera.training.distributed.train_pipeline import (
    DataLoadingThread,
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
    PipelineStage,
    SparseDataDistUtil,
    StagedTrainPipeline,
    TorchCompileConfig,
    TrainPipeline,
    TrainPipelineBase,
    TrainPipelinePT2,
    TrainPipelineSparseDist,
)
from tests.training.ranks import rank_device, run_on_ranks
from tests.training.test_pipeline_kinds import LR, assert_equal, behind_by_one, sgd
from tests.training.test_train_pipeline import (
    DIM,
    STEPS,
    Model,
    batches,
    plain_loop,
    sharded,
    tables_of,
)

pytestmark = pytest.mark.multi_gpu

# Gradient accumulation


def added_up(pipeline_type, num_steps, says_last, replicated):
    """Dense gradients of several batches, tables updated by each."""
    ways = [data_parallel()] if replicated else None
    plain, optimizer = sharded(Model, ways=ways)
    every = list(batches(dist.get_rank()))
    expected = []
    for step, batch in enumerate(every):
        loss, _ = plain(batch.to(rank_device()))
        loss.backward()  # averages over the ranks what is added up
        expected.append(loss.item())
        if (step + 1) % num_steps == 0 or step + 1 == len(every):
            optimizer.step()
            optimizer.zero_grad()
    dmp, optimizer = sharded(Model, ways=ways)
    config = GradientAccumulationConfig(is_enabled=True, num_steps=num_steps)
    pipeline = GradientAccumulationWrapper(
        pipeline_type(dmp, optimizer, rank_device()), optimizer, dmp, config
    )
    iterator, losses = iter(every), []
    for step in range(len(every)):
        last = says_last and step + 1 == len(every)
        losses.append(pipeline.progress(iterator, is_last_batch=last)[0].item())
    for _ in range(2):  # the second time nothing is left to step on
        with pytest.raises(StopIteration):
            pipeline.progress(iterator)
    assert pipeline.current_step == STEPS
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-7)
    found, wanted = tables_of(dmp), tables_of(plain)
    for name, table in found.items():
        torch.testing.assert_close(table, wanted[name], rtol=1e-5, atol=1e-6)
    gathered = [None] * dist.get_world_size()
    dense = {name: value for name, value in found.items() if "over" in name[0]}
    dist.all_gather_object(gathered, dense)
    for other in gathered:
        assert_equal(other, dense)


@pytest.mark.parametrize("says_last", [False, True])
@pytest.mark.parametrize("pipeline_type", [TrainPipelineBase, TrainPipelineSparseDist])
def test_gradients_of_several_batches_make_one_step(pipeline_type, says_last):
    for world_size, num_steps in ((1, 3), (2, 3), (2, 1), (2, 100)):
        run_on_ranks(world_size, added_up, pipeline_type, num_steps, says_last, False)


def test_gradients_of_replicated_tables_are_added_up_too():
    run_on_ranks(2, added_up, TrainPipelineSparseDist, 3, False, True)


class OwnPipeline(TrainPipeline):
    """A program's own pipeline, which is not a `TrainPipelineBase`."""

    def __init__(self, model, optimizer):
        self._model, self._optimizer = model, optimizer

    def progress(self, dataloader_iter):
        self._optimizer.zero_grad()
        loss = self._model(next(dataloader_iter)).sum()
        loss.backward()
        self._optimizer.step()
        return loss


def test_gradients_are_added_up_for_a_programs_own_pipeline():
    model = nn.Linear(3, 1, bias=False)
    start, batches = model.weight.detach().clone(), torch.rand(4, 2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = GradientAccumulationWrapper(
        OwnPipeline(model, optimizer), optimizer, model, GradientAccumulationConfig(num_steps=2)
    )
    iterator = iter(batches)
    for step in range(4):
        pipeline.progress(iterator)
        whole = batches[: (step + 1) // 2 * 2].sum((0, 1))
        torch.testing.assert_close(model.weight, start - 0.1 * whole)

    class NoOptimizer(TrainPipeline):
        def progress(self, dataloader_iter):
            return next(dataloader_iter)

    with pytest.raises(UserError, match="NoOptimizer has no _optimizer"):
        GradientAccumulationWrapper(
            NoOptimizer(), optimizer, model, GradientAccumulationConfig(num_steps=2)
        )


def test_a_step_needs_a_batch():
    with pytest.raises(UserError, match="num_steps=0: must be at least 1"):
        GradientAccumulationConfig(num_steps=0)


# Stages


def stream_of_rank():
    return torch.cuda.Stream() if rank_device().type == "cuda" else torch.cpu.Stream()


def staged(how):
    expected, tables = plain_loop(Model)
    dmp, optimizer = sharded(Model)
    stream = stream_of_rank()
    own = (stream_of_rank(), stream) if how == "prefetch" else (None, None)
    sdd = SparseDataDistUtil(dmp, own[0], prefetch_stream=own[1])
    stages = [
        PipelineStage("copy", lambda batch: batch.to(rank_device(), non_blocking=True), None),
        sdd.start_sparse_data_dist_stage(),
    ]
    if how == "prefetch":
        stages.append(PipelineStage("prefetch", sdd.prefetch, stream, sdd.load_prefetch))
    pipeline = StagedTrainPipeline(stages)
    every, losses = list(batches(dist.get_rank())), []
    sources = [iter(every[:4]), iter(every[4:])] if how == "turns" else [iter(every)]
    for source in sources:
        while (batch := pipeline.progress(source)) is not None:
            optimizer.zero_grad()
            loss, _ = dmp(batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if how == "detached" and len(losses) in {2, STEPS - 1}:
                sdd.detach()
                assert all("forward" not in vars(module) for module in dmp.modules())
    assert losses == expected
    assert_equal(tables_of(dmp), tables)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("how", ["ids", "prefetch", "turns", "detached"])
def test_stages_that_send_ids_train_like_the_plain_loop(world_size, how):
    run_on_ranks(world_size, staged, how)


def staged_lookup():
    """A lookup in a stage is one update behind, as semi-synchronous training from batch 0 on."""
    expected, _ = behind_by_one(STEPS, 0, stashes=False)
    dmp, optimizer = sharded(Model, fused_params={"optimizer": sgd()})
    stream = stream_of_rank()
    sdd = SparseDataDistUtil(dmp, None, embedding_lookup_stream=stream)
    pipeline = StagedTrainPipeline(
        [sdd.start_sparse_data_dist_stage(), sdd.start_embedding_lookup_stage()]
    )
    source, losses = iter([one.to(rank_device()) for one in batches(dist.get_rank())]), []
    while (batch := pipeline.progress(source)) is not None:
        optimizer.zero_grad()
        loss, _ = dmp(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)


def test_a_stage_that_looks_up_is_one_update_behind():
    run_on_ranks(2, staged_lookup)


def doubled_and_noted(notes, name):
    def run(batch):
        notes.append((name, int(batch)))
        return batch * 2

    return run


def test_each_stage_runs_on_another_batch_and_a_flush_empties_the_pipeline():
    notes, flushed = [], []
    pipeline = StagedTrainPipeline(
        [PipelineStage(name, doubled_and_noted(notes, name), None) for name in "abc"],
        on_flush_end=lambda: flushed.append(len(notes)),
    )
    source = (torch.tensor(i) for i in range(1, 8))
    assert pipeline.num_stages == 3
    assert pipeline.progress(source) == 8
    # Batches 1, 2 and 3 fill the pipeline, then the newest batch's stage comes first.
    assert notes == [
        *[("a", 1), ("b", 2), ("c", 4), ("a", 2), ("b", 4), ("a", 3)],
        *[("a", 4), ("b", 6), ("c", 8)],
    ]
    pipeline.set_flush(True)
    assert [int(pipeline.progress(source)) for _ in range(3)] == [16, 24, 32]
    assert not flushed
    assert [int(pipeline.progress(source)) for _ in range(3)] == [40, 48, 56]
    assert len(flushed) == 1
    assert pipeline.progress(source) is None
    assert pipeline.progress(iter([torch.tensor(9)])) == 72


# The thread and the compiled model


def test_the_thread_holds_one_batch_and_hands_errors_on():
    taken = []

    def source():
        for number in range(3):
            taken.append(number)
            yield torch.tensor(number)
        raise OSError("the disk is away")

    thread = DataLoadingThread(torch.device("cpu"), source(), to_device_non_blocking=True)
    thread.start()
    assert [int(thread.get_next_batch()) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the disk is away"):
        thread.get_next_batch()
    assert thread.get_next_batch() is None
    with pytest.raises(StopIteration):
        thread.get_next_batch(none_throws=True)
    thread.join()
    endless = DataLoadingThread(
        torch.device("cpu"), map(torch.tensor, itertools.count()), to_device_non_blocking=True
    )
    endless.start()
    assert int(endless.get_next_batch()) == 0
    endless.stop()
    endless.join()  # a thread that is stopped ends, with a batch in its hand


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(DIM, 1)

    def forward(self, batch):
        loss = self.layer(batch).square().mean()
        return loss, loss.detach()


def compiled():
    torch.manual_seed(0)
    model = Small()
    twin = copy.deepcopy(model)
    every = [torch.rand(4, DIM) for _ in range(5)]
    events = []
    pipeline = TrainPipelinePT2(
        model,
        torch.optim.SGD(model.parameters(), LR),
        torch.device("cpu"),
        TorchCompileConfig(fullgraph=True, backend="eager", compile_on_iter=2),
        pre_compile_fn=lambda m: events.append(("before", m._compiled_call_impl is None)),
        post_compile_fn=lambda m: events.append(("after", m._compiled_call_impl is None)),
        input_transformer=lambda batch: batch * 2,
    )
    source = iter(every)
    losses = [pipeline.progress(source).item() for _ in every]
    with pytest.raises(StopIteration):
        pipeline.progress(source)
    assert events == [("before", True), ("after", False)]
    optimizer = torch.optim.SGD(twin.parameters(), LR)
    for batch, found in zip(every, losses, strict=True):
        optimizer.zero_grad()
        loss, _ = twin(batch * 2)
        loss.backward()
        optimizer.step()
        assert found == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


def test_a_compiled_model_trains_like_the_plain_loop():
    run_on_ranks(1, compiled)  # ranks have loaded the compiler
