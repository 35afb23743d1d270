"""Managed collisions on ranks: ids, vectors and updates as of a dictionary for each rank's range of ids."""

import pytest
import torch
from torch import distributed as dist

from tessera.errors import UserError
from tessera.training import (
    CombinedOptimizer,
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
from tessera.training.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from tessera.training.distributed.mc_embeddingbag import (
    ManagedCollisionEmbeddingBagCollectionSharder,
)
from tessera.training.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from tessera.training.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from tessera.training.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from tests.training.mc_reference import MapInADictionary
from tests.training.ranks import rank_device, run_on_ranks, whole_on_each_rank

IDS = 1000
ROWS = {"a": 16, "b": 24}
FEATURES = {"a": ["x", "y"], "b": ["z"]}
ONE_OF_TWO_TABLES = {"a": ["x", "y"], "b": ["z", "x"]}
DIM, LR, START, STEPS, INTERVAL = 4, 0.5, 0.25, 7, 2


def fill(weights):
    torch.nn.init.constant_(weights, START)


def half(ids, size):
    """A function of ids that several ids have in common."""
    return (ids // 2) % size


def plain(pooled, device, features=FEATURES):
    configs = [
        (EmbeddingBagConfig if pooled else EmbeddingConfig)(
            rows,
            DIM,
            name=name,
            feature_names=features[name],
            init_fn=fill,
            **({"pooling": PoolingType.MEAN} if pooled and name == "b" else {}),
        )
        for name, rows in ROWS.items()
    ]
    maps = {
        table.name: MCHManagedCollisionModule(
            table.num_embeddings,
            device,
            DistanceLFU_EvictionPolicy(),
            INTERVAL,
            input_hash_size=IDS,
            input_hash_func=half if table.name == "b" else None,
            name=table.name,
        )
        for table in configs
    }
    inner = (EmbeddingBagCollection if pooled else EmbeddingCollection)(configs, device=device)
    outer = (
        ManagedCollisionEmbeddingBagCollection if pooled else ManagedCollisionEmbeddingCollection
    )
    return outer(inner, ManagedCollisionCollection(maps, configs), True)


def batch(rank, step, device="cpu", samples=None):
    """Bags of 0 to 3 ids, features in another order than the tables'; the ids drift."""
    samples = rank + 2 if samples is None else samples
    generator = torch.Generator().manual_seed(31 * rank + step)
    lengths = torch.randint(0, 4, (3 * samples,), generator=generator)
    ids = torch.randint(0, 12, (int(lengths.sum()),), generator=generator)
    ids = (ids * 83 + step * 37) % IDS
    return KeyedJaggedTensor(["z", "x", "y"], ids.to(device), lengths=lengths.to(device))


def model_on(pooled, *, by_planner=False, optimizer="exact_sgd", features=FEATURES):
    kind = (
        ManagedCollisionEmbeddingBagCollectionSharder
        if pooled
        else ManagedCollisionEmbeddingCollectionSharder
    )
    sharder = kind(fused_params={"optimizer": optimizer, "learning_rate": LR})
    module = plain(pooled, torch.device("meta"), features)
    device, plan = rank_device(), None
    if not by_planner:
        plan = construct_module_sharding_plan(
            module,
            dict.fromkeys(ROWS, row_wise(compute_kernel="fused")),
            sharder,
            device_type=device.type,
        )
        plan = ShardingPlan({"": plan})
    return DistributedModelParallel(module, device=device, plan=plan, sharders=[sharder])


def vectors_of(pooled, found):
    return found.values() if pooled else torch.cat([found[k].values() for k in ("x", "y", "z")])


def scale(values):
    return torch.arange(values.numel()).view(values.shape) / 10


def train(model, pooled, steps):
    rank, seen = dist.get_rank(), []
    for step in steps:
        found, rows = model(batch(rank, step, rank_device()))
        values = vectors_of(pooled, found)
        seen.append(
            (values.detach().cpu(), {key: rows[key].values().tolist() for key in ("x", "y", "z")})
        )
        (values * scale(values).to(values.device)).sum().backward()
    return seen


def table_of(model, name):
    (weight,) = [v for k, v in model.state_dict().items() if k.endswith(f".{name}.weight")]
    return whole_on_each_rank(weight)


def run(pooled, by_planner):
    model = model_on(pooled, by_planner=by_planner)
    seen = train(model, pooled, range(STEPS))
    model.eval()
    with torch.no_grad():
        _, rows = model(batch(dist.get_rank(), STEPS, rank_device()))
    unseen = {key: rows[key].values().tolist() for key in ("x", "y", "z")}
    return seen, unseen, {name: table_of(model, name) for name in ROWS}


class Reference:
    """A dictionary for each rank's range of each table's ids, and tables in float64."""

    def __init__(self, world, features=FEATURES):
        self.world, self.features = world, features
        self.maps = {
            name: [
                MapInADictionary(rows // world, "distance", INTERVAL, first=r * rows // world)
                for r in range(world)
            ]
            for name, rows in ROWS.items()
        }
        self.weights = {n: torch.full((r, DIM), START).double() for n, r in ROWS.items()}

    def ids(self, given, name, key):
        found = given[key].values()
        return (half(found, IDS) if name == "b" else found).tolist()

    def owner(self, id_):
        return id_ // -(-IDS // self.world)

    def places(self, given):
        """Table, feature and rows of each feature of each table, in order."""
        return [
            (name, key, [self.maps[name][self.owner(i)].rows([i])[0] for i in ids])
            for name, keys in self.features.items()
            for key in keys
            for ids in [self.ids(given, name, key)]
        ]

    def rows(self, given):
        return {key: rows for _, key, rows in self.places(given)}

    def profile(self, batches):
        changed = 0
        for name, keys in self.features.items():
            ids = [i for given in batches for key in keys for i in self.ids(given, name, key)]
            for rank, own in enumerate(self.maps[name]):
                evicted = own.train([i for i in ids if self.owner(i) == rank]) or []
                self.weights[name][evicted] = START
                changed += len(evicted)
        return changed

    def vectors(self, pooled, name, lengths, rows, weights):
        vectors = weights[name][rows].split(lengths.tolist())
        if not pooled:
            return torch.cat(vectors)
        mean = name == "b"
        return torch.stack([v.sum(0) / (max(len(v), 1) if mean else 1) for v in vectors])

    def outputs(self, pooled, given, weights):
        parts = [
            self.vectors(pooled, name, given[key].lengths(), rows, weights)
            for name, key, rows in self.places(given)
        ]
        return torch.cat(parts, dim=1 if pooled else 0)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("pooled", [True, False])
def test_steps_are_those_of_dictionaries_and_plain_tables(world, pooled):
    per_rank = run_on_ranks(world, run, pooled, by_planner=world == 2)
    reference, changed = Reference(world), 0
    for step in range(STEPS):
        batches = [batch(rank, step) for rank in range(world)]
        changed += reference.profile(batches)
        weights = {n: w.clone().requires_grad_() for n, w in reference.weights.items()}
        for rank, given in enumerate(batches):
            values, rows = per_rank[rank][0][step]
            assert rows == reference.rows(given)
            expected = reference.outputs(pooled, given, weights)
            torch.testing.assert_close(values.double(), expected, rtol=1e-4, atol=1e-4)
            (expected * scale(expected)).sum().backward()
        for name, weight in weights.items():
            reference.weights[name] = weight.detach() - LR * weight.grad / world
    assert changed > sum(ROWS.values())  # rows were given up, not only filled
    for rank, (_, unseen, tables) in enumerate(per_rank):
        assert unseen == reference.rows(batch(rank, STEPS))
        for name, weight in reference.weights.items():
            torch.testing.assert_close(tables[name].double(), weight, rtol=1e-4, atol=1e-4)


def two_tables(pooled):
    """By step the vectors of each feature of each table, and their rows, each in a list by place."""
    model = model_on(pooled, features=ONE_OF_TWO_TABLES)
    seen = []
    for step in range(STEPS):
        found, rows = model(batch(dist.get_rank(), step, rank_device()))
        vectors = found.values().split(DIM, 1) if pooled else [b.values() for b in found.values()]
        parts = rows.split([1] * 4)
        seen.append(([v.detach().cpu() for v in vectors], [p.values().tolist() for p in parts]))
        sum((v * scale(v).to(v.device)).sum() for v in vectors).backward()
    return seen


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("pooled", [True, False])
def test_a_feature_of_two_tables_has_rows_of_each_map(world, pooled):
    per_rank = run_on_ranks(world, two_tables, pooled)
    reference, different = Reference(world, ONE_OF_TWO_TABLES), 0
    for step in range(STEPS):
        batches = [batch(rank, step) for rank in range(world)]
        reference.profile(batches)
        weights = {n: w.clone().requires_grad_() for n, w in reference.weights.items()}
        for rank, given in enumerate(batches):
            vectors, rows = per_rank[rank][step]
            places = reference.places(given)
            assert rows == [own for _, _, own in places]
            different += rows[0] != rows[3]
            for found, (name, key, own) in zip(vectors, places, strict=True):
                expected = reference.vectors(pooled, name, given[key].lengths(), own, weights)
                torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
                (expected * scale(expected)).sum().backward()
        for name, weight in weights.items():
            reference.weights[name] = weight.detach() - LR * weight.grad / world
    assert different


def rows_of(model):
    """The rows of ids that the training has seen, and of others, in evaluation."""
    model.eval()
    with torch.no_grad():
        rows = [model(batch(0, step, rank_device(), samples=20))[1] for step in (3, STEPS)]
    model.train()
    return [own[key].values().tolist() for own in rows for key in ("x", "y", "z")]


def goes_on(model):
    """The rows after two steps more, of the same batches on all ranks."""
    for step in (4, 5):
        found, _ = model(batch(0, step, rank_device(), samples=8))
        found.values().sum().backward()
    return rows_of(model)


def save(folder):
    model = model_on(pooled=True)
    optimizer = CombinedOptimizer([model.fused_optimizer])
    train(model, True, range(4))
    save_checkpoint(folder, model=model, optimizer=optimizer)
    model.load_state_dict(model.state_dict())
    return rows_of(model), [table_of(model, name) for name in ROWS], goes_on(model)


def load(folder):
    model = model_on(pooled=True)
    train(model, True, range(2))  # forgotten by the load
    optimizer = CombinedOptimizer([model.fused_optimizer])
    load_checkpoint(folder, model=model, optimizer=optimizer)
    return rows_of(model), [table_of(model, name) for name in ROWS], goes_on(model)


def moved(rows, world):
    """What becomes of rows that 4 ranks gave: unknown ids have the last row of their new part."""
    result = []
    for key, own in zip("xyz" * 2, rows, strict=True):
        size = ROWS["b" if key == "z" else "a"]
        before, now = size // 4, size // world
        result.append([row if (row + 1) % before else (row // now + 1) * now - 1 for row in own])
    return result


def test_checkpoints_move_to_fewer_ranks_and_to_one_process(tmp_path):
    folder = tmp_path / "step"
    rows, tables, after = run_on_ranks(4, save, folder)[0]
    known = [row for own in rows for row in own if (row + 1) % 4 and (row + 1) % 6]
    assert len(set(known)) > 5
    for world in (4, 2):
        for own_rows, own_tables, own_after in run_on_ranks(world, load, folder):
            assert own_rows == moved(rows, world)
            for found, expected in zip(own_tables, tables, strict=True):
                assert torch.equal(found, expected)
            assert world != 4 or own_after == after
    model = plain(True, torch.device("cpu"))
    model.load_state_dict(read_checkpoint(folder).model)
    assert rows_of(model) == moved(rows, 1)
    bags = model._embedding_bag_collection.embedding_bags
    for name, expected in zip(ROWS, tables, strict=True):
        assert torch.equal(bags[name].weight, expected)


def maps_of(model):
    """By table the ids that have a row, with the row's numbers and its optimizer state, and their scores."""
    found = {}
    maps = model.module._managed_collision_collection
    for kernel in model.module.table_kernels():
        for place, table in enumerate(kernel.tables):
            part = maps._part_of(table.name)
            first = table.local_metadata.shard_offsets[0]
            tensors = [kernel.split_embedding_weights()[place], *kernel.states_by_table()[place]]
            for id_, row, *remembered in part.pairs().tolist():
                numbers = [tensor[row - first].tolist() for tensor in tensors]
                found[table.name, id_] = (numbers, remembered)
            unknown = [tensor[-1].tolist() for tensor in tensors]
            found[table.name, f"unknown of {dist.get_rank()}"] = (unknown, None)
    return found


def save_maps(folder):
    model = model_on(pooled=True, optimizer="exact_row_wise_adagrad")
    optimizer = CombinedOptimizer([model.fused_optimizer])
    train(model, True, range(6))
    save_checkpoint(folder, model=model, optimizer=optimizer)
    return maps_of(model)


def load_maps(folder):
    model = model_on(pooled=True, optimizer="exact_row_wise_adagrad")
    train(model, True, range(2))  # forgotten by the load
    optimizer = CombinedOptimizer([model.fused_optimizer])
    load_checkpoint(folder, model=model, optimizer=optimizer)
    found = maps_of(model)
    train(model, True, range(6, 9))
    # The maps' and the tables' own rules still hold, and it is saved as any.
    save_checkpoint(folder.with_name(f"{folder.name}-again"), model=model, optimizer=optimizer)
    return found


def score(remembered, step=6):
    count, last = remembered
    return count / (step - last + 1)


def joined(per_rank):
    return {key: value for own in per_rank for key, value in own.items()}


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, 4), (2, 4), (2, 3), (3, 2), (4, 3)])
def test_checkpoints_move_to_any_number_of_ranks(tmp_path, saved_on, loaded_on):
    folder = tmp_path / "step"
    before = joined(run_on_ranks(saved_on, save_maps, folder))
    after = joined(run_on_ranks(loaded_on, load_maps, folder))
    for table, rows in ROWS.items():
        ids = sorted(id_ for name, id_ in before if name == table and isinstance(id_, int))
        kept = {id_ for name, id_ in after if name == table and isinstance(id_, int)}
        assert kept <= set(ids)
        for rank in range(loaded_on):
            # The ids of the rank's range, of which those with the highest scores fit.
            own = [id_ for id_ in ids if id_ // -(-IDS // loaded_on) == rank]
            share = -(-rows // loaded_on)
            room = min(share, rows - share * rank) - 1
            scores = {id_: score(before[table, id_][1]) for id_ in own}
            assert len(kept & set(own)) == min(len(own), room)
            lost = [scores[id_] for id_ in own if id_ not in kept]
            assert all(scores[id_] >= max(lost, default=0) for id_ in kept & set(own))
            source = -(-IDS // loaded_on) * rank // -(-IDS // saved_on)
            assert after[table, f"unknown of {rank}"] == before[table, f"unknown of {source}"]
        for id_ in kept:
            assert after[table, id_] == before[table, id_]
    assert len(after) > 20


def refuse(folder):
    messages = []
    for attempt in (
        lambda: model_on(pooled=True).load_state_dict(read_checkpoint(folder).model),
        lambda: construct_and_shard(table_wise(0)),
        shard_used,
        lambda: ManagedCollisionEmbeddingCollectionSharder(
            EmbeddingCollectionSharder(use_index_dedup=True)
        ),
    ):
        with pytest.raises(UserError) as told:
            attempt()
        messages.append(str(told.value))
    return messages


def construct_and_shard(placement, module=None):
    module = module or plain(True, torch.device("cpu"))
    sharder = ManagedCollisionEmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(module, dict.fromkeys(ROWS, placement), sharder)
    DistributedModelParallel(module, plan=ShardingPlan({"": plan}), sharders=[sharder])


def shard_used():
    module = plain(True, torch.device("cpu"))
    module(batch(0, 0))
    module(batch(0, 1))
    construct_and_shard(row_wise(), module)


def test_what_cannot_be_spread_is_refused(tmp_path):
    folder = tmp_path / "step"
    run_on_ranks(2, save, folder)
    for messages in run_on_ranks(4, refuse, folder):
        for message, part in zip(
            messages,
            [
                "on as many ranks as it was saved on",
                "are table_wise; place all of a collection row-wise",
                "the map of table 'a' holds ids already",
                "use_index_dedup",
            ],
            strict=True,
        ):
            assert part in message
