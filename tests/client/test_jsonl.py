"""Lines become batches, or an error that begins with the line's number."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import UserError
from tessera.serving.client.assemble import assemble
from tessera.serving.client.jsonl import read_batches
from tests.client.client_schemas import feature, schema

LINE = '{"dense": {"I0": 0.5, "I1": 2}, "sparse": {"C1": [1, 2], "W1": [3]}, "weights": {"W1": [0.25]}}'


def read(*lines, batch_size=64, model=None):
    return list(read_batches(lines, batch_size=batch_size, schema=model or schema()))


def test_named_features_land_in_the_models_order():
    (batch,) = read(LINE)
    assert batch.dense.tolist() == [[0.5, 2.0]]
    assert list(batch.sparse) == ["C1", "C2", "W1"]
    assert batch.sparse["C1"].values.tolist() == [1, 2]
    assert batch.sparse["C2"].lengths.tolist() == [0]
    assert batch.sparse["W1"].weights.tolist() == [0.25]
    assemble(batch.dense, batch.sparse, schema=schema())  # is what predict takes


@pytest.mark.parametrize(
    "dense", ['{"I1": 2}', '{"I0": null, "I1": 2}', "[null, 2]"], ids=["absent", "null", "list"]
)
def test_missing_values_are_nan(dense):
    (batch,) = read(f'{{"dense": {dense}}}')
    assert math.isnan(batch.dense[0, 0])
    assert batch.dense[0, 1] == 2


def test_an_empty_sample_has_nothing_but_is_one():
    (batch,) = read("{}")
    assert np.isnan(batch.dense).all()
    assert all(bags.lengths.tolist() == [0] for bags in batch.sparse.values())


def test_batches_say_their_lines_and_empty_lines_count():
    lines = [LINE, "", LINE, "  \n", LINE]
    batches = read(*lines, batch_size=2)
    assert [(b.first_line, b.last_line, b.size) for b in batches] == [(1, 3, 2), (5, 5, 1)]


def test_lines_are_read_only_as_needed():
    endless = itertools.repeat(LINE)
    batches = read_batches(endless, batch_size=3, schema=schema())
    assert next(batches).size == 3


def test_without_a_schema_positions_count():
    lines = [
        '{"dense": [1, null], "sparse": [[7], []]}',
        '{"dense": [2, 3], "sparse": [[], [8, 9]]}',
    ]
    (batch,) = read_batches(lines, batch_size=9, schema=None)
    arrays = assemble(batch.dense, batch.sparse)
    assert arrays.id_list.lengths.tolist() == [[1, 0], [0, 2]]
    assert arrays.id_list.values.tolist() == [7, 8, 9]
    assert arrays.dense[1].tolist() == [2, 3]


def test_more_than_ten_positions_keep_their_order():
    line = json.dumps({"sparse": [[i] for i in range(12)]})
    (batch,) = read_batches([line], batch_size=1, schema=None)
    assert batch.dense is None
    assert assemble(None, batch.sparse).id_list.values.tolist() == list(range(12))


WRONG = {
    "not JSON": ("{", "not JSON"),
    "deep": ("[" * 100_000, "not JSON"),
    "a list": ("[1]", "a JSON list; a sample is an object"),
    "unknown key": ('{"spares": {}}', "unknown key 'spares'; did you mean 'sparse'"),
    "dense name": ('{"dense": {"J0": 1}}', "dense: no feature 'J0'; the model has I0, I1"),
    "dense count": ('{"dense": [1]}', "dense: 1 values; the model has 2"),
    "dense text": ('{"dense": {"I0": "1"}}', "'I0': a JSON string; give a number"),
    "dense bool": ('{"dense": {"I0": true}}', "'I0': a JSON boolean"),
    "dense NaN": ('{"dense": {"I0": NaN}}', "write null where it is missing"),
    "dense infinite": ('{"dense": {"I0": 1e39}}', "not a finite 32-bit number"),
    "dense huge": ('{"dense": {"I0": 1' + "0" * 400 + "}}", "not a finite 32-bit number"),
    "dense kind": ('{"dense": 3}', "dense: a JSON number; give an object"),
    "sparse kind": ('{"sparse": [[1]]}', "sparse: a JSON list; give an object"),
    "sparse name": ('{"sparse": {"C9": [1]}}', "sparse: no feature 'C9'"),
    "bag kind": ('{"sparse": {"C1": 1}}', "'C1' is a JSON number; give a list of ids"),
    "float id": ('{"sparse": {"C1": [1.0]}}', "'C1' holds 1.0; ids are integers"),
    "bool id": ('{"sparse": {"C1": [true]}}', "'C1' holds True; ids are integers"),
    "unsigned id": ('{"sparse": {"C1": [9223372036854775808]}}', r"subtract 2\*\*64"),
    "weights name": ('{"weights": {"C9": [1]}}', "weights: no feature 'C9'"),
    "unwanted": ('{"sparse": {"C1": [1]}, "weights": {"C1": [1]}}', "'C1' takes none"),
    "no weights": ('{"sparse": {"W1": [1]}}', "'W1' needs one weight per id"),
    "few weights": ('{"sparse": {"W1": [1]}, "weights": {"W1": []}}', "needs a list of 1"),
    "weight kind": ('{"sparse": {"W1": [1]}, "weights": {"W1": [null]}}', "'W1': a JSON null"),
}


@pytest.mark.parametrize(("line", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_malformed_line_is_named(line, message):
    with pytest.raises(UserError, match=f"^line 3: .*{message}"):
        read(LINE, "", line, LINE)


POSITIONAL_WRONG = {
    "names": ('{"dense": {"I0": 1}, "sparse": [[1]]}', "named features need the model's schema"),
    "sparse names": ('{"sparse": {"C1": [1]}}', "--model-file"),
    "weights": ('{"sparse": [[1]], "weights": [[1]]}', "weights need the model's schema"),
    "empty": ("{}", "the sample is empty"),
    "another width": ('{"dense": [1, 2], "sparse": [[1]]}', "the lines before have 1 and 1"),
}


@pytest.mark.parametrize(
    ("line", "message"), POSITIONAL_WRONG.values(), ids=POSITIONAL_WRONG.keys()
)
def test_a_malformed_line_without_a_schema_is_named(line, message):
    lines = ['{"dense": [1], "sparse": [[1]]}', line]
    with pytest.raises(UserError, match=f"^line 2: .*{message}"):
        list(read_batches(lines, batch_size=1, schema=None))


def test_a_model_that_takes_no_missing_values():
    model = schema(missing="refuse", features=(feature("C1"),))
    with pytest.raises(UserError, match="line 1: dense: 'I1' has no value"):
        read('{"dense": {"I0": 1}}', model=model)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["dense", "sparse", "weights", "I0", "C1", "W1"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@given(value=json_values)
def test_any_json_is_a_sample_or_an_error(value):
    try:
        (batch,) = read(json.dumps(value))
    except UserError:
        return
    assemble(batch.dense, batch.sparse, schema=schema())
