"""In-training pruning against loops in plain Python, on one process and over ranks."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tessera.errors import UserError
from tessera.training import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
    ShardingPlan,
)
from tessera.training.distributed.checkpoint import (
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from tessera.training.distributed.embedding import EmbeddingCollectionSharder
from tessera.training.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tessera.training.distributed.itep_embeddingbag import (
    ITEPEmbeddingBagCollectionSharder,
    ITEPEmbeddingCollectionSharder,
    ShardedITEPEmbeddingBagCollection,
    ShardedITEPEmbeddingCollection,
)
from tessera.training.distributed.planner import EmbeddingShardingPlanner, Topology
from tessera.training.distributed.planner.generators import get_default_sharders
from tessera.training.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from tessera.training.distributed.train_pipeline import TrainPipelineSparseDist
from tessera.training.distributed.types import ShardingEnv
from tessera.training.modules import id_pruning
from tessera.training.modules.itep_embedding_modules import (
    ITEPEmbeddingBagCollection,
    ITEPEmbeddingCollection,
)
from tessera.training.modules.itep_modules import GenericITEPModule
from tests.training.ranks import rank_device, run_on_ranks, whole_on_each_rank

IDS, ROWS, DIM, LR, INTERVAL, STEPS = 120, 40, 4, 0.5, 5, 12


def pruned(address, use, rows, step, interval):
    """The description of `id_pruning` as loops: new addresses and uses, and the rows that moved."""
    ids, use = len(address), list(use)
    if step > interval:
        use = [float(torch.tensor(u, dtype=torch.float32) * 0.98) for u in use]
    stride = 23 if ids >= 23 else 1
    sample = sorted(use[min(ids - 1, step % stride + k * stride)] for k in range(ids // stride))
    limit = sample[min(int((1 - rows / ids) * len(sample)), len(sample) - 1)]
    gain = [i for i in range(ids) if use[i] > limit and address[i] == 0]
    lose = [i for i in range(ids) if use[i] <= limit and address[i] != 0]
    address, moved = list(address), []
    for new, old in zip(gain, lose, strict=False):
        moved.append(address[old])
        address[new], address[old] = address[old], 0
    return address, use, moved


class Blocks:
    """Addresses and uses of a table's ids, which are cut into blocks that share blocks of rows."""

    def __init__(self, ids, rows, blocks):
        def bounds(count):
            size = -(-count // blocks)
            return [min(size * block, count) for block in range(blocks + 1)]

        self.spans = list(zip(pairwise(bounds(ids)), pairwise(bounds(rows)), strict=True))
        self.address = [
            [i if i < r1 - r0 else 0 for i in range(u1 - u0)] for (u0, u1), (r0, r1) in self.spans
        ]
        self.use = [[0.0] * (u1 - u0) for (u0, u1), _ in self.spans]

    def step(self, batch, step):
        """Rows of the whole table for the ids of all ranks, and the rows that begin anew."""
        fresh = []
        if (step < 10 and (step + 1) % 3 == 0) or (step + 1) % INTERVAL == 0:
            for block, (_, (r0, r1)) in enumerate(self.spans):
                self.address[block], self.use[block], moved = pruned(
                    self.address[block], self.use[block], r1 - r0, step, INTERVAL
                )
                fresh += [r0 + row for row in moved]
        if step < 10:
            for i in batch:
                block = self.block_of(i)
                place = i - self.spans[block][0][0]
                self.use[block][place] = float(np.float32(self.use[block][place]) + np.float32(1))
        return self.rows(batch), fresh if step > INTERVAL else []

    def block_of(self, i):
        return next(b for b, ((u0, u1), _) in enumerate(self.spans) if u0 <= i < u1)

    def rows(self, batch):
        found = []
        for i in batch:
            block = self.block_of(i)
            (u0, _), (r0, _) = self.spans[block]
            found.append(r0 + self.address[block][i - u0])
        return found

    def state(self):
        return (
            [
                r0 + a
                for (_, (r0, _)), own in zip(self.spans, self.address, strict=True)
                for a in own
            ],
            [u for own in self.use for u in own],
        )


def batch_of(step, rank, device, samples=6):
    """A batch of features x, y (of the pruned table) and z; later steps like other ids."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(0, 5, (3 * samples,), generator=generator)
    counts = lengths.view(3, -1).sum(1).tolist()
    spread = torch.rand(sum(counts), generator=generator) ** 3
    liked = (spread * IDS + 17 * step).long() % IDS
    liked[counts[0] + counts[1] :] %= 8
    return KeyedJaggedTensor(["x", "y", "z"], liked, lengths=lengths).to(device)


def ids_of(batch):
    values, (x, y, _) = batch.values().tolist(), batch.length_per_key()
    return values[: x + y]


def plain(pooled, device=None):
    tables = [
        {"name": name, "embedding_dim": DIM, "num_embeddings": rows, "feature_names": features}
        for name, rows, features in (("t", ROWS, ["x", "y"]), ("other", 8, ["z"]))
    ]
    itep = GenericITEPModule({"t": IDS, "other": 8}, pruning_interval=INTERVAL)
    if pooled:
        bags = [EmbeddingBagConfig(**table, pooling=PoolingType.SUM) for table in tables]
        return ITEPEmbeddingBagCollection(EmbeddingBagCollection(tables=bags, device=device), itep)
    configs = [EmbeddingConfig(**table) for table in tables]
    return ITEPEmbeddingCollection(EmbeddingCollection(tables=configs, device=device), itep)


@pytest.mark.parametrize(("ids", "rows"), [(120, 40), (50, 49), (10, 3), (1000, 1)])
def test_pruning_is_what_its_description_says(ids, rows):
    generator = torch.Generator().manual_seed(ids)
    address = id_pruning.first_addresses(ids, rows)
    assert address.tolist() == [i if i < rows else 0 for i in range(ids)]
    use = torch.zeros(ids)
    moves = 0
    for step in range(30):
        some = torch.randint(0, ids, (ids // 2,), generator=generator)
        id_pruning.count_use(use, some)
        expected = pruned(address.tolist(), use.tolist(), rows, step, 10)
        (moved,) = id_pruning.prune([address], [use], [rows], step, 10)
        assert (address.tolist(), use.tolist(), moved.tolist()) == expected
        moves += len(moved)
        # Every row but the first belongs to one id at most.
        held = address[address != 0].tolist()
        assert len(held) == len(set(held)) == max(rows - 1, 0)
    assert moves or rows == 1


def test_tables_are_pruned_at_once_as_each_by_itself():
    generator = torch.Generator().manual_seed(0)
    tables = [(120, 40), (10, 3), (50, 49), (1000, 1), (22, 7), (23, 5), (400, 120)]
    rows = [own for _, own in tables]
    addresses = [id_pruning.first_addresses(ids, own) for ids, own in tables]
    uses = [torch.zeros(ids) for ids, _ in tables]
    assert id_pruning.prune([], [], [], 2, 10) == []
    moves = [0] * len(tables)
    for step in range(30):
        for use in uses:
            ids = torch.randint(0, len(use), (len(use) // 2,), generator=generator)
            id_pruning.count_use(use, ids)
        expected = [
            pruned(address.tolist(), use.tolist(), own, step, 10)
            for address, use, own in zip(addresses, uses, rows, strict=True)
        ]
        moved = id_pruning.prune(addresses, uses, rows, step, 10)
        for place, wanted in enumerate(expected):
            found = (addresses[place].tolist(), uses[place].tolist(), moved[place].tolist())
            assert found == wanted
            moves[place] += len(moved[place])
    assert sum(count > 0 for count in moves) >= 5, moves


def test_steps_of_pruning_and_counting():
    pruning = [step for step in range(1300) if id_pruning.prunes(step, 500)]
    assert pruning == [2, 5, 8, 29, 59, 89, 299, 499, 599, 899, 999]
    counting = [step for step in range(200) if id_pruning.counts_use(step)]
    assert counting == [*range(10), 18, 37, 38, 56, 75, 77, 94, 116, 155, 194]


@pytest.mark.parametrize("pooled", [True, False])
def test_one_process_looks_up_the_rows_of_ids(pooled):
    module, expected = plain(pooled), Blocks(IDS, ROWS, 1)
    weights = dict(module.named_parameters())
    table = next(w for name, w in weights.items() if ".t." in name)
    fresh_rows = 0
    for step in range(STEPS):
        batch = batch_of(step, 0, None)
        rows, fresh = expected.step(ids_of(batch), step)
        before = table.detach().clone()
        before[fresh] = 0
        vectors = module(batch)
        assert torch.equal(table.detach(), before)
        if pooled:
            found = torch.cat([vectors["x"], vectors["y"]])
            bags = torch.split(before[rows], batch.lengths()[:12].tolist())
            assert torch.allclose(found, torch.stack([bag.sum(0) for bag in bags]))
        else:
            found = torch.cat([vectors["x"].values(), vectors["y"].values()])
            assert torch.equal(found, before[rows])
        table.grad = None
        found.sum().backward()
        counts = torch.bincount(torch.tensor(rows), minlength=ROWS).float()
        assert torch.equal(table.grad, counts.unsqueeze(1).expand(-1, DIM))
        fresh_rows += len(fresh)
    assert fresh_rows
    address, use = expected.state()
    state = module.state_dict()
    assert state["_itep_module.t_itp_address_lookup"].tolist() == address
    assert state["_itep_module.t_itp_row_util"].tolist() == use
    assert int(state["_iter"]) == STEPS
    assert not any("other_itp" in name for name in state)
    # In evaluation nothing changes; a state that was loaded gives the same.
    module.eval()
    batch = batch_of(2, 0, None)
    again = plain(pooled)
    again.load_state_dict(state)
    again.eval()
    for _ in range(3):
        for each in (module, again):
            found = each(batch)
            values = found["x"] if pooled else found["x"].values()
            rows = expected.rows(ids_of(batch))[: batch.length_per_key()[0]]
            assert torch.allclose(values.sum(0), table.detach()[rows].sum(0), atol=1e-5)
    assert int(module._iter) == STEPS
    assert [config.name for config in module.embedding_bag_configs()] == ["t", "other"]


def test_bags_that_samples_share_count_for_each():
    module = plain(pooled=True)
    batch = KeyedJaggedTensor(
        ["x", "y", "z"],
        torch.tensor([100, 7, 7, 50, 1]),
        lengths=torch.tensor([1, 2, 1, 1]),
        stride_per_key_per_rank=[[2], [1], [1]],
        inverse_indices=(["y", "x", "z"], torch.tensor([[0, 0, 0], [0, 1, 1], [0, 0, 0]])),
    )
    module(batch)
    use = module.state_dict()["_itep_module.t_itp_row_util"]
    assert {i: float(use[i]) for i in use.nonzero().flatten().tolist()} == {100: 1, 7: 4, 50: 3}


def test_what_does_not_fit_is_told():
    with pytest.raises(UserError, match="pruning_interval is 0"):
        GenericITEPModule({}, pruning_interval=0)
    config = EmbeddingBagConfig(
        name="t", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["x"]
    )
    few = EmbeddingBagCollection(tables=[config])
    with pytest.raises(UserError, match="table 't' has 40 rows for 30 ids"):
        ITEPEmbeddingBagCollection(few, GenericITEPModule({"t": 30}))
    module = plain(pooled=True)
    with pytest.raises(
        IndexError, match="id 120 of feature 'y' is not one of the 120 ids of table 't'"
    ):
        module(
            KeyedJaggedTensor(["x", "y", "z"], torch.tensor([IDS]), lengths=torch.tensor([0, 1, 0]))
        )
    state = module.state_dict()
    state["_itep_module.t_itp_address_lookup"][3] = ROWS
    with pytest.raises(UserError, match="saved with ids on rows of other ranks"):
        module.load_state_dict(state)
    off = GenericITEPModule({"t": IDS}, enable_pruning=False)
    left = ITEPEmbeddingBagCollection(few, off)
    one = KeyedJaggedTensor(["x"], torch.tensor([3]), lengths=torch.tensor([1]))
    assert torch.equal(left(one)["x"], few(one)["x"])
    alone, sharder = ShardingEnv.from_local(1, 0), ITEPEmbeddingBagCollectionSharder()
    place = construct_module_sharding_plan(plain(True), {"t": table_wise(0), "other": data_parallel()}, sharder, 1, 1, "cpu")  # fmt: skip
    with pytest.raises(UserError, match="table 'other' is data_parallel"):
        sharder.shard(plain(pooled=True), place, alone)
    used = plain(pooled=True)
    used(batch_of(0, 0, None))
    place = construct_module_sharding_plan(used, {"t": table_wise(0), "other": table_wise(0)}, sharder, 1, 1, "cpu")  # fmt: skip
    with pytest.raises(UserError, match="shard first, then load the state"):
        sharder.shard(used, place, alone)
    with pytest.raises(UserError, match="not prefetched"):
        sharder.shard(plain(pooled=True), place, alone).prefetch([])
    with pytest.raises(UserError, match="use_index_dedup"):
        ITEPEmbeddingCollectionSharder(EmbeddingCollectionSharder(use_index_dedup=True))


def test_a_row_that_moves_loses_its_optimizers_state():
    sharder = ITEPEmbeddingBagCollectionSharder(
        EmbeddingBagCollectionSharder({"optimizer": "exact_row_wise_adagrad", "learning_rate": LR})
    )
    module = plain(pooled=True)
    place = construct_module_sharding_plan(module, {"t": table_wise(0, compute_kernel="fused"), "other": table_wise(0, compute_kernel="fused")}, sharder, 1, 1, "cpu")  # fmt: skip
    sharded = sharder.shard(module, place, ShardingEnv.from_local(1, 0))
    ((own, address, use),) = sharded._itep_module.held
    for tensor in (own.weights, *own.states):
        tensor.fill_(1.0)
    use[100:] = 5.0
    sharded._itep_module.prune(INTERVAL * 2 - 1)
    gained = address[100:][address[100:] != 0]
    assert len(gained) > 10
    for tensor in (own.weights, *own.states):
        zero = (tensor.view(ROWS, -1) == 0).all(1).nonzero().flatten()
        assert zero.tolist() == sorted(gained.tolist())
    assert len(own.states) == 1


PLANS = {
    "table_wise": (lambda ranks: table_wise(ranks - 1, compute_kernel="fused"), 1),
    "column_wise": (lambda ranks: column_wise(list(range(ranks)), compute_kernel="fused"), 1),
    "row_wise": (lambda _: row_wise(compute_kernel="fused"), None),
    "table_row_wise": (lambda _: table_row_wise(0, compute_kernel="fused"), None),
}


class Model(nn.Module):
    """A pruned collection in a model."""

    def __init__(self, pooled):
        super().__init__()
        self.tables = plain(pooled, torch.device("meta"))

    def forward(self, batch):
        return self.tables(batch)


def model_on(kind, pooled):
    ranks, device = dist.get_world_size(), rank_device()
    settings = {"optimizer": "exact_sgd", "learning_rate": LR}
    sharders = [
        ITEPEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(settings)),
        ITEPEmbeddingCollectionSharder(EmbeddingCollectionSharder(settings)),
    ]
    model = Model(pooled)
    # The other table is cut in another way, so that there are two shardings.
    other = row_wise() if kind == "table_wise" and ranks > 1 else table_wise(0)
    place = construct_module_sharding_plan(
        *(model.tables, {"t": PLANS[kind][0](ranks), "other": other}),
        *(sharders[0 if pooled else 1], ranks, ranks, device.type),
    )
    assert place["t"].sharding_type == kind
    return DistributedModelParallel(
        model,
        ShardingEnv.from_process_group(dist.group.WORLD),
        device,
        ShardingPlan({"tables": place}),
        sharders,
    )


def whole(state, name):
    (key,) = (key for key in state if key.endswith(name))
    return whole_on_each_rank(state[key])


def trains(kind, pooled, folder):
    """Vectors, gradients, addresses and uses of each step as of the loops for all ranks' ids; a checkpoint."""
    ranks, rank, device = dist.get_world_size(), dist.get_rank(), rank_device()
    model = model_on(kind, pooled)
    form = ShardedITEPEmbeddingBagCollection if pooled else ShardedITEPEmbeddingCollection
    assert isinstance(model.module.tables, form)
    expected = Blocks(IDS, ROWS, PLANS[kind][1] or ranks)
    anew = 0
    for step in range(STEPS):
        batches = [batch_of(step, source, device) for source in range(ranks)]
        before = whole(model.state_dict(), ".t.weight")
        rows, fresh = expected.step([i for batch in batches for i in ids_of(batch)], step)
        before[fresh] = 0
        anew += len(fresh)
        own = expected.rows(ids_of(batches[rank]))
        vectors = model(batches[rank])
        if pooled:
            found = torch.cat([vectors["x"], vectors["y"]])
            bags = torch.split(before[own], batches[rank].lengths()[:12].tolist())
            wanted = torch.stack([bag.sum(0) for bag in bags])
            loss = vectors.values().sum()
        else:
            found = torch.cat([vectors["x"].values(), vectors["y"].values()])
            wanted = before[own]
            loss = sum(own.values().sum() for own in vectors.values())
        assert torch.allclose(found.cpu(), wanted, atol=1e-4)
        loss.backward()
        counts = torch.bincount(torch.tensor(rows), minlength=ROWS).unsqueeze(1)
        after = whole(model.state_dict(), ".t.weight")
        assert torch.allclose(after, before - LR * counts / ranks, atol=1e-4)
    assert anew
    address, use = expected.state()
    state = model.state_dict()
    for name, values in (("t_itp_address_lookup", address), ("t_itp_row_util", use)):
        tensor = whole(state, name)
        for column in tensor.view(IDS, -1).t():
            assert column.tolist() == values
    model.eval()
    outcome = evaluated(model, device)
    save_checkpoint(folder, model=model)
    other = model_on(kind, pooled)
    load_checkpoint(folder, model=other)
    other.eval()
    assert torch.equal(evaluated(other, device), outcome)
    again = model_on(kind, pooled)
    again.load_state_dict(state)
    again.eval()
    assert torch.equal(evaluated(again, device), outcome)
    assert int(other.module.tables._iter) == STEPS
    return outcome


def evaluated(model, device):
    batch = batch_of(77, 0, device)
    found = model(batch)
    parts = [
        found[key] if isinstance(found[key], torch.Tensor) else found[key].values() for key in "xyz"
    ]
    return torch.cat(parts).detach().cpu()


@pytest.mark.multi_gpu
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("table_wise", 1), ("row_wise", 4), ("table_wise", 3), *((kind, 2) for kind in PLANS)],
)
def test_ranks_train_as_the_loops_do(kind, ranks, pooled, tmp_path):
    outcomes = run_on_ranks(ranks, trains, kind, pooled, tmp_path / "saved")
    assert all(torch.equal(outcome, outcomes[0]) for outcome in outcomes)
    # One process reads what they saved.
    model = Model(pooled)
    model.tables = plain(pooled)
    model.load_state_dict(read_checkpoint(tmp_path / "saved").model)
    model.eval()
    found = evaluated(model, None)
    assert torch.allclose(found, outcomes[0], atol=1e-4)
    # It goes on with one row that ids share, where each block of rows had one.
    model.train()
    for step in range(STEPS, STEPS + 6):
        model(batch_of(step, 0, None))
    address = model.state_dict()["tables._itep_module.t_itp_address_lookup"]
    held = address[address != 0].tolist()
    assert len(held) == len(set(held)) > ROWS - max(4, ranks + 1)  # each block shares a row


class Trained(nn.Module):
    """A model with a loss, as pipelines take it."""

    def __init__(self):
        super().__init__()
        self.tables = plain(pooled=True)

    def forward(self, batch):
        loss = self.tables(batch).values().square().mean()
        return loss, loss.detach()


def planned_and_pipelined():
    """A plan of the planner, with default sharders; a pipeline gives the losses of a loop."""
    device, found = rank_device(), []
    for pipelined in (False, True):
        torch.manual_seed(0)
        topology = Topology(world_size=dist.get_world_size(), compute_device=device.type)
        net = Trained()
        plan = EmbeddingShardingPlanner(topology).collective_plan(
            net, get_default_sharders(), dist.group.WORLD
        )
        model = DistributedModelParallel(net, device=device, plan=plan)
        assert isinstance(model.module.tables, ShardedITEPEmbeddingBagCollection)
        batches = [batch_of(step, dist.get_rank(), device) for step in range(STEPS)]
        losses = []
        if pipelined:
            pipeline, rest = TrainPipelineSparseDist(model, NoSteps(), device), iter(batches)
            losses = [float(pipeline.progress(rest)) for _ in batches]
        else:
            for batch in batches:
                loss, _ = model(batch)
                loss.backward()
                losses.append(float(loss))
        found.append((losses, whole(model.state_dict(), "t_itp_address_lookup").tolist()))
    assert found[0] == found[1]
    return found[0]


class NoSteps(torch.optim.SGD):
    """The optimizer of a model whose tables have theirs in the backward pass."""

    def __init__(self):
        super().__init__([nn.Parameter(torch.zeros(1))], lr=0.0)


@pytest.mark.multi_gpu
def test_a_pipeline_trains_as_a_loop_does():
    (losses, address), _ = run_on_ranks(2, planned_and_pipelined)
    assert len(set(losses)) == STEPS
    assert address != [i if i < ROWS else 0 for i in range(IDS)]


def test_default_sharders_know_pruned_collections():
    types = {sharder.module_type for sharder in get_default_sharders()}
    assert {ITEPEmbeddingBagCollection, ITEPEmbeddingCollection} <= types
