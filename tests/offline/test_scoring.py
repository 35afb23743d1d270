"""`tessera score`: the bits of single rows, whatever the format, the processes and the interruptions."""

import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tessera.cli import main
from tessera.errors import UserError
from tessera.serving.offline import raw_text, raw_units, scoring
from tessera.serving.offline.scoring import ScoreOptions, score_files
from tessera.serving.package.loading import load_package
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tessera.training.data.criteo_format import COLUMNS, DENSE_NAMES, SPARSE_NAMES
from tessera.training.data.table import convert
from tessera.training.models.config import ModelConfig
from tessera.training.models.ranking import build_ranking_model
from tests.offline.raw_rows import TYPES, plain_scores, rows, same, to_csv, to_table, write
from tests.package_factory import package_file, string_columns

ROWS = rows(300)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return package_file(tmp_path_factory.mktemp("package"), columns=string_columns())


@pytest.fixture(scope="module")
def expected(package):
    return plain_scores(load_package(package), ROWS)["default"]


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """Units of some rows, so that small files have several."""
    monkeypatch.setattr(raw_units, "UNIT_ROWS", 100)
    monkeypatch.setattr(raw_units, "UNIT_BYTES", 6000)
    monkeypatch.setattr(raw_units, "CHUNK_ROWS", 37)
    monkeypatch.setattr(raw_text, "BLOCK_BYTES", 5000)
    monkeypatch.setattr(convert, "BLOCK_BYTES", 5000)


def score(package, out, *data, **options):
    """The output as a table, and what was told."""
    told = score_files(
        package, [str(path) for path in data], out, ScoreOptions(**options), progress=False
    )
    return pq.read_table(out), told


@pytest.mark.parametrize(
    "name",
    ["a.parquet", "a.csv", "a.tsv", "a.csv.gz", "a.jsonl", "a.jsonl.gz", "a.arrow", "a.feather"],
)
def test_every_format_gives_the_bits_of_single_rows(package, expected, tmp_path, name):
    path = write(tmp_path / name, ROWS)
    table, told = score(package, tmp_path / "out.parquet", path, keep=("id", "note=text"))
    assert table.column_names == ["id", "text", "default"]
    assert table.schema.field("default").type == pa.float32()
    assert same(table.column("default"), expected)
    assert table.column("id").to_pylist() == [row["id"] for row in ROWS]
    assert table.column("text").to_pylist() == [row["note"] for row in ROWS]
    assert told.rows == len(ROWS)
    assert told.malformed == 0
    assert told.units > 2 or name == "a.feather"
    assert not (tmp_path / "out.parquet.parts").exists()


@pytest.mark.parametrize("name", ["a.parquet", "a.csv"])
def test_processes_and_batches_change_no_byte(package, tmp_path, name):
    path = write(tmp_path / name, ROWS)
    outs = []
    for number, options in enumerate(
        [{"processes": 1}, {"processes": 2}, {"processes": 3, "batch_rows": 7}]
    ):
        out = tmp_path / f"{number}.parquet"
        score(package, out, path, keep=("id",), **options)
        outs.append(out.read_bytes())
    assert outs[0] == outs[1] == outs[2]


def test_one_large_row_group_is_several_units(package, expected, tmp_path):
    pq.write_table(to_table(ROWS), tmp_path / "a.parquet")
    table, told = score(package, tmp_path / "out.parquet", tmp_path / "a.parquet")
    assert told.units == 3
    assert same(table.column("default"), expected)


def test_folders_and_patterns_keep_their_order(package, expected, tmp_path):
    for part, bucket in enumerate(("x", "y", "z")):
        folder = tmp_path / "data" / f"user=u{bucket}"
        folder.mkdir(parents=True)
        table = to_table(ROWS[100 * part : 100 * part + 100]).drop_columns(["user"])
        pq.write_table(table, folder / "rows.parquet")
    table, _ = score(package, tmp_path / "out.parquet", tmp_path / "data", keep=("id", "user"))
    assert table.column("id").to_pylist() == list(range(300))
    assert table.column("user").to_pylist() == ["ux"] * 100 + ["uy"] * 100 + ["uz"] * 100
    given = [{**row, "user": f"u{'xyz'[row['id'] // 100]}"} for row in ROWS]
    assert same(table.column("default"), plain_scores(load_package(package), given)["default"])
    again, _ = score(package, tmp_path / "again.parquet", tmp_path / "data" / "*" / "*.parquet")
    assert again.column("default").equals(table.column("default"))
    with pytest.raises(UserError, match="folders name other columns"):
        score(package, tmp_path / "no.parquet", tmp_path / "data", write(tmp_path / "b.csv", ROWS))


def test_rows_that_the_model_cannot_take_are_null_and_told(package, expected, tmp_path):
    """A cell of another type, cells too many, an id that is refused, a line that is not JSON."""
    lines = to_csv(ROWS).splitlines()
    lines[11] = lines[11].replace(lines[11].split(",")[1], "much", 1)
    lines[201] += ",one too many"
    cells = lines[121].split(",")
    cells[list(TYPES).index("genre")] = "3|19"
    lines[121] = ",".join(cells)
    lines[300] += ",one too many"
    csv = tmp_path / "a.csv"
    csv.write_text("\n".join(lines) + "\n")
    bad = {10: 12, 120: 122, 200: 202, 299: 301}  # place -> row, the header being row 1
    table, told = score(package, tmp_path / "csv.parquet", csv, keep=("id",), processes=2)
    check(table, told, expected, bad, csv)
    assert "column 'dense_0': found 'much' (str); give a number" in told.examples[0]
    assert "column 'genre': id 19 is outside [0, 19)" in told.examples[1]
    assert "the row has 14 cells, the header 13" in told.examples[2]
    assert table.column("id").to_pylist()[200] is None

    shown = [json.dumps(row) for row in ROWS]
    shown[10] = json.dumps({**ROWS[10], "dense_0": "much"})
    shown[120] = json.dumps({**ROWS[120], "genre": [3, 19]})
    shown[200] = "{"
    shown[299] = json.dumps({**ROWS[299], "user": 7})
    jsonl = tmp_path / "a.jsonl"
    jsonl.write_text("\n\n".join(shown) + "\n")  # empty lines are not rows
    table, told = score(package, tmp_path / "jsonl.parquet", jsonl)
    check(table, told, expected, {place: 2 * place + 1 for place in bad}, jsonl)

    given = to_table(ROWS).to_pylist()
    given[10]["dense_0"], given[120]["genre"] = 1e300, [-1]
    given[200]["dense_3"] = float("inf")
    wide = {**TYPES, "item": pa.list_(pa.float64())}
    given[299]["item"] = [1.5]
    for name in ("a.parquet", "a.arrow"):
        arrays = {n: pa.array([row[n] for row in given], kind) for n, kind in wide.items()}
        path = tmp_path / name
        if name == "a.parquet":
            pq.write_table(pa.table(arrays), path, row_group_size=90)
        else:
            table = pa.table(arrays)
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=90)
        table, told = score(package, tmp_path / f"{name}.parquet", path)
        check(table, told, expected, {place: place + 1 for place in bad}, path)


def check(table, told, expected, bad, path):
    found = table.column("default").to_numpy(zero_copy_only=False)
    assert np.flatnonzero(np.isnan(found)).tolist() == sorted(bad)
    assert table.column("default").null_count == len(bad)
    good = [place for place in range(len(expected)) if place not in bad]
    assert np.array_equal(found[good].view(np.uint32), expected[good].view(np.uint32))
    assert told.malformed == len(bad)
    assert [line.split(": ")[0] for line in told.examples] == [f"{path}:{n}" for n in bad.values()]


def test_cells_that_only_single_rows_can_say_are_scored(package, tmp_path):
    """Python's and JSON's ways to write a number, which a block as a whole cannot have."""
    given = [dict(row) for row in ROWS[:40]]
    given[3]["item"] = [2**62 + 1, 2.0]
    given[4]["item"] = 7
    given[5]["dense_1"] = True
    # A JSON row may lack a column, whose value is then missing, beside such cells and alone.
    lacking = [dict(row) for row in given]
    for place, column in ((5, "user"), (4, "dense_0"), (7, "dense_2"), (8, "history")):
        del lacking[place][column]
        given[place][column] = None
    jsonl = tmp_path / "a.jsonl"
    jsonl.write_text("".join(json.dumps(row) + "\n" for row in lacking))
    table, told = score(package, tmp_path / "jsonl.parquet", jsonl)
    assert told.malformed == 0
    assert same(table.column("default"), plain_scores(load_package(package), given)["default"])
    lines = to_csv(ROWS[:40]).splitlines()
    for place, item in ((3, f"{2**62 + 1}|2.0"), (9, "x")):
        cells = lines[place + 1].split(",")
        cells[list(TYPES).index("item")] = item
        lines[place + 1] = ",".join(cells)
    (tmp_path / "a.csv").write_text("\n".join(lines))
    found, told = score(package, tmp_path / "csv.parquet", tmp_path / "a.csv")
    assert told.malformed == 1
    assert found.column("default")[3] == table.column("default")[3]


def test_strict_refuses_the_first_row(package, tmp_path):
    given = [dict(row) for row in ROWS]
    given[250]["genre"] = [99]
    path = write(tmp_path / "a.csv", given)
    with pytest.raises(
        UserError, match=r"a\.csv:252: column 'genre': id 99 is outside \[0, 19\); mend"
    ):
        score(package, tmp_path / "out.parquet", path, strict=True)
    assert not (tmp_path / "out.parquet").exists()


class EndedError(Exception):
    pass


@pytest.mark.parametrize("name", ["a.parquet", "a.csv"])
def test_a_call_goes_on_where_another_was_ended(package, tmp_path, monkeypatch, name):
    path, out = write(tmp_path / name, ROWS), tmp_path / "out.parquet"
    score(package, tmp_path / "straight.parquet", path, keep=("id",))
    keeps = scoring.PartsFolder.write

    def write_two(self, number, part):
        if number >= 2:
            raise EndedError
        keeps(self, number, part)

    monkeypatch.setattr(scoring.PartsFolder, "write", write_two)
    with pytest.raises(EndedError):
        score(package, out, path, keep=("id",), processes=2)
    monkeypatch.setattr(scoring.PartsFolder, "write", keeps)
    assert not out.exists()
    for options, says in (
        ({"keep": ()}, "another keep"),
        ({"keep": ("id",), "batch_rows": 5}, "another batch"),
    ):
        with pytest.raises(UserError, match=f"{says}; repeat that call.*--overwrite"):
            score(package, out, path, **options)
    _, told = score(package, out, path, keep=("id",))
    assert told.taken_up == 2
    assert told.rows == len(ROWS)
    assert out.read_bytes() == (tmp_path / "straight.parquet").read_bytes()
    with pytest.raises(UserError, match="is there already"):
        score(package, out, path, keep=("id",))
    _, told = score(package, out, path, overwrite=True)
    assert told.taken_up == 0


def test_changed_data_are_not_mixed(package, tmp_path, monkeypatch):
    path, out = write(tmp_path / "a.parquet", ROWS), tmp_path / "out.parquet"
    folder = scoring.PartsFolder(out, {"data": "other"})
    busy = pytest.raises(UserError, match="another process is writing this output")
    with folder.opened(anew=False), busy:
        score(package, out, path)
    with pytest.raises(UserError, match="parts of a call with another batch and data and"):
        score(package, out, path)
    os.utime(path, (1, 1))
    assert score(package, out, path, overwrite=True)[1].rows == len(ROWS)


def test_criteos_own_files_are_read(tmp_path, monkeypatch):
    config = ModelConfig(
        arch="dlrm",
        embedding_dim=4,
        rows=100,
        dense_layers=(4,),
        over_layers=(4,),
        embedding_init=1.0,
    )
    model = build_ranking_model(
        config, list(DENSE_NAMES), list(SPARSE_NAMES), transforms=COLUMNS.transforms()
    ).eval()
    path = tmp_path / "m.pt"
    write_model(model, path, PackageOptions(name="m"), columns=COLUMNS)
    random = np.random.default_rng(0)
    given, lines = [], []
    for number in range(60):
        dense = [None if random.random() < 0.2 else int(n) for n in random.integers(-2, 9999, 13)]
        ids = [None if random.random() < 0.1 else int(n) for n in random.integers(0, 2**32, 26)]
        given.append(dict(zip((*DENSE_NAMES, *SPARSE_NAMES), (*dense, *ids), strict=True)))
        shown = ["" if n is None else str(n) for n in dense]
        shown += ["" if n is None else f"{n:08x}" for n in ids]
        lines.append("\t".join([str(number % 2), *shown]))
    lines[7] = lines[7].replace("\t", "\tx", 1)
    expected = plain_scores(load_package(path), given)["default"]
    (tmp_path / "day.tsv").write_text("\n".join(lines))
    (tmp_path / "test.txt").write_text("\n".join(line.partition("\t")[2] for line in lines) + "\n")
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(raw_text, "CRITEO_BLOCK_BYTES", 1000)
        table, told = score(
            path, tmp_path / "a.parquet", tmp_path / "day.tsv", keep=("label", "C1")
        )
        without, _ = score(path, tmp_path / "b.parquet", tmp_path / "test.txt")
    assert told.units > 3
    assert [line.split(": ", 1) for line in told.examples] == [
        [
            f"{tmp_path}/day.tsv:8",
            "column 'I1': expected an integer of at most 18 digits, or nothing",
        ]
    ]
    assert table.column("label").to_pylist() == [number % 2 for number in range(60)]
    assert table.column("C1")[0].as_py() == f"{given[0]['C1']:08x}"
    found = table.column("default").to_numpy(zero_copy_only=False)
    good = np.arange(60) != 7
    assert np.array_equal(found[good], expected[good])
    assert np.isnan(found[7])
    assert without.column("default").equals(table.column("default"))


def wrong_calls(tmp_path, package):
    good = str(write(tmp_path / "good.parquet", ROWS))
    table = to_table(ROWS)
    pq.write_table(table.drop_columns(["item"]), tmp_path / "lacks.parquet")
    ints = table.set_column(5, "user", pa.array(range(300)))
    pq.write_table(ints, tmp_path / "ints.parquet")
    texts = table.set_column(1, "dense_0", pa.array(["x"] * 300))
    pq.write_table(texts, tmp_path / "texts.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "good.parquet").read_bytes()[:-9])
    (tmp_path / "lacks.csv").write_text("id,note\n1,x\n")
    jsons = [{n: v for n, v in row.items() if n != "item"} for row in ROWS]
    (tmp_path / "lacks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in jsons))
    (tmp_path / "rows.xls").write_text("x")
    kept = table.set_column(0, "id", pa.array(list("abc") * 100))
    pq.write_table(kept, tmp_path / "kept.parquet")
    out = ["--out", str(tmp_path / "out.parquet")]
    yield [str(tmp_path / "none.pt"), "--data", good, *out], "No such file"
    package = str(package)
    for name, says in (
        ("none.parquet", "no such file or folder"),
        ("rows.xls", "its name must end in"),
        ("lacks.parquet", "has no column 'item'"),
        ("lacks.csv", "has no column"),
        ("lacks.jsonl", "has no column 'item'"),
        (
            "ints.parquet",
            "column 'user' has integers (int64), but the model was trained on strings",
        ),
        ("texts.parquet", "column 'dense_0' has the type string, which kind dense cannot"),
        ("cut.parquet", "cannot be read"),
    ):
        yield [package, "--data", str(tmp_path / name), *out], says
    both = [good, str(tmp_path / "kept.parquet")]
    yield (
        [package, "--data", *both, *out, "--keep", "id"],
        "column 'id' has the type string, but in",
    )
    yield [package, "--data", good, *out, "--keep", "uid"], "has no column 'uid'; did you mean id?"
    yield [package, "--data", good, *out, "--keep", "id=default"], "has another column of this name"
    yield [package, "--data", good, *out, "--ray-address", "a:1"], "the local engine has none"
    nowhere = ["--out", str(tmp_path / "no" / "out.parquet")]
    yield [package, "--data", good, *nowhere], "there is no folder"


def test_what_is_wrong_is_told_in_one_line(package, tmp_path, capsys):
    for call, says in wrong_calls(tmp_path, package):
        assert main(["score", *call]) == 2, call
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        assert says in error, error
        assert not list(tmp_path.glob("out.parquet*"))


def test_the_command_says_what_it_did(package, tmp_path, capsys):
    given = [dict(row) for row in ROWS]
    given[0]["genre"] = [99]
    write(tmp_path / "a.csv", [{**r, "bucket": None} for r in given])
    text = (tmp_path / "a.csv").read_text().replace("|", ";")
    (tmp_path / "a.csv").write_text(text)
    call = ["score", str(package), "--data", str(tmp_path / "a.csv"), "--out"]
    assert main([*call, str(tmp_path / "out.parquet")]) == 0
    error = capsys.readouterr().err
    assert "300 rows; 1 could not be scored and are null:" in error
    assert "a.csv:2: column 'genre': id 99 is outside [0, 19)" in error
    assert "column 'item' holds lists, whose items are taken to be separated by ';'" in error
    assert main([*call, str(tmp_path / "said.parquet"), "--separator", ";", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    one, other = (pq.read_table(tmp_path / f"{n}.parquet") for n in ("out", "said"))
    assert one.equals(other)
    assert main([*call, str(tmp_path / "out.csv")]) == 2
    assert "scores are written as Parquet" in capsys.readouterr().err
    assert not (tmp_path / "out.csv").exists()


def test_no_rows_are_a_file_without_rows(package, tmp_path):
    pq.write_table(to_table([]), tmp_path / "a.parquet")
    table, told = score(package, tmp_path / "out.parquet", tmp_path / "a.parquet", keep=("id",))
    assert told.rows == table.num_rows == 0
    assert table.column_names == ["id", "default"]
