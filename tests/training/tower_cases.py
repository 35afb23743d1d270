"""A model with three towers and one of them alone, its batches, and its training on ranks and on one rank."""

from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch import nn

from tessera.training import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from tessera.training.distributed import sharding_plan
from tessera.training.distributed.checkpoint.layout import local_parts
from tessera.training.distributed.embedding_tower_sharding import (
    EmbeddingTowerCollectionSharder,
    EmbeddingTowerSharder,
)
from tessera.training.distributed.fbgemm_qcomm_codec import get_qcomm_codecs_registry
from tessera.training.distributed.model_parallel import DistributedModelParallel
from tessera.training.distributed.types import ShardingPlan
from tessera.training.modules.embedding_configs import PoolingType
from tessera.training.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from tessera.training.optim.optimizers import in_backward_optimizer_filter
from tessera.training.streamable import Pipelineable
from tests.training.ranks import rank_device
from tests.training.sharded_cases import placed

ROWS, LR = 30, 0.1
# Samples of each rank; one rank has none.
BATCHES = {1: (5,), 2: (4, 3), 4: (3, 0, 2, 4)}


class Interaction(nn.Module):
    """A layer over the vectors of a pooled collection, or over the sums of an unpooled one's."""

    def __init__(self, names, columns, out):
        super().__init__()
        self.names, self.layer = names, nn.Linear(columns, out)
        self.register_buffer("scale", torch.tensor(float(out)))

    def forward(self, looked_up):
        parts = []
        for name in self.names:
            part = looked_up[name]
            if not isinstance(part, torch.Tensor):  # one vector per id
                places = torch.arange(part.lengths().numel(), device=part.values().device)
                sums = part.values().new_zeros(places.numel(), part.values().size(1))
                part = sums.index_add(0, places.repeat_interleave(part.lengths()), part.values())
            parts.append(part)
        return torch.tanh(self.layer(torch.cat(parts, dim=1))) * self.scale


def pooled(name, columns, *features, mean=False):
    kind = PoolingType.MEAN if mean else PoolingType.SUM
    return EmbeddingBagConfig(ROWS, columns, name=name, feature_names=list(features), pooling=kind)


def towers():
    first = EmbeddingBagCollection([pooled("t0", 8, "a"), pooled("t1", 4, "b", "c", mean=True)])
    second = EmbeddingBagCollection([pooled("t2", 8, "w")], is_weighted=True)
    third = EmbeddingCollection([EmbeddingConfig(ROWS, 8, name="t3", feature_names=["a"])])
    return [
        EmbeddingTower(first, Interaction(["c", "a", "b"], 16, 3)),
        EmbeddingTower(second, Interaction(["w"], 8, 2)),
        EmbeddingTower(third, Interaction(["a"], 8, 4)),
    ]


@dataclass
class Batch(Pipelineable):
    ids: KeyedJaggedTensor
    weighted: KeyedJaggedTensor
    factors: torch.Tensor

    def to(self, device, non_blocking=False):  # noqa: FBT002 - as of torch.Tensor
        move = [part.to(device, non_blocking=non_blocking) for part in vars(self).values()]
        return Batch(*move)

    def record_stream(self, stream):
        for part in vars(self).values():
            part.record_stream(stream)


class Model(nn.Module):
    """A collection of three towers, and a tower by itself."""

    def __init__(self):
        super().__init__()
        self.arch = EmbeddingTowerCollection(towers())
        alone = EmbeddingBagCollection([pooled("t4", 8, "b"), pooled("t5", 8, "d")])
        self.alone = EmbeddingTower(alone, Interaction(["b", "d"], 16, 2))
        self.over = nn.Linear(11, 5)

    def forward(self, batch):
        columns = torch.cat([self.arch(batch.ids, batch.weighted), self.alone(batch.ids)], dim=1)
        # A mean over samples would not be a number where there are none.
        loss = (self.over(columns) * batch.factors).sum()
        return loss, columns.detach()


def model_of(seed=1):
    torch.manual_seed(seed)
    return Model()


def bags(generator, keys, size, *, weighted=False):
    lengths = torch.randint(0, 4, (len(keys) * size,), generator=generator)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(ids.numel(), generator=generator) + 0.5 if weighted else None
    return KeyedJaggedTensor(list(keys), ids, weights, lengths=lengths, stride=size)


def batch_of(rank, size, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = bags(generator, "dxbac", size)
    weighted = bags(generator, "w", size, weighted=True)
    return Batch(ids, weighted, torch.randn(size, 5, generator=generator))


def batches(steps, size=None):
    """This rank's batches."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    own = BATCHES[world][rank] if size is None else size
    return [batch_of(rank, own, step).to(rank_device()) for step in range(steps)]


def sharders(optimizer="exact_sgd", codecs=None):
    settings = {"optimizer": optimizer, "learning_rate": LR}
    registry = None if codecs is None else get_qcomm_codecs_registry(codecs)
    return [
        EmbeddingTowerCollectionSharder(settings, registry),
        EmbeddingTowerSharder(settings, registry),
    ]


# Per world and ranks per node, by table, what `sharding_plan` is asked for: towers not in the order of their nodes.
PLANS = {
    (1, 1): {f"t{number}": ("table_wise", {"rank": 0}) for number in range(6)},
    (2, 1): {
        "t0": ("table_row_wise", {"host_index": 1}),
        "t1": ("table_column_wise", {"host_index": 1}),
        "t2": ("table_wise", {"rank": 0}),
        "t3": ("table_row_wise", {"host_index": 1}),
        "t4": ("table_wise", {"rank": 1}),
        "t5": ("table_row_wise", {"host_index": 1}),
    },
    (2, 2): {
        "t0": ("table_wise", {"rank": 1}),
        "t1": ("table_row_wise", {"host_index": 0}),
        "t2": ("table_column_wise", {"host_index": 0}),
        "t3": ("table_row_wise", {"host_index": 0}),
        "t4": ("table_wise", {"rank": 1}),
        "t5": ("table_row_wise", {"host_index": 0}),
    },
    (4, 2): {
        "t0": ("table_row_wise", {"host_index": 1}),
        "t1": ("table_wise", {"rank": 3}),
        "t2": ("table_row_wise", {"host_index": 0}),
        "t3": ("table_column_wise", {"host_index": 1}),
        "t4": ("table_column_wise", {"host_index": 0}),
        "t5": ("table_wise", {"rank": 0}),
    },
}
# Every tower on the node where it was not.
OTHER_WAY_ROUND = {
    "t0": ("table_wise", {"rank": 1}),
    "t1": ("table_column_wise", {"host_index": 0}),
    "t2": ("table_column_wise", {"host_index": 1}),
    "t3": ("table_row_wise", {"host_index": 0}),
    "t4": ("table_row_wise", {"host_index": 1}),
    "t5": ("table_row_wise", {"host_index": 1}),
}


def plan_of(model, by_table):
    return ShardingPlan(
        {
            path: sharding_plan.construct_module_sharding_plan(
                model.get_submodule(path),
                {name: placed(*by_table[name]) for name in sharder.shardable_parameters(part)},
                sharder,
                device_type=rank_device().type,
            )
            for path, part, sharder in (
                (path, model.get_submodule(path), sharder)
                for path, sharder in zip(("arch", "alone"), sharders(), strict=True)
            )
        }
    )


def sharded(by_table, *, seed=1, optimizer="exact_sgd", codecs=None):
    """The model over ranks; ``by_table`` None: as the planner says."""
    model = model_of(seed).to(rank_device())
    plan = None if by_table is None else plan_of(model, by_table)
    return DistributedModelParallel(
        model, device=rank_device(), plan=plan, sharders=sharders(optimizer, codecs)
    )


def dense_optimizer(model):
    return torch.optim.SGD(
        [p for _, p in in_backward_optimizer_filter(model.named_parameters())], LR
    )


def state_of(model):
    """(name, where it begins, values) of all that this rank holds."""
    return [
        (name, offsets, part.detach().cpu().clone())
        for name, value in model.state_dict().items()
        for offsets, part in local_parts(value)
    ]


def train(model, steps):
    """The outputs of each step before its update."""
    dense, outputs = dense_optimizer(model), []
    for batch in batches(steps):
        dense.zero_grad()
        loss, columns = model(batch)
        loss.backward()
        dense.step()
        outputs.append(columns.cpu())
    return outputs


def reference(world, steps):
    """The plain model on the samples of all ranks, one after the other: each rank's outputs by step, and the state."""
    model = model_of()
    dense, outputs = torch.optim.SGD(model.parameters(), LR), []
    for step in range(steps):
        dense.zero_grad()
        found = []
        for rank, size in enumerate(BATCHES[world]):
            batch = batch_of(rank, size, step)
            loss, columns = model(batch)
            (loss / world).backward()
            found.append(columns)
        dense.step()
        outputs.append(found)
    return outputs, model.state_dict()


def check(results, expected, nodes_of, *, bound=1e-5):
    """Hold what the ranks saw and hold against the reference.

    Three steps of float32 sums of some tens of terms in another order keep an error of some 1e-6; a lost
    sample, gradient or factor of 1/2 changes 1e-2 and more.

    Args:
        results: per rank its outputs by step, and its `state_of`.
        expected: of `reference`.
        nodes_of: how many ranks hold a parameter that is not a table, by its name.
        bound: absolute and relative.
    """
    outputs, state = expected
    for rank, (own, _) in enumerate(results):
        for step, columns in enumerate(own):
            torch.testing.assert_close(columns, outputs[step][rank], rtol=bound, atol=bound)
    covered = {name: torch.zeros_like(value) for name, value in state.items()}
    for _, held in results:
        for name, offsets, part in held:
            place = tuple(
                slice(first, first + size) for first, size in zip(offsets, part.shape, strict=True)
            )
            covered[name][place] += 1
            torch.testing.assert_close(
                part, state[name][place], rtol=bound, atol=bound, msg=lambda t, n=name: f"{n}: {t}"
            )
    for name, copies in covered.items():
        assert bool((copies == nodes_of(name)).all()), name
