"""How columns become slices, groups and weights, and which batches a bounded pass takes."""

from __future__ import annotations

from datetime import datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest

from tessera.errors import UserError
from tessera.serving.offline.evaluation.columns import Keys, Values, Weights
from tessera.serving.offline.evaluation.scoring import evenly_spread


def slices(*arrays, numeric=False, buckets=3, top=2):
    """The slices of a column that comes in several batches: name and places."""
    values = Values(sum(map(len, arrays)), "c", numeric=numeric, buckets=buckets, top=top)
    for array in arrays:
        values.add(array)
    return [(name, rows.tolist()) for name, rows in values.slices()]


def test_values_are_shown_by_how_many_rows_they_have():
    found = slices(pa.array(["a", "b", None, "b"]), pa.array(["c", "b", "a", None, "d"]))
    assert found == [
        ("b", [1, 3, 5]),
        ("(missing)", [2, 7]),
        ("(the rest: 3 values)", [0, 4, 6, 8]),
    ]


def test_integers_and_truths_are_values():
    assert slices(pa.array([7, 8, 7])) == [("7", [0, 2]), ("8", [1])]
    assert slices(pa.array([True, False, True])) == [("True", [0, 2]), ("False", [1])]


def test_numbers_are_cut_into_buckets_of_as_many_rows():
    numbers = np.random.default_rng(0).permutation(90).astype(float)
    found = slices(pa.array(numbers[:50]), pa.array([*numbers[50:], None]))
    assert [(name, len(rows)) for name, rows in found] == [
        ("up to 29", 30),
        ("29 to 59", 30),
        ("above 59", 30),
        ("(missing)", 1),
    ]
    assert all(29 < numbers[row] <= 59 for row in found[1][1])


def test_few_numbers_are_values_and_many_ties_make_fewer_buckets():
    assert slices(pa.array([0.5, 1.5, 0.5])) == [("0.5", [0, 2]), ("1.5", [1])]
    found = slices(pa.array([1.0] * 20 + [2.0, 3.0, 4.0]))
    assert [(name, len(rows)) for name, rows in found] == [("up to 1", 20), ("above 1", 3)]


def test_texts_that_are_numbers_or_times_are_cut_like_these():
    found = slices(pa.array([str(n + 0.5) for n in range(9)]))
    assert [(name, len(rows)) for name, rows in found] == [
        ("up to 2.5", 3),
        ("2.5 to 5.5", 3),
        ("above 5.5", 3),
    ]
    begin = datetime(2024, 3, 1)  # noqa: DTZ001 - a column of times without a zone
    texts = [str(begin + timedelta(hours=n)) for n in range(9)]
    times = slices(pa.array(texts))
    assert times == slices(pa.array([begin + timedelta(hours=n) for n in range(9)]))
    assert times[0] == ("up to 2024-03-01 02:00:00", [0, 1, 2])
    # Texts that are whole numbers are as good as ids.
    assert slices(pa.array([str(n) for n in range(9)]))[-1][0] == "(the rest: 7 values)"


def test_keys_are_codes_and_a_missing_one_is_alone():
    keys = Keys(6)
    keys.add(pa.array(["a", None, "b"]))
    keys.add(pa.array(["a", None, "c"]))
    codes, missing = keys.codes()
    assert missing.tolist() == [False, True, False, False, True, False]
    assert codes[0] == codes[3]
    assert len(set(codes.tolist())) == 5
    numbers = Keys(3)
    numbers.add(pa.array([1.5, 2.5, 1.5]))
    assert numbers.codes()[0].tolist() == [0, 1, 0]


@pytest.mark.parametrize("wrong", [[1.0, -1.0], [1.0, None], ["1", "x"], [float("inf"), 1.0]])
def test_weights_are_numbers_of_at_least_0(wrong):
    with pytest.raises(UserError, match="--weight w: a row's weight is"):
        Weights(2, "w").add(pa.array(wrong))


def test_weights_may_be_texts():
    weights = Weights(2, "w")
    weights.add(pa.array(["1.5", " 2"]))
    assert weights.values().tolist() == [1.5, 2.0]


def test_batches_are_spread_over_all_rows():
    assert evenly_spread(10, 4, 0) == [(0, 4), (4, 8), (8, 10)]
    assert evenly_spread(10, 4, 10) == [(0, 4), (4, 8), (8, 10)]
    spans = evenly_spread(1000, 10, 200)
    assert len(spans) == 20
    assert (spans[0], spans[-1]) == ((0, 10), (990, 1000))
    assert evenly_spread(1000, 100, 7) == [(0, 7)]
