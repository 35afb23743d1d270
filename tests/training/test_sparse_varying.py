"""Batches whose number of bags varies per key."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tessera.training import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from tessera.training.sparse.jagged_tensor import JaggedTensor, kjt_is_equal
from tests.training.jagged_strategies import quick

KEYS = ["a", "b", "c"]


def as_lists(kjt):
    return {key: [bag.tolist() for bag in kjt[key].to_dense()] for key in kjt.index_per_key()}


@st.composite
def varying_bags(draw):
    """Per key a list of bags; numbers of bags differ, and may be 0."""
    bag = st.lists(st.integers(0, 8), max_size=4)
    return {key: draw(st.lists(bag, max_size=5)) for key in KEYS}


def build(bags, *, ranks=1, weighted=True):
    flat = [i for key in bags for bag in bags[key] for i in bag]
    strides = [len(bags[key]) for key in bags]
    split = [[stride - stride // ranks * (ranks - 1), *[stride // ranks] * (ranks - 1)]
             for stride in strides]  # fmt: skip
    return KeyedJaggedTensor(
        list(bags),
        torch.tensor(flat, dtype=torch.int64),
        weights=torch.arange(len(flat), dtype=torch.float32) if weighted else None,
        lengths=torch.tensor([len(b) for key in bags for b in bags[key]], dtype=torch.int32),
        stride_per_key_per_rank=split,
    )


@quick
@given(varying_bags(), st.integers(1, 3))
def test_every_key_keeps_its_own_number_of_bags(bags, ranks):
    kjt = build(bags, ranks=ranks)
    strides = [len(bags[key]) for key in KEYS]
    counts = [sum(map(len, bags[key])) for key in KEYS]
    assert kjt.variable_stride_per_key()
    assert kjt.stride_per_key() == strides
    assert [len(own) for own in kjt.stride_per_key_per_rank()] == [ranks] * 3
    assert kjt.stride() == max(strides)
    assert kjt.length_per_key() == counts
    assert kjt.lengths_offset_per_key() == [0, strides[0], strides[0] + strides[1], sum(strides)]
    assert as_lists(kjt) == bags
    offsets_only = KeyedJaggedTensor(
        KEYS, kjt.values(), offsets=kjt.offsets(), stride_per_key=strides
    )
    assert as_lists(offsets_only) == bags


@quick
@given(varying_bags(), st.lists(st.integers(0, 2), max_size=5))
def test_permute_split_and_concat_work_key_by_key(bags, order):
    kjt = build(bags)
    permuted = kjt.permute(order)
    wanted = [KEYS[index] for index in order]
    assert permuted.keys() == wanted
    assert permuted.stride_per_key() == [len(bags[key]) for key in wanted]
    ids = [i for key in wanted for bag in bags[key] for i in bag]
    assert permuted.values().tolist() == ids
    first, _, rest = kjt.split([1, 0, 2])
    assert as_lists(first) == {"a": bags["a"]}
    assert as_lists(rest) == {"b": bags["b"], "c": bags["c"]}
    assert kjt_is_equal(KeyedJaggedTensor.concat([first, rest]), kjt)


@quick
@given(varying_bags())
def test_a_dict_of_features_with_different_batches_goes_both_ways(bags):
    kjt = build(bags)
    again = KeyedJaggedTensor.from_jt_dict(kjt.to_dict())
    assert as_lists(again) == bags
    assert again.stride_per_key() == kjt.stride_per_key()
    assert again.variable_stride_per_key() == (len(set(again.stride_per_key())) > 1)


def test_the_strides_of_ranks_may_come_as_a_tensor():
    kjt = KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=torch.tensor([[1, 0], [1, 1]]),
    )
    assert kjt.stride_per_key_per_rank() == [[1, 0], [1, 1]]
    assert as_lists(kjt) == {"a": [[1]], "b": [[2], [3]]}


def test_inverse_indices_give_the_batch_size_and_survive_a_move():
    kjt = KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key=[1, 2],
        inverse_indices=(["a", "b"], torch.tensor([[0, 0, 0, 0], [0, 1, 1, 0]])),
    )
    assert kjt.stride() == 4
    moved = kjt.to("cpu").with_values(torch.tensor([4, 5, 6]))
    assert moved.inverse_indices()[1].tolist() == [[0, 0, 0, 0], [0, 1, 1, 0]]
    assert kjt_is_equal(kjt, kjt.to("cpu"))
    assert not kjt_is_equal(kjt, moved)
    assert kjt.permute([1, 0]).inverse_indices_or_none() is None


def with_inverse(keys, places):
    return KeyedJaggedTensor(
        keys,
        torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key=[1, 2],
        inverse_indices=(keys, torch.tensor(places)),
    )


@pytest.mark.parametrize("known", [{}, {"stride": 2}, {"stride_per_key": [2, 2]}])
def test_shared_bags_are_expanded_where_keys_have_as_many_of_them(known):
    # Ranks whose keys happen to have as many bags send what the others send.
    places = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]])
    lengths = {"lengths": torch.tensor([1, 2, 1, 0])}
    for bags in (lengths, {"offsets": torch.tensor([0, 1, 3, 4, 4])}):
        kjt = KeyedJaggedTensor(
            ["a", "b"],
            torch.tensor([1, 2, 3, 4]),
            inverse_indices=(["a", "b"], places),
            **bags,
            **known,
        )
        assert kjt.variable_stride_per_key()
        assert kjt.stride_per_key_per_rank() == [[2], [2]]
        assert kjt.stride() == 4
        table = EmbeddingBagCollection(
            [EmbeddingBagConfig(9, 3, name="t", feature_names=["a", "b"])]
        )
        pooled = table(KeyedJaggedTensor(["a", "b"], kjt.values(), **lengths)).to_dict()
        expected = torch.cat([pooled["a"][places[0]], pooled["b"][places[1]]], dim=1)
        assert torch.equal(table(kjt).values(), expected)


def test_joined_features_keep_their_inverse_indices():
    first = with_inverse(["a", "b"], [[0, 0, 0], [0, 1, 1]])
    joined = KeyedJaggedTensor.concat([first, with_inverse(["c", "d"], [[0, 0, 0], [1, 1, 0]])])
    keys, places = joined.inverse_indices()
    assert keys == joined.keys() == ["a", "b", "c", "d"]
    assert places.tolist() == [[0, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 0]]
    assert joined.stride() == 3
    [whole, nothing] = first.split([2, 0])
    assert kjt_is_equal(whole, first)
    assert nothing.inverse_indices_or_none() is None


def test_inverse_indices_that_do_not_fit_together_are_refused():
    first = with_inverse(["a", "b"], [[0, 0, 0], [0, 1, 1]])
    [without] = with_inverse(["c", "d"], [[0], [0]]).permute([0, 1]).split([2])
    with pytest.raises(ValueError, match="some tensors have inverse_indices and some have not"):
        KeyedJaggedTensor.concat([first, without])
    with pytest.raises(ValueError, match=r"different batch sizes: \[3, 1\]"):
        KeyedJaggedTensor.concat([first, with_inverse(["c", "d"], [[0], [0]])])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stride_per_key_per_rank": [[1], [1]]}, "3 bags of 2 keys, but the strides per key are"),
        ({"stride_per_key_per_rank": [[3]]}, "3 bags of 2 keys"),
        ({"stride_per_key": [2, 2]}, "3 bags of 2 keys"),
        (
            {"stride_per_key": [1, 2], "inverse_indices": (["a"], torch.tensor([0, 1]))},
            "inverse_indices has shape",
        ),
    ],
)
def test_strides_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        KeyedJaggedTensor(
            ["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 1, 1]), **fields
        )


@quick
@given(st.data())
def test_a_collection_expands_distinct_bags_to_samples(data):
    bags = data.draw(st.lists(st.lists(st.integers(0, 8), max_size=3), min_size=1, max_size=4))
    other = data.draw(st.lists(st.lists(st.integers(0, 8), max_size=3), min_size=1, max_size=4))
    B = data.draw(st.integers(1, 5))
    places = [
        data.draw(st.lists(st.integers(0, len(own) - 1), min_size=B, max_size=B))
        for own in (bags, other)
    ]
    table = EmbeddingBagCollection([EmbeddingBagConfig(9, 3, name="t", feature_names=["b", "a"])])
    both = {"a": JaggedTensor.from_dense([torch.tensor(b, dtype=torch.int64) for b in bags]),
            "b": JaggedTensor.from_dense([torch.tensor(b, dtype=torch.int64) for b in other])}  # fmt: skip
    joined = KeyedJaggedTensor.from_jt_dict(both)
    kjt = KeyedJaggedTensor(
        joined.keys(),
        joined.values(),
        lengths=joined.lengths(),
        stride_per_key_per_rank=[[len(bags)], [len(other)]],
        inverse_indices=(["a", "b"], torch.tensor(places)),
    )
    whole = KeyedJaggedTensor.from_jt_dict(
        {
            "a": JaggedTensor.from_dense(
                [torch.tensor(bags[p], dtype=torch.int64) for p in places[0]]
            ),
            "b": JaggedTensor.from_dense(
                [torch.tensor(other[p], dtype=torch.int64) for p in places[1]]
            ),
        }
    )
    assert torch.equal(table(kjt).values(), table(whole).values())


def test_a_collection_cannot_guess_which_bag_a_sample_uses():
    table = EmbeddingBagCollection([EmbeddingBagConfig(9, 3, name="t", feature_names=["a", "b"])])
    kjt = KeyedJaggedTensor(
        ["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 1, 1]), stride_per_key=[1, 2]
    )
    with pytest.raises(ValueError, match="give inverse_indices="):
        table(kjt)
