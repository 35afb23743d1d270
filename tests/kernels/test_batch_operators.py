"""What a batch of training goes through before its lookups, on every device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.kernels import reference
from tessera.kernels.plan import IdRule, OutOfRange

EDGES = [0, 1, -1, 2**31 - 1, -(2**31), 2**32, 2**63 - 1, -(2**63), 6, 7, 8]
TYPES = {torch.int32: 2**31, torch.int64: 2**63}


@st.composite
def batches(draw):
    """Ids by feature and bag, the table of each feature, and the types of ids and offsets."""
    features, batch = draw(st.integers(1, 6)), draw(st.sampled_from([0, 1, 3, 40]))
    types = draw(st.tuples(*2 * [st.sampled_from(list(TYPES))]))
    most = TYPES[types[0]]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    tables, ids, lengths = [], [], []
    for _ in range(features):
        rows = draw(st.sampled_from([1, 2, 7, 1000, 2**31 - 1, 2**62]))
        rule, outside = draw(st.sampled_from(IdRule)), draw(st.sampled_from(OutOfRange))
        tables.append((rows, rule, outside))
        longest = draw(st.sampled_from([0, 1, 3, 200]))
        own = torch.randint(0, longest + 1, (batch,), generator=generator).tolist()
        lengths += own
        count = sum(own)
        drawn = torch.randint(-most, most - 1, (count,), generator=generator).tolist()
        small = torch.randint(-3, 12, (count,), generator=generator).tolist()
        kinds = torch.randint(0, 3, (count,), generator=generator).tolist()
        edges = [edge for edge in EDGES if -most <= edge < most]
        ids += [
            (d, s, edges[s % len(edges)])[k] for d, s, k in zip(drawn, small, kinds, strict=True)
        ]
    return tables, batch, lengths, ids, types


@settings(max_examples=60, deadline=None)
@given(batches())
def test_rows_of_ids_equal_the_reference(device, case):
    tables, batch, lengths, ids, (id_type, offset_type) = case
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    bounds = offsets[::batch].tolist() if batch else [0] * (len(tables) + 1)
    expected = [
        reference.resolve_id(raw, *table)[0]
        for table, begin, end in zip(tables, bounds, bounds[1:], strict=False)
        for raw in ids[begin:end]
    ]
    columns = [torch.tensor([int(t[k]) for t in tables], device=device) for k in range(3)]
    given_ids = torch.tensor(ids, dtype=torch.int64).to(id_type)
    found = torch.ops.tessera.rows_of_ids(
        given_ids.to(device), offsets.to(offset_type).to(device), *columns
    )
    assert found.dtype == torch.int64
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.zeros(4)}, "ids: a contiguous int32 or int64 vector"),
        ({"ids": torch.zeros(2, 2, dtype=torch.int64)}, "ids: a contiguous"),
        (
            {"offsets": torch.zeros(4, dtype=torch.int64)},
            "offsets: 4 entries do not fit 2 features",
        ),
        ({"rows": torch.zeros(0, dtype=torch.int64)}, "rows: those of at least one feature"),
        ({"rules": torch.zeros(3, dtype=torch.int64)}, "rules: 2 contiguous int64 values"),
        ({"outside": torch.zeros(2, dtype=torch.int32)}, "outside: 2 contiguous int64 values"),
    ],
)
def test_ids_that_do_not_fit_are_refused(device, change, message):
    call = {
        "ids": torch.arange(4),
        "offsets": torch.tensor([0, 1, 4]),
        "rows": torch.tensor([5, 7]),
        "rules": torch.zeros(2, dtype=torch.int64),
        "outside": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(RuntimeError, match=message):
        torch.ops.tessera.rows_of_ids(**{k: v.to(device) for k, v in (call | change).items()})


@pytest.mark.parametrize("offsets", [[0, 5, 4], [1, 2, 4], [0, 2, 3], [0, -1, 4]])
def test_the_cpu_refuses_bags_that_do_not_fit_the_ids(offsets):
    two = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="offsets: "):
        torch.ops.tessera.rows_of_ids(torch.arange(4), torch.tensor(offsets), two + 3, two, two)


@pytest.mark.parametrize("rows", [0, -1])
def test_the_cpu_refuses_a_table_without_rows(rows):
    two = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=f"rows: feature 1 has {rows}, expected at least 1"):
        torch.ops.tessera.rows_of_ids(
            torch.arange(4), torch.tensor([0, 2, 4]), torch.tensor([3, rows]), two, two
        )


@pytest.mark.gpu
@pytest.mark.parametrize("offsets", [[0, 5, 4], [9, 2, 4], [0, 2, 3], [0, -1, 4]])
def test_a_gpu_reads_and_writes_within_the_ids_whatever_the_bags_say(offsets):
    two = torch.zeros(2, dtype=torch.int64, device="cuda")
    found = torch.ops.tessera.rows_of_ids(
        torch.arange(4).cuda(), torch.tensor(offsets).cuda(), two + 3, two, two
    )
    assert all(0 <= row < 3 for row in found.tolist())


@settings(max_examples=40, deadline=None)
@given(
    batch=st.sampled_from([0, 1, 31, 32, 33, 300]),
    features=st.sampled_from([1, 5, 26, 32]),
    beside=st.tuples(st.integers(0, 3), st.integers(0, 2)),
    absent=st.sampled_from([0.0, 0.2, 1.0]),
    seed=st.integers(0, 2**20),
)
def test_unpacked_rows_equal_their_columns(device, *, batch, features, beside, absent, seed):
    generator = torch.Generator().manual_seed(seed)
    before, behind = beside
    width = 1 + before + features + behind
    words = torch.randint(-(2**31), 2**31, (batch, width), generator=generator)
    there = torch.rand(batch, features, generator=generator) >= absent
    # The bits beyond the features' mean nothing.
    bits = (there.long() << torch.arange(features)).sum(1)
    bits |= (words[:, 0] & 0xFFFFFFFF) >> features << features
    words[:, 0] = bits
    words = words.to(torch.int32)
    lengths = there.t().flatten().int()
    ids = (words[:, 1 + before : 1 + before + features].long() & 0xFFFFFFFF).t().flatten()
    count = int(there.sum())
    found = torch.ops.tessera.unpack_rows(words.to(device), 0, 1 + before, features, count)
    expected = (lengths, torch.tensor([0, *lengths.tolist()]).cumsum(0), ids[lengths.bool()])
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"words": torch.zeros(3, 4)}, "words: a contiguous int32 matrix"),
        ({"words": torch.zeros(4, 3, dtype=torch.int32).t()}, "words: a contiguous int32 matrix"),
        ({"features": 0}, "features: 1 to 32 are needed, got 0"),
        ({"first": 3}, "first: the words 3 to 4 are not all in rows of 4"),
        ({"first": -1}, "first: the words -1 to 0"),
        ({"present": 4}, "present: word 4 is not in rows of 4"),
        ({"count": 7}, "count: 0 to 6 ids can be there, got 7"),
        ({"count": -1}, "count: 0 to 6 ids can be there, got -1"),
    ],
)
def test_rows_that_do_not_fit_are_refused(device, change, message):
    call = {
        "words": torch.zeros(3, 4, dtype=torch.int32),
        "present": 0,
        "first": 1,
        "features": 2,
        "count": 0,
        **change,
    }
    call["words"] = call["words"].to(device)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.tessera.unpack_rows(**call)


def test_the_cpu_refuses_another_number_of_ids():
    words = torch.tensor([[1, 5, 6], [3, 7, 8]], dtype=torch.int32)
    for count in (2, 4):
        with pytest.raises(RuntimeError, match=f"count: 3 ids are there, got {count}"):
            torch.ops.tessera.unpack_rows(words, 0, 1, 2, count)


@pytest.mark.gpu
def test_a_gpu_writes_no_more_ids_than_there_is_room_for():
    words = torch.tensor([[1, 5, 6], [3, 7, 8]], dtype=torch.int32, device="cuda")
    room = torch.ops.tessera.unpack_rows(words, 0, 1, 2, 2)
    assert room[1].tolist() == [0, 1, 2, 2, 3]
    assert room[2].tolist() == [5, 7]


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 50), max_size=4),
    table=st.sampled_from([1, 3, 200]),
    features=st.sampled_from([1, 26, 32]),
    seed=st.integers(0, 2**20),
)
def test_packed_rows_are_those_of_the_table(sizes, table, features, seed):
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (table, features + 3), generator=generator).int()
    rows = torch.randint(0, table, (sum(sizes),), generator=generator)
    out = torch.empty(len(rows), words.shape[1], dtype=torch.int32)
    ends = torch.tensor(sizes, dtype=torch.int64).cumsum(0).tolist()
    counts = torch.ops.tessera.pack_rows(words, rows, out, 1, features, ends)
    assert torch.equal(out, words[rows])
    there = [(int(word) & (1 << features) - 1).bit_count() for word in out[:, 1]]
    expected = [sum(there[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    assert counts == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": torch.tensor([0, 3])}, "rows: entry 1 is 3, expected 0 to 2"),
        ({"rows": torch.tensor([0, -1])}, "rows: entry 1 is -1, expected 0 to 2"),
        ({"rows": torch.tensor([0, 1], dtype=torch.int32)}, "rows: int64 is needed"),
        ({"out": torch.empty(3, 4, dtype=torch.int32)}, r"out: a contiguous int32 \[2, 4\]"),
        ({"out": torch.empty(2, 4)}, r"out: a contiguous int32 \[2, 4\]"),
        ({"ends": [1, 3]}, "ends: the last one is 3 of 2 rows"),
        ({"ends": []}, "ends: the last one is 0 of 2 rows"),
        ({"ends": [2, 1, 2]}, "ends: 1 comes behind 2"),
        ({"present": 4}, "present: word 4 is not in rows of 4"),
        ({"features": 33}, "features: 1 to 32 are needed, got 33"),
    ],
)
def test_rows_that_cannot_be_packed_are_refused(change, message):
    call = {
        "table": torch.zeros(3, 4, dtype=torch.int32),
        "rows": torch.tensor([2, 0]),
        "out": torch.empty(2, 4, dtype=torch.int32),
        "present": 0,
        "features": 3,
        "ends": [1, 2],
        **change,
    }
    with pytest.raises(RuntimeError, match=message):
        torch.ops.tessera.pack_rows(**call)
