"""Hash-based managed collisions on ranks: rows as of lists of rows, whatever the number of ranks."""

from unittest import mock

import pytest
import torch
from torch import distributed as dist

from tessera.errors import UserError
from tessera.training import CombinedOptimizer, DistributedModelParallel, ShardingPlan
from tessera.training.distributed.checkpoint import (
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from tessera.training.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from tessera.training.distributed.mc_embeddingbag import (
    ManagedCollisionEmbeddingBagCollectionSharder,
)
from tessera.training.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from tessera.training.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tessera.training.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.training.modules.hash_mc_evictions import (
    HashZchEvictionConfig,
    HashZchEvictionPolicyName,
)
from tessera.training.modules.hash_mc_modules import HashZchManagedCollisionModule
from tessera.training.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from tessera.training.modules.mc_modules import (
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from tests.training.mc_reference import MapInADictionary, PlacesInAList
from tests.training.ranks import rank_device, run_on_ranks
from tests.training.test_sharded_mc import batch, table_of

IDS, BUCKETS, PROBES, STEPS = 1000, 4, 3, 6
ROWS = {"a": 24, "b": 16, "c": 20}
FEATURES = {"a": ["x"], "b": ["y"], "c": ["z"]}


def fill(weights):
    torch.nn.init.constant_(weights, 0.25)


def plain(pooled, device, buckets=BUCKETS):
    """Hash-based maps by range and by remainder, and beside them, in unpooled tables, one that is sorted."""
    kind = EmbeddingBagConfig if pooled else EmbeddingConfig
    configs = [
        kind(rows, 4, name=name, feature_names=FEATURES[name], init_fn=fill)
        for name, rows in ROWS.items()
        if name != "c" or not pooled
    ]
    lru = {
        "eviction_policy_name": HashZchEvictionPolicyName.LRU_EVICTION,
        "eviction_config": HashZchEvictionConfig([], single_ttl=0),
    }
    maps = {
        "a": HashZchManagedCollisionModule(
            24, device, buckets, PROBES, input_hash_size=IDS, name="a", **lru
        ),
        "b": HashZchManagedCollisionModule(16, device, buckets, PROBES, name="b"),
    }
    if not pooled:
        maps["c"] = MCHManagedCollisionModule(
            20, device, LFU_EvictionPolicy(), 1, input_hash_size=IDS
        )
    inner = (EmbeddingBagCollection if pooled else EmbeddingCollection)(configs, device=device)
    outer = (
        ManagedCollisionEmbeddingBagCollection if pooled else ManagedCollisionEmbeddingCollection
    )
    return outer(inner, ManagedCollisionCollection(maps, configs), True)


def sharded(pooled, buckets=BUCKETS):
    sharder = (
        ManagedCollisionEmbeddingBagCollectionSharder
        if pooled
        else ManagedCollisionEmbeddingCollectionSharder
    )(fused_params={"optimizer": "exact_sgd", "learning_rate": 0.5})
    module, device = plain(pooled, torch.device("meta"), buckets), rank_device()
    names = list(ROWS)[: 2 if pooled else 3]
    by_rows = dict.fromkeys(names, row_wise(compute_kernel="fused"))
    plan = construct_module_sharding_plan(module, by_rows, sharder, device_type=device.type)
    return DistributedModelParallel(
        module, device=device, plan=ShardingPlan({"": plan}), sharders=[sharder]
    )


def run(pooled):
    model, seen = sharded(pooled), []
    for step in range(STEPS):
        with mock.patch("time.time", return_value=(step + 50) * 3600.0):
            seen.append(train(model, batch(dist.get_rank(), step, rank_device(), samples=10)))
    return seen, table_of(model, "a")


def train(model, given):
    """One step; returns the rows of the ids by feature."""
    found, rows = model(given)
    values = found.values()
    if not isinstance(values, torch.Tensor):  # of an unpooled collection, by feature
        values = torch.cat([own.values() for own in values])
    values.sum().backward()
    return {key: bag.values().tolist() for key, bag in rows.to_dict().items()}


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_are_those_of_lists_of_rows(world):
    pooled = world == 4
    per_rank = run_on_ranks(world, run, pooled)
    references = {
        "a": PlacesInAList([(6 * b, 6) for b in range(4)], PROBES, lambda i: i // 250, "lru"),
        "b": PlacesInAList([(4 * b, 4) for b in range(4)], PROBES, lambda i: i % 4),
    }
    sorted_maps = [
        MapInADictionary(20 // world, "lfu", first=rank * 20 // world) for rank in range(world)
    ]
    owner = -(-IDS // world)
    evicted = 0
    for step in range(STEPS):
        batches = [batch(rank, step, samples=10) for rank in range(world)]
        for name, reference in references.items():
            (key,) = FEATURES[name]
            ids = [id_ for given in batches for id_ in given[key].values().tolist()]
            evicted += len(reference.train(ids, step + 50))
            for given, (seen, _) in zip(batches, per_rank, strict=True):
                assert seen[step][key] == [reference.row(i) for i in given[key].values().tolist()]
        ids = [id_ for given in batches for id_ in given["z"].values().tolist()]
        for rank, own in enumerate(sorted_maps):
            own.train([id_ for id_ in ids if id_ // owner == rank])
        for given, (seen, _) in zip(batches, [] if pooled else per_rank, strict=not pooled):
            expected = [sorted_maps[i // owner].rows([i])[0] for i in given["z"].values().tolist()]
            assert seen[step]["z"] == expected
    assert evicted > 5
    assert len(references["b"].rows) > 8
    assert all(bool((table != 0.25).any()) for _, table in per_rank)


def known_to(model):
    """The rows and vectors of ids of all steps, in evaluation."""
    model.eval()
    with torch.no_grad():
        found = [model(batch(0, step, rank_device(), samples=20)) for step in range(STEPS)]
    model.train()
    rows = [own[key].values().tolist() for _, own in found for key in ("x", "y")]
    return rows, [vectors.values().cpu() for vectors, _ in found]


def save(folder):
    model = sharded(pooled=True)
    for step in range(3):
        train(model, batch(dist.get_rank(), step, rank_device()))
    optimizer = CombinedOptimizer([model.fused_optimizer])
    save_checkpoint(folder, model=model, optimizer=optimizer)
    before = known_to(model)
    model.load_state_dict(model.state_dict())
    assert known_to(model)[0] == before[0]
    return before


def load(folder, buckets=BUCKETS):
    model = sharded(True, buckets)
    train(model, batch(dist.get_rank(), 4, rank_device()))  # forgotten by the load
    optimizer = CombinedOptimizer([model.fused_optimizer])
    load_checkpoint(folder, model=model, optimizer=optimizer)
    return known_to(model)


def refuse(folder):
    messages = []
    for buckets in (2, 1):
        with pytest.raises(UserError) as told:
            load(folder, buckets)
        messages.append(str(told.value))
    return messages


def test_checkpoints_move_to_more_and_to_fewer_ranks(tmp_path):
    folder = tmp_path / "step"
    saved = run_on_ranks(2, save, folder)[0]
    assert len({row for own in saved[0] for row in own}) > 12
    for world in (1, 4):
        for rows, vectors in run_on_ranks(world, load, folder):
            assert rows == saved[0]
            assert all(map(torch.equal, vectors, saved[1]))
    model = plain(True, torch.device("cpu"))
    model.load_state_dict(read_checkpoint(folder).model)
    assert known_to(model)[0] == saved[0]
    for messages in run_on_ranks(2, refuse, folder):
        assert "has 4 buckets; give the module total_num_buckets=4" in messages[0]
        assert "not whole buckets; give it a total_num_buckets" in messages[1]
