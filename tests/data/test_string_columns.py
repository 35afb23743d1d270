"""Ids of strings in Arrow columns, whatever form the column has."""

import warnings

import numpy as np
import pyarrow as pa
import pytest

from tessera.kernels.string_ids import string_ids
from tessera.training.data.string_columns import arrow_string_ids, is_string_type

STRINGS = ["a", "", None, "Zürich", "x" * 100, "a"]


def column(kind):
    if pa.types.is_dictionary(kind):
        return pa.array(STRINGS).dictionary_encode().cast(kind)
    if "binary" in str(kind):
        return pa.array([None if s is None else s.encode() for s in STRINGS], kind)
    return pa.array(STRINGS, kind)


@pytest.mark.parametrize(
    "kind",
    [
        *(pa.string(), pa.large_string(), pa.string_view()),
        *(pa.binary(), pa.large_binary(), pa.binary_view()),
        *(pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.large_string())),
    ],
    ids=str,
)
@pytest.mark.parametrize("part", [slice(None), slice(1, 5), slice(3, 3)], ids=str)
def test_ids_are_those_of_the_strings(kind, part):
    given = column(kind)[part]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ids = arrow_string_ids(given)
        twice = arrow_string_ids(pa.chunked_array([given, given]))
    expected = string_ids([text or "" for text in STRINGS[part]])
    there = given.is_valid().to_numpy(zero_copy_only=False)
    assert ids[there].tolist() == expected[there].tolist()
    assert ids.dtype == np.int64
    assert twice.tolist() == [*ids, *ids]
    assert is_string_type(kind)


def test_a_fixed_width_and_an_empty_dictionary():
    assert arrow_string_ids(pa.array([b"abc"], pa.binary(3))).tolist() == [*string_ids(["abc"])]
    nulls = pa.DictionaryArray.from_arrays(
        pa.array([None, None], pa.int8()), pa.array([], "string")
    )
    assert arrow_string_ids(nulls).shape == (2,)
    assert arrow_string_ids(pa.chunked_array([], pa.string())).shape == (0,)


@pytest.mark.parametrize("kind", [pa.int64(), pa.float32(), pa.list_(pa.string())], ids=str)
def test_other_types_are_not_strings(kind):
    assert not is_string_type(kind)
