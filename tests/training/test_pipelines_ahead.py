"""Pipelines whose results nobody waits for until the end: on a GPU the host is many steps ahead.

Memory that is given to another step too early, or read before it is written, shows only then.
"""

from __future__ import annotations

from contextlib import suppress
from unittest import mock

import pytest
import torch
from torch import distributed as dist

from tessera.training.distributed.train_pipeline import (
    EvalPipelineSparseDist,
    PipelineStage,
    PrefetchTrainPipelineSparseDist,
    SparseDataDistUtil,
    StagedTrainPipeline,
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
)
from tessera.training.distributed.train_pipeline.attached import AttachedModel
from tessera.training.distributed.train_pipeline.contexts import TrainPipelineContext
from tessera.training.distributed.train_pipeline.forwards import PipelinedForward
from tessera.training.distributed.train_pipeline.train_pipelines import (
    EvalPipelineFusedSparseDist,
    TrainPipelineSparseDistLite,
)
from tests.training.ranks import rank_device, run_on_ranks, uses_cuda
from tests.training.test_train_pipeline import STEPS, Model, batches, sharded

pytestmark = pytest.mark.multi_gpu
TURNS = 10 if uses_cuda() else 2
EVALUATE = (EvalPipelineSparseDist, EvalPipelineFusedSparseDist)


def turns():
    """This rank's batches, several times."""
    return list(batches(dist.get_rank())) * TURNS


def waited_for(*, trains):
    """The logits of each batch, one step after the other."""
    dmp, optimizer = sharded(Model)
    dmp.train(trains)
    found = []
    for batch in turns():
        with torch.set_grad_enabled(trains):
            loss, (_, logits) = dmp(batch.to(rank_device()))
        if trains:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found.append(logits.cpu())
    return found


def check(found, expected, *, trains):
    """On a GPU the order in which gradients of one row are added is not fixed."""
    assert len(found) == TURNS * STEPS
    bounds = {"rtol": 1e-3, "atol": 1e-4} if trains and uses_cuda() else {"rtol": 0, "atol": 0}
    torch.testing.assert_close([logits.cpu() for logits in found], expected, **bounds)


def ahead(kind, options):
    trains = kind not in EVALUATE
    expected = waited_for(trains=trains)
    dmp, optimizer = sharded(Model)
    dmp.train(trains)
    pipeline, source, found = kind(dmp, optimizer, rank_device(), **options), iter(turns()), []
    with suppress(StopIteration):
        while True:
            found.append(pipeline.progress(source)[1])
    check(found, expected, trains=trains)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (TrainPipelineBase, {}),
        (TrainPipelineSparseDist, {}),
        (TrainPipelineSparseDistLite, {}),
        (TrainPipelineFusedSparseDist, {}),
        (TrainPipelineFusedSparseDist, {"emb_lookup_stream": "new"}),
        (TrainPipelineFusedSparseDist, {"emb_lookup_stream": "current"}),
        (TrainPipelineSemiSync, {"start_batch": TURNS * STEPS}),
        (PrefetchTrainPipelineSparseDist, {}),
        (EvalPipelineSparseDist, {}),
        (EvalPipelineFusedSparseDist, {}),
        (EvalPipelineFusedSparseDist, {"emb_lookup_stream": "new"}),
        (EvalPipelineFusedSparseDist, {"enable_embedding_lookup_prefetch": True}),
    ],
)
def test_steps_that_nobody_waits_for_are_those_of_the_plain_loop(world_size, kind, options):
    run_on_ranks(world_size, ahead, kind, options)


def staged_ahead(own_streams):
    """Stages on streams of their own, and on the one that is current."""

    def stream():
        return torch.cuda.Stream() if own_streams and uses_cuda() else None

    expected = waited_for(trains=True)
    dmp, optimizer = sharded(Model)
    sdd = SparseDataDistUtil(dmp, torch.cuda.Stream() if uses_cuda() else None)
    pipeline = StagedTrainPipeline(
        [
            PipelineStage(
                "copy", lambda batch: batch.to(rank_device(), non_blocking=True), stream()
            ),
            PipelineStage("nothing", lambda batch: batch, stream()),
            sdd.start_sparse_data_dist_stage(),
        ]
    )
    source, found = iter(turns()), []
    while (batch := pipeline.progress(source)) is not None:
        optimizer.zero_grad()
        loss, (_, logits) = dmp(batch)
        loss.backward()
        optimizer.step()
        found.append(logits)
    check(found, expected, trains=True)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("own_streams", [False, True])
def test_stages_that_nobody_waits_for_are_those_of_the_plain_loop(world_size, own_streams):
    run_on_ranks(world_size, staged_ahead, own_streams)


class Stream:
    """A GPU's stream that notes which others it waits for."""

    device = torch.device("cuda", 0)

    def __init__(self):
        self.waits_for = []

    def wait_stream(self, other):
        self.waits_for.append(other)


def streams_of_an_attached_model():
    dmp, _ = sharded(Model)
    streams = [Stream(), Stream()]
    with mock.patch.object(torch.cuda, "current_stream", lambda device: f"current of {device}"):
        AttachedModel(
            dmp,
            PipelinedForward,
            TrainPipelineContext(),
            dist_stream=streams[0],
            input_stream=streams[1],
            pipeline_postproc=False,
            apply_jit=False,
        ).detach()
    return [stream.waits_for for stream in streams]


def test_streams_of_a_pipeline_wait_for_what_the_model_was_made_of():
    assert run_on_ranks(1, streams_of_an_attached_model) == [[["current of cuda:0"]] * 2]
