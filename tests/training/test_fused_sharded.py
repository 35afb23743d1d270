"""Fused collections over ranks: they train as the same collection does in one process."""

import importlib

import pytest
import torch
from torch import nn

from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.fused_embedding import (
    FusedEmbeddingCollectionSharder,
    ShardedFusedEmbeddingCollection,
)
from tessera.training.distributed.fused_embeddingbag import (
    FusedEmbeddingBagCollectionSharder,
    ShardedFusedEmbeddingBagCollection,
)
from tessera.training.distributed.model_parallel import DistributedModelParallel
from tessera.training.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from tessera.training.distributed.types import LazyAwaitable, ShardingPlan
from tessera.training.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tessera.training.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)
from tessera.training.optim.rowwise_adagrad import RowWiseAdagrad
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tests.training.ranks import rank_device, run_on_ranks, whole_on_each_rank

STRATEGIES = {
    "table_wise": lambda last: {"a": table_wise(rank=0), "b": table_wise(rank=last)},
    "row_wise": lambda _: {"a": row_wise(), "b": row_wise()},
    "column_wise": lambda last: {
        "a": column_wise(ranks=[last, 0]),
        "b": column_wise(ranks=[0, last]),
    },
    "dense": lambda last: {
        "a": row_wise(compute_kernel="dense"),
        "b": column_wise(ranks=[last, last], compute_kernel="dense"),
    },
    "data_parallel": lambda _: {"a": data_parallel(), "b": data_parallel()},
}
OPTIMIZERS = [(torch.optim.SGD, {"lr": 0.1}), (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-8})]


def collection(pooled, optimizer, settings, device="cpu"):
    config = EmbeddingBagConfig if pooled else EmbeddingConfig
    cls = FusedEmbeddingBagCollection if pooled else FusedEmbeddingCollection
    tables = [
        config(name="a", embedding_dim=8, num_embeddings=7, feature_names=["f"]),
        config(name="b", embedding_dim=8, num_embeddings=5, feature_names=["g"]),
    ]
    made = cls(tables, optimizer, settings, device=torch.device(device))
    with torch.no_grad():
        for place, weight in enumerate(made.parameters() if device != "meta" else []):
            numbers = torch.arange(weight.numel(), dtype=torch.float32) + place
            weight.copy_(numbers.sin().reshape(weight.shape))
    return made


def batch(step, rank):
    """Two samples of a rank."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(1, 4, (4,), generator=generator)
    ids = torch.randint(0, 5, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor.from_lengths_sync(["f", "g"], ids, lengths)


def total(output):
    """A loss whose gradient depends on the vectors, summed over samples."""
    if isinstance(output, LazyAwaitable):
        output = output.wait()
    if isinstance(output, dict):
        return sum((part.values() ** 2).sum() for part in output.values())
    return (output.values() ** 2).sum()


def train(pooled, strategy, optimizer, settings):
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = nn.Sequential(collection(pooled, optimizer, settings))
    sharder = FusedEmbeddingBagCollectionSharder() if pooled else FusedEmbeddingCollectionSharder()
    placed = STRATEGIES[strategy](world - 1)
    plan = construct_module_sharding_plan(
        model[0], placed, sharder, world, world, rank_device().type
    )
    sharded = DistributedModelParallel(
        model, device=rank_device(), plan=ShardingPlan({"0": plan}), sharders=[sharder]
    )
    expected = ShardedFusedEmbeddingBagCollection if pooled else ShardedFusedEmbeddingCollection
    (found,) = [part for part in sharded.modules() if isinstance(part, expected)]
    assert found.unsharded_module_type is sharder.module_type
    holder = getattr(found, found._holder)
    here = {name.partition(".")[0] for name, _ in holder.named_parameters()}
    assert {name.split(".")[1] for name in found.fused_optimizer.params} == here
    losses = []
    for step in range(3):
        loss = total(sharded(batch(step, rank).to(rank_device())))
        losses.append(loss.item())
        loss.backward()
    state = {
        name.rpartition("0.")[2]: whole_on_each_rank(value)
        if hasattr(value, "local_shards")
        else value.detach().cpu()
        for name, value in sharded.state_dict().items()
    }
    return losses, state


def alone(pooled, optimizer, settings, world):
    """The same in one process; gradients over ranks are averaged."""
    model = collection(pooled, optimizer, settings)
    losses = []
    for step in range(3):
        parts = [batch(step, rank) for rank in range(world)]
        of_ranks = [total(model(part)) for part in parts]
        losses.append([loss.item() for loss in of_ranks])
        joined = KeyedJaggedTensor(
            ["f", "g"],
            torch.cat([part[key].values() for key in ("f", "g") for part in parts]),
            lengths=torch.cat([part[key].lengths() for key in ("f", "g") for part in parts]),
        )
        (total(model(joined)) / world).backward()
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize(("optimizer", "settings"), OPTIMIZERS)
@pytest.mark.parametrize("pooled", [True, False])
def test_ranks_train_as_one_process(pooled, optimizer, settings, strategy, world):
    if strategy in {"column_wise", "dense"} and optimizer is RowWiseAdagrad:
        pytest.skip("blocks of columns have a sum of squares of their own")
    expected_losses, expected = alone(pooled, optimizer, settings, world)
    for rank, (losses, state) in enumerate(
        run_on_ranks(world, train, pooled, strategy, optimizer, settings)
    ):
        assert losses == pytest.approx([step[rank] for step in expected_losses], rel=1e-5)
        assert state.keys() == expected.keys()
        for name, values in expected.items():
            torch.testing.assert_close(state[name], values, atol=1e-5, rtol=1e-5)


def from_meta(pooled):
    model = nn.Sequential(collection(pooled, torch.optim.SGD, {"lr": 0.1}, "meta"))
    sharded = DistributedModelParallel(model, device=rank_device())  # default sharders and plan
    assert not any(parameter.is_meta for parameter in sharded.parameters())
    output = sharded(batch(0, torch.distributed.get_rank()).to(rank_device()))
    loss = total(output)
    loss.backward()
    before = loss.item()
    after = total(sharded(batch(0, torch.distributed.get_rank()).to(rank_device()))).item()
    kinds = {type(part).__name__ for part in sharded.modules()}
    return before, after, kinds


@pytest.mark.multi_gpu
@pytest.mark.parametrize("pooled", [True, False])
def test_a_collection_without_memory_is_planned_and_gets_first_values(pooled):
    for before, after, kinds in run_on_ranks(2, from_meta, pooled):
        assert 0 < after < before
        assert {
            "ShardedFusedEmbeddingBagCollection",
            "ShardedFusedEmbeddingCollection",
        } & kinds


@pytest.mark.parametrize("pooled", [True, False])
def test_tables_without_memory_are_not_looked_up(pooled):
    fused = collection(pooled, torch.optim.SGD, {"lr": 0.1}, "meta")
    assert all(parameter.is_meta for parameter in fused.parameters())
    assert list(fused.state_dict()) == list(
        collection(pooled, torch.optim.SGD, {"lr": 0.1}).state_dict()
    )
    with pytest.raises(ValueError, match="the tables are on the meta device"):
        fused(batch(0, 0))
    with pytest.raises(ValueError, match="the tables are on the meta device"):
        fused.fused_optimizer()


def test_the_sharders_optimizer_is_the_collections():
    model = collection(True, torch.optim.SGD, {"lr": 0.25})
    sharder = FusedEmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        model, {"a": table_wise(rank=0), "b": table_wise(rank=0)}, sharder, 1, 1, "cpu"
    )
    sharded = sharder.shard(model, plan, ShardingEnv.from_local(1, 0), torch.device("cpu"))
    groups = sharded.fused_optimizer.param_groups
    assert [group["lr"] for group in groups] == [0.25] * len(groups)
    assert set(sharder.shardable_parameters(model)) == {"a", "b"}


def train_with(library, optimizer, settings):
    """Losses of four steps of a rank with ``library``, from the same weights; tables table-wise and in columns."""
    own = {
        name: importlib.import_module(library + module)
        for name, module in {
            "configs": ".modules.embedding_configs",
            "fused": ".modules.fused_embedding_modules",
            "sharder": ".distributed.fused_embeddingbag",
            "model": ".distributed.model_parallel",
            "by_hand": ".distributed.sharding_plan",
            "types": ".distributed.types",
            "sparse": ".sparse.jagged_tensor",
        }.items()
    }
    tables = [
        own["configs"].EmbeddingBagConfig(
            name=name, embedding_dim=8, num_embeddings=7, feature_names=[feature]
        )
        for name, feature in zip("ab", "fg", strict=True)
    ]
    module = own["fused"].FusedEmbeddingBagCollection(
        tables, optimizer, settings, device=torch.device("cpu")
    )
    sharder = own["sharder"].FusedEmbeddingBagCollectionSharder()
    placed = {
        "a": own["by_hand"].table_wise(rank=1, compute_kernel="fused"),
        "b": own["by_hand"].column_wise(ranks=[0, 1], compute_kernel="fused"),
    }
    plan = own["by_hand"].construct_module_sharding_plan(module, placed, sharder, 2, 2, "cpu")
    model = own["model"].DistributedModelParallel(
        nn.Sequential(module),
        device=torch.device("cpu"),
        plan=own["types"].ShardingPlan({"0": plan}),
        sharders=[sharder],
    )
    with torch.no_grad():
        for place, (_, table) in enumerate(sorted(model.state_dict().items())):
            whole = (torch.arange(56, dtype=torch.float32) + place).sin().reshape(7, 8)
            for shard in table.local_shards():
                (row, column), (rows, columns) = (
                    shard.metadata.shard_offsets,
                    shard.metadata.shard_sizes,
                )
                shard.tensor.copy_(whole[row : row + rows, column : column + columns])
    losses = []
    for step in range(4):
        features = batch(step, torch.distributed.get_rank())
        loss = total(
            model(
                own["sparse"].KeyedJaggedTensor(
                    ["f", "g"], features.values(), lengths=features.lengths()
                )
            )
        )
        losses.append(loss.item())
        loss.backward()
    return losses


@pytest.mark.parametrize(
    ("optimizer", "settings"), [(torch.optim.Adagrad, {"lr": 0.1}), OPTIMIZERS[0]]
)
def test_losses_are_torchrecs(optimizer, settings):
    pytest.importorskip("torchrec", reason="TorchRec is a peer")
    ours = run_on_ranks(2, train_with, "tessera.training", optimizer, settings)
    theirs = run_on_ranks(2, train_with, "torchrec", optimizer, settings)
    for own, other in zip(ours, theirs, strict=True):
        assert own == pytest.approx(other, rel=1e-6)
