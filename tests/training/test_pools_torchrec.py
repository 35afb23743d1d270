"""Pools over ranks beside TorchRec's own on the same ids, where TorchRec is installed."""

import pytest
import torch
import torch.distributed as dist

from tessera.training import KeyedJaggedTensor
from tessera.training.distributed.keyed_jagged_tensor_pool import KeyedJaggedTensorPoolSharder
from tessera.training.distributed.tensor_pool import TensorPoolSharder
from tessera.training.distributed.types import (
    ObjectPoolShardingPlan,
    ObjectPoolShardingType,
    ShardingEnv,
)
from tessera.training.modules.keyed_jagged_tensor_pool import KeyedJaggedTensorPool
from tessera.training.modules.tensor_pool import TensorPool
from tests.training.ranks import rank_device, run_on_ranks

pytest.importorskip(
    "torchrec", reason="TorchRec is not installed: there is nothing to compare with"
)
pytestmark = pytest.mark.multi_gpu
ROWS, DIM, KEYS = 9, 3, {"a": 3, "b": 4}


def both(make):
    """What ``make`` gives of our library and of TorchRec's: its argument looks names up."""
    import torchrec.distributed.keyed_jagged_tensor_pool as kjt
    import torchrec.distributed.tensor_pool as tensors
    from torchrec import KeyedJaggedTensor as TheirTensor
    from torchrec.distributed import types

    ours = {
        "bags": KeyedJaggedTensorPool,
        "bags_sharder": KeyedJaggedTensorPoolSharder,
        "vectors": TensorPool,
        "vectors_sharder": TensorPoolSharder,
        "plan": ObjectPoolShardingPlan,
        "kind": ObjectPoolShardingType,
        "env": ShardingEnv,
        "batch": KeyedJaggedTensor,
    }
    theirs = {
        "bags": kjt.KeyedJaggedTensorPool,
        "bags_sharder": kjt.KeyedJaggedTensorPoolSharder,
        "vectors": tensors.TensorPool,
        "vectors_sharder": tensors.TensorPoolSharder,
        "plan": types.ObjectPoolShardingPlan,
        "kind": types.ObjectPoolShardingType,
        "env": types.ShardingEnv,
        "batch": TheirTensor,
    }
    return make(ours), make(theirs)


def steps(name, kind):
    """Sharded pools of both libraries, written and read in random steps."""

    def run(of):
        device = rank_device()
        generator = torch.Generator().manual_seed(dist.get_rank())
        if name == "vectors":
            plain = of["vectors"](ROWS, DIM, torch.float32, torch.device("meta"))
        else:
            plain = of["bags"](ROWS, KEYS, device=torch.device("meta"))
        pool = of[f"{name}_sharder"]().shard(
            plain,
            plan=of["plan"](of["kind"][kind]),
            env=of["env"].from_process_group(dist.group.WORLD),
            device=device,
        )
        found = []
        for _ in range(5):
            count = int(torch.randint(1, 7, (1,), generator=generator))
            ids = torch.randint(0, ROWS, (count,), generator=generator).to(device)
            asked = torch.randint(0, ROWS, (3,), generator=generator).to(device)
            if name == "vectors":
                vectors = torch.rand(count, DIM, generator=generator).to(device)
                pool.update(ids=ids, values=vectors)
                found.append(pool.lookup(asked).wait())
                continue
            # TorchRec 1.8 writes bags to other rows where ids are not in the order of the ranks that hold them.
            ids = ids.sort().values
            lengths = torch.randint(0, 4, (2 * count,), generator=generator, dtype=torch.int32)
            values = torch.randint(0, 99, (int(lengths.sum()),), generator=generator)
            batch = of["batch"].from_lengths_sync(["b", "a"], values, lengths).to(device)
            pool.update(ids=ids, values=batch)
            read = pool.lookup(ids=asked).wait()
            assert list(read.keys()) == ["a", "b"]
            found += [read.values(), read.lengths()]
        state = pool.state_dict()
        return found, [
            (key, list(value.size()), value.local_shards()[0].metadata.shard_offsets,
             value.local_shards()[0].tensor)
            for key, value in state.items()
        ]  # fmt: skip

    (our_steps, our_state), (their_steps, their_state) = both(run)
    for own, their in zip(our_steps, their_steps, strict=True):
        assert own.dtype == their.dtype
        assert torch.equal(own, their)
    for own, their in zip(our_state, their_state, strict=True):
        assert own[:3] == their[:3]
        assert torch.equal(own[3], their[3])


@pytest.mark.parametrize(
    ("ranks", "node", "name", "kind"),
    [
        (1, 1, "vectors", "ROW_WISE"),
        (2, 2, "vectors", "ROW_WISE"),
        (1, 1, "bags", "ROW_WISE"),
        (2, 2, "bags", "ROW_WISE"),
        (4, 4, "bags", "REPLICATED_ROW_WISE"),
    ],
)
def test_pools_give_what_torchrecs_give(ranks, node, name, kind):
    run_on_ranks(ranks, steps, name, kind, local_world_size=node)
