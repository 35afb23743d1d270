"""Values that a request gives as strings: what becomes of them, and what is refused."""

import numpy as np
import pytest

from tessera.kernels.string_ids import string_ids
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.serving.server.errors import InvalidRequestError
from tessera.serving.server.request.strings import MAX_STRING_BYTES, make_ids, split_raw
from tests.server.server_harness import feature, string_feature

FEATURES = (string_feature("country"), feature("item"))


def ids_of(strings, lengths, features=FEATURES):
    return make_ids("values_bytes", strings, np.array(lengths, np.int32), features)


def test_strings_are_hashed_and_decimal_numbers_are_read():
    found = ids_of([b"DE", b"", b"12", b"-9223372036854775808", b"0007"], [1, 1, 1, 2])
    expected = [*string_ids(["DE", ""]), 12, -(2**63), 7]
    assert found.tolist() == expected


@pytest.mark.parametrize(
    "wrong",
    [
        *(b"", b"-", b"+5", b" 5", b"5 ", b"1.0", b"1e3", b"x", b"0x10", b"--1", b"1\n"),
        *("٣".encode(), b"9223372036854775808", b"-9223372036854775809", b"9" * 400),
    ],
)
def test_what_is_not_a_number_is_refused_by_feature_and_row(wrong):
    says = (
        rf"^values_bytes: feature 'item', row 1: a string of {len(wrong)} bytes is not a whole "
        "number of 64 bits"
    )
    with pytest.raises(InvalidRequestError, match=says):
        ids_of([b"DE", b"1", b"2", wrong], [0, 1, 2, 1])


def test_a_string_may_be_as_long_as_the_bound_and_no_longer():
    ids_of([b"x" * MAX_STRING_BYTES], [1, 0, 0, 0])
    with pytest.raises(InvalidRequestError, match="has 65537 bytes, the limit is 65536"):
        ids_of([b"a", b"x" * (MAX_STRING_BYTES + 1)], [1, 1, 0, 0])


def test_the_first_that_is_wrong_is_named():
    with pytest.raises(InvalidRequestError, match="feature 'country', row 1: a string has"):
        ids_of([b"a", b"x" * (MAX_STRING_BYTES + 1), b"x"], [1, 1, 1, 0])
    with pytest.raises(InvalidRequestError, match="feature 'item', row 0: a string of 1 bytes"):
        ids_of([b"x", b"y" * (MAX_STRING_BYTES + 1)], [0, 0, 1, 1])


def test_a_raw_tensor_is_split_into_its_strings():
    raw = b"\x02\0\0\0DE\0\0\0\0\x01\0\0\0x"
    assert split_raw(raw, 3) == [b"DE", b"", b"x"]
    for cut in range(len(raw)):
        assert split_raw(raw[:cut], 3) is None
    assert split_raw(raw, 2) is None
    assert split_raw(raw, 4) is None
    assert split_raw(raw + b"\0", 3) is None
    assert split_raw(b"\xff\xff\xff\xff", 1) is None
    assert split_raw(b"", 0) == []


def test_the_field_number_is_what_the_contract_says():
    field = pb.SparseFeatures.DESCRIPTOR.fields_by_name["values_bytes"]
    assert (field.number, field.type) == (101, field.TYPE_BYTES)
