"""Hash-based managed collisions on one process, held against a list of rows and a loop over ids."""

import pytest
import torch

from tessera.errors import UserError
from tessera.training import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from tessera.training.modules import hash_places
from tessera.training.modules.hash_learning import Refused
from tessera.training.modules.hash_mc_evictions import (
    HashZchEvictionConfig,
    HashZchEvictionModule,
    HashZchEvictionPolicyName,
    HashZchPerFeatureTtlScorer,
    get_kernel_from_policy,
)
from tessera.training.modules.hash_mc_modules import HashZchManagedCollisionModule, TrainInputMapper
from tessera.training.modules.hash_places import murmur3_words
from tessera.training.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from tessera.training.modules.mc_modules import ManagedCollisionCollection
from tessera.training.sparse.jagged_tensor import JaggedTensor
from tests.training.mc_reference import PlacesInAList, murmur

CPU = torch.device("cpu")
MAX = 2**63 - 1
POLICIES = {
    None: None,
    "ttl": HashZchEvictionPolicyName.SINGLE_TTL_EVICTION,
    "lru": HashZchEvictionPolicyName.LRU_EVICTION,
}


def zch(rows=20, buckets=2, policy=None, ttl=2, device=CPU, **rest):
    config = HashZchEvictionConfig(features=["f"], single_ttl=ttl)
    return HashZchManagedCollisionModule(
        zch_size=rows,
        device=device,
        total_num_buckets=buckets,
        **{
            "eviction_policy_name": POLICIES[policy],
            "eviction_config": config if policy else None,
            **rest,
        },
    )


def bag(ids, key="f", device=CPU):
    values = torch.tensor(ids, dtype=torch.int64, device=device)
    return {key: JaggedTensor(values, lengths=torch.tensor([len(ids)], device=device))}


def rows_of(module, ids, key="f"):
    return module(bag(ids, key, module.device))[key].values().tolist()


@pytest.fixture
def clock(monkeypatch):
    """Sets the hour of now."""
    return lambda hour: monkeypatch.setattr("time.time", lambda: hour * 3600.0 + 100)


def test_the_hash_is_the_published_one():
    ids = [0, 1, -1, 7, MAX, -MAX - 1, 123456789012345678, *range(-40, 40, 7)]
    found = murmur3_words(torch.tensor(ids)).tolist()
    assert [word % 2**64 for word in found] == [murmur(id_) for id_ in ids]


@pytest.fixture(params=["as built", "without our operators"])
def operators(request, monkeypatch):
    if request.param != "as built":
        monkeypatch.setattr(hash_places, "has_operators", lambda _: False)
    return request.param


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reserved", [0, 30])
@pytest.mark.parametrize("shape", [(24, 3, 5, 0), (40, 2, 128, 900)])
def test_streams_of_ids_have_the_rows_of_a_loop(clock, policy, reserved, shape, device):
    rows, buckets, probes, size = shape
    more = {"opt_in_prob": 100, "percent_reserved_slots": reserved} if reserved else {}
    module = zch(rows, buckets, policy, 2, device, max_probe=probes, input_hash_size=size, **more)
    own = rows // buckets
    reference = PlacesInAList(
        [(own * bucket, own) for bucket in range(buckets)],
        probes,
        (lambda id_: id_ // (size // buckets) % buckets) if size else lambda id_: id_ % buckets,
        policy,
        own * reserved // 100,
    )
    generator = torch.Generator().manual_seed(rows)
    changed = 0
    for step in range(25):
        clock(1000 + step)
        ids = torch.randint(0, 20, (step % 9 + 2,), generator=generator) * 17 + step * 11 - 30
        ids = ids.tolist()
        evicted = reference.train(ids, 1000 + step, 2)
        assert rows_of(module, ids) == [reference.row(id_) for id_ in ids]
        found = module.evict()
        assert (found.tolist() if policy else found) == (evicted if policy else None)
        changed += len(evicted)
        assert module.open_slots().item() == rows - own * reserved // 100 * buckets - len(
            reference.rows
        )
    assert bool(changed) == bool(policy)
    everything = [*range(-40, 700, 3), -1, MAX, -MAX - 1]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module.eval()
    assert rows_of(module, everything) == [reference.row(id_) for id_ in everything]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_refused_ids_are_told_from_all_others(device):
    for values in ([5], [7, -3, 9], [MAX, 0], [-MAX - 1, MAX, 4]):
        refused = Refused(torch.tensor(values, device=device))
        assert refused.values.tolist() == sorted(values)
        asked = [-MAX - 1, -4, -3, -1, 0, 4, 5, 6, 7, 8, 9, 10, MAX - 1, MAX]
        found = refused.holds(torch.tensor(asked, device=device))
        assert found.tolist() == [value in values for value in asked]


@pytest.mark.parametrize("policy", POLICIES)
def test_ids_that_a_full_table_refused_get_rows_when_others_expire(
    clock, policy, device, operators
):
    module = zch(12, 2, policy, 1, device, max_probe=4)
    reference = PlacesInAList([(0, 6), (6, 6)], 4, lambda id_: id_ % 2, policy)
    generator = torch.Generator().manual_seed(7)
    evicted, refusals, remembered, regained, once_refused = 0, 0, 0, 0, set()
    for step in range(60):
        hour = 500 + step // 6
        clock(hour)
        if step == 40:  # a table that was loaded has other rows
            module.load_state_dict(module.state_dict())
        ids = torch.randint(0, 30, (7,), generator=generator).tolist()
        evicted += len(reference.train(ids, hour, 1))
        assert rows_of(module, ids) == [reference.row(id_) for id_ in ids]
        regained += sum(reference.knows(id_) for id_ in once_refused)
        refused = {id_ for id_ in ids if not reference.knows(id_)}
        refusals += bool(refused)
        once_refused |= refused
        if module._in_tensors.refused is not None:
            remembered += 1
            assert not any(map(reference.knows, module._in_tensors.refused.values.tolist()))
    assert refusals > 20, refusals
    assert (remembered > 20) == (operators == "without our operators"), remembered
    assert bool(evicted) == bool(regained) == bool(policy)


@pytest.mark.usefixtures("operators")
def test_many_new_ids_at_once_are_placed_one_after_another(device):
    module = zch(6000, 1, device=device, max_probe=8)
    reference = PlacesInAList([(0, 6000)], 8, lambda _: 0)
    ids = (torch.randperm(9000, generator=torch.Generator().manual_seed(1)) * 7919).tolist()
    reference.train(ids)
    assert rows_of(module, ids) == [reference.row(id_) for id_ in ids]
    assert 0 < module.open_slots().item() < 200


def test_fbgemms_operator_reads_the_table_alike():
    module = zch(64, 1, max_probe=10)
    ids = torch.arange(50) * 31
    rows = rows_of(module, ids.tolist())
    found, _ = torch.ops.fbgemm.zero_collision_hash(
        torch.arange(-5, 2000), module._hash_zch_identities, 10, circular_probe=True, readonly=True
    )
    assert found[5 + ids].tolist() == rows
    expected = rows_of(module.eval(), [*range(-5, -1), *range(2000)])
    assert torch.cat([found[:4], found[5:]]).tolist() == expected


def test_features_have_times_to_live_of_their_own_and_some_only_read(clock):
    module = HashZchManagedCollisionModule(
        zch_size=8,
        device=CPU,
        total_num_buckets=1,
        eviction_policy_name=HashZchEvictionPolicyName.PER_FEATURE_TTL_EVICTION,
        eviction_config=HashZchEvictionConfig(features=["a", "b"], per_feature_ttl=[1, 9]),
    )
    clock(100)
    module({**bag([1, 2, 3], "b"), **bag([3, 4], "a"), **bag([55], "A_READONLY")})
    entries = torch.cat([module._hash_zch_identities, module._hash_zch_metadata], dim=1)
    assert {*map(tuple, entries.tolist())} == {(1, 109), (2, 109), (3, 109), (4, 101), (-1, -1)}
    clock(105)
    assert len(set(rows_of(module, [10, 11, 12, 13, 14], "b"))) == 5  # the row of 4 is taken
    assert len(module.evict()) == 1
    with pytest.raises(UserError, match="feature 'c' has no time to live"):
        module(bag([1], "c"))
    scorer = HashZchPerFeatureTtlScorer(HashZchEvictionConfig(["a", "b"], per_feature_ttl=[1, 9]))
    counts = JaggedTensor(torch.arange(3), weights=torch.tensor([2, 1]), lengths=torch.tensor([3]))
    assert scorer.gen_score(counts, CPU).tolist() == [106, 106, 114]
    config = HashZchEvictionConfig(["a"], single_ttl=3)
    name = HashZchEvictionPolicyName.LRU_EVICTION
    scores, threshold = HashZchEvictionModule(name, CPU, config)(counts)
    assert (scores.tolist(), threshold) == ([108] * 3, 105)
    assert [get_kernel_from_policy(policy) for policy in POLICIES.values()] == [0, 0, 1]


def test_an_occurrence_lets_an_id_in_by_chance():
    torch.manual_seed(0)
    module = zch(20_000, 1, opt_in_prob=10, percent_reserved_slots=1)
    once, often = list(range(2000)), [id_ for id_ in range(5000, 7000) for _ in range(5)]
    rows = torch.tensor(rows_of(module, once + often))
    inside = rows < 19_800
    assert float(inside[:2000].float().mean()) == pytest.approx(0.1, abs=0.03)
    assert float(inside[2000:].float().mean()) == pytest.approx(1 - 0.9**5, abs=0.04)
    assert len(rows[~inside].unique()) > 150


def test_parts_of_any_number_of_ranks_are_cut_anew(clock):
    clock(500)
    whole = zch(48, 4, "ttl", input_hash_size=400)
    ids = torch.randperm(400, generator=torch.Generator().manual_seed(2))[:40].tolist()
    rows_of(whole, ids)
    state = whole.state_dict()
    assert sorted(state) == ["_hash_zch_bucket", "_hash_zch_identities", "_hash_zch_metadata"]
    expected = dict(zip(ids, rows_of(whole.eval(), ids), strict=True))
    for ranks in (1, 2, 4):
        rows = 48 // ranks
        for rank in range(ranks):
            part = whole.rebuild_with_output_id_range((rank * rows, (rank + 1) * rows))
            own = {
                name: value[rank * rows : (rank + 1) * rows] if value.numel() > 1 else value
                for name, value in state.items()
            }
            part.load_state_dict(own)
            here = [id_ for id_ in ids if id_ // (400 // ranks) == rank]
            assert rows_of(part.eval(), here) == [expected[id_] for id_ in here]
            assert part.holds_ids()
            assert part.range_key(torch.tensor(here)).tolist() == [id_ // 100 for id_ in here]


def test_modes_of_inference_and_training(clock):
    clock(100)
    module = zch(policy="ttl", ttl=5)
    rows = rows_of(module, [1, 2, 3])
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    module.reset_inference_mode()
    assert not module.training
    assert rows_of(module.train(), [1, 2, 3, 4])[:3] == rows
    assert module.evict() is None
    assert not bool((module._hash_zch_identities == 4).any())
    module.load_state_dict(saved)
    assert "_hash_zch_metadata" not in module.state_dict()
    module.reset_training_mode()
    assert module._hash_zch_metadata.max() == 100
    rows_of(module, [3, 4])
    assert bool((module._hash_zch_identities == 4).any())
    assert module._hash_zch_metadata.max() == 105
    given = zch(is_inference=True)
    assert not given.training
    rows_of(given, [1, 1])
    assert not given.holds_ids()


def test_rows_of_evicted_ids_begin_anew_and_are_trained(clock):
    def fill(weights):
        torch.nn.init.constant_(weights, 0.25)

    tables = [EmbeddingBagConfig(8, 4, name="t", feature_names=["f"], init_fn=fill)]
    model = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables),
        ManagedCollisionCollection({"t": zch(8, 1, "ttl", 0)}, tables),
        return_remapped_features=True,
    )
    given = [
        KeyedJaggedTensor(["f"], torch.arange(8) + first, lengths=torch.ones(8).long())
        for first in (0, 100)
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for hour, own in enumerate(given):
        clock(hour + 10)
        vectors, rows = model(own)
        assert sorted(rows.values().tolist()) == list(range(8))
        assert bool((vectors.values() == 0.25).all())
        vectors.values().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: zch(21), "zch_size of a table without a name is 21, which total_num_buckets=2"),
        (lambda: zch(max_probe=0), "max_probe of a table without a name is 0"),
        (lambda: zch(opt_in_prob=50), "opt_in_prob .* is 50 and percent_reserved_slots 0"),
        (lambda: zch(percent_reserved_slots=5), "without opt_in_prob"),
        (lambda: zch(policy="ttl", ttl=None), "single_ttl of HashZchEvictionConfig is None"),
        (lambda: zch(output_segments=[0, 5, 19], name="t"), "of t is 20, its 2 buckets"),
        (
            lambda: zch(eviction_policy_name=HashZchEvictionPolicyName.LRU_EVICTION),
            "LRU_EVICTION and eviction_config is missing",
        ),
        (
            lambda: HashZchPerFeatureTtlScorer(HashZchEvictionConfig(["a"])),
            "per_feature_ttl has 0 numbers for 1 features",
        ),
        (
            lambda: zch(name="t").rebuild_with_output_id_range((0, 5)),
            "rows 0 to 4 of table t are not whole buckets",
        ),
        (
            lambda: zch(buckets=4).load_state_dict(zch().state_dict()),
            "has 2 buckets; give the module total_num_buckets=2",
        ),
        (lambda: TrainInputMapper(0, 0, torch.tensor([1]), torch.tensor([0])), "is 0; give 1"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_what_has_no_effect_is_told():
    with pytest.warns(UserWarning, match="tb_logging_frequency has no effect"):
        zch(tb_logging_frequency=5)


def test_rows_of_evicted_ids_are_told_once_whoever_writes_to_the_table(clock, device):
    clock(100)
    module = zch(6, 1, "ttl", 1, device)
    rows_of(module, [1, 2, 3, 4, 5, 6])
    assert module.evict().tolist() == []
    assert module.evict() is None
    for hour, ids, expected in [
        (101, [7], 0),
        (102, [7, 8], 2),  # of those that came at 100
        (102, [7], 0),
        (102, [9, 10], 2),
        (103, [7, 8, 9, 10], 0),
    ]:
        clock(hour)
        rows_of(module, ids)
        found = module.evict().tolist()
        assert (len(found), found) == (expected, sorted(set(found))), (hour, ids)
    before = module.state_dict()
    module._hash_zch_metadata.fill_(102)  # as a program may do that knows of no method
    rows_of(module, [11])
    rows_of(module, [12])
    assert len(module.evict()) == 2  # of two steps
    module.load_state_dict({**before, "_hash_zch_metadata": module._hash_zch_metadata - 1})
    rows_of(module, [13])
    assert len(module.evict()) == 1


def test_rows_of_many_steps_are_kept_until_they_are_asked_for(clock, device):
    module = zch(12, 1, "ttl", 0, device)
    given_away = set()
    for step in range(100):
        clock(step + 5)
        rows = rows_of(module, [2 * step, 2 * step + 1])
        given_away |= {*rows} if step >= 6 else set()
    assert module.evict().tolist() == sorted(given_away)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_waited_for_only_where_an_id_may_have_expired(clock):
    clock(100)
    module = zch(64, 2, "lru", 2, torch.device("cuda"))
    batches = [bag([*range(first, first + 9)], device="cuda") for first in range(0, 50, 5)]
    module(batches[0])
    assert module.evict().tolist() == []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            module(batch)
            assert not module.evict().numel()
        module.eval()
        module(batches[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    clock(103)
    module.train()
    module(bag([*range(100, 140)], device="cuda"))
    assert module.evict().numel() == 40 - (64 - 54)
