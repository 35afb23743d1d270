"""A single nn.EmbeddingBag on ranks against torch's own."""

import pytest
import torch
from torch import distributed as dist
from torch import nn

from tessera.training.distributed import sharding_plan
from tessera.training.distributed.embeddingbag import (
    EmbeddingBagSharder,
    replace_placement_with_meta_device,
)
from tessera.training.distributed.model_parallel import DistributedModelParallel
from tessera.training.distributed.types import ParameterSharding, ShardingEnv, ShardingPlan
from tests.training.ranks import rank_device, run_on_ranks, whole_on_each_rank
from tests.training.sharded_cases import placed

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning"),
]

LR = 0.1


def plain(mode, *, last=False):
    torch.manual_seed(1)
    return nn.EmbeddingBag(11, 8, mode=mode, include_last_offset=last)


def arguments(rank, step, form, mode):
    generator = torch.Generator().manual_seed(10 * rank + step)
    size = 2 + rank
    if form == "matrix":
        ids = torch.randint(0, 11, (size, 3), generator=generator)
        weights = torch.rand(size, 3, generator=generator) if mode == "sum" else None
        return ids, None, weights
    lengths = torch.randint(0, 4, (size,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(0, 11, (int(lengths.sum()),), generator=generator)
    return ids, offsets if form == "last" else offsets[:-1], None


def train(kind, kwargs, mode, form):
    rank, device = dist.get_rank(), rank_device()
    module = plain(mode, last=form == "last")
    sharder = EmbeddingBagSharder({"optimizer": "exact_sgd", "learning_rate": LR})
    placement = {"weight": placed(kind, kwargs)}
    plan = sharding_plan.construct_module_sharding_plan(
        module, placement, sharder, device_type=device.type
    )
    dmp = DistributedModelParallel(
        nn.Sequential(module).to(device),
        device=device,
        plan=ShardingPlan({"0": plan}),
        sharders=[sharder],
    )
    outputs = []
    for step in range(2):
        given = (a if a is None else a.to(device) for a in arguments(rank, step, form, mode))
        out = dmp.module[0](*given)
        outputs.append(out.wait().detach().cpu().clone())
        (out * out).sum().backward()
    state = dmp.state_dict()
    assert list(state) == ["0.weight"]
    full = whole_on_each_rank(state["0.weight"])
    dmp.load_state_dict({"0.weight": torch.ones(11, 8)})
    assert all(bool((p == 1).all()) for _, p in dmp.named_parameters())
    return outputs, full


@pytest.mark.parametrize("form", ["matrix", "offsets", "last"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_bag_on_two_ranks_is_torchs(mode, form):
    for kind, kwargs in (
        ("row_wise", {}),
        ("column_wise", {"ranks": [1, 0]}),
        ("table_wise", {"rank": 1}),
    ):
        found = run_on_ranks(2, train, kind, kwargs, mode, form)
        reference = plain(mode, last=form == "last")
        optimizer = torch.optim.SGD(reference.parameters(), lr=LR)
        for step in range(2):
            total = 0
            for rank in range(2):
                out = reference(*arguments(rank, step, form, mode))
                # Float32 sums in another order, after at most one step.
                torch.testing.assert_close(found[rank][0][step], out, rtol=1e-4, atol=1e-5)
                total = total + (out * out).sum() / 2
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
        torch.testing.assert_close(found[0][1], reference.weight.detach(), rtol=1e-4, atol=1e-5)


def shard_here(module):
    return EmbeddingBagSharder().shard(
        module, {"weight": ParameterSharding()}, ShardingEnv.from_local(1, 0)
    )


@pytest.mark.parametrize(
    "options", [{"mode": "max"}, {"max_norm": 1.0}, {"padding_idx": 0, "mode": "sum"}]
)
def test_what_sharded_tables_do_not_do_is_refused(options):
    with pytest.raises(ValueError, match="it takes mode 'sum' or 'mean', without max_norm"):
        shard_here(nn.EmbeddingBag(4, 4, **options))


def test_arguments_that_do_not_go_together_are_refused():
    module = shard_here(nn.EmbeddingBag(4, 4, mode="mean"))
    with pytest.raises(ValueError, match="offsets is not given; give"):
        module(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="2 dimensions and offsets is given"):
        module(torch.tensor([[1, 2]]), torch.tensor([0]))
    with pytest.raises(ValueError, match="per_sample_weights go with mode 'sum'"):
        module(torch.tensor([[1, 2]]), per_sample_weights=torch.ones(1, 2))


def test_placements_of_tables_without_memory_are_without_device():
    module = nn.EmbeddingBag(4, 4, device="meta")
    plan = sharding_plan.construct_module_sharding_plan(
        module,
        {"weight": sharding_plan.row_wise(compute_kernel="fused")},
        EmbeddingBagSharder(),
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    from tessera.training.distributed.embedding_sharding import EmbeddingShardingInfo
    from tessera.training.distributed.embedding_types import EmbeddingTableConfig

    info = EmbeddingShardingInfo(EmbeddingTableConfig(4, 4), plan["weight"], module.weight)
    replace_placement_with_meta_device([info])
    assert [str(s.placement) for s in plan["weight"].sharding_spec.shards] == [
        "rank:0/meta",
        "rank:1/meta",
    ]
