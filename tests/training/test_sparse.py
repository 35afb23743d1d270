import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tessera.training import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from tests.training.jagged_strategies import bags_of, quick

ROWS = {"a": 9, "b": 5, "c": 30}
int64 = torch.int64


def as_lists(kjt):
    return {key: [bag.tolist() for bag in kjt[key].to_dense()] for key in kjt.index_per_key()}


@quick
@given(bags_of(ROWS), st.sampled_from([torch.int32, int64]), st.sampled_from([torch.int32, int64]))
def test_a_keyed_jagged_tensor_holds_the_bags_it_was_given(bags, values_dtype, lengths_dtype):
    kjt = bags.kjt(weighted=True, values_dtype=values_dtype, lengths_dtype=lengths_dtype)
    assert kjt.stride() == bags.batch_size
    assert as_lists(kjt) == bags.ids
    counts = [sum(map(len, bags.ids[key])) for key in bags.ids]
    assert kjt.length_per_key() == counts
    assert kjt.offset_per_key() == [0, counts[0], counts[0] + counts[1], sum(counts)]
    assert kjt.values().dtype == values_dtype
    assert kjt.lengths().dtype == lengths_dtype
    weights = {key: [w.tolist() for w in kjt[key].to_dense_weights()] for key in bags.ids}
    assert weights == bags.weights


@quick
@given(bags_of(ROWS))
def test_lengths_and_offsets_describe_the_same_bags(bags):
    kjt = bags.kjt()
    again = KeyedJaggedTensor.from_offsets_sync(kjt.keys(), kjt.values(), kjt.offsets())
    assert as_lists(again) == bags.ids
    assert torch.equal(again.lengths(), kjt.lengths())
    assert again.stride() == bags.batch_size


@quick
@given(bags_of(ROWS), st.permutations(range(3)), st.integers(0, 3))
def test_permute_takes_keys_in_the_order_asked_for(bags, order, count):
    kjt = bags.kjt(weighted=True)
    chosen = order[:count]
    keys = [kjt.keys()[index] for index in chosen]
    permuted = kjt.permute(chosen)
    assert permuted.keys() == keys
    assert as_lists(permuted) == {key: bags.ids[key] for key in keys}
    assert permuted.stride() == bags.batch_size
    assert permuted.weights().tolist() == [
        w for key in keys for bag in bags.weights[key] for w in bag
    ]


@quick
@given(bags_of(ROWS), st.sampled_from([[3], [0, 3], [1, 2], [1, 1, 1], [2, 0, 1]]))
def test_split_and_concat_are_inverses(bags, segments):
    kjt = bags.kjt(weighted=True)
    parts = kjt.split(segments)
    assert [len(part.keys()) for part in parts] == segments
    assert all(part.stride() == bags.batch_size for part in parts)
    for part in parts:
        assert as_lists(part) == {key: bags.ids[key] for key in part.index_per_key()}
    whole = KeyedJaggedTensor.concat(parts)
    assert as_lists(whole) == bags.ids
    assert torch.equal(whole.weights(), kjt.weights())


@quick
@given(bags_of(ROWS))
def test_a_dict_of_jagged_tensors_goes_both_ways(bags):
    kjt = bags.kjt(weighted=True)
    again = KeyedJaggedTensor.from_jt_dict(kjt.to_dict())
    assert as_lists(again) == bags.ids
    assert torch.equal(again.weights(), kjt.weights())


def test_with_values_keeps_the_bags_and_refuses_another_number_of_ids():
    kjt = KeyedJaggedTensor(["a"], torch.tensor([1, 2]), lengths=torch.tensor([2, 0]))
    assert as_lists(kjt.with_values(torch.tensor([7, 8]))) == {"a": [[7, 8], []]}
    with pytest.raises(ValueError, match="3 ids, not 2"):
        kjt.with_values(torch.tensor([7, 8, 9]))


def test_empty_tensors_have_no_keys_and_keep_the_batch_size_when_asked():
    assert KeyedJaggedTensor.empty().stride() == 0
    assert KeyedJaggedTensor.empty(is_weighted=True).weights().numel() == 0
    kjt = KeyedJaggedTensor(["a"], torch.tensor([1]), lengths=torch.tensor([1, 0, 0]))
    like = KeyedJaggedTensor.empty_like(kjt)
    assert (like.keys(), like.stride(), like.values().numel()) == ([], 3, 0)
    assert JaggedTensor.empty().to_dense() == []


def test_known_bounds_are_taken_and_can_be_forgotten():
    kjt = KeyedJaggedTensor(
        ["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]), length_per_key=[1, 2]
    )
    assert kjt.offset_per_key_or_none() == [0, 1, 3]
    assert kjt.unsync().length_per_key_or_none() is None
    assert kjt.sync().length_per_key_or_none() == [1, 2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lengths": [1, 1]}, "add up to 2 but there are 3 values"),
        ({"lengths": [4, -1]}, r"negative length \(-1\)"),
        ({"lengths": [1, 1, 1]}, "3 bags, which do not divide evenly among 2 keys"),
        ({"lengths": [1.0, 2.0]}, "lengths has dtype torch.float32; give int32 or int64"),
        ({"lengths": [[3, 0]]}, "one-dimensional"),
        ({"offsets": [0, 1, 2]}, "run from 0 to 2; they must run from 0 to .* 3"),
        ({"offsets": [1, 2, 3]}, "run from 1 to 3"),
        ({"offsets": [0, 4, 3]}, "offsets decrease"),
        ({"offsets": [0, 1, 3], "lengths": [3]}, "3 entries for 1 bags"),
        ({"offsets": []}, "0 entries for 0 bags"),
        ({"lengths": [3, 0], "stride": 2}, "2 keys with stride 2 make 4"),
        ({"lengths": [3, 0], "length_per_key": [3]}, "length_per_key has 1 entries; 2 keys need 2"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields, message):
    tensors = {
        name: torch.tensor(value, dtype=None if value else int64)
        if name in {"lengths", "offsets", "weights"}
        else value
        for name, value in fields.items()
    }
    with pytest.raises(ValueError, match=message):
        KeyedJaggedTensor(["a", "b"], torch.tensor([5, 6, 7]), **tensors)


def test_what_is_never_looked_up_may_be_incomplete_and_is_refused_when_it_is():
    ids = torch.tensor([5, 6, 7])
    bare = KeyedJaggedTensor(["a", "b"], ids)
    assert (bare.lengths_or_none(), bare.offsets_or_none(), bare.stride()) == (None, None, 0)
    with pytest.raises(ValueError, match="lengths and offsets are both None"):
        bare.lengths()
    with pytest.raises(ValueError, match="lengths and offsets are both None"):
        bare.to_dict()
    with pytest.raises(ValueError, match="lengths and offsets are both None"):
        JaggedTensor(ids).offsets()
    lengths = torch.tensor([3, 0])
    few = KeyedJaggedTensor(["a", "b"], ids, weights=torch.ones(1), lengths=lengths)
    uses = few.to_dict, lambda: few["a"], lambda: few.split([1, 1]), lambda: few.permute([1])
    one = JaggedTensor(ids, weights=torch.ones(1), lengths=lengths)
    for use in (*uses, few.dist_tensors, one.to_dense_weights, one.to_padded_dense_weights):
        with pytest.raises(ValueError, match="weights has 1 entries but values has 3"):
            use()


def test_of_a_key_that_is_there_twice_lookups_take_the_last():
    kjt = KeyedJaggedTensor(["a", "a"], torch.tensor([5, 6, 7]), lengths=torch.tensor([1, 2]))
    assert kjt["a"].values().tolist() == [6, 7]
    assert kjt.to_dict()["a"].values().tolist() == [6, 7]
    assert [part.values().tolist() for part in kjt.split([1, 1])] == [[5], [6, 7]]


def test_questions_that_have_no_answer_are_refused():
    kjt = KeyedJaggedTensor(["a"], torch.tensor([1]), lengths=torch.tensor([1]))
    with pytest.raises(ValueError, match="no weights"):
        kjt.weights()
    with pytest.raises(ValueError, match="no weights"):
        kjt["a"].weights()
    with pytest.raises(KeyError, match="no key 'z'"):
        kjt["z"]
    with pytest.raises(ValueError, match="do not add up"):
        kjt.split([2])
    with pytest.raises(ValueError, match="indices holds 1; give places among 1 keys"):
        kjt.permute([1])
    with pytest.raises(ValueError, match="different batch sizes"):
        KeyedJaggedTensor.concat(
            [kjt, KeyedJaggedTensor(["b"], torch.tensor([1]), lengths=torch.tensor([1, 0]))]
        )
    with pytest.raises(ValueError, match="without inverse_indices"):
        kjt.inverse_indices()
    with pytest.raises(ValueError, match="jt_dict is empty"):
        KeyedJaggedTensor.from_jt_dict({})
    with pytest.raises(ValueError, match="nothing to concatenate"):
        KeyedJaggedTensor.concat([])


def test_jagged_from_dense_tensors():
    jagged = JaggedTensor.from_dense(
        [torch.tensor([1, 2]), torch.tensor([], dtype=int64), torch.tensor([3])],
        weights=[torch.tensor([0.5, 1.5]), torch.tensor([]), torch.tensor([2.0])],
    )
    assert jagged.lengths().tolist() == [2, 0, 1]
    assert jagged.offsets().tolist() == [0, 2, 2, 3]
    assert [bag.tolist() for bag in jagged.to_dense()] == [[1, 2], [], [3]]
    assert [bag.tolist() for bag in jagged.to_dense_weights()] == [[0.5, 1.5], [], [2.0]]


def test_jagged_from_rows_takes_the_head_of_each_row():
    values = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    jagged = JaggedTensor.from_dense_lengths(values, torch.tensor([2, 0, 3]), values.float())
    assert [bag.tolist() for bag in jagged.to_dense()] == [[1, 2], [], [7, 8, 9]]
    assert jagged.weights().tolist() == [1, 2, 7, 8, 9]
    with pytest.raises(ValueError, match="lengths holds 4, but rows have 3"):
        JaggedTensor.from_dense_lengths(values, torch.tensor([4, 0, 0]))


@quick
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=5),
    st.one_of(st.none(), st.integers(0, 5)),
)
def test_padding_cuts_and_fills(bags, length):
    flat = [i for bag in bags for i in bag]
    jagged = JaggedTensor(
        torch.tensor(flat, dtype=int64),
        lengths=torch.tensor([len(bag) for bag in bags], dtype=int64),
    )
    width = max(map(len, bags), default=0) if length is None else length
    expected = [(bag + [-1] * width)[:width] for bag in bags]
    padded = jagged.to_padded_dense(length, padding_value=-1)
    assert padded.shape == (len(bags), width)
    assert padded.tolist() == expected


def test_padding_vectors_pads_rows():
    jagged = JaggedTensor(torch.arange(6.0).view(3, 2), lengths=torch.tensor([1, 2]))
    assert jagged.to_padded_dense(2).tolist() == [[[0, 1], [0, 0]], [[2, 3], [4, 5]]]


def test_keyed_tensor_gives_columns_by_name_and_regroups():
    first = KeyedTensor(["a", "b"], [1, 2], torch.arange(6.0).view(2, 3))
    second = KeyedTensor.from_tensor_list(["c"], [torch.tensor([[9.0], [8.0]])])
    assert first["b"].tolist() == [[1, 2], [4, 5]]
    assert first.offset_per_key() == [0, 1, 3]
    left, right = KeyedTensor.regroup([first, second], [["c", "a"], ["b"]])
    assert left.tolist() == [[9, 0], [8, 3]]
    assert torch.equal(right, first["b"])
    named = KeyedTensor.regroup_as_dict([first, second], [["c"], ["b"]], ["x", "y"])
    assert torch.equal(named["x"], second.values())
    with pytest.raises(KeyError, match="no key 'z'"):
        KeyedTensor.regroup([first], [["z"]])
    with pytest.raises(ValueError, match="adds up to 2, but values has 3"):
        KeyedTensor(["a", "b"], [1, 1], first.values())


def test_tensors_print_their_bags():
    kjt = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 0, 0, 1]))
    assert str(kjt) == 'KeyedJaggedTensor({\n    "a": [[1, 2], []],\n    "b": [[], [3]]\n})\n'
    assert str(kjt["a"]) == "JaggedTensor({\n    [[1, 2], []]\n})\n"
    weighted = KeyedJaggedTensor(
        ["a"], torch.tensor([1, 2]), lengths=torch.tensor([2, 0]), weights=torch.ones(2)
    )
    assert '"weights": [[1.0, 1.0], []]' in str(weighted)
    assert '"weights": [[1.0, 1.0], []]' in str(weighted["a"])
    assert '"a": [[1.0]]' in str(KeyedTensor(["a"], [1], torch.ones(1, 1)))
    assert str(KeyedTensor([], [], torch.ones(1, 0))) == "KeyedTensor()\n"
