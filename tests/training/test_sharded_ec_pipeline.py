"""Unpooled collections whose ids are sent ahead by a pipeline, against the plain loop."""

from dataclasses import dataclass

import pytest
import torch
from torch import distributed as dist
from torch import nn

from tessera.training import KeyedJaggedTensor
from tessera.training.distributed import sharding_plan
from tessera.training.distributed.embedding import EmbeddingCollectionSharder
from tessera.training.distributed.model_parallel import DistributedModelParallel
from tessera.training.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineSparseDist,
)
from tessera.training.distributed.types import ShardingPlan
from tessera.training.modules.embedding_configs import EmbeddingConfig
from tessera.training.modules.embedding_modules import EmbeddingCollection
from tessera.training.optim.keyed import KeyedOptimizerWrapper
from tessera.training.optim.optimizers import in_backward_optimizer_filter
from tessera.training.streamable import Pipelineable
from tests.training.ranks import rank_device, run_on_ranks
from tests.training.sharded_cases import placed

ROWS, DIM, STEPS = 20, 8, 5
NAMES = ("clicks", "views", "buys")


@dataclass
class History(Pipelineable):
    ids: KeyedJaggedTensor

    def to(self, device, non_blocking=False):  # noqa: FBT002 - as of torch.Tensor
        return History(self.ids.to(device, non_blocking=non_blocking))

    def record_stream(self, stream):
        self.ids.record_stream(stream)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.history = EmbeddingCollection(
            [EmbeddingConfig(ROWS, DIM, name=f"t_{name}", feature_names=[name]) for name in NAMES]
        )
        self.top = nn.Linear(DIM, 1)

    def forward(self, batch):
        looked_up = self.history(batch.ids)
        vectors = torch.cat([looked_up[name].values() for name in NAMES])
        loss = self.top(vectors).square().sum() / 10
        return loss, loss.detach()


def batches():
    generator = torch.Generator().manual_seed(dist.get_rank())
    for size in range(1, STEPS + 1):
        lengths = torch.randint(0, 4, (len(NAMES) * size,), generator=generator)
        ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        yield History(KeyedJaggedTensor(list(NAMES), ids, lengths=lengths, stride=size))


def model_of(kind, dedup):
    torch.manual_seed(1)
    model = Model()
    sharder = EmbeddingCollectionSharder({"learning_rate": 0.1}, use_index_dedup=dedup)
    how = {"host_index": 0} if kind == "table_row_wise" else {}
    ways = {f"t_{name}": placed(kind, how) for name in NAMES}
    ways["t_views"] = placed("table_wise", {"rank": dist.get_world_size() - 1})
    plan = sharding_plan.construct_module_sharding_plan(
        model.history, ways, sharder, device_type=rank_device().type
    )
    model.to(rank_device())
    dmp = DistributedModelParallel(
        model, device=rank_device(), plan=ShardingPlan({"history": plan}), sharders=[sharder]
    )
    optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    return dmp, optimizer


def losses_of(kind, dedup, pipeline_type):
    dmp, optimizer = model_of(kind, dedup)
    losses = []
    if pipeline_type is None:
        for batch in batches():
            optimizer.zero_grad()
            loss, shown = dmp(batch.to(rank_device()))
            loss.backward()
            optimizer.step()
            losses.append(shown.item())
        return losses
    pipeline = pipeline_type(dmp, optimizer, rank_device())
    iterator = batches()
    return [pipeline.progress(iterator).item() for _ in range(STEPS)]


def run_all(kind, dedup):
    plain = losses_of(kind, dedup, None)
    assert len(set(plain)) == STEPS
    for pipeline_type in (TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist):
        ahead = losses_of(kind, dedup, pipeline_type)
        # The same operations in the same order; on a GPU sums of one row's gradients have none.
        rtol = 1e-4 if rank_device().type == "cuda" else 0
        torch.testing.assert_close(torch.tensor(ahead), torch.tensor(plain), rtol=rtol, atol=0)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("kind", ["row_wise", "table_row_wise"])
def test_ids_sent_ahead_train_like_the_plain_loop(kind, dedup):
    run_on_ranks(2, run_all, kind, dedup)
