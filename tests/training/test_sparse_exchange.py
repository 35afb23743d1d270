"""What ranks send one another: simulated here by cutting and joining lists."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.training import KeyedJaggedTensor
from tessera.training.fbgemm import import_training_tables
from tessera.training.sparse.exchange import permute_segments
from tessera.training.sparse.layout import lengths_to_offsets
from tests.training.jagged_strategies import quick

KEYS = ["a", "b"]


@st.composite
def rank_batches(draw, *, varying):
    """Per rank and key a list of bags."""
    ranks = draw(st.integers(1, 3))
    bag = st.lists(st.integers(0, 99), max_size=3)
    batches = []
    for _ in range(ranks):
        B = draw(st.integers(0, 3))
        sizes = {"max_size": 3} if varying else {"min_size": B, "max_size": B}
        batches.append({key: draw(st.lists(bag, **sizes)) for key in KEYS})
    return batches


def build(bags, *, weighted, varying):
    flat = [i for key in KEYS for bag in bags[key] for i in bag]
    strides = [len(bags[key]) for key in KEYS]
    return KeyedJaggedTensor(
        KEYS,
        torch.tensor(flat, dtype=torch.int64),
        weights=torch.tensor(flat, dtype=torch.float32) * 0.5 if weighted else None,
        lengths=torch.tensor([len(b) for key in KEYS for b in bags[key]], dtype=torch.int32),
        stride=None if varying else strides[0],
        stride_per_key_per_rank=[[stride] for stride in strides] if varying else None,
    )


def orders(batches):
    """(rank, key) segments key by key, and the same for single bags."""
    ranks = len(batches)
    segments = [rank * len(KEYS) + key for key in range(len(KEYS)) for rank in range(ranks)]
    starts, place = [], 0
    for bags in batches:
        for key in KEYS:
            starts.append(range(place, place + len(bags[key])))
            place += len(bags[key])
    return segments, [bag for segment in segments for bag in starts[segment]]


@pytest.mark.parametrize("with_fbgemm", [True, False])
@pytest.mark.parametrize("varying", [True, False])
def test_what_was_sent_is_put_together_key_by_key(with_fbgemm, varying, monkeypatch):
    import_training_tables()
    if not with_fbgemm:
        monkeypatch.delitem(sys.modules, "fbgemm_gpu")

    @quick
    @given(rank_batches(varying=varying), st.booleans())
    def check(batches, weighted):
        sent = [build(bags, weighted=weighted, varying=varying) for bags in batches]
        labels = sent[0].dist_labels()
        expected = ["lengths", "values", *["strides"] * varying, *["weights"] * weighted]
        assert labels == expected
        for kjt in sent:
            splits = kjt.dist_splits([2])
            assert [s[0] for s in splits] == [t.numel() for t in kjt.dist_tensors()]
            halves = kjt.dist_splits([1, 1])
            assert [sum(half) for half in halves] == [s[0] for s in splits]
        tensors = [
            torch.cat(parts) for parts in zip(*(k.dist_tensors() for k in sent), strict=True)
        ]
        segments, bags = orders(batches)
        strides = None if varying else [kjt.stride() for kjt in sent]
        by_segment = varying or len(set(strides)) == 1
        kjt = KeyedJaggedTensor.dist_init(
            keys=KEYS,
            tensors=tensors,
            variable_stride_per_key=varying,
            num_workers=len(batches),
            recat=torch.tensor(segments if by_segment else bags, dtype=torch.int32),
            stride_per_rank=strides,
        )
        for key in KEYS:
            whole = [bag for batch in batches for bag in batch[key]]
            assert [bag.tolist() for bag in kjt[key].to_dense()] == whole
            if weighted:
                halved = [[0.5 * i for i in bag] for bag in whole]
                assert [bag.tolist() for bag in kjt[key].to_dense_weights()] == halved
        if varying:
            assert kjt.stride_per_key_per_rank() == [
                [len(batch[key]) for batch in batches] for key in KEYS
            ]
        else:
            assert kjt.stride() == sum(strides)

    check()


def test_staggered_ranks_are_put_back_in_their_own_order():
    # 2 nodes of 2 ranks: arrived as 0, 2, 1, 3.
    strides = torch.tensor([1, 3, 2, 4])
    lengths = torch.ones(10, dtype=torch.int32)
    kjt = KeyedJaggedTensor.dist_init(
        ["a"], [lengths, torch.arange(10), strides], True, 4, None, None, stagger=2
    )
    assert kjt.stride_per_key_per_rank() == [[1, 2, 3, 4]]


def test_batch_sizes_are_needed_where_the_batch_does_not_vary():
    with pytest.raises(ValueError, match="stride_per_rank is None"):
        KeyedJaggedTensor.dist_init(["a"], [torch.ones(1), torch.ones(1)], False, 1, None, None)


@quick
@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=6), st.randoms())
def test_segments_move_whole(segments, random):
    order = list(range(len(segments)))
    random.shuffle(order)
    flat = torch.tensor([i for segment in segments for i in segment], dtype=torch.int64)
    sizes = torch.tensor([len(segment) for segment in segments], dtype=torch.int32)
    moved = permute_segments(flat, sizes, torch.tensor(order, dtype=torch.int32))
    assert moved.tolist() == [i for place in order for i in segments[place]]


@pytest.mark.parametrize("with_fbgemm", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [[], [3], [2, 0, 5], [2**31 - 1, 2**31 - 1, 1]])
def test_offsets_are_int64_and_exact(lengths, dtype, with_fbgemm, monkeypatch):
    import_training_tables()
    if not with_fbgemm:
        monkeypatch.delitem(sys.modules, "fbgemm_gpu")
    offsets = lengths_to_offsets(torch.tensor(lengths, dtype=dtype))
    assert offsets.dtype == torch.int64
    assert offsets.tolist() == [0, *(sum(lengths[: n + 1]) for n in range(len(lengths)))]


def test_offsets_take_one_operator_where_fbgemm_is():
    import_training_tables()
    called = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func.name())
            return func(*args, **(kwargs or {}))

    lengths = torch.ones(4, dtype=torch.int64)
    with Calls():
        lengths_to_offsets(lengths)
    assert called == ["fbgemm::asynchronous_complete_cumsum"]


def test_pinned_copies_know_the_bounds_of_their_keys(monkeypatch):
    """So that a GPU need not be asked for them; page-locked memory itself is of hosts with one."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    lengths = torch.tensor([1, 0, 2, 1], dtype=torch.int32)
    whole = KeyedJaggedTensor(KEYS, torch.arange(4), lengths=lengths)
    assert whole.offset_per_key_or_none() is None
    moved = whole.pin_memory().to(torch.device("cpu"), non_blocking=True)
    assert moved.offset_per_key_or_none() == [0, 1, 4]
    assert torch.equal(moved.lengths(), lengths)
    # Those that are built and never looked up are pinned too.
    assert KeyedJaggedTensor(KEYS, torch.arange(4)).pin_memory().values().tolist() == [0, 1, 2, 3]
    assert KeyedJaggedTensor.empty().pin_memory().keys() == []
