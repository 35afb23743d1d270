"""Rows of raw values: what becomes of each form of a cell, and what is refused by row and column."""

import dataclasses
import gzip
import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tessera.errors import UserError
from tessera.kernels.string_ids import string_ids
from tessera.serving.client.row_files import read_row_batches
from tessera.serving.client.rows import rows_to_parts
from tessera.serving.package.schema import InputSchema, OutputSpec
from tests.client.client_schemas import feature


def column(name, group="id_list", **options):
    return dataclasses.replace(feature(name, group), **options)


SCHEMA = InputSchema(
    dense_features=("price", "age"),
    dense_missing="nan",
    dense_columns=("", "years"),
    features=(
        column("country", strings=True, many=False),
        column("user", column="uid", many=False),
        column("history", max_length=2, keep="last"),
        column("tags", strings=True, max_length=2),
        column("scored", "id_score_list"),
        column("rated", "id_score_list", strings=True, weights_column="stars"),
    ),
    outputs=(OutputSpec(name="default", width=1),),
)

ROWS = [
    {
        "price": 3.5,
        "years": 7,
        "country": "DE",
        "uid": 2**60 + 1,
        "history": [1, 2, 3],
        "tags": ["x", "y", "z"],
        "scored": {5: 0.5, 6: 2.0},
        "rated": ["a", "b"],
        "stars": [1.0, 0.25],
    },
    {"price": None, "uid": None, "history": [], "tags": [None, "q"]},
    {"years": float("nan"), "country": None, "history": None, "scored": [[9, 1.5]]},
]


def check(dense, sparse):
    np.testing.assert_array_equal(
        dense, np.array([[3.5, 7], [np.nan, np.nan], [np.nan, np.nan]], np.float32)
    )
    bags = {name: (bag.lengths.tolist(), bag.values.tolist()) for name, bag in sparse.items()}
    assert bags == {
        "country": ([1, 0, 0], string_ids(["DE"]).tolist()),
        "user": ([1, 0, 0], [2**60 + 1]),
        "history": ([2, 0, 0], [2, 3]),
        "tags": ([2, 1, 0], string_ids(["x", "y", "q"]).tolist()),
        "scored": ([2, 0, 1], [5, 6, 9]),
        "rated": ([2, 0, 0], string_ids(["a", "b"]).tolist()),
    }
    assert sparse["scored"].weights.tolist() == [0.5, 2.0, 1.5]
    assert sparse["rated"].weights.tolist() == [1.0, 0.25]
    assert sparse["country"].weights is None


def table():
    kinds = {
        "price": pa.float64(),
        "years": pa.int32(),
        "country": pa.string(),
        "uid": pa.int64(),
        "history": pa.list_(pa.int64()),
        "tags": pa.list_(pa.string()),
        "scored": pa.map_(pa.int64(), pa.float32()),
        "rated": pa.list_(pa.string()),
        "stars": pa.list_(pa.float32()),
    }
    rows = [dict(row) for row in ROWS]
    rows[0]["scored"] = list(ROWS[0]["scored"].items())
    rows[2]["scored"] = [(9, 1.5)]
    rows[2]["years"] = None
    return pa.table({name: pa.array([r.get(name) for r in rows], kinds[name]) for name in kinds})


def test_dictionaries():
    check(*rows_to_parts(ROWS, SCHEMA))


def test_an_arrow_table_and_a_record_batch():
    check(*rows_to_parts(table(), SCHEMA))
    check(*rows_to_parts(table().to_batches()[0], SCHEMA))


def test_a_parquet_and_an_arrow_file_in_batches(tmp_path):
    pq.write_table(table(), tmp_path / "rows.parquet")
    with (
        pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, table().schema) as writer,
    ):
        writer.write_table(table())
    for name in ("rows.parquet", "rows.arrow"):
        (whole,) = read_row_batches(tmp_path / name, batch_size=9, schema=SCHEMA)
        check(*rows_to_parts(whole.rows, SCHEMA))
        parts = list(read_row_batches(tmp_path / name, batch_size=2, schema=SCHEMA))
        assert [(part.first, part.size) for part in parts] == [(1, 2), (3, 1)]


def test_a_pandas_frame_with_gaps_among_integers():
    frame = pd.DataFrame(
        {"uid": [7, None, 9], "country": ["DE", None, "FR"], "price": [1.0, 2.0, None]}
    )
    dense, sparse = rows_to_parts(frame, SCHEMA)
    assert sparse["user"].lengths.tolist() == [1, 0, 1]
    assert sparse["user"].values.tolist() == [7, 9]
    assert sparse["country"].values.tolist() == string_ids(["DE", "FR"]).tolist()
    np.testing.assert_array_equal(dense[:, 0], np.array([1, 2, np.nan], np.float32))


def test_a_csv_file(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(
        "price,years,country,uid,history,tags,rated,stars,scored,clicked\n"
        f"3.5,7,DE,{2**60 + 1},1|2|3,\"['x', 'y', 'z']\",a|b,1|0.25,,1\n"
        ',NA,null,,,"[]",,,,0\n'
    )
    (batch,) = read_row_batches(path, batch_size=5, schema=SCHEMA)
    dense, sparse = rows_to_parts(batch.rows, SCHEMA, ignore=["clicked"])
    expected_dense, expected = rows_to_parts([{**ROWS[0], "scored": None}, {"price": None}], SCHEMA)
    np.testing.assert_array_equal(dense, expected_dense)
    for name, bag in expected.items():
        assert sparse[name].lengths.tolist() == bag.lengths.tolist(), name
        assert sparse[name].values.tolist() == bag.values.tolist(), name


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prise": 1}, "column 'prise' is not one of the model's; did you mean 'price'?"),
        ({"price": "3"}, "row 1, column 'price': found '3' (str); give a number"),
        ({"price": 1e300}, "row 1, column 'price': found 1e+300 (float); give a finite number"),
        ({"price": float("inf")}, "row 1, column 'price': found inf (float)"),
        ({"country": 3}, "row 1, column 'country': found 3 (int); give a text or a list of texts"),
        (
            {"country": ["a", "b"]},
            "row 1, column 'country': found ['a', 'b'] (list); give one value",
        ),
        ({"uid": "x"}, "row 1, column 'uid': found 'x' (str); give a whole number of 64 bits"),
        ({"uid": 2**63}, "row 1, column 'uid': found 9223372036854775808 (int); give a whole"),
        ({"uid": 1.5}, "row 1, column 'uid': found 1.5 (float); give a whole number"),
        ({"history": [1, "b"]}, "row 1, column 'history': found 'b' (str)"),
        (
            {"scored": [1, 2]},
            "row 1, column 'scored': found 1 (int); give a mapping of id to weight",
        ),
        ({"scored": {1: "x"}}, "row 1, column 'scored': found 'x' (str); give a finite"),
        (
            {"rated": ["a", None], "stars": [1, 2]},
            "row 1, column 'rated': found ['a', None] (list); give an id for each weight",
        ),
        (
            {"rated": ["a"], "stars": []},
            "row 1, column 'rated': found ['a'] (list); give as many values as column 'stars' has",
        ),
    ],
)
def test_what_is_refused_names_row_and_column(row, says):
    with pytest.raises(UserError) as caught:
        rows_to_parts([{}, row], SCHEMA)
    assert str(caught.value).startswith(says), str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "there are 0 rows"),
        ({"price": 1}, "rows is a dict; give a list of dictionaries"),
        (3, "rows is a int"),
        ([3], "row 0 is a int; give a dictionary"),
    ],
)
def test_what_is_not_rows_is_refused(rows, says):
    with pytest.raises(UserError, match=says):
        rows_to_parts(rows, SCHEMA)


def test_a_model_without_missing_values_refuses_them():
    schema = dataclasses.replace(SCHEMA, dense_missing="refuse")
    with pytest.raises(UserError, match="row 6, column 'years': there is no value"):
        rows_to_parts([{"price": 1, "years": 2}, {"price": 1}], schema, first_row=5)


@pytest.mark.parametrize("end", ["csv", "tsv"])
def test_compressed_text_is_read_as_it_is_without(tmp_path, end):
    sign = "," if end == "csv" else "\t"
    others = ["uid", "history", "tags", "rated", "stars", "scored"]
    lines = [["price", "years", "country", *others], ["3.5", "7", "DE", *[""] * len(others)]]
    text = "".join(sign.join(line) + "\n" for line in lines)
    plain, small = tmp_path / f"rows.{end}", tmp_path / f"rows.{end}.gz"
    plain.write_text(text)
    small.write_bytes(gzip.compress(text.encode()))
    (expected,) = read_row_batches(plain, batch_size=5, schema=SCHEMA)
    (found,) = read_row_batches(small, batch_size=5, schema=SCHEMA)
    assert found == expected
    empty = dict.fromkeys(others)
    assert found.rows == [{"price": 3.5, "years": 7, "country": "DE", **empty}]


def test_a_compressed_file_that_is_cut_is_told(tmp_path):
    path = tmp_path / "rows.csv.gz"
    whole = gzip.compress(("price,years\n" + "1,2\n" * 5000).encode())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"rows\.csv\.gz: not a file of rows"):
        list(read_row_batches(path, batch_size=5, schema=SCHEMA))
    path.write_text("price,years\n1,2\n")
    with pytest.raises(UserError, match=r"rows\.csv\.gz: not a file of rows"):
        list(read_row_batches(path, batch_size=5, schema=SCHEMA))
    # Parquet is compressed inside.
    with pytest.raises(UserError, match="ends in none of"):
        read_row_batches(tmp_path / "rows.parquet.gz", batch_size=5, schema=SCHEMA)


def test_a_row_of_another_width_in_csv_is_told_with_its_line(tmp_path):
    path = tmp_path / "rows.csv"
    columns = "price,years,country,uid,history,tags,rated,stars,scored"
    path.write_text(f"{columns}\n1,2,,,,,,,\n1\n")
    with pytest.raises(UserError, match="Row #3: Expected 9 columns, got 1"):
        list(read_row_batches(path, batch_size=5, schema=SCHEMA))
    other = tmp_path / "rows.xls"
    other.write_text(json.dumps(ROWS[1]))
    with pytest.raises(UserError, match=r"ends in none of \.csv"):
        read_row_batches(other, batch_size=5, schema=SCHEMA)
