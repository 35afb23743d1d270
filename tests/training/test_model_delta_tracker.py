"""Trackers of trained rows against dictionaries: what each consumer is told, in every mode."""

import pytest
import torch
from torch import distributed as dist
from torch import nn

from tessera.errors import UserError
from tessera.training import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    ShardingPlan,
)
from tessera.training.distributed import sharding_plan
from tessera.training.distributed.embedding import EmbeddingCollectionSharder
from tessera.training.distributed.model_tracker import ModelDeltaTracker, TrackingMode
from tessera.training.distributed.model_tracker.delta_store import DeltaStoreTrec
from tessera.training.distributed.model_tracker.types import DeltaTrackerConfig, UpdateMode
from tests.training.ranks import rank_device, run_on_ranks

ROWS = {"a": 13, "b": 7}
# Table t_a serves two features; feature b is looked up in both tables.
FEATURES = {"t_a": ["a", "b"], "t_b": ["b"]}
TABLE_ROWS = {"t_a": 13, "t_b": 7}
LR = 0.1
CPU = torch.device("cpu")


class Tower(nn.Module):
    def __init__(self, pooled):
        super().__init__()
        torch.manual_seed(0)
        self.pooled = pooled
        kind, config = (
            (EmbeddingBagCollection, EmbeddingBagConfig)
            if pooled
            else (EmbeddingCollection, EmbeddingConfig)
        )
        self.tables = kind(
            [
                config(
                    num_embeddings=TABLE_ROWS[name], embedding_dim=4, name=name, feature_names=own
                )
                for name, own in FEATURES.items()
            ]
        )

    def forward(self, features):
        out = self.tables(features)
        values = [out.values()] if self.pooled else [own.values() for own in out.values()]
        return sum(own.pow(2).sum() for own in values)


def built(*, pooled, optimizer="exact_row_wise_adagrad", place=None, kernel="fused", device=CPU):
    sharder = (EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder)(
        {"optimizer": optimizer, "learning_rate": LR}
    )
    model = Tower(pooled)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    plan = sharding_plan.construct_module_sharding_plan(
        model.tables,
        dict.fromkeys(FEATURES, place or sharding_plan.table_wise(rank=0, compute_kernel=kernel)),
        sharder,
        local_size=ranks,
        world_size=ranks,
        device_type=device.type,
    )
    return DistributedModelParallel(
        model, device=device, plan=ShardingPlan({"tables": plan}), sharders=[sharder]
    )


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 3, (6,), generator=generator)
    values = [
        torch.randint(0, rows, (int(own.sum()),), generator=generator)
        for rows, own in zip(ROWS.values(), lengths.split(3), strict=True)
    ]
    ids = dict(zip(ROWS, values, strict=True))
    return KeyedJaggedTensor(list(ROWS), torch.cat(values), lengths=lengths), ids


def states_of(model, mode):
    """Per table what the mode keeps of each of its rows, now."""
    found = {}
    for name in FEATURES:
        if mode is TrackingMode.ID_ONLY:
            found[name] = None
        elif mode is TrackingMode.EMBEDDING:
            found[name] = model.module.tables.embeddings[name].weight.detach().clone()
        else:
            states = model.fused_optimizer.state_dict()["state"]
            holder = "embedding_bags" if model.module.pooled else "embeddings"
            own = states[f"tables.{holder}.{name}.weight"]["momentum1"].clone()
            last = mode is TrackingMode.MOMENTUM_LAST and own.dim() == 2
            found[name] = own.norm(dim=1) if last else own
    return found


def check_told(rows, holder, waiting, now, mode):
    """Hold what a consumer was told against what waits for it, which is told then."""
    for name, expected in waiting.items():
        found = rows[f"{holder}.{name}"]
        assert found.ids.tolist() == sorted(expected)
        for place, row in enumerate(found.ids.tolist()):
            state = expected[row]
            if mode in {TrackingMode.ROWWISE_ADAGRAD, TrackingMode.MOMENTUM_DIFF}:
                state = now[name][row] - state
            if state is not None:
                assert torch.equal(found.states[place], state)
        expected.clear()


@pytest.mark.parametrize("auto_compact", [False, True])
@pytest.mark.parametrize("delete_on_read", [False, True])
@pytest.mark.parametrize(
    ("mode", "pooled", "optimizer"),
    [
        (TrackingMode.ID_ONLY, True, "exact_sgd"),
        (TrackingMode.ID_ONLY, False, "adam"),
        (TrackingMode.EMBEDDING, False, "exact_row_wise_adagrad"),
        (TrackingMode.ROWWISE_ADAGRAD, True, "exact_row_wise_adagrad"),
        (TrackingMode.MOMENTUM_DIFF, False, "exact_adagrad"),
        (TrackingMode.MOMENTUM_LAST, True, "adam"),
    ],
)
def test_each_consumer_is_told_of_every_row_once(
    *, mode, pooled, optimizer, auto_compact, delete_on_read, device
):
    model = built(pooled=pooled, optimizer=optimizer, device=device)
    assert model.get_delta_tracker() is None
    config = DeltaTrackerConfig(mode, ["x", "y"], delete_on_read, auto_compact)
    tracker = model.init_torchrec_delta_tracker(config)
    assert isinstance(tracker, ModelDeltaTracker)
    assert model.get_delta_tracker() is model.init_torchrec_delta_tracker(config) is tracker
    holder = "tables.embedding_bags" if pooled else "tables.embeddings"
    assert tracker.fqn_to_feature_names() == {
        f"{holder}.{name}": own for name, own in FEATURES.items()
    }
    assert list(tracker.get_tracked_modules()) == ["tables"]
    waiting = {consumer: {name: {} for name in FEATURES} for consumer in "xy"}
    told = {2: "x", 3: "x", 5: "y", 6: "xy", 8: "yx"}
    for step in range(9):
        features, ids = batch(step)
        before = states_of(model, mode)
        for consumer in waiting.values():
            for name, own in FEATURES.items():
                for row in torch.cat([ids[key] for key in own]).tolist():
                    state = None if before[name] is None else before[name][row]
                    if mode is TrackingMode.MOMENTUM_LAST:
                        consumer[name][row] = state
                    else:
                        consumer[name].setdefault(row, state)
        model(features.to(device)).backward()
        now = states_of(model, mode)
        for consumer in told.get(step, ""):
            check_told(tracker.get_unique(consumer), holder, waiting[consumer], now, mode)
    kept = sum(len(own) for own in tracker.store.per_fqn_lookups.values())
    assert (kept == 0) == delete_on_read
    assert all(len(own) == 0 for own in tracker.get_unique_ids("x").values())


def test_rows_are_forgotten_for_one_consumer_or_all():
    model = built(pooled=True)
    tracker = model.init_torchrec_delta_tracker(DeltaTrackerConfig(consumers=["x", "y"]))
    model(batch(1)[0])
    tracker.clear("x")
    assert all(len(own) == 0 for own in tracker.get_unique_ids("x").values())
    assert any(len(own) > 0 for own in tracker.get_unique_ids("y").values())
    model(batch(2)[0])
    tracker.clear()
    assert tracker.get_unique_ids("y") == {}
    with pytest.raises(UserError, match="consumer is 'z'; give one of x, y"):
        tracker.get_unique("z")
    with pytest.raises(UserError, match="emb_module is a NoneType whose tables are not tracked"):
        tracker.record_lookup(batch(1)[0], torch.zeros(1))


def test_tables_are_skipped_by_name():
    model = built(pooled=True)
    config = DeltaTrackerConfig(fqns_to_skip=["t_a"])
    tracker = model.init_torchrec_delta_tracker(config)
    features, ids = batch(3)
    model(features)
    (found,) = tracker.get_unique_ids().items()
    assert found[0] == "tables.embedding_bags.t_b"
    assert found[1].tolist() == sorted(set(ids["b"].tolist()))


def test_a_mode_that_does_not_go_with_the_tables_is_refused():
    for mode, how, message in (
        (TrackingMode.EMBEDDING, {"pooled": True}, "tables pools its vectors"),
        (
            TrackingMode.ROWWISE_ADAGRAD,
            {"pooled": True, "optimizer": "adam"},
            "trained by adam in a fused kernel; ROWWISE_ADAGRAD needs",
        ),
        (
            TrackingMode.MOMENTUM_LAST,
            {"pooled": False, "optimizer": "exact_sgd"},
            "MOMENTUM_LAST needs a fused optimizer with a momentum",
        ),
    ):
        with pytest.raises(UserError, match=message):
            built(**how).init_torchrec_delta_tracker(DeltaTrackerConfig(mode))


def test_a_store_refuses_what_its_mode_does_not_keep():
    store = DeltaStoreTrec(UpdateMode.LAST)
    with pytest.raises(ValueError, match="t: states are not given and updateMode is LAST"):
        store.append(0, "t", torch.tensor([1]))
    with pytest.raises(ValueError, match="start_idx is 3; give a step before end_idx, 3"):
        store.compact(3, 3)
    for step, value in enumerate((1.0, 2.0, 3.0)):
        store.append(step, "t", torch.tensor([5, 4 + step]), torch.tensor([value, -value]))
    store.compact(0, 2)
    lookups = store.get_indexed_lookups(0, 3)["t"]
    assert [own.compact for own in lookups] == [True, False]
    found = store.get_unique()["t"]
    assert (found.ids.tolist(), found.states.tolist()) == ([4, 5, 6], [-1.0, 3.0, -3.0])


def test_states_without_a_mode_are_kept_until_rows_must_be_told_apart():
    store = DeltaStoreTrec()
    store.append(1, "t", torch.tensor([5]), torch.tensor([0.5]))
    store.append(2, "t", torch.tensor([5]), torch.tensor([0.7]))
    kept = store.get_indexed_lookups(1, 3)["t"]
    assert [float(own.states) for own in kept] == pytest.approx([0.5, 0.7])
    for ask in (store.get_unique, lambda: store.compact(1, 3)):
        with pytest.raises(ValueError, match="updateMode is NONE, which does not say"):
            ask()
    store.delete(up_to_idx=2)
    assert [own.batch_idx for own in store.per_fqn_lookups["t"]] == [2]


def rows_of_this_rank():
    device = rank_device()
    place = sharding_plan.row_wise(compute_kernel="fused")
    model = built(pooled=True, place=place, device=device)
    tracker = model.init_torchrec_delta_tracker(DeltaTrackerConfig())
    model(batch(dist.get_rank())[0].to(device)).backward()
    return tracker.get_unique_ids()


@pytest.mark.multi_gpu
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_are_those_of_this_ranks_shards(ranks):
    asked = [batch(rank)[1] for rank in range(ranks)]
    for rank, found in enumerate(run_on_ranks(ranks, rows_of_this_rank)):
        for name, own in FEATURES.items():
            ids = torch.cat([ids[key] for ids in asked for key in own]).tolist()
            share = -(-TABLE_ROWS[name] // ranks)
            here = sorted({row - rank * share for row in ids if row // share == rank})
            assert found[f"tables.embedding_bags.{name}"].tolist() == here
