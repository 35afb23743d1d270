"""Cases of sharded collections, run on ranks, and the same arithmetic on one rank in float64."""

from dataclasses import dataclass, field

import torch
from torch import distributed as dist

from tessera.training import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from tessera.training.distributed import sharding_plan
from tessera.training.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tessera.training.distributed.fbgemm_qcomm_codec import (
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from tessera.training.distributed.types import ShardingEnv
from tessera.training.modules.embedding_configs import PoolingType
from tessera.training.optim.optimizers import in_backward_optimizer_filter
from tests.training.optimizer_reference import new_states, update_row
from tests.training.ranks import rank_device

LR = 0.1
EPS = 1e-3


@dataclass(frozen=True)
class Table:
    name: str
    rows: int
    dim: int
    features: tuple[str, ...]
    mean: bool = False


@dataclass(frozen=True)
class Case:
    """What is sharded how, and the batches that it sees.

    ``plan`` maps tables to (function of `sharding_plan`, its keyword arguments).
    """

    tables: tuple[Table, ...]
    plan: dict
    batch_sizes: tuple[int, ...]
    weighted: bool = False
    optimizer: str = "exact_row_wise_adagrad"
    steps: int = 3
    seed: int = 0
    most_ids: int = 4
    local_size: int | None = None
    fused_params: dict = field(default_factory=dict)
    codecs: QCommsConfig | None = None
    variable: bool = False  # the batch varies per feature; samples share bags

    def features(self):
        return sorted({feature for table in self.tables for feature in table.features})

    def rows_of(self, feature):
        return min(table.rows for table in self.tables if feature in table.features)


def bags(case, rank, step):
    """Per feature a list of bags, one a sample, each a list of (id, weight)."""
    made, bag_of = shared_bags(case, rank, step)
    return {key: [bags[place] for place in bag_of[key]] for key, bags in made.items()}


def shared_bags(case, rank, step):
    """Per feature its bags, and which of them each sample uses."""
    generator = torch.Generator().manual_seed(case.seed * 10007 + rank * 101 + step)
    made, bag_of = {}, {}
    for feature in case.features():
        size = case.batch_sizes[rank]
        bag_of[feature] = list(range(size))
        if case.variable and size:
            bag_of[feature] = torch.randint(0, size, (size,), generator=generator).tolist()
            size = max(bag_of[feature]) + 1
        lengths = torch.randint(0, case.most_ids + 1, (size,), generator=generator)
        made[feature] = [
            [
                (
                    int(torch.randint(case.rows_of(feature), (1,), generator=generator)),
                    float(torch.rand(1, generator=generator)) + 0.5,
                )
                for _ in range(int(length))
            ]
            for length in lengths
        ]
    return made, bag_of


def kjt_of(case, rank, step, device, order=None):
    made, bag_of = shared_bags(case, rank, step)
    keys = order or case.features()
    ids = [id_ for key in keys for bag in made[key] for id_, _ in bag]
    weights = [weight for key in keys for bag in made[key] for _, weight in bag]
    lengths = [len(bag) for key in keys for bag in made[key]]
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.tensor(ids, dtype=torch.int64, device=device),
        weights=torch.tensor(weights, device=device) if case.weighted else None,
        lengths=torch.tensor(lengths, dtype=torch.int64, device=device),
        stride=None if case.variable else case.batch_sizes[rank],
        stride_per_key_per_rank=[[len(made[key])] for key in keys] if case.variable else None,
        inverse_indices=(
            (keys, torch.tensor([bag_of[key] for key in keys], dtype=torch.int64, device=device))
            if case.variable
            else None
        ),
    )


def plain_collection(case, device=None):
    torch.manual_seed(case.seed)
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                table.rows,
                table.dim,
                name=table.name,
                feature_names=list(table.features),
                pooling=PoolingType.MEAN if table.mean else PoolingType.SUM,
            )
            for table in case.tables
        ],
        is_weighted=case.weighted,
        device=device,
    )


def placed(kind, arguments):
    """A table's place by hand: fused with its optimizer, where that can be and nothing else is said."""
    default = "dense" if kind == "data_parallel" else "fused"
    return getattr(sharding_plan, kind)(**{"compute_kernel": default, **arguments})


def plan_of(case, module, sharder, device):
    return sharding_plan.construct_module_sharding_plan(
        module,
        {name: placed(kind, arguments) for name, (kind, arguments) in case.plan.items()},
        sharder,
        local_size=case.local_size,
        device_type=device.type,
    )


def shard(case):
    """The sharded collection of a case, on a rank."""
    device = rank_device()
    sharder = EmbeddingBagCollectionSharder(
        {"optimizer": case.optimizer, "learning_rate": LR, "eps": EPS, **case.fused_params},
        qcomm_codecs_registry=(
            get_qcomm_codecs_registry(case.codecs) if case.codecs is not None else None
        ),
    )
    module = plain_collection(case)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return sharder.shard(module, plan_of(case, module, sharder, device), env, device)


def local_shards(module):
    """Per table, (row, column, values) of the shards here."""
    found = {}
    for name, table in module.embedding_bags.items():
        found[name] = [
            (
                *((0, 0) if own.local_metadata is None else own.local_metadata.shard_offsets),
                values.detach().cpu().clone(),
            )
            for own, values in table.shards
        ]
    return found


def gradient(case, rank, step, columns):
    generator = torch.Generator().manual_seed(case.seed * 7919 + rank * 211 + step)
    return torch.randn(case.batch_sizes[rank], columns, generator=generator)


def run_case(case):
    """Forward outputs of each step, and the shards after the last."""
    rank, device = dist.get_rank(), rank_device()
    module = shard(case)
    left = [p for _, p in in_backward_optimizer_filter(module.named_parameters())]
    dense = torch.optim.SGD(left, lr=LR) if left else None
    outputs = []
    for step in range(case.steps):
        # The order of the input's features is not the tables'.
        order = case.features()[::-1]
        out = module(kjt_of(case, rank, step, device, order))
        names = module.embedding_names()
        outputs.append({key: out[key].detach().cpu().clone() for key in names})
        values = out.values()
        if dense is not None:
            dense.zero_grad()
        (values * gradient(case, rank, step, values.size(1)).to(device)).sum().backward()
        if dense is not None:
            dense.step()
    return outputs, local_shards(module)


def run_cases(cases):
    return [run_case(case) for case in cases]


class Reference:
    """The tables of a case on one rank, in float64, a row at a time."""

    def __init__(self, case, column_blocks):
        self.case = case
        plain = plain_collection(case)
        self.names = plain.embedding_names()
        self.weights = {
            name: bag.weight.detach().double() for name, bag in plain.embedding_bags.items()
        }
        # A column shard is a table of its own to the optimizer.
        self.blocks = column_blocks
        self.kinds = {
            name: "exact_sgd" if case.plan[name][0] == "data_parallel" else case.optimizer
            for name in self.weights
        }
        self.states = {
            (table.name, first): new_states(self.kinds[table.name], table.rows, last - first)
            for table in case.tables
            for first, last in self.blocks[table.name]
        }

    def pooled(self, table, bags_of_feature):
        out = torch.zeros(len(bags_of_feature), table.dim, dtype=torch.float64)
        for place, bag in enumerate(bags_of_feature):
            for id_, weight in bag:
                out[place] += self.weights[table.name][id_] * (weight if self.case.weighted else 1)
            if table.mean and bag:
                out[place] /= len(bag)
        return out

    def forward(self, made):
        names = iter(self.names)
        return {
            next(names): self.pooled(table, made[feature])
            for table in self.case.tables
            for feature in table.features
        }

    def step(self, step):
        """One step; the outputs of each rank before it."""
        case, world = self.case, len(self.case.batch_sizes)
        gradients = {name: {} for name in self.weights}
        outputs = []
        for rank in range(world):
            made = bags(case, rank, step)
            outputs.append(self.forward(made))
            width = sum(t.dim * len(t.features) for t in case.tables)
            grad, column = gradient(case, rank, step, width).double() / world, 0
            for table in case.tables:
                for feature in table.features:
                    own = grad[:, column : column + table.dim]
                    column += table.dim
                    for place, bag in enumerate(made[feature]):
                        for id_, weight in bag:
                            factor = weight if case.weighted else 1.0
                            factor /= len(bag) if table.mean else 1
                            rows = gradients[table.name]
                            rows[id_] = rows.get(id_, 0) + factor * own[place]
        for name, rows in gradients.items():
            for row, g in rows.items():
                for first, last in self.blocks[name]:
                    update_row(
                        self.kinds[name],
                        self.weights[name][row, first:last],
                        g[first:last],
                        [state[row] for state in self.states[name, first]],
                        step=step + 1,
                        lr=LR,
                        eps=EPS,
                        **case.fused_params,
                    )
        return outputs


def column_blocks(case, results):
    """Per table where its column shards begin and end; ``results`` as of `run_case`."""
    return {
        table.name: sorted(
            {
                (column, column + values.size(1))
                for _, shards in results
                for _, column, values in shards[table.name]
            }
        )
        for table in case.tables
    }


def check_close(found, expected, what, **bounds):
    torch.testing.assert_close(
        found.double().cpu(), expected, msg=lambda text: f"{what}: {text}", **bounds
    )


def check_shards(case, results, weights, **bounds):
    """Hold the shards of all ranks against whole tables; every number is somewhere, once."""
    for table in case.tables:
        covered = torch.zeros(table.rows, table.dim)
        for rank, (_, shards) in enumerate(results):
            for row, column, values in shards[table.name]:
                part = (slice(row, row + values.size(0)), slice(column, column + values.size(1)))
                covered[part] += 1
                what = f"{table.name}, rank {rank}, {case}"
                check_close(values, weights[table.name][part], what, **bounds)
        copies = len(results) if case.plan[table.name][0] == "data_parallel" else 1
        assert bool((covered == copies).all())


def check(case, results, *, rtol=1e-4, atol=1e-4):
    """Compare what every rank saw and holds with one rank's arithmetic.

    Float32 sums of some tens of terms in another order keep a relative error of about 1e-6; an
    update divides by a root of sums of squares, which EPS keeps away from zero, and three steps
    compound it.  1e-4 is far below what one gradient, row or sample lost would change (>= 1e-2).
    """
    reference = Reference(case, column_blocks(case, results))
    for step in range(case.steps):
        for rank, expected in enumerate(reference.step(step)):
            found = results[rank][0][step]
            assert list(found) == list(expected)
            for name, value in expected.items():
                what = f"{name}, step {step}, rank {rank}, {case}"
                check_close(found[name], value, what, rtol=rtol, atol=atol)
    check_shards(case, results, reference.weights, rtol=rtol, atol=atol)
