import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tessera.kernels import ops
from tessera.training import KeyedJaggedTensor
from tessera.training.modules import hashing
from tessera.training.modules.hashing import FeatureHasher, HashSpec, hash_ids
from tests.training.jagged_strategies import quick

MASK = 2**64 - 1
EDGES = [0, 1, -1, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 2**33, 12345678901234]
ids64 = st.one_of(st.sampled_from(EDGES), st.integers(-(2**63), 2**63 - 1))
rows62 = st.one_of(st.integers(1, 200), st.integers(1, 2**62), st.just(2**62))


def murmur3(key):
    """fmix64 on Python's integers, which do not wrap."""
    key &= MASK
    key ^= key >> 33
    key = key * 0xFF51AFD7ED558CCD & MASK
    key ^= key >> 33
    key = key * 0xC4CEB9FE1A85EC53 & MASK
    return key ^ (key >> 33)


def expected_row(spec, key):
    if spec.hashing == "murmur3":
        return murmur3(key) % spec.rows
    if spec.hashing == "modulo":
        return key % spec.rows
    if 0 <= key < spec.rows:
        return key
    if spec.out_of_range == "hash":
        return murmur3(key) % spec.rows
    return min(max(key, 0), spec.rows - 1)


def test_the_reference_is_murmurhash3s_finaliser():
    # Published pairs of fmix64 (MurmurHash3 test vectors).
    assert murmur3(0) == 0
    assert murmur3(1) == 0xB456BCFC34C2CB2C
    assert murmur3(2) == 0x3ABF2A20650683E7


@pytest.mark.parametrize("rule", ["none", "modulo", "murmur3"])
@quick
@given(ids=st.lists(ids64, max_size=20), rows=rows62)
def test_eager_and_scripted_hashes_equal_plain_integers(rule, ids, rows):
    spec = HashSpec(name="f", rows=rows, hashing=rule)
    tensor = torch.tensor(ids, dtype=torch.int64)
    expected = ids if rule == "none" else [expected_row(spec, key) for key in ids]
    assert hash_ids(tensor, rule, rows).tolist() == expected
    assert SCRIPTED(tensor, rule, rows).tolist() == expected


SCRIPTED = torch.jit.script(hash_ids)


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="none of none, modulo, murmur3"):
        hash_ids(torch.tensor([1]), "md5", 7)


@st.composite
def hasher_cases(draw):
    count = draw(st.integers(1, 5))
    one_rule = draw(st.booleans())
    one_size = draw(st.booleans())
    rules = st.sampled_from(["none", "modulo", "murmur3"])
    outside = st.sampled_from(["reject", "clamp", "hash"])
    first = (draw(rules), draw(outside), draw(rows62))
    specs = [
        HashSpec(
            name=f"f{index}",
            rows=first[2] if one_size else draw(rows62),
            hashing=first[0] if one_rule else draw(rules),
            out_of_range=first[1] if one_rule else draw(outside),
        )
        for index in range(count)
    ]
    batch = draw(st.integers(0, 4))
    ids = [
        draw(st.lists(st.lists(ids64, max_size=3), min_size=batch, max_size=batch)) for _ in specs
    ]
    return specs, ids


@pytest.fixture(params=["operator", "torch"])
def way(request, monkeypatch):
    """Hashing by our operator, and by torch's functions, as where the operator was not built."""
    assert ops.is_built_for("rows_of_ids", "cpu")
    if request.param == "torch":
        monkeypatch.setattr(hashing.ops, "is_built_for", lambda *_: False)
    return request.param


# The fixture is the same for all examples, as it is meant to be.
@settings(parent=quick, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(hasher_cases())
def test_one_pass_over_all_features_equals_feature_by_feature(way, case):
    specs, ids = case
    kjt = KeyedJaggedTensor(
        [spec.name for spec in specs],
        torch.tensor([i for bags in ids for bag in bags for i in bag], dtype=torch.int64),
        lengths=torch.tensor([len(bag) for bags in ids for bag in bags], dtype=torch.int32),
    )
    hashed = FeatureHasher(specs)(kjt)
    for spec, bags in zip(specs, ids, strict=True):
        expected = [[expected_row(spec, key) for key in bag] for bag in bags]
        assert [bag.tolist() for bag in hashed[spec.name].to_dense()] == expected
        assert all(0 <= row < spec.rows for bag in expected for row in bag)


@quick
@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9))
def test_int32_ids_are_the_same_ids(ids):
    specs = [HashSpec(name="f", rows=1000, hashing="murmur3")]
    lengths = torch.tensor([len(ids)])
    hashed = [
        FeatureHasher(specs)(
            KeyedJaggedTensor(["f"], torch.tensor(ids, dtype=dtype), lengths=lengths)
        ).values()
        for dtype in (torch.int32, torch.int64)
    ]
    assert torch.equal(*hashed)
    assert hashed[0].dtype == torch.int64


def test_features_come_out_in_the_order_of_the_specs():
    hasher = FeatureHasher(
        [
            HashSpec(name="b", rows=10, hashing="modulo"),
            HashSpec(name="a", rows=100, hashing="none"),
        ]
    )
    kjt = KeyedJaggedTensor(
        ["a", "unused", "b"], torch.tensor([5, 0, 25]), lengths=torch.tensor([1, 1, 1])
    )
    hashed = hasher(kjt)
    assert hashed.keys() == ["b", "a"]
    assert hashed.values().tolist() == [5, 5]
    with pytest.raises(KeyError, match="feature 'b' is missing"):
        hasher(kjt.permute([0]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 0}, "rows is 0"),
        ({"rows": 2**62 + 1}, "give 1 to"),
        ({"hashing": "md5"}, "hashing is 'md5'; give one of none, modulo, murmur3"),
        ({"out_of_range": "drop"}, "out_of_range is 'drop'; give one of reject, clamp, hash"),
    ],
)
def test_specs_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        HashSpec(**{"name": "f", "rows": 5, "hashing": "none", **change})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_not_waited_for():
    specs = [
        HashSpec(name="a", rows=7, hashing="murmur3"),
        HashSpec(name="b", rows=9, hashing="modulo"),
    ]
    ids = torch.arange(5)
    own = KeyedJaggedTensor(["a", "b"], ids, lengths=torch.tensor([1, 2, 0, 2]))
    hasher, there = FeatureHasher(specs).cuda(), own.to(torch.device("cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = hasher(there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.values().tolist() == FeatureHasher(specs)(own).values().tolist()
