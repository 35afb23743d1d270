"""What a caller gives becomes the model's arrays, or an error that says what to change."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import UserError
from tessera.serving.client.arrays import Bags, Shared
from tessera.serving.client.assemble import assemble
from tests.client.client_schemas import feature, schema

DENSE = np.zeros((2, 2), dtype=np.float32)


def sparse(**changes):
    bags = {
        "C1": [[1], [2, 3]],
        "C2": [[], [4]],
        "W1": Bags.from_lists([[5], []], [[0.5], []]),
    }
    return {name: bag for name, bag in (bags | changes).items() if bag is not None}


def test_features_are_put_in_the_schemas_order():
    bags = dict(reversed(sparse().items()))
    arrays = assemble(DENSE, bags, schema=schema())
    assert arrays.batch_size == 2
    assert arrays.id_list.lengths.tolist() == [[1, 2], [0, 1]]
    assert arrays.id_list.values.tolist() == [1, 2, 3, 4]
    assert arrays.id_score_list.lengths.tolist() == [[1, 0]]
    assert arrays.id_score_list.weights.tolist() == [0.5]
    assert arrays.num_ids == 5


def test_without_a_schema_the_mappings_order_is_kept():
    arrays = assemble(None, {"b": [[7]], "a": [[8]]})
    assert arrays.dense is None
    assert arrays.id_list.values.tolist() == [7, 8]
    assert arrays.id_score_list is None


@given(
    bags=st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), min_size=1, max_size=6)
)
def test_every_form_of_a_feature_gives_the_same_arrays(bags):
    flat = [value for bag in bags for value in bag]
    lengths = [len(bag) for bag in bags]
    forms = [
        bags,
        Bags(np.array(lengths), np.array(flat, dtype=np.int64)),
        (lengths, np.array(flat, dtype=np.int64)),
    ]
    if len(set(lengths)) == 1:
        forms.append(np.array(bags, dtype=np.int64).reshape(len(bags), -1))
    for form in forms:
        group = assemble(None, {"x": form}).id_list
        assert group.lengths.dtype == np.int32
        assert group.lengths.tolist() == [lengths]
        assert group.values.tolist() == flat


def test_a_flat_array_is_one_id_per_sample():
    group = assemble(None, {"x": np.array([5, 6, 7], dtype=np.int32)}).id_list
    assert group.lengths.tolist() == [[1, 1, 1]]
    assert group.values.dtype == np.int32


def test_shared_features_leave_the_samples_group():
    shared = Shared.one_user({"C2": [[9, 9]]}, 2)
    arrays = assemble(DENSE, sparse(C2=None), shared=shared, schema=schema())
    assert arrays.id_list.lengths.tolist() == [[1, 2]]
    assert arrays.shared.names == ("C2",)
    assert arrays.shared.group.lengths.tolist() == [[2]]
    assert arrays.shared.row_index.tolist() == [0, 0]
    assert arrays.shared.row_index.dtype == np.int32


WRONG = {
    "unknown name": (
        DENSE,
        sparse(C3=[[1], [1]]),
        "'C3' is not in the model; the model has C1, C2, W1",
    ),
    "missing name": (DENSE, sparse(C1=None), "'C1' is missing"),
    "missing dense": (None, sparse(), "dense: 0 columns; the model has 2"),
    "dense width": (np.zeros((2, 3)), sparse(), "dense: 3 columns; the model has 2"),
    "dense flat": (np.zeros(4), sparse(), r"dense: float64 of shape \(4,\)"),
    "dense text": (np.array([["a", "b"]] * 2), sparse(), "dense: <U1"),
    "dense ragged": ([[1.0], [1.0, 2.0]], sparse(), "dense: rows of different widths"),
    "batch": (np.zeros((3, 2)), sparse(), "dense has 3 samples but feature 'C1' has 2"),
    "lengths": (DENSE, sparse(C1=([1, 1], [1])), "lengths sum to 2 but there are 1 values"),
    "negative": (DENSE, sparse(C1=([3, -1], [1, 2])), "lengths hold -1"),
    "long": (DENSE, sparse(C1=([2**32 + 1, 1], [1, 2])), "lengths hold 4294967297; none may be so"),
    "float ids": (DENSE, sparse(C1=([1, 1], [1.0, 2.0])), "values are float64; they must be"),
    "float lists": (DENSE, sparse(C1=[[1], [1.5]]), "values are float64; they must be"),
    "bool ids": (DENSE, sparse(C1=np.array([True, False])), "values are bool"),
    "huge": (DENSE, sparse(C1=np.array([1, 2**63], np.uint64)), r"\.view\(numpy\.int64\)"),
    "beyond 64 bits": (DENSE, sparse(C1=[[1], [2**64]]), "they must be 64-bit integers"),
    "flat list": (DENSE, sparse(C1=[1, 2]), "not one list of integer ids per sample"),
    "3-D": (DENSE, sparse(C1=np.zeros((2, 1, 1), int)), r"an array of shape \(2, 1, 1\)"),
    "tuple of one": (DENSE, sparse(C1=([1, 1],)), "a tuple of 1 parts"),
    "2-D lengths": (DENSE, sparse(C1=([[1, 1]], [1, 2])), r"lengths have shape \(1, 2\)"),
    "no weights": (DENSE, sparse(W1=[[1], []]), "'W1' belongs to .* and needs weights"),
    "weights": (DENSE, sparse(C1=([1, 1], [1, 2], [0.5, 0.5])), "'C1' .* takes no weights"),
    "too few weights": (DENSE, sparse(W1=([1, 1], [1, 2], [0.5])), "1 weights for 2 values"),
    "text weights": (DENSE, sparse(W1=([1, 0], [1], ["a"])), "'W1': weights are <U1"),
    "no samples": (np.zeros((0, 2)), sparse(C1=[], C2=[], W1=([], [], [])), "0 samples"),
}


@pytest.mark.parametrize(("dense", "bags", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_request_is_refused(dense, bags, message):
    with pytest.raises(UserError, match=message):
        assemble(dense, bags, schema=schema())


SHARED_WRONG = {
    "twice": (sparse(), Shared.one_user({"C2": [[1]]}, 2), "both per sample and in shared"),
    "weighted": (
        sparse(W1=None),
        Shared.one_user({"W1": [[1]]}, 2),
        "'W1' has weights in the model and cannot be shared",
    ),
    "weights": (
        sparse(C2=None),
        Shared.one_user({"C2": ([1], [1], [0.5])}, 2),
        "a shared feature cannot have weights",
    ),
    "index": (
        sparse(C2=None),
        Shared({"C2": [[1]]}, np.array([0, 1])),
        "holds 0 to 1; the shared features have rows 0 to 0",
    ),
    "negative index": (
        sparse(C2=None),
        Shared({"C2": [[1]]}, np.array([0, -1])),
        "holds -1 to 0",
    ),
    "float index": (sparse(C2=None), Shared({"C2": [[1]]}, np.zeros(2)), "float64 of shape"),
    "index size": (
        sparse(C2=None),
        Shared.one_user({"C2": [[1]]}, 3),
        "row_index has 3 samples but feature 'C1' has 2",
    ),
    "rows": (
        sparse(C1=None, C2=None),
        Shared({"C1": [[1]], "C2": [[1], [1]]}, np.array([0, 0])),
        "shared feature 'C2' has 2 rows but 'C1' has 1",
    ),
    "none": (sparse(), Shared.one_user({}, 2), "no features; leave shared out"),
}


@pytest.mark.parametrize(
    ("bags", "shared", "message"), SHARED_WRONG.values(), ids=SHARED_WRONG.keys()
)
def test_wrong_shared_features_are_refused(bags, shared, message):
    with pytest.raises(UserError, match=message):
        assemble(DENSE, bags, shared=shared, schema=schema())


def test_missing_values_are_refused_by_a_model_that_takes_none():
    dense = np.array([[0, 1], [2, np.nan]], dtype=np.float32)
    assemble(dense, sparse(), schema=schema())
    with pytest.raises(UserError, match="sample 1 has no value for 'I1'"):
        assemble(dense, sparse(), schema=schema(missing="refuse"))


def test_an_empty_request_is_refused():
    with pytest.raises(UserError, match="the request is empty"):
        assemble(None, {})


def test_a_model_without_dense_features_takes_none():
    model = schema(dense=0, features=(feature("C1"),))
    assert assemble(None, {"C1": [[1]]}, schema=model).dense is None
    with pytest.raises(UserError, match="dense: 2 columns; the model has 0"):
        assemble(DENSE, {"C1": [[1], [1]]}, schema=model)
