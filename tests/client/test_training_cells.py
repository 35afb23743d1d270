"""One file through training's reader and through the client: the same bits reach the model."""

import datetime as dt
import json
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tessera.errors import UserError
from tessera.serving.client.row_files import json_rows, read_row_batches
from tessera.serving.client.rows import rows_to_parts
from tessera.serving.offline.raw_columns import RawColumns
from tessera.serving.package.schema import FeatureSpec, InputSchema, OtherColumn, OutputSpec
from tessera.serving.packaging.ranking import raw_columns
from tessera.training.config import load_config
from tessera.training.data.loader import BatchLoader
from tessera.training.data.opening import open_data

DENSE, ONE, MANY = {"kind": "dense"}, {"kind": "categorical"}, {"kind": "categorical_list"}
PAIRS = {"kind": "weighted_list", "weights": "w"}
BIG = 2**60 + 2**36 + 1  # rounded to float64 and then to float32 it is another number than at once

# What a column is, and cells of it as CSV has them, each of which training reads.
CSV = {
    "numbers": (DENSE, ["1", "-2.5", "1e3", "", "NA", "NaN", "0.1", ".5", "7.", "1e-46", str(BIG)]),
    "numbers of every spelling": (DENSE, [" 1", "+2", "NAN", "true", "FALSE", "\t3 ", "1E2"]),
    "integers": (ONE, ["1", "-7", "0", "", "NULL", "9223372036854775807", "-9223372036854775808"]),
    "texts": (ONE, ["DE", "", "NA", '""', '"NA"', "Zürich", " x ", '"a,b"', '"a""b"', "None", "7"]),
    "texts that look like numbers": ({**ONE, "strings": True}, ["007", "7", "1.0", "true"]),
    "texts of several lines": (ONE, ['"a\nb"', "c"]),
    "lists": (MANY, ["a|b", "c", "", "a||b", '""', "NA|x", " a | b ", "[c|d]", "'q'|r"]),
    "lists of integers": (MANY, ["1|2|3", "-4", "", "5| 6"]),
    "lists in brackets": (MANY, ['"[1, 2]"', '"[]"', '"[3]"', "", '"[ ]"']),
    "lists with a sign of their own": ({**MANY, "separator": "~"}, ["a~b|c", "d", "e f~g"]),
    "lists with semicolons": (MANY, ["a;b", "c;d;e", "f"]),
    "lists with spaces": (MANY, ["a b", "c", "d e f"]),
    "sequences": ({"kind": "sequence", "max_length": 2}, ["1|2|3", "4", "5|6"]),
    "lists that are cut": ({**MANY, "max_length": 2}, ["1|2|3", "4", "5|6"]),
}

TIME = dt.datetime(2026, 1, 2, 3, 4, 5, 678901, dt.timezone.utc)
# What a column is, its type, and its values.
ARROW = {
    "float64": (DENSE, pa.float64(), [0.1, None, float("nan"), -1e-46, 3.4e38]),
    "float16": (DENSE, pa.float16(), [np.float16(0.1), None, np.float16(6e-8)]),
    "int64 as a number": (DENSE, pa.int64(), [BIG, 2**53 + 1, None, -(2**63)]),
    "uint64 as a number": (DENSE, pa.uint64(), [2**64 - 1, 2**63, 3, None]),
    "bool as a number": (DENSE, pa.bool_(), [True, False, None]),
    "decimal": (DENSE, pa.decimal128(20, 10), [Decimal("0.1"), None, Decimal("1234567.89")]),
    "int8": (ONE, pa.int8(), [-128, 127, None]),
    "uint64": (ONE, pa.uint64(), [2**64 - 1, 2**63, 3, None]),
    "whole float64": (ONE, pa.float64(), [3.0, None, float("nan"), -7.0, 2.0**60]),
    "bool": (ONE, pa.bool_(), [True, False, None]),
    "timestamp": (
        ONE,
        pa.timestamp("us"),
        [TIME, None, dt.datetime(1969, 12, 31, tzinfo=dt.timezone.utc)],
    ),
    "date32": (ONE, pa.date32(), [TIME.date(), None, dt.date(1969, 1, 1)]),
    "time64": (ONE, pa.time64("us"), [TIME.time(), None]),
    "string": (ONE, pa.string(), ["DE", "", None, "NA", "Zürich"]),
    "binary": (ONE, pa.binary(), [b"DE", b"", None, b"\xff\x00"]),
    "dictionary": (ONE, pa.dictionary(pa.int8(), pa.string()), ["b", "a", None, "b"]),
    "lists of strings": (MANY, pa.list_(pa.string()), [["a", None, ""], [], None, ["b"]]),
    "lists of integers": (MANY, pa.list_(pa.int32()), [[1, None, 2], [], None, [-5]]),
    "lists of dates": (MANY, pa.list_(pa.date32()), [[TIME.date()], [], None]),
    "lists as texts": (MANY, pa.string(), ["a|b", "", None, "[c|d]", "e"]),
    "lists of integers as texts": ({**MANY, "strings": False}, pa.string(), ["1|-2", "3", None]),
    "maps": (
        {"kind": "weighted_list"},
        pa.map_(pa.int64(), pa.float32()),
        [[(1, 0.5), (2, None)], [], None, [(3, 0.1)]],
    ),
}

JSON = {
    "numbers": (DENSE, [1, 2.5, None, True, BIG, 1e-46, -0.0]),
    "integers": (ONE, [1, -7, None, 2**63 - 1, -(2**63)]),
    "whole numbers and truths": (ONE, [True, False, 2.0, 3]),
    "strings": (ONE, ["DE", "", None, "NA", "Zürich", "null"]),
    "lists": (MANY, [["a", None], [], None, ["b", "a|b"]]),
    "maps": ({"kind": "weighted_list"}, [{"1": 0.5, "-2": 3}, {}, None]),
    "maps of strings": ({"kind": "weighted_list"}, [{"a": 0.5, "b": 1e-3}, {}, None]),
}


def trained(folder, path, columns):
    """What training's reader gives of a file: its columns, dense values and bags."""
    given = {
        "data": {
            "format": "table",
            "path": str(path),
            "columns": {**columns, "extra": {"kind": "categorical"}, "y": {"kind": "label"}},
            "valid_fraction": 0.0,
            "test_fraction": 0.0,
        }
    }
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(given))
    splits = open_data(load_config(config).data, progress=False)
    (batch,) = BatchLoader(splits.train, batch_size=1000, shuffle=False, seed=0).epoch(0)
    return splits.train.dataset.columns, splits.malformed.total, batch


def schema_of(columns):
    """What a package's manifest says of the columns."""
    raw = raw_columns(columns)
    table = {"rows": 9, "dim": 4, "pooling": "sum", "hashing": "murmur3", "out_of_range": "hash"}
    return InputSchema(
        dense_features=columns.dense_names,
        dense_missing="nan",
        dense_columns=tuple(raw[name].column for name in columns.dense_names),
        other_columns=tuple(
            OtherColumn(name=name, role=role) for name, role in columns.not_features().items()
        ),
        features=tuple(
            FeatureSpec(
                name=one.name,
                group="id_score_list" if one.kind == "weighted_list" else "id_list",
                table=one.name,
                **table,
                **vars(raw[one.name]),
            )
            for one in columns.sparse
        ),
        outputs=(OutputSpec(name="default", width=1),),
    )


def check(folder, path, columns, *, rows):
    settled, malformed, batch = trained(folder, path, columns)
    assert malformed == 0
    schema = schema_of(settled)
    if path.suffix == ".jsonl":
        given = list(json_rows(path.read_text().splitlines(), str(path), schema))
    else:
        (found,) = read_row_batches(path, batch_size=1000, schema=schema)
        given = found.rows
    dense, sparse = rows_to_parts(given, schema)
    assert batch.size == rows
    if dense is not None:
        assert dense.tobytes() == batch.dense_features.numpy().tobytes()
    for name, jagged in batch.sparse_features.to_dict().items():
        assert sparse[name].lengths.tolist() == jagged.lengths().tolist()
        assert sparse[name].values.tolist() == jagged.values().tolist()
        if schema.features[[f.name for f in schema.features].index(name)].group != "id_list":
            assert sparse[name].weights.tobytes() == jagged.weights().numpy().tobytes()
    if path.suffix in {".parquet", ".arrow"}:
        check_columns(path, schema, dense, sparse)


def check_columns(path, schema, dense, sparse):
    """What ``tessera score`` reads by columns is the same; it asks the client about the other rows."""
    table = pq.read_table(path) if path.suffix == ".parquet" else pa.ipc.open_file(path).read_all()
    columns = RawColumns(schema, table.schema, path)
    kept = ~columns.suspects(table)
    batch = columns.host_batch(table.filter(pa.array(kept)))
    if dense is not None:
        assert batch.float_features.numpy().tobytes() == dense[kept].tobytes()
    groups = {
        "id_list": (batch.id_list_features_lengths, batch.id_list_features_values, None),
        "id_score_list": (
            batch.id_score_list_features_lengths,
            batch.id_score_list_features_values,
            batch.id_score_list_features_weights,
        ),
    }
    for group, (lengths, ids, weights) in groups.items():
        own = [sparse[feature.name] for feature in schema.features if feature.group == group]
        bags = [kept[np.repeat(np.arange(len(each.lengths)), each.lengths)] for each in own]
        assert lengths.tolist() == [n for each in own for n in each.lengths[kept].tolist()]
        pairs = list(zip(own, bags, strict=True))
        assert ids.tolist() == [one for each, bag in pairs for one in each.values[bag].tolist()]
        if weights is not None and own:
            expected = np.concatenate([each.weights[bag] for each, bag in pairs])
            assert weights.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", CSV)
@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_csv(tmp_path, name, ending):
    column, cells = CSV[name]
    path, sign = tmp_path / f"rows.{ending}", "," if ending == "csv" else "\t"
    if ending == "tsv":
        cells = [cell for cell in cells if "\t" not in cell]
    lines = [sign.join(["x", "extra", "y"]), *(sign.join([cell, "1", "0"]) for cell in cells)]
    path.write_text("\n".join(lines) + "\n")
    check(tmp_path, path, {"x": column}, rows=len(cells))


@pytest.mark.parametrize("name", ARROW)
@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_tables(tmp_path, name, ending):
    column, kind, values = ARROW[name]
    path, ones = tmp_path / f"rows.{ending}", [1] * len(values)
    table = pa.table({"x": pa.array(values, kind), "extra": ones, "y": [0] * len(values)})
    if ending == "parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    check(tmp_path, path, {"x": column}, rows=len(values))


@pytest.mark.parametrize("name", JSON)
def test_json_lines(tmp_path, name):
    column, values = JSON[name]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"x": v, "extra": 1, "y": 0}) + "\n" for v in values))
    check(tmp_path, path, {"x": column}, rows=len(values))


def test_two_columns_of_lists_make_one_with_weights(tmp_path):
    path = tmp_path / "rows.parquet"
    ids, weights = [["a", "b"], [], None, ["c"]], [[0.5, None], [], None, [0.1]]
    table = {"x": ids, "w": pa.array(weights, pa.list_(pa.float64())), "extra": [1] * 4}
    pq.write_table(pa.table({**table, "y": [0] * 4}), path)
    check(tmp_path, path, {"x": PAIRS}, rows=4)


@pytest.mark.parametrize(
    ("column", "cell"), [(DENSE, "1_0"), (DENSE, "x"), (ONE, "1_0"), (ONE, "2.5"), (ONE, "1" * 20)]
)
def test_what_training_leaves_out_is_refused(tmp_path, column, cell):
    path = tmp_path / "rows.csv"
    path.write_text(f"x,extra,y\n1,1,0\n{cell},1,0\n")
    settled, malformed, _ = trained(tmp_path, path, {"x": {**column, **_numbers(column)}})
    assert malformed == 1
    schema = schema_of(settled)
    (found,) = read_row_batches(path, batch_size=9, schema=schema)
    with pytest.raises(UserError, match="row 1, column 'x'"):
        rows_to_parts(found.rows, schema)


def _numbers(column):
    return {"strings": False} if column is ONE else {}


def test_columns_that_training_did_not_have_are_refused_with_the_nearest(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("x,extra,y,seen\n1,2,0,9\n")
    columns = {"x": DENSE, "note": {"kind": "ignore", "column": "seen"}}
    settled, _, _ = trained(tmp_path, path, columns)
    schema = schema_of(settled)
    assert {one.name: one.role for one in schema.other_columns} == {"y": "label", "seen": "ignore"}
    (found,) = read_row_batches(path, batch_size=9, schema=schema)
    rows_to_parts(found.rows, schema)
    rows_to_parts([{"x": 1, "note": 2}], schema, ignore=["note"])
    with pytest.raises(UserError, match=r"column 'extr' is not one of the model's; .*extra"):
        rows_to_parts([{"x": 1, "extr": 2}], schema)
