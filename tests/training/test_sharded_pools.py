"""Pools over ranks against dictionaries in plain Python; the names and orders are TorchRec's."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tessera.errors import UserError
from tessera.training import KeyedJaggedTensor
from tessera.training.distributed.checkpoint import (
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from tessera.training.distributed.dist_data import TensorAllToAll
from tessera.training.distributed.keyed_jagged_tensor_pool import (
    KeyedJaggedTensorPoolSharder,
    ShardedInferenceKeyedJaggedTensorPool,
    ShardedKeyedJaggedTensorPool,
)
from tessera.training.distributed.model_parallel import DistributedModelParallel
from tessera.training.distributed.shard import shard_modules
from tessera.training.distributed.sharding.rw_tensor_pool_sharding import TensorPoolRwSharding
from tessera.training.distributed.tensor_pool import (
    LocalShardPool,
    ShardedInferenceTensorPool,
    ShardedTensorPool,
    TensorPoolSharder,
)
from tessera.training.distributed.tensor_sharding import TensorPoolRwShardingContext
from tessera.training.distributed.types import (
    ObjectPoolShardingPlan,
    ObjectPoolShardingType,
    ShardedTensor,
    ShardingEnv,
    ShardingPlan,
)
from tessera.training.fx import symbolic_trace
from tessera.training.modules.keyed_jagged_tensor_pool import KeyedJaggedTensorPool
from tessera.training.modules.tensor_pool import TensorPool
from tests.training.ranks import rank_device, run_on_ranks, whole_on_each_rank

pytestmark = pytest.mark.multi_gpu
ROWS, DIM, KEYS = 7, 3, {"a": 2, "b": 0, "c": 4}
PLANS = {
    kind.value: ObjectPoolShardingPlan(kind)
    for kind in (ObjectPoolShardingType.ROW_WISE, ObjectPoolShardingType.REPLICATED_ROW_WISE)
}


def ids_of(step, rank, ranks):
    """What a rank asks for in a step: some rows several times, and nothing at all at times."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    count = 0 if step % 4 == rank % 4 else int(torch.randint(1, 9, (1,), generator=generator))
    return torch.randint(0, ROWS, (count,), generator=generator), generator


def bags_for(ids, generator, weighted):
    """One bag of each key for each id, in another order of keys and with one key too many; and as lists."""
    keys = {"c": 4, "other": 3, "b": 0, "a": 2}
    lists = {
        key: [
            torch.randint(1, 100, (int(torch.randint(0, most + 1, (1,), generator=generator)),),
                          generator=generator).tolist()
            for _ in ids
        ]
        for key, most in keys.items()
    }  # fmt: skip
    flat = [bag for key in keys for bag in lists[key]]
    values = torch.tensor([value for bag in flat for value in bag], dtype=torch.int64)
    lengths = torch.tensor([len(bag) for bag in flat], dtype=torch.int64)
    batch = KeyedJaggedTensor(
        list(keys), values, values / 7.0 if weighted else None, lengths, stride=len(ids)
    )
    return batch, lists


def env():
    assert dist.group.WORLD is not None
    return ShardingEnv.from_process_group(dist.group.WORLD)


def vectors_are_read_and_written(kind):
    """Random steps of all ranks against a dictionary, in which the highest rank's last value of an id counts."""
    device, ranks, rank = rank_device(), dist.get_world_size(), dist.get_rank()
    first = torch.arange(ROWS * DIM, dtype=torch.float32).view(ROWS, DIM)
    plain = TensorPool(ROWS, DIM, torch.float32, loaded_values=first.clone())
    pool = TensorPoolSharder().shard(plain, PLANS[kind], env(), device)
    assert isinstance(pool, ShardedTensorPool)
    held = first.tolist()
    for step in range(6):
        for source in range(ranks):
            ids, generator = ids_of(step, source, ranks)
            vectors = torch.rand(len(ids), DIM, generator=generator)
            for row, vector in zip(ids.tolist(), vectors.tolist(), strict=True):
                held[row] = vector
            if source == rank:
                own = ids.to(device, torch.int32 if rank else torch.int64), vectors.to(device)
        pool.update(*own)
        asked, _ = ids_of(50 + step, rank, ranks)
        found = pool.lookup(asked.to(device))
        assert torch.equal(
            found.wait().cpu(), torch.tensor([held[row] for row in asked]).view(-1, DIM)
        )
        assert torch.equal(pool(asked.to(device)).cpu(), found.cpu())
    state = pool.state_dict()
    assert list(state) == ["_pool"]
    if kind == "row_wise":
        assert isinstance(state["_pool"], ShardedTensor)
        assert torch.equal(whole_on_each_rank(state["_pool"]), torch.tensor(held))
    # The state goes to a pool cut the same way, and to one cut another way.
    again = ShardedTensorPool(env(), ROWS, DIM, torch.float32, PLANS[kind], device)
    again.load_state_dict(state)
    assert torch.equal(again._pool, pool._pool)
    assert again._pool.data_ptr() != pool._pool.data_ptr()
    plain.load_state_dict({"_pool": torch.tensor(held)})
    other = TensorPoolSharder().shard(plain, PLANS["row_wise"], env(), device)
    everything = torch.arange(ROWS, device=device)
    assert torch.equal(other(everything).cpu(), torch.tensor(held))
    assert (pool.pool_size, pool.dim, pool.dtype, pool.device.type) == (
        *(ROWS, DIM, torch.float32),
        device.type,
    )
    return pool._pool.size(0)


@pytest.mark.parametrize(
    ("ranks", "node", "kind", "rows"),
    [
        (1, 1, "row_wise", [7]),
        (2, 2, "row_wise", [4, 3]),
        (4, 4, "row_wise", [2, 2, 2, 1]),
        (4, 2, "replicated_row_wise", [4, 3, 4, 3]),
    ],
)
def test_vectors_over_ranks(ranks, node, kind, rows):
    assert run_on_ranks(ranks, vectors_are_read_and_written, kind, local_world_size=node) == rows


def bags_are_read_and_written(kind, weighted):
    """Bags are read and written as vectors are, against a dictionary."""
    device, ranks, rank = rank_device(), dist.get_world_size(), dist.get_rank()
    plain = KeyedJaggedTensorPool(ROWS, KEYS, is_weighted=weighted, device=torch.device("meta"))
    pool = KeyedJaggedTensorPoolSharder().shard(plain, PLANS[kind], env(), device)
    assert isinstance(pool, ShardedKeyedJaggedTensorPool)
    held = {row: {key: [] for key in KEYS} for row in range(ROWS)}
    for step in range(6):
        for source in range(ranks):
            ids, generator = ids_of(step, source, ranks)
            batch, lists = bags_for(ids, generator, weighted)
            for place, row in enumerate(ids.tolist()):
                held[row] = {key: lists[key][place] for key in KEYS}
            if source == rank:
                own = ids.to(device), batch.to(device)
        pool.update(*own)
        asked = ids_of(50 + step, rank, ranks)[0].tolist()
        found = pool.lookup(torch.tensor(asked, dtype=torch.int64, device=device)).wait()
        assert found.keys() == list(KEYS)
        assert found.stride() == len(asked)
        expected = [value for key in KEYS for row in asked for value in held[row][key]]
        assert found.values().tolist() == expected
        assert found.lengths().tolist() == [len(held[row][key]) for key in KEYS for row in asked]
        assert found.lengths().dtype == torch.int32
        if weighted:
            assert found.weights().tolist() == (torch.tensor(expected) / 7.0).tolist()
        else:
            assert found.weights_or_none() is None
    assert list(pool.state_dict()) == ["values", "key_lengths", *(["weights"] if weighted else [])]
    again = ShardedKeyedJaggedTensorPool(
        *(ROWS, KEYS, torch.int64, weighted, env(), PLANS[kind], device)
    )
    again.load_state_dict(pool.state_dict())
    everything = torch.arange(ROWS, device=device)
    assert torch.equal(again(everything).values(), pool(everything).values())
    assert (pool.pool_size, pool.values_dtype, pool.is_weighted) == (ROWS, torch.int64, weighted)
    assert pool.feature_max_lengths == KEYS


@pytest.mark.parametrize(
    ("ranks", "node", "kind", "weighted"),
    [
        (1, 1, "row_wise", False),
        (2, 2, "row_wise", True),
        (4, 4, "row_wise", False),
        (4, 2, "replicated_row_wise", True),
    ],
)
def test_bags_over_ranks(ranks, node, kind, weighted):
    run_on_ranks(ranks, bags_are_read_and_written, kind, weighted, local_world_size=node)


def the_steps_in_torchrecs_order():
    """What TorchRec's own test of the steps expects, with rows 0 to 2 on the first of two ranks."""
    device, rank = rank_device(), dist.get_rank()
    ids = torch.tensor([[4, 1], [3, 0]][rank], dtype=torch.int32, device=device)
    values = torch.tensor(
        [[[0.1, 0.2], [0.4, 0.5]], [[0.11, 0.21], [0.41, 0.51]]][rank], device=device
    )
    ctx = TensorPoolRwShardingContext(
        block_size=torch.tensor([3], dtype=torch.int32, device=device)
    )
    sharding = TensorPoolRwSharding(env=env(), device=device, dim=2, pool_size=5)
    arrived = sharding.create_update_ids_dist()(ctx=ctx, ids=ids).wait().wait()
    assert arrived.dtype == torch.int32
    assert arrived.tolist() == [1, 0]
    rows = sharding.create_update_values_dist()(ctx=ctx, values=values).wait()
    expected = [[[0.4, 0.5], [0.41, 0.51]], [[0.1, 0.2], [0.11, 0.21]]][rank]
    assert torch.equal(rows.cpu(), torch.tensor(expected))

    ctx = TensorPoolRwShardingContext(block_size=torch.tensor([3], device=device))
    asked = torch.tensor([3, 0, 2, 1, 3], device=device)
    arrived = sharding.create_lookup_ids_dist()(ctx=ctx, ids=asked).wait().wait()
    assert arrived.tolist() == [[0, 2, 1, 0, 2, 1], [0, 0, 0, 0]][rank]
    answer = (arrived + 3 * rank).view(-1, 1).float()
    back = sharding.create_lookup_values_dist()(ctx=ctx, values=answer).wait()
    assert back.flatten().tolist() == [0, 2, 1, 3, 3]
    assert ctx.unbucketize_permute.tolist() == [3, 0, 1, 2, 4]
    own = TensorPool(sharding.local_pool_size, 2, torch.int8)
    ((name, whole),) = sharding.get_sharded_states_to_register(own)
    assert (name, list(whole.size())) == ("_pool", [5, 2])

    # Rows of any number, of any shape, where no rank knows how many come.
    sent = torch.arange(6, device=device).view(3, 2) + 10 * rank
    splits = torch.tensor([[1, 2], [3, 0]][rank], device=device)
    got = TensorAllToAll(dist.group.WORLD)(sent, splits).wait().wait()
    assert got.tolist() == [[[0, 1], [10, 11], [12, 13], [14, 15]], [[2, 3], [4, 5]]][rank]


def test_steps_have_torchrecs_order():
    run_on_ranks(2, the_steps_in_torchrecs_order)


class Model(nn.Module):
    """A model that looks vectors up in a pool."""

    def __init__(self):
        super().__init__()
        rows = torch.arange(ROWS * DIM, dtype=torch.float32).view(ROWS, DIM)
        self.pool = TensorPool(ROWS, DIM, torch.float32, loaded_values=rows)
        self.top = nn.Linear(DIM, 1)

    def forward(self, ids):
        return self.top(self.pool(ids))


def sharded_model(kind):
    return DistributedModelParallel(
        *(Model(), env(), rank_device(), ShardingPlan({"pool": PLANS[kind]}), [TensorPoolSharder()])
    )


def a_model_with_a_pool_is_sharded(folder, kind):
    device, plain = rank_device(), Model()
    ids = torch.tensor([6, 0, 3])
    torch.manual_seed(0)
    model = sharded_model(kind)
    assert isinstance(model.module.pool, ShardedTensorPool)
    assert "row_wise" in str(model.plan)
    plain.top.load_state_dict(model.module.top.state_dict())
    assert torch.allclose(model(ids.to(device)).cpu(), plain(ids))
    model(ids.to(device)).sum().backward()
    # A checkpoint holds what was written since.
    here = dist.get_rank() == 0
    model.module.pool.update(
        ids[:here].to(device), torch.full((int(here), DIM), 9.0, device=device)
    )
    save_checkpoint(folder, model=model)


def a_checkpoint_is_read_by_other_ranks(folder, kind):
    model = sharded_model(kind)
    load_checkpoint(folder, model=model)
    return model.module.pool(torch.arange(ROWS, device=rank_device())).tolist()


def test_a_model_with_a_pool_is_sharded_and_saved(tmp_path):
    expected = torch.arange(ROWS * DIM, dtype=torch.float32).view(ROWS, DIM)
    expected[6] = 9.0
    for ranks, kind in ((1, "row_wise"), (2, "row_wise"), (4, "replicated_row_wise")):
        folder = tmp_path / str(ranks)
        run_on_ranks(
            ranks, a_model_with_a_pool_is_sharded, folder, kind, local_world_size=min(ranks, 2)
        )
        assert torch.equal(read_checkpoint(folder).model["pool._pool"], expected)
        for readers, own in ((1, "row_wise"), (2, "row_wise"), (4, "replicated_row_wise")):
            read = run_on_ranks(
                *(readers, a_checkpoint_is_read_by_other_ranks, folder, own),
                local_world_size=min(readers, 2),
            )
            assert read == [expected.tolist()] * readers
    plain = Model()
    plain.load_state_dict(read_checkpoint(folder).model)
    assert torch.equal(plain.pool.pool, expected)


def test_wrong_rows_are_told_before_anything_is_sent():
    alone = ShardingEnv.from_local(1, 0)
    pool = ShardedTensorPool(alone, ROWS, DIM, torch.float32, PLANS["row_wise"])
    assert isinstance(pool.state_dict()["_pool"], torch.Tensor)
    with pytest.raises(IndexError, match="id 7 is not one of the pool's 7 rows"):
        pool.lookup(torch.tensor([7]))
    with pytest.raises(ValueError, match=r"shape \[1, 2\]; give torch.float32 of shape \[1, 3\]"):
        pool.update(torch.tensor([1]), torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"ids are torch\.float32"):
        pool.update(torch.tensor([1.0]), torch.ones(1, 3))
    with pytest.raises(UserError, match="there is no process group"):
        ShardedTensorPool(ShardingEnv.from_local(2, 0), ROWS, DIM, torch.float32, PLANS["row_wise"])
    bags = ShardedKeyedJaggedTensorPool(ROWS, {"a": 2}, torch.int64, True, alone, PLANS["row_wise"])
    one = torch.tensor([1])
    without = KeyedJaggedTensor(["a"], one, lengths=one)
    with pytest.raises(ValueError, match="weights"):
        bags.update(one, without)
    with pytest.raises(ValueError, match="there are 2 ids and 1 bags"):
        bags.update(torch.tensor([1, 2]), without)


@pytest.mark.parametrize("capacities", [None, [3, 1]])
def test_vectors_over_the_devices_of_one_process(capacities):
    rows = torch.rand(ROWS, DIM)
    plain = TensorPool(ROWS, DIM, torch.float32, loaded_values=rows.clone())
    plan = ObjectPoolShardingPlan(ObjectPoolShardingType.ROW_WISE, True, capacities)
    two = ShardingEnv.from_local(2, 0)
    pool = shard_modules(
        plain, two, torch.device("cpu"), ShardingPlan({"": plan}), [TensorPoolSharder()]
    )
    assert isinstance(pool, ShardedInferenceTensorPool)
    assert [len(own) for own in pool.parameters()] == ([4, 3] if capacities is None else [5, 2])
    traced = torch.jit.script(symbolic_trace(pool))
    asked = [[6, 0, 4, 4, 5], [2], []]
    for ids in asked:
        wanted = rows[torch.tensor(ids, dtype=torch.int64)]
        for each in (pool, pool.lookup, traced):
            assert torch.equal(each(torch.tensor(ids, dtype=torch.int64)), wanted)
    written = torch.rand(4, DIM)
    for each in (pool, plain):
        each.update(torch.tensor([5, 1, 6, 5]), written)
    everything = torch.arange(ROWS)
    assert torch.equal(pool(everything), plain(everything))
    assert torch.equal(traced(everything), plain(everything))
    with pytest.raises(IndexError, match="id 7"):
        pool(torch.tensor([7]))
    assert "_local_shard_pools.1._shard" in pool.state_dict()
    assert (pool.pool_size, pool.dim, pool.dtype, pool.device.type) == (
        ROWS,
        DIM,
        torch.float32,
        "cpu",
    )
    assert LocalShardPool(rows)(torch.tensor([2])).equal(rows[2:3])


@pytest.mark.parametrize("weighted", [False, True])
def test_bags_over_the_devices_of_one_process(weighted):
    plain = KeyedJaggedTensorPool(ROWS, KEYS, is_weighted=weighted)
    everything = torch.arange(ROWS)
    plain.update(everything, bags_for(everything, torch.Generator().manual_seed(1), weighted)[0])
    plan = ObjectPoolShardingPlan(ObjectPoolShardingType.ROW_WISE, inference=True)
    pool = KeyedJaggedTensorPoolSharder().shard(plain, plan, ShardingEnv.from_local(3, 0))
    assert isinstance(pool, ShardedInferenceKeyedJaggedTensorPool)
    traced = torch.jit.script(symbolic_trace(pool))
    for ids in ([6, 0, 4, 4, 5], [2], []):
        asked = torch.tensor(ids, dtype=torch.int64)
        wanted = plain(asked)
        for each in (pool, pool.lookup, traced):
            found = each(asked)
            assert found.keys() == wanted.keys()
            assert torch.equal(found.values(), wanted.values())
            assert torch.equal(found.lengths(), wanted.lengths())
            assert not weighted or torch.equal(found.weights(), wanted.weights())
    assert hasattr(traced._local_kjt_pool_shards, "1")
    with pytest.raises(NotImplementedError, match="update the plain pool"):
        pool.update(everything, wanted)


def test_plans_that_do_not_fit_one_process_are_told():
    plain, two = TensorPool(ROWS, DIM, torch.float32), ShardingEnv.from_local(2, 0)
    for plan, message in (
        (ObjectPoolShardingPlan(ObjectPoolShardingType.REPLICATED_ROW_WISE, True), "row_wise with"),
        (ObjectPoolShardingPlan(ObjectPoolShardingType.ROW_WISE, True, [1]), r"is \[1\]; give one"),
        (
            ObjectPoolShardingPlan(ObjectPoolShardingType.ROW_WISE, True, [0, 0]),
            "not all of them 0",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            TensorPoolSharder().shard(plain, plan, two)


@pytest.mark.skipif("TESSERA_TEST_DEVICE" in os.environ, reason="more ranks than rows, on the CPU")
@pytest.mark.parametrize("kind", list(PLANS))
def test_more_ranks_than_rows(kind):
    assert run_on_ranks(4, few_rows, kind) == [1, 1, 1, 0]


def few_rows(kind):
    pool = ShardedTensorPool(env(), 3, 1, torch.float32, PLANS[kind])
    rank = dist.get_rank()
    pool.update(torch.tensor([rank % 3]), torch.tensor([[float(rank)]]))
    assert pool(torch.tensor([2, 0, 1])).tolist() == [[2.0], [3.0], [1.0]]
    assert list(pool.state_dict()["_pool"].size()) == [3, 1]
    return pool._pool.size(0)
