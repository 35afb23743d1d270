"""Sharded towers beside TorchRec's own with the same weights and the same plan, where TorchRec is installed."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.nn.parallel import DistributedDataParallel

from tests.training.ranks import rank_device, run_on_ranks, uses_cuda

pytest.importorskip(
    "torchrec", reason="TorchRec is not installed: there is nothing to compare with"
)
pytestmark = pytest.mark.multi_gpu
ROWS, COLUMNS, SAMPLES, STEPS, LR = 20, 8, 3, 3, 0.1
# Per world and ranks per node, by table its way; towers in the order of their nodes, as TorchRec's outputs are.
PLANS = {
    (2, 1): {
        "t0": ("table_row_wise", 0),
        "t1": ("table_column_wise", 0),
        "t2": ("table_row_wise", 0),
        "t3": ("table_row_wise", 1),
        "t4": ("table_row_wise", 1),
    },
    (4, 2): {
        "t0": ("table_row_wise", 0),
        "t1": ("table_column_wise", 0),
        "t2": ("table_row_wise", 0),
        "t3": ("table_column_wise", 1),
        "t4": ("table_row_wise", 1),
    },
}


def names_of(library):
    """The modules of a library that the case needs."""
    if library == "torchrec":
        import torchrec as top
        import torchrec.distributed.embedding_tower_sharding as towers
        import torchrec.modules.embedding_tower as plain
        from torchrec.distributed import types
    else:
        import tessera.training as top
        import tessera.training.distributed.embedding_tower_sharding as towers
        import tessera.training.modules.embedding_tower as plain
        from tessera.training.distributed import types
    return top, plain, towers, types


class Interaction(nn.Module):
    """A layer over pooled vectors, taken by name: TorchRec's sharded collections have them in another order."""

    def __init__(self, features, out):
        super().__init__()
        self.features, self.layer = features, nn.Linear(len(features) * COLUMNS, out)

    def forward(self, looked_up):
        columns = torch.cat([looked_up[name] for name in self.features], dim=1)
        return torch.tanh(self.layer(columns))


def plain_modules(top, plain):
    """A collection of three towers and a tower, with values that do not depend on the library."""

    def tower(columns, *tables, weighted=False):
        collection = top.EmbeddingBagCollection(
            tables=[
                top.EmbeddingBagConfig(
                    num_embeddings=ROWS,
                    embedding_dim=COLUMNS,
                    name=name,
                    feature_names=list(features),
                )
                for name, features in tables
            ],
            is_weighted=weighted,
        )
        features = [feature for _, own in tables for feature in own]
        return plain.EmbeddingTower(collection, Interaction(features, columns))

    several = plain.EmbeddingTowerCollection(
        [
            tower(3, ("t0", "a"), ("t1", "bc")),
            tower(2, ("t2", "w"), weighted=True),
            tower(4, ("t3", "a")),
        ]
    )
    alone = tower(2, ("t4", "b"))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for module in (several, alone):
            for _, parameter in sorted(module.named_parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return several, alone


def bags(top, keys, step, *, weighted=False):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    lengths = torch.randint(0, 4, (len(keys) * SAMPLES,), generator=generator)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(ids.numel(), generator=generator) if weighted else None
    made = top.KeyedJaggedTensor(keys=list(keys), values=ids, weights=weights, lengths=lengths)
    return made.to(rank_device())


def placed(types, local, kind, host):
    """A table on the ranks of a host: blocks of its rows, or of its columns."""
    by_rows = kind == "table_row_wise"
    size = [ROWS // local, COLUMNS] if by_rows else [ROWS, COLUMNS // local]
    ranks = list(range(host * local, (host + 1) * local))
    device = rank_device().type
    shards = [
        ShardMetadata(
            shard_offsets=[place * size[0], 0] if by_rows else [0, place * size[1]],
            shard_sizes=size,
            placement=f"rank:{rank}/{device}" + (f":{rank}" if uses_cuda() else ""),
        )
        for place, rank in enumerate(ranks)
    ]
    return types.ParameterSharding(
        sharding_type=kind,
        compute_kernel="fused",
        ranks=ranks,
        sharding_spec=EnumerableShardingSpec(shards),
    )


def shards_of(module):
    """Name, where it begins, and the live values of each part of a table here."""
    for name, value in module.state_dict().items():
        for shard in value.local_shards() if isinstance(value, ShardedTensor) else ():
            yield name, tuple(shard.metadata.shard_offsets), shard.tensor


def fill(module, whole):
    """Give tables their values; TorchRec's sharded ones begin with others than the plain collection's."""
    with torch.no_grad():
        for name, (row, column), part in shards_of(module):
            rows, columns = part.shape
            part.copy_(whole[name][row : row + rows, column : column + columns])


def steps_of(library, local):
    """The outputs of both modules by step, and what this rank holds in the end by name."""
    top, plain, towers, types = names_of(library)
    env = types.ShardingEnv.from_process_group(dist.group.WORLD)
    settings = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LR}
    made = []
    for module, sharder in zip(
        plain_modules(top, plain),
        (towers.EmbeddingTowerCollectionSharder, towers.EmbeddingTowerSharder),
        strict=True,
    ):
        own = sharder(fused_params=settings)
        plan = types.EmbeddingModuleShardingPlan(
            {
                name: placed(types, local, *PLANS[dist.get_world_size(), local][name])
                for name in own.shardable_parameters(module)
            }
        )
        values = {name: value.clone() for name, value in module.state_dict().items()}
        made.append(own.shard(module, plan, env, rank_device()))
        fill(made[-1], values)
    several, alone = made
    names = [n for m in made for n, _ in m.named_parameters() if ".interaction." in f".{n}"]
    left = [p for m in made for n, p in m.named_parameters() if ".interaction." in f".{n}"]
    assert names
    optimizer = torch.optim.SGD(left, lr=LR)
    outputs = []
    for step in range(STEPS):
        ids, weighted = bags(top, "cab", step), bags(top, "w", step, weighted=True)
        optimizer.zero_grad()
        found = [several(ids, weighted), alone(ids)]
        columns = torch.cat([torch.tanh(part) for part in found], dim=1)
        factors = torch.randn(columns.shape, generator=torch.Generator().manual_seed(step))
        (columns * factors.to(columns.device)).sum().backward()
        optimizer.step()
        outputs.append(columns.detach())
    held = {}
    for number, module in enumerate(made):
        for name, place, part in shards_of(module):
            held[number, name, place] = part.detach().clone()
        for name, value in module.state_dict().items():
            if not isinstance(value, ShardedTensor):
                held[number, name, ()] = value.detach().clone()
    return outputs, held


def on_cpu(self, *args, device_ids=None, **kwargs):
    """TorchRec names a device for each replica, which torch takes of GPUs alone."""
    _plain_init(self, *args, device_ids=device_ids if uses_cuda() else None, **kwargs)


_plain_init = DistributedDataParallel.__init__


def both(local):
    ours = steps_of("tessera", local)
    DistributedDataParallel.__init__ = on_cpu
    try:
        theirs = steps_of("torchrec", local)
    finally:
        DistributedDataParallel.__init__ = _plain_init
    return ours, theirs


@pytest.mark.parametrize(("world", "local"), list(PLANS))
def test_outputs_and_weights_are_torchrecs(world, local):
    """Float32 sums of the same terms: the largest difference is a rounding of one of them."""
    for (our_outputs, our_state), (their_outputs, their_state) in run_on_ranks(
        world, both, local, local_world_size=local
    ):
        for own, their in zip(our_outputs, their_outputs, strict=True):
            assert own.shape == their.shape == (SAMPLES, 11)
            torch.testing.assert_close(own, their, rtol=1e-6, atol=1e-6)
        assert set(our_state) == set(their_state)
        for key, own in our_state.items():
            torch.testing.assert_close(own, their_state[key], rtol=1e-6, atol=1e-6, msg=str(key))
