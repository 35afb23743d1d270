"""Managed collisions on one process, held against a map in a dictionary and tables in float64."""

import re
from pathlib import Path

import pytest
import torch

from tessera.errors import UserError
from tessera.training import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from tessera.training.distributed.model.shard import init_parameters
from tessera.training.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from tessera.training.modules.mc_exchange import exchanged_by_parts, exchanged_by_sort
from tessera.training.modules.mc_history import merge, sort_with
from tessera.training.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
    apply_mc_method_to_jt_dict,
    average_threshold_filter,
    dynamic_threshold_filter,
    probabilistic_threshold_filter,
)
from tessera.training.sparse.jagged_tensor import JaggedTensor
from tests.training.mc_reference import POLICIES, MapInADictionary

CPU = torch.device("cpu")
MAX = torch.iinfo(torch.int64).max
DOCS = Path(__file__).parents[2] / "docs" / "managed_collisions.md"


def mch(rows, policy=None, interval=1, device=CPU, **rest):
    return MCHManagedCollisionModule(
        zch_size=rows,
        device=device,
        eviction_policy=policy or LFU_EvictionPolicy(),
        eviction_interval=interval,
        **rest,
    )


def bag(ids, device=CPU):
    values = torch.tensor(ids, dtype=torch.int64, device=device)
    return {"f": JaggedTensor(values, lengths=torch.tensor([len(ids)], device=device))}


def rows_of(module, ids):
    return module(bag(ids, module.device))["f"].values().tolist()


def above_the_mean(counts):
    return {id_ for id_, n in counts.items() if n > sum(counts.values()) / len(counts)}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("filtered", [False, True])
def test_streams_of_ids_have_the_rows_of_a_dictionary(policy, interval, filtered, device):
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        rows = int(torch.randint(2, 14, (1,), generator=generator))
        module = mch(
            rows,
            policy(threshold_filtering_func=average_threshold_filter if filtered else None),
            interval,
            device,
        )
        reference = MapInADictionary(
            rows, POLICIES[policy], interval, above_the_mean if filtered else None
        )
        for step in range(15):
            count = int(torch.randint(0, 16, (1,), generator=generator))
            # The ids drift, so that those of the first steps do not come any more.
            ids = (torch.randint(0, 12, (count,), generator=generator) + step - 5).tolist()
            evicted = reference.train(ids)
            assert rows_of(module, ids) == reference.rows(ids)
            found = module.evict()
            assert (None if found is None else found.tolist()) == evicted
            assert module.open_slots().tolist() == [reference.open_slots()]
        assert module.evict() is None
        everything = list(range(-6, 40))
        assert rows_of(module.eval(), everything) == reference.rows(everything)


@pytest.mark.parametrize("interval", [1, 3])
def test_counting_and_looking_up_apart_give_what_both_in_one_give(interval):
    class Shifted(MCHManagedCollisionModule):
        def remap(self, features, *rest):
            found = super().remap(features, *rest)
            return {"f": bag([row + 1000 for row in found["f"].values().tolist()])["f"]}

    together, apart = mch(6, LRU_EvictionPolicy(), interval), mch(6, LRU_EvictionPolicy(), interval)
    own = Shifted(6, CPU, LRU_EvictionPolicy(), interval)
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        ids = torch.randint(0, 9, (5,), generator=generator).tolist()
        rows = rows_of(together, ids)
        assert apart.remap(apart.profile(bag(ids)))["f"].values().tolist() == rows
        assert rows_of(own, ids) == [row + 1000 for row in rows]
        assert str(together.evict()) == str(apart.evict()) == str(own.evict())


def test_rows_taken_between_two_changes_count_at_the_next_one():
    module = mch(4, interval=2)
    assert rows_of(module, [30, 10, 30]) == [3, 3, 3]
    assert rows_of(module, [20, 10]) == [2, 0]
    assert rows_of(module, [30, 5, 5]) == [1, 3, 3]
    # 40 comes in the place of 10: 30 stands elsewhere than in the step before, in which it came.
    pairs = module.pairs()
    module.take_pairs(torch.cat([pairs[pairs[:, 0] != 10], torch.tensor([[40, 0, 9]])]))
    assert rows_of(module, [5, 5]) == [2, 2]
    assert module.pairs().tolist() == [[5, 2, 4], [30, 1, 3], [40, 0, 9]]


def test_an_id_without_a_row_has_the_last_one_and_evaluation_changes_nothing():
    module = mch(4)
    assert rows_of(module, [7, 7, 8, 9, 1]) == [0, 0, 2, 3, 1]
    module.eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert rows_of(module, [1, 5, 5, 5, MAX, -(2**63)]) == [1, 3, 3, 3, 3, 3]
    after = module.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert module.evict().tolist() == [0, 1, 2]
    assert rows_of(mch(4), [MAX, MAX]) == [3, 3]
    # int32 ids are ids, too.
    given = {"f": JaggedTensor(torch.tensor([1, 2], dtype=torch.int32), lengths=torch.tensor([2]))}
    assert module(given)["f"].values().tolist() == [1, 3]


def test_ids_are_hashed_first_where_a_function_says_so():
    module = mch(5, input_hash_size=10, input_hash_func=lambda ids, size: ids % size)
    assert rows_of(module, [23, 3, 13, 5]) == [2, 2, 2, 3]
    assert module.preprocess(bag([25]))["f"].values().tolist() == [5]
    assert module.input_size() == 10
    given = apply_mc_method_to_jt_dict(module.eval(), "remap", bag([3, 23]))
    assert given["f"].values().tolist() == [2, 4]


class Observed(DistanceLFU_EvictionPolicy):
    """A policy of a user's own, which is asked by TorchRec's method."""

    calls = 0

    def update_metadata_and_generate_eviction_scores(self, *args, **kwargs):
        self.calls += 1
        return super().update_metadata_and_generate_eviction_scores(*args, **kwargs)


def test_a_policy_of_a_users_own_is_asked_by_the_method_of_its_interface():
    observed, generator = Observed(), torch.Generator().manual_seed(0)
    modules = [
        MCHManagedCollisionModule(20, torch.device("cpu"), policy, 2)
        for policy in (observed, DistanceLFU_EvictionPolicy())
    ]
    for _ in range(30):
        ids = (torch.rand(25, generator=generator) ** 2 * 60).long()
        bags = {"f": JaggedTensor(ids, lengths=torch.ones(25, dtype=torch.int32))}
        own, expected = (module(bags)["f"].values() for module in modules)
        assert own.tolist() == expected.tolist()
    assert observed.calls == 15


@pytest.mark.parametrize("size", [1, 2, 30])
def test_a_map_is_sorted_again_alike_by_a_sort_and_by_passes(size):
    generator = torch.Generator().manual_seed(size)
    for _ in range(50):
        ids, others = (torch.randperm(100, generator=generator) for _ in range(2))
        sorted_ids, new_ids = ids[:size].sort().values, ids[size:]
        count = int(torch.randint(0, size + 1, (), generator=generator))
        replaced = torch.randperm(size, generator=generator)[:count]
        new_ids = new_ids[:count].sort().values
        places = torch.searchsorted(sorted_ids, new_ids)
        by_passes, by_sort = ([sorted_ids.clone(), others[:size].clone()] for _ in range(2))
        merge(by_passes[0], by_passes[1:], replaced, new_ids, places)
        sort_with(by_sort[0], by_sort[1:], replaced, new_ids)
        for own, expected in zip(by_sort, by_passes, strict=True):
            assert own.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_rows_change_hands_alike_by_a_sort_of_all_and_by_parts(dtype):
    generator = torch.Generator().manual_seed(3)
    moves = 0
    for trial in range(200):
        sizes = torch.randint(1, 30, (2,), generator=generator).tolist()
        spread = 2 + trial % 40
        scores = [torch.randint(spread, (n,), generator=generator).to(dtype) for n in sizes]
        by_parts, by_sort = exchanged_by_parts(*scores), exchanged_by_sort(*scores)
        assert [part.tolist() for part in by_parts] == [part.tolist() for part in by_sort]
        moves += len(by_parts[0])
    assert moves > 200


@pytest.mark.parametrize(
    "policy", [LFU_EvictionPolicy, LRU_EvictionPolicy, DistanceLFU_EvictionPolicy]
)
def test_small_maps_that_are_sorted_and_large_ones_that_are_merged_are_alike(policy, monkeypatch):
    generator = torch.Generator().manual_seed(8)
    batches = [(torch.rand(40, generator=generator) ** 2 * 90).long() for _ in range(30)]

    def rows_and_state():
        module = MCHManagedCollisionModule(
            zch_size=20, device=torch.device("cpu"), eviction_policy=policy(), eviction_interval=2
        )
        lengths = torch.ones(40, dtype=torch.int32)
        rows = [module({"f": JaggedTensor(ids, lengths=lengths)})["f"].values() for ids in batches]
        return [*rows, *module.state_dict().values()]

    small = rows_and_state()
    for limit in ("mc_exchange._FEW_SCORES", "mc_history._FEW_IDS"):
        monkeypatch.setattr(f"tessera.training.modules.{limit}", 0)
    for own, expected in zip(rows_and_state(), small, strict=True):
        assert own.tolist() == expected.tolist()


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize(
    "policy", [LFU_EvictionPolicy, LRU_EvictionPolicy, DistanceLFU_EvictionPolicy]
)
def test_scores_with_counts_give_rows_as_scores_of_ids_sorted_by_counts_do(
    policy, interval, monkeypatch
):
    generator = torch.Generator().manual_seed(9)
    batches = [(torch.rand(60, generator=generator) ** 2 * 90).long() for _ in range(40)]

    def state():
        module = MCHManagedCollisionModule(
            zch_size=25, device=CPU, eviction_policy=policy(), eviction_interval=interval
        )
        lengths = torch.ones(60, dtype=torch.int32)
        for ids in batches:
            module({"f": JaggedTensor(ids, lengths=lengths)})
        return [values.tolist() for values in module.state_dict().values()]

    found = state()
    asked = []

    def none(*_given, **_named):
        asked.append(1)

    monkeypatch.setattr(policy, "_scores_with_counts", none)
    assert state() == found
    assert len(asked) == 40 // interval


def test_thresholds():
    counts = torch.tensor([1, 2, 3, 4, 5])
    for multiple in (0.5, 1.0, 1.3):
        kept, threshold = dynamic_threshold_filter(counts, multiple)
        assert float(threshold) == pytest.approx(3 * multiple)
        assert kept.tolist() == [count > 3 * multiple for count in counts.tolist()]
    assert average_threshold_filter(counts)[0].tolist() == [False, False, False, True, True]
    torch.manual_seed(0)
    many = torch.full((20_000,), 100)
    share = float(probabilistic_threshold_filter(many, 0.01)[0].float().mean())
    assert share == pytest.approx(1 - 0.99**100, abs=0.02)


START = 0.25


def fill(weights):
    torch.nn.init.constant_(weights, START)


def tables(kind, rows=(6, 5)):
    more = {"pooling": PoolingType.MEAN} if kind is EmbeddingBagConfig else {}
    return [
        kind(rows[0], 3, name="a", feature_names=["x", "y"], init_fn=fill),
        kind(rows[1], 3, name="b", feature_names=["z"], init_fn=fill, **more),
    ]


def collection(pooled, *, in_place=False, device=CPU):
    configs = tables(EmbeddingBagConfig if pooled else EmbeddingConfig)
    inner = (EmbeddingBagCollection if pooled else EmbeddingCollection)(configs, device=device)
    maps = ManagedCollisionCollection(
        {
            table.name: MCHManagedCollisionModule(
                table.num_embeddings, device, LRU_EvictionPolicy(), 2
            )
            for table in configs
        },
        configs,
    )
    outer = (
        ManagedCollisionEmbeddingBagCollection if pooled else ManagedCollisionEmbeddingCollection
    )
    return outer(inner, maps, True, in_place)


def batch(seed, keys=("z", "other", "x", "y"), samples=4):
    """Bags of 0 to 3 ids; features in another order than the tables', and one more."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(keys) * samples,), generator=generator)
    ids = torch.randint(0, 9, (int(lengths.sum()),), generator=generator) * 10**12 + seed
    return KeyedJaggedTensor(list(keys), ids, lengths=lengths)


def outputs(pooled, found):
    return found.values() if pooled else torch.cat([found[k].values() for k in ("x", "y", "z")])


@pytest.mark.parametrize("pooled", [True, False])
def test_values_and_gradients_are_those_of_plain_tables_behind_dictionaries(pooled, device):
    model = collection(pooled, device=device)
    holder = (
        model._embedding_module.embedding_bags if pooled else model._embedding_module.embeddings
    )
    features = {"a": ["x", "y"], "b": ["z"]}
    maps = {"a": MapInADictionary(6, "lru", 2), "b": MapInADictionary(5, "lru", 2)}
    plain = {name: torch.full((maps[name].size, 3), START).double() for name in features}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    changed = 0
    for step in range(9):
        # Ids of two steps are alike, so that the second finds what the first put into the map.
        given = batch(step // 2)
        if step == 7:
            model.eval()
        weights = {}
        for name, own in features.items():
            ids = [id_ for key in own for id_ in given[key].values().tolist()]
            if step < 7:
                evicted = maps[name].train(ids) or []
                changed += len(evicted)
                plain[name][evicted] = START
            weights[name] = plain[name].clone().requires_grad_()
        expected = []
        remapped = {}
        for name, own in features.items():
            for key in own:
                bags = [maps[name].rows(b.tolist()) for b in given[key].to_dense()]
                remapped[key] = [row for b in bags for row in b]
                mean = pooled and name == "b"
                vectors = [weights[name][b] for b in bags]
                if pooled:
                    vectors = [v.sum(0) / (max(len(v), 1) if mean else 1) for v in vectors]
                expected.append(torch.stack(vectors) if pooled else torch.cat(vectors))
        found, rows = model(given.to(device))
        assert {key: rows[key].values().tolist() for key in remapped} == remapped
        assert rows.keys() == list(remapped)
        assert rows["y"].lengths().tolist() == given["y"].lengths().tolist()
        values = outputs(pooled, found).cpu()
        expected = torch.cat(expected, dim=1 if pooled else 0)
        torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-6)
        scale = torch.arange(values.numel()).view(values.shape) / 10
        optimizer.zero_grad()
        (values * scale).sum().backward()
        (expected * scale).sum().backward()
        for name, weight in weights.items():
            gradient = holder[name].weight.grad.cpu()
            torch.testing.assert_close(gradient.double(), weight.grad, rtol=1e-5, atol=1e-6)
            plain[name] = weight.detach() - 0.5 * weight.grad
        optimizer.step()
    assert changed > 12  # rows were given up, not only filled


def test_a_forward_between_forward_and_backward():
    """A weighted sum keeps the table for the backward pass, which autograd guards."""
    configs = tables(EmbeddingBagConfig)[:1]
    for in_place in (False, True):
        model = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(configs, is_weighted=True),
            ManagedCollisionCollection({"a": mch(6)}, configs),
            allow_in_place_embed_weight_update=in_place,
        )
        given = batch(1, ("x", "y"))
        weights = torch.ones(given.values().numel(), requires_grad=True)
        weighted = given.with_fields(given.values(), weights, given.lengths(), None)
        found, none = model(weighted)
        assert none is None
        model(weighted.with_values(given.values() + 1))  # other ids get rows
        if in_place:
            found.values().sum().backward()
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                found.values().sum().backward()


STATE_NAMES = [
    "_current_iter_tensor",
    "_mch_counts",
    "_mch_last_access_iter",
    "_mch_remapped_ids_mapping",
    "_mch_sorted_raw_ids",
    "_output_segments_tensor",
]


def test_a_loaded_state_goes_on_as_the_saved_one():
    torch.manual_seed(0)
    streams = [torch.randint(0, 30, (12,)).tolist() for _ in range(12)]
    first = mch(8, DistanceLFU_EvictionPolicy(), 2)
    for ids in streams[:6]:
        first(bag(ids))
    assert sorted(first.state_dict()) == STATE_NAMES
    second = mch(8, DistanceLFU_EvictionPolicy(), 2)
    rows_of(second, [100, 101, 102])  # forgotten by the load
    second.load_state_dict(first.state_dict())
    first.evict()
    for ids in streams[6:]:
        assert rows_of(second, ids) == rows_of(first, ids)
        assert str(second.evict()) == str(first.evict())
    model = collection(pooled=True)
    prefix = "_managed_collision_collection._managed_collision_modules"
    assert {f"{prefix}.a._mch_sorted_raw_ids", "_embedding_module.embedding_bags.a.weight"} <= set(
        model.state_dict()
    )


def test_parts_of_several_ranks_become_one_map_and_one_map_no_parts():
    whole = mch(8, input_hash_size=100)
    bounds = [0, 4, 8]
    parts = [whole.rebuild_with_output_id_range(span, bounds) for span in ((0, 4), (4, 8))]
    assert rows_of(parts[0], [5, 5, 6, 49]) == [0, 0, 1, 2]
    assert rows_of(parts[1], [99, 50, 50, 50, 98]) == [6, 4, 4, 4, 5]
    states = [part.state_dict() for part in parts]
    rows = {name for name in states[0] if name.startswith("_mch")}
    together = {
        name: torch.cat([s[name] for s in states]) if name in rows else states[0][name]
        for name in states[0]
    }
    whole.load_state_dict(together)
    assert whole.open_slots().tolist() == [1]  # row 3, which was the first part's for unknown ids
    assert rows_of(whole.eval(), [49, 6, 5, 50, 98, 99, 7]) == [2, 1, 0, 4, 5, 6, 7]
    assert rows_of(whole.train(), [7, 7]) == [3, 3]
    parts = [{n: v[:4] if n in rows else v for n, v in whole.state_dict().items()}]
    with pytest.raises(UserError, match="does not map to rows 0 to 3"):
        mch(4).load_state_dict(parts[0])


@pytest.mark.parametrize("pooled", [True, False])
def test_a_feature_of_two_tables_has_rows_of_each_map(pooled):
    kind = EmbeddingBagConfig if pooled else EmbeddingConfig
    configs = [
        kind(9, 3, name="a", feature_names=["x", "y"]),
        kind(4, 3, name="b", feature_names=["z", "x"]),
    ]

    def behind_maps(tables):
        inner = (EmbeddingBagCollection if pooled else EmbeddingCollection)(tables)
        maps = {table.name: mch(table.num_embeddings) for table in tables}
        outer = ManagedCollisionEmbeddingBagCollection
        outer = outer if pooled else ManagedCollisionEmbeddingCollection
        return outer(inner, ManagedCollisionCollection(maps, tables), True)

    both = behind_maps(configs)
    alone = [behind_maps([table]) for table in configs]
    for model in alone:
        model.load_state_dict({key: both.state_dict()[key] for key in model.state_dict()})
    different = 0
    for step in range(8):
        if step == 6:
            for model in (both, *alone):
                model.eval()
        # Fresh values of evicted rows are drawn by each model in the same order.
        torch.manual_seed(step)
        found, rows = both(batch(step // 2))
        torch.manual_seed(step)
        expected = [model(batch(step // 2)) for model in alone]
        assert rows.keys() == ["x", "y", "z", "x"]
        by_map = [own[key].values().tolist() for _, own in expected for key in own.keys()]  # noqa: SIM118
        assert [part.values().tolist() for part in rows.split([1] * 4)] == by_map
        different += by_map[0] != by_map[3]
        if pooled:
            values = torch.cat([own.values() for own, _ in expected], dim=1)
            assert torch.equal(found.values(), values)
            assert found.keys() == ["x@a", "y", "z", "x@b"]
        else:
            own = [alone_found[key] for alone_found, _ in expected for key in alone_found]
            assert list(found) == ["x@a", "y", "z", "x@b"]
            for one, other in zip(found.values(), own, strict=True):
                assert torch.equal(one.values(), other.values())
    assert different


def test_made_on_the_meta_device_it_begins_empty():
    model = collection(pooled=False, device=torch.device("meta"))
    assert init_parameters(model, CPU)
    found, _ = model(batch(0))
    assert bool((outputs(False, found) == START).all())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mch(1), "zch_size is 1; give 2 or more"),
        (lambda: mch(5, interval=0), "eviction_interval is 0; give 1 step or more"),
        (lambda: LRU_EvictionPolicy(0.0), "decay_exponent is 0.0; give a positive number"),
        (lambda: mch(5, output_segments=list(range(1026))), "output_segments has 1025 parts"),
        (
            lambda: ManagedCollisionCollection({"a": mch(6)}, tables(EmbeddingConfig)),
            "table 'b' is missing in managed_collision_modules",
        ),
        (
            lambda: ManagedCollisionCollection(
                {"a": mch(6), "b": mch(6)}, tables(EmbeddingConfig)[:1]
            ),
            "table 'b' is missing in embedding_configs",
        ),
        (
            lambda: ManagedCollisionCollection({"a": mch(5)}, tables(EmbeddingConfig)[:1]),
            "maps to 5 rows, the table has 6; give it zch_size=6",
        ),
        (
            lambda: ManagedCollisionEmbeddingCollection(
                EmbeddingCollection(tables(EmbeddingConfig)),
                ManagedCollisionCollection({"a": mch(6)}, tables(EmbeddingConfig)[:1]),
            ),
            r"is of tables \['a'\], the embedding module has \['a', 'b'\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_what_has_no_effect_is_told():
    with pytest.warns(UserWarning, match="mch_size and mch_hash_func have no effect"):
        mch(5, mch_size=3)
    assert mch(5, buckets=4).buckets() == 4


def test_a_missing_feature_is_named():
    with pytest.raises(KeyError, match="feature 'y' is missing"):
        collection(pooled=True)(batch(0, ("x", "z")))


def test_the_page_runs():
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    exec(compile(code, str(DOCS), "exec"), {})
