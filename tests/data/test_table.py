from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather as pa_feather
import pyarrow.parquet as pq
import pytest
import xxhash

from tessera.errors import UserError
from tessera.training.data import BatchLoader, DataConfig, DataSplits, MalformedRowError, open_data
from tessera.training.data.dataset import View
from tessera.training.data.table import parquet as parquet_module
from tessera.training.data.table import view as view_module
from tests.data import clicks

COLUMNS: dict[str, dict[str, Any]] = {
    "price": {"kind": "dense"},
    "age": {"kind": "dense"},
    "country": {"kind": "categorical"},
    "device": {"kind": "categorical"},
    "tags": {"kind": "categorical_list"},
    "user_id": {"kind": "categorical"},
    "click": {"kind": "label"},
    "purchase": {"kind": "label"},
    "timestamp": {"kind": "timestamp"},
}
WHOLE = {"valid_fraction": 0.0, "test_fraction": 0.0}


def config(path: Path | list[str], columns: dict[str, Any] = COLUMNS, **fields: Any) -> DataConfig:
    """The section as a YAML file would give it."""
    from tessera.training.config import ExperimentConfig

    where = path if isinstance(path, list) else str(path)
    data = {"format": "table", "path": where, "columns": columns, **fields}
    return ExperimentConfig.from_plain({"data": data}, name="c.yaml").data


def opened(path: Path | list[str], columns: dict[str, Any] = COLUMNS, **fields: Any) -> DataSplits:
    return open_data(config(path, columns, **fields), progress=False)


def string_id(text: str) -> int:
    number = xxhash.xxh64_intdigest(text.encode())
    return number - (1 << 64) if number >= 1 << 63 else number


def batch_rows(view: View, *, shuffle: bool = False, epoch: int = 0, start: int = 0) -> list[Any]:
    """Every row as plain values: row number, dense, bags by feature, labels."""
    found = []
    for batch in BatchLoader(view, batch_size=64, shuffle=shuffle, seed=3, numbered=True).epoch(
        epoch, start
    ):
        found += plain_rows(batch)
    return found


def plain_rows(batch: Any) -> list[Any]:
    dense = np.nan_to_num(batch.dense_features.numpy(), nan=-99).tolist()
    bags = {
        key: [bag.tolist() for bag in np.split(part.values().numpy(), part.offsets().numpy()[1:-1])]
        for key, part in batch.sparse_features.to_dict().items()
    }
    return [
        (number, dense[row], {key: bag[row] for key, bag in bags.items()}, label)
        for row, (number, label) in enumerate(
            zip(batch.row_numbers.tolist(), batch.labels.tolist(), strict=True)
        )
    ]


def expected_rows(content: list[list[Any]]) -> list[Any]:
    """The same, made slowly from the rows of `clicks`."""
    place = {name: number for number, name in enumerate(clicks.HEADER)}
    found = []
    for number, row in enumerate(content):
        cell = {name: row[where] for name, where in place.items()}
        dense = [
            float(np.float32(cell[name])) if cell[name] else -99.0 for name in ("price", "age")
        ]
        bags = {
            name: [string_id(cell[name])] if cell[name] else []
            for name in ("country", "device", "user_id")
        }
        bags["tags"] = [string_id(tag) for tag in cell["tags"].split("|") if tag]
        found.append((number, dense, bags, [cell["click"], cell["purchase"]]))
    return found


def arrow_table(content: list[list[Any]]) -> Any:
    cells = list(zip(*content, strict=True))
    place = {name: cells[number] for number, name in enumerate(clicks.HEADER)}
    text = ("country", "device", "user_id")
    return pa.table(
        {
            **{n: pa.array([float(c) if c else None for c in place[n]]) for n in ("price", "age")},
            **{name: pa.array([cell or None for cell in place[name]]) for name in text},
            "tags": pa.array(
                [[tag for tag in cell.split("|") if tag] for cell in place["tags"]],
                pa.list_(pa.string()),
            ),
            "timestamp": pa.array(place["timestamp"]).cast(pa.timestamp("us")),
            **{name: pa.array(place[name], pa.int8()) for name in ("click", "purchase")},
        }
    )


def write(path: Path, content: list[list[Any]]) -> Path:
    """Rows in the format that the name's ending says."""
    table = arrow_table(content)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=70)
    elif path.suffix == ".feather":
        pa_feather.write_feather(table, path)
    elif path.suffix == ".arrow":
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=50)
    elif ".jsonl" in path.name:
        rows = [
            {k: str(v) if k == "timestamp" else v for k, v in r.items()} for r in table.to_pylist()
        ]
        text = "".join(
            json.dumps({k: v for k, v in r.items() if v is not None}) + "\n" for r in rows
        )
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "wt", encoding="utf-8") as file:
            file.write(text)
    else:
        plain = path.with_suffix("") if path.suffix == ".gz" else path
        clicks.write_csv(plain, content, "\t" if plain.suffix == ".tsv" else ",")
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(plain.read_bytes()))
            plain.unlink()
    return path


NAMES = ("a.parquet", "a.csv", "a.tsv", "a.csv.gz", "a.jsonl", "a.jsonl.gz", "a.feather", "a.arrow")


@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    content = clicks.rows(300)
    path = write(tmp_path / name, content)
    expected = expected_rows(content)
    for _ in range(2):  # the second time from what was prepared
        splits = opened(path, **WHOLE)
        assert batch_rows(splits.train) == expected
        assert splits.malformed.total == 0
    columns = splits.train.dataset.columns
    assert columns.dense_names == ("price", "age")
    assert columns.sparse_names == ("country", "device", "user_id", "tags")
    assert all(column.strings for column in columns.sparse)
    assert splits.train.labels().tolist() == [row[3] for row in expected]


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_module, "UNIT_ROWS", 64)
    monkeypatch.setattr(view_module, "WINDOW_ROWS", 300)


def test_a_shuffled_epoch_has_every_row_once_whatever_the_threads(
    tmp_path: Path, small_units: None
) -> None:
    content = clicks.rows(1000)
    splits = opened(write(tmp_path / "a.parquet", content))
    view = splits.train
    rows = batch_rows(view, shuffle=True)
    expected = {row[0]: row for row in expected_rows(content)}
    assert sorted(row[0] for row in rows) == sorted(row[0] for row in batch_rows(view))
    assert all(row == expected[row[0]] for row in rows)
    assert rows != batch_rows(view, shuffle=True, epoch=1)
    assert [row[0] for row in rows[:64]] != sorted(row[0] for row in rows[:64])
    # Rows from several units stand in the first batch.
    assert len({row[0] // 70 for row in rows[:64]}) > 2
    for threads, prefetch in ((1, 0), (3, 4)):
        loader = BatchLoader(
            view,
            batch_size=64,
            shuffle=True,
            seed=3,
            threads=threads,
            prefetch=prefetch,
            numbered=True,
        )
        assert [row for batch in loader.epoch(0) for row in plain_rows(batch)] == rows
        for start in (1, 7, loader.num_batches):
            again = [row for batch in loader.epoch(0, start) for row in plain_rows(batch)]
            assert again == rows[64 * start :]


def test_random_time_hash_and_files_splits(tmp_path: Path, small_units: None) -> None:
    content = clicks.rows(1000)
    path = write(tmp_path / "a.parquet", content)

    def numbers(splits: DataSplits) -> list[list[int]]:
        views = (splits.train, splits.valid, splits.test)
        return [[row[0] for row in batch_rows(view)] for view in views]

    random = numbers(opened(path, test_fraction=0.2))
    assert [len(part) for part in random] == [700, 100, 200]
    assert sorted(row for part in random for row in part) == list(range(1000))
    assert random != numbers(opened(path, test_fraction=0.2, split_seed=1))
    assert numbers(opened(path, split="time")) == [
        list(range(800)),
        list(range(800, 900)),
        list(range(900, 1000)),
    ]
    by_hash = opened(path, split="hash", split_column="user_id", valid_fraction=0.3)
    users = [
        {row[2]["user_id"][0] for row in batch_rows(view)}
        for view in (by_hash.train, by_hash.valid, by_hash.test)
    ]
    assert len(users[0] | users[1] | users[2]) == sum(map(len, users))
    assert 200 < len(by_hash.valid) < 400
    write(tmp_path / "v.parquet", content[:50])
    files = opened(path, split="files", valid_path=str(tmp_path / "v.parquet"))
    assert [len(part) for part in numbers(files)] == [1000, 50, 0]
    with pytest.raises(UserError, match="give the files for validation as valid_path"):
        opened(path, split="files")
    with pytest.raises(UserError, match="split_column is missing: split hash needs one"):
        opened(path, split="hash")
    with pytest.raises(UserError, match="split random looks at no column"):
        opened(path, split_column="age")


def test_equal_times_are_not_parted(tmp_path: Path) -> None:
    day = np.repeat([0.5, -3.0, 7.25, 2.0], 25)
    table = pa.table({"day": day, "id": np.arange(100), "y": np.arange(100) % 2})
    pq.write_table(table, tmp_path / "a.parquet")
    columns = {"day": {"kind": "timestamp"}, "id": {"kind": "categorical"}, "y": {"kind": "label"}}
    splits = opened(tmp_path / "a.parquet", columns, split="time", valid_fraction=0.2)
    views = (splits.train, splits.valid, splits.test)
    days = [{day[row[0]] for row in batch_rows(view)} for view in views]
    assert days == [{-3.0, 0.5}, {2.0}, {7.25}]


MOMENTS = {
    "integers": ([20, 10, 30, 40], 30, 40),
    "floats": ([0.5, -1.5, 1.5, 2.5], 1.5, 2.5),
    "seconds": (
        pa.array([20, 10, 30, 40], pa.timestamp("s")),
        "1970-01-01 00:00:30",
        "1970-01-01 00:00:40",
    ),
    "with_zone": (
        pa.array([20, 10, 30, 40], pa.timestamp("ms", tz="UTC")),
        "1970-01-01 00:00:00.030",
        "1970-01-01 00:00:00.040",
    ),
    "dates": (pa.array([20, 10, 30, 40], pa.date32()), "1970-01-31", "1970-02-10"),
    "texts": (["1999-12-31", "0200-01-01", "2000-01-01", "2000-02-01"], "2000-01-01", "2000-02-01"),
}
"""A column of times, and the first ones of the validation and of the test rows."""


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [
        (kind, suffix)
        for kind in MOMENTS
        for suffix in (".parquet", ".csv")
        if (kind, suffix) != ("floats", ".csv")  # there, numbers that are times are integers
    ],
)
def test_a_split_at_given_moments(tmp_path: Path, kind: str, suffix: str) -> None:
    column, valid_from, test_from = MOMENTS[kind]
    table = pa.table({"when": column, "id": np.arange(4), "y": [0, 1, 0, 1]})
    path = tmp_path / f"a{suffix}"
    if suffix == ".csv":
        pa.csv.write_csv(table, path)
    else:
        pq.write_table(table, path)
    columns = {"id": {"kind": "categorical"}, "y": {"kind": "label"}}
    said = {"split": "time", "split_column": "when"}

    def numbers(**more: Any) -> list[list[int]]:
        splits = opened(path, columns, **said, **more)
        return [
            [row[2]["id"][0] for row in batch_rows(view)]
            for view in (splits.train, splits.valid, splits.test)
        ]

    assert numbers(valid_from=valid_from, test_from=test_from) == [[0, 1], [2], [3]]
    assert numbers(valid_from=valid_from) == [[0, 1], [2, 3], []]
    # Shares of the rows, of texts too, are held out in the order of time.
    assert numbers(valid_fraction=0.25, test_fraction=0.25) == [[0, 1], [2], [3]]
    wrong = "yesterday" if isinstance(valid_from, str) else "1970-01-31"
    with pytest.raises(UserError, match=f"'{wrong}', but column 'when' holds"):
        opened(path, columns, **said, valid_from=wrong)


def test_moments_that_do_not_go_with_the_rest(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", clicks.rows(10))
    for fields, reason in (
        ({"valid_from": 3}, "valid_from=3: split random looks at no times"),
        ({"split": "time", "test_from": 3}, "test_from=3: say valid_from, too"),
        (
            {"split": "time", "valid_from": 3, "valid_fraction": 0.1},
            "valid_from and valid_fraction both say",
        ),
    ):
        with pytest.raises(UserError, match=reason):
            opened(path, **fields)
    pq.write_table(pa.table({"when": ["soon"], "id": [1], "y": [0]}), path)
    columns = {"id": {"kind": "categorical"}, "y": {"kind": "label"}}
    with pytest.raises(UserError, match="not every text in it is a date"):
        opened(path, columns, split="time", split_column="when", valid_from="2026-01-31")


def test_lists_weights_maps_and_integers(tmp_path: Path) -> None:
    table = pa.table(
        {
            "history": pa.array([[1, 2, 3], None, [4], []], pa.list_(pa.int32())),
            "scores": pa.array(
                [[("a", 0.5)], [], None, [("b", 2.0), ("c", None)]],
                pa.map_(pa.string(), pa.float32()),
            ),
            "ids": pa.array([[7], [8, 9], [], [1]]),
            "ids_w": pa.array([[0.1], [0.2, 0.3], [], [None]]),
            "holes": pa.array([[5, None], [None], [6], None]),
            "code": pa.array([1.0, float("nan"), 3.0, None]),
            "big": pa.array([2**64 - 1, 1, None, 0], pa.uint64()),
            "tags": ["x|y", "", None, "z"],
            "w": [1.0, 0.5, 2.0, 0.0],
            "y": [0.5, -1.0, 2.0, 3.0],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    columns = {
        "history": {"kind": "sequence", "max_length": 2},
        "first_history": {"kind": "categorical_list", "max_length": 2, "column": "history"},
        "scores": {"kind": "weighted_list"},
        "ids": {"kind": "weighted_list", "weights": "ids_w"},
        "holes": {"kind": "categorical_list"},
        "code": {"kind": "categorical"},
        "big": {"kind": "categorical"},
        "tags": {"kind": "categorical_list"},
        "w": {"kind": "weight"},
        "y": {"kind": "label", "task": "regression"},
    }
    splits = opened(tmp_path / "a.parquet", columns, **WHOLE)
    (batch,) = BatchLoader(splits.train, batch_size=9, shuffle=False, seed=0, numbered=True).epoch(
        0
    )
    a, b, c, x, y, z = map(string_id, "abcxyz")
    rows = [bags for _, _, bags, _ in plain_rows(batch)]
    assert rows == [
        {"code": [1], "big": [-1], "history": [2, 3], "first_history": [1, 2], "scores": [a], "ids": [7], "holes": [5], "tags": [x, y]},
        {"code": [], "big": [1], "history": [], "first_history": [], "scores": [], "ids": [8, 9], "holes": [], "tags": []},
        {"code": [3], "big": [], "history": [4], "first_history": [4], "scores": [], "ids": [], "holes": [6], "tags": []},
        {"code": [], "big": [0], "history": [], "first_history": [], "scores": [b, c], "ids": [1], "holes": [], "tags": [z]},
    ]  # fmt: skip
    weights = batch.sparse_features.to_dict()["scores"].weights().tolist()
    assert weights == [0.5, 2.0, 1.0]
    assert batch.sparse_features.to_dict()["ids"].weights().tolist() == pytest.approx(
        [0.1, 0.2, 0.3, 1]
    )
    assert batch.sparse_features.to_dict()["history"].weights().tolist() == [1, 1, 1]
    assert batch.weights.tolist() == [1.0, 0.5, 2.0, 0.0]
    assert batch.labels.tolist() == [0.5, -1.0, 2.0, 3.0]
    shuffled = next(
        BatchLoader(splits.train, batch_size=9, shuffle=True, seed=0, numbered=True).epoch(0)
    )
    assert sorted(plain_rows(shuffled)) == sorted(plain_rows(batch), key=lambda row: row[0])


def test_folders_globs_and_partitions(tmp_path: Path) -> None:
    content = clicks.rows(90)
    for day in (1, 2, 10):
        folder = tmp_path / "clicks" / f"day={day}" / "place=x%2Fy"
        folder.mkdir(parents=True)
        write(folder / "part.parquet", content[:30])
    (tmp_path / "clicks" / "_SUCCESS").touch()
    columns = {**COLUMNS, "day": {"kind": "dense"}, "place": {"kind": "categorical"}}
    splits = opened(tmp_path / "clicks", columns, **WHOLE)
    rows = batch_rows(splits.train)
    assert [row[1][2] for row in rows] == [1.0] * 30 + [10.0] * 30 + [2.0] * 30
    assert {row[2]["place"][0] for row in rows} == {string_id("x/y")}
    assert (tmp_path / "clicks.cache").is_dir()
    pattern = [str(tmp_path / "clicks" / "day=1*" / "*" / "*.parquet")]
    assert len(opened(pattern, columns, **WHOLE).train) == 60
    two = [str(path) for path in sorted((tmp_path / "clicks").rglob("*.parquet"))[:2]]
    assert len(opened(two, **WHOLE).train) == 60


def test_large_row_groups_are_cut_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tessera.training.data.table import opening

    content = clicks.rows(300)
    path = write(tmp_path / "a.parquet", content)
    monkeypatch.setattr(opening, "GROUP_ROWS", 50)
    splits = opened(path, **WHOLE)
    assert batch_rows(splits.train) == expected_rows(content)
    assert list((tmp_path / "a.parquet.cache").glob("a.parquet-*/rows.parquet"))


def bad_lines(path: Path) -> Path:
    """Four good rows and, in rows 3, 5, 6, 7 and 9, bad ones."""
    path.write_text("x,id,y\n1,5,0\nabc,6,1\n2,7,1\n3,8\n4,9.5,0\n5,10,2\n6,11,\n7,12,1\n,,0\n")
    return path


XY = {
    "x": {"kind": "dense"},
    "id": {"kind": "categorical", "strings": False},
    "y": {"kind": "label"},
}


def test_malformed_rows_of_text_are_counted_with_file_and_row(tmp_path: Path) -> None:
    path = bad_lines(tmp_path / "a.csv")
    splits = opened(path, XY, **WHOLE)
    assert [row[1:] for row in batch_rows(splits.train)] == [
        ([1.0], {"id": [5]}, 0.0),
        ([2.0], {"id": [7]}, 1.0),
        ([7.0], {"id": [12]}, 1.0),
        ([-99.0], {"id": []}, 0.0),
    ]
    assert splits.malformed.total == 5
    assert sorted(str(row) for row in splits.malformed.examples) == [
        f"{path}:3: x='abc': expected a number",
        f"{path}:5: line='2 columns': expected 3 columns",
        f"{path}:6: id='9.5': expected an integer id",
        f"{path}:7: y='2.0': expected 0 or 1",
        f"{path}:8: y='None': expected 0 or 1",
    ]
    with pytest.raises(MalformedRowError, match=r"a\.csv:\d: "):
        opened(path, XY, strict=True)
    lines = [
        '{"x": 1, "id": 5, "y": 0}',
        "{",
        '{"x": "a", "id": 6, "y": 0}',
        "[]",
        "",
        '{"x": 2, "id": 7.0, "y": true, "more": {}}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    splits = opened(tmp_path / "a.jsonl", XY, **WHOLE)
    assert [row[1:] for row in batch_rows(splits.train)] == [
        ([1.0], {"id": [5]}, 0.0),
        ([2.0], {"id": [7]}, 1.0),
    ]
    assert [(row.line, row.column) for row in splits.malformed.examples] == [
        (2, "line"),
        (3, "x"),
        (4, "line"),
    ]


def test_what_does_not_fit_is_one_line(tmp_path: Path) -> None:
    content = clicks.rows(60)
    path = write(tmp_path / "a.parquet", content)

    def refused(where: Path | list[str], match: str, columns: Any = COLUMNS, **fields: Any) -> None:
        with pytest.raises(UserError, match=match) as caught:
            opened(where, columns, **fields)
        assert "\n" not in str(caught.value)

    refused(
        path, "has no column 'pric'; did you mean price", {**COLUMNS, "pric": {"kind": "dense"}}
    )
    refused(
        path,
        "column 'country' has the type string, which kind dense cannot be read",
        {**COLUMNS, "country": {"kind": "dense"}},
    )
    refused(path, "columns: none has the kind label", {"age": {"kind": "dense"}})
    refused(path, "columns: none has ids", {"age": {"kind": "dense"}, "click": {"kind": "label"}})
    columns = {**COLUMNS, "paid": {"kind": "categorical", "column": "price"}}
    with pytest.raises(UserError, match=r"a\.parquet: column 'price': .* is not an integer id"):
        batch_rows(opened(path, columns).train)
    data = path.read_bytes()
    for name, content_bytes in (
        ("cut", data[:-100]),
        ("magic", b"PAR2" + data[4:-4] + b"PAR2"),
        ("empty", b""),
    ):
        (tmp_path / f"{name}.parquet").write_bytes(content_bytes)
        refused(tmp_path / f"{name}.parquet", rf"{name}\.parquet: cannot be read")
    changed = arrow_table(content)
    place = changed.schema.get_field_index("country")
    changed = changed.set_column(place, "country", pa.array(range(60)))
    pq.write_table(changed, tmp_path / "b.parquet")
    refused(
        [str(path), str(tmp_path / "b.parquet")],
        "b.parquet: column 'country' has integers, but in .*a.parquet it has strings",
    )
    pq.write_table(changed.drop(["age"]), tmp_path / "c.parquet")
    refused([str(path), str(tmp_path / "c.parquet")], "c.parquet: has no column 'age'")
    (tmp_path / "e.csv").write_text("")
    refused(tmp_path / "e.csv", r"e\.csv: cannot be read: Empty CSV")
    (tmp_path / "h.csv").write_text(",".join(clicks.HEADER) + "\n")
    refused(tmp_path / "h.csv", "holds no row that can be read")
    repeated = (",".join(clicks.HEADER) + "\n").encode() * 1000
    (tmp_path / "z.csv.gz").write_bytes(gzip.compress(repeated)[:-9])
    refused(tmp_path / "z.csv.gz", "cannot be read")
    (tmp_path / "n.txt").write_text("x")
    refused(tmp_path / "n.txt", "its name must end in one of .parquet")
    refused(tmp_path / "*.pq", "no file has such a name")
    refused(tmp_path / "absent", "no such file or folder")
