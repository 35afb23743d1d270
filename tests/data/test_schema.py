from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tessera.cli import main
from tessera.training.config import load_config
from tests.data import clicks
from tests.data.test_table import write


def inferred(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """The config that ``tessera schema`` writes; it must be one that is understood."""
    out = tmp_path / "data.yaml"
    assert main(["schema", *arguments, "--out", str(out), "--overwrite"]) == 0
    load_config(out)
    return dict(yaml.safe_load(out.read_text(encoding="utf-8")))


def kinds(config: dict[str, Any]) -> dict[str, str]:
    return {name: column["kind"] for name, column in config["data"]["columns"].items()}


CLICKS = {
    "price": "dense",
    "age": "dense",
    "country": "categorical",
    "device": "categorical",
    "user_id": "categorical",
    "tags": "categorical_list",
    "timestamp": "timestamp",
    "click": "label",
    "purchase": "label",
}


@pytest.mark.parametrize("name", ["a.csv", "a.tsv.gz", "a.jsonl", "a.parquet", "a.feather"])
def test_every_format_of_the_same_rows_is_understood_alike(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / name, clicks.rows(2000))
    config = inferred(tmp_path, str(path))
    found = kinds(config)
    assert {key: found[key] for key in CLICKS} == CLICKS
    assert config["data"]["split"] == "time"
    columns = config["data"]["columns"]
    assert columns["price"]["transform"] == ["log1p", "standardize"]
    assert columns["country"]["transform"] == [{"vocabulary": {"min_count": 2}}]
    assert columns["user_id"]["side"] == "user"
    assert "side" not in columns["country"]
    shown = capsys.readouterr().out
    assert "2,000 of about 2,000 rows" in shown
    assert "0.0%" in shown
    assert "numbers with few large ones, so their logarithm" in shown
    assert "train with: tessera train --config" in shown


def test_the_config_trains_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    clicks.write_csv(tmp_path / "clicks.csv", clicks.rows(6000))
    assert main(["schema", "clicks.csv", "--label", "click", "--out", "data.yaml"]) == 0
    arguments = ["train", "--config", "data.yaml", "--out", "run", "--quiet"]
    assert main([*arguments, "train.epochs=1", "run.report=false"]) == 0
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    assert final["malformed_rows"] == 0
    assert final["test"]["auc"] > 0.65
    assert final["test"]["rows"] == 600


def test_a_run_on_a_table_is_resumed_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tessera.training.config import load_config as load
    from tessera.training.trainer.checkpoint import load_checkpoint
    from tessera.training.trainer.files import latest_checkpoint
    from tessera.training.trainer.run import train

    monkeypatch.chdir(tmp_path)
    clicks.write_csv(tmp_path / "clicks.csv", clicks.rows(2000))
    assert main(["schema", "clicks.csv", "--label", "click", "--out", "data.yaml"]) == 0
    config = load(Path("data.yaml"), ["train.epochs=1", "train.batch_size=100", "run.report=false"])
    asked = iter([*[False] * 6, *[True] * 1000])
    stopped = train(config, Path("stopped"), progress=False, should_stop=lambda: next(asked, True))
    assert stopped.status == "interrupted"
    assert 0 < stopped.step < 16
    again = train(config, Path("stopped"), resume=True, progress=False)
    whole = train(config, Path("whole"), progress=False)
    models = []
    for run in (again, whole):
        path = latest_checkpoint(run.folder / "checkpoints")
        assert path is not None
        models.append(load_checkpoint(path).model)
    assert models[0].keys() == models[1].keys()
    for name, value in models[0].items():
        assert np.array_equal(value.numpy(), models[1][name].numpy()), name


def test_kinds_sides_and_shared_tables(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = 3000
    items = random.integers(0, 400, rows)
    lists = [random.integers(0, 400, size).tolist() for size in random.integers(1, 80, rows)]
    table = pa.table(
        {
            "item_id": items,
            "user_history": pa.array(lists, pa.list_(pa.int64())),
            "interests": pa.array([["a", "b"], ["c"], ["a"]] * 1000),
            "interests_w": pa.array([[0.5, 1.0], [2.0], [3.0]] * 1000),
            "affinity": pa.array(
                [[("x", 1.0)], [], [("y", 2.0)]] * 1000, pa.map_(pa.string(), pa.float32())
            ),
            "embedding": pa.array([[0.1, 0.2]] * rows),
            "row_id": pa.array([f"r{number}" for number in range(rows)]),
            "comment": pa.array(
                [f"a long text of many words, number {number}, " * 2 for number in range(rows)]
            ),
            "stars": random.integers(1, 6, rows),
            "weight": random.random(rows),
            "constant": [1] * rows,
            "nothing": pa.nulls(rows),
            "member": random.random(rows) < 0.5,
            "clicked": random.random(rows) < 0.2,
            "bought": random.random(rows) < 0.1,
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    config = inferred(tmp_path, str(tmp_path / "a.parquet"))
    assert kinds(config) == {
        "item_id": "categorical",
        "user_history": "sequence",
        "interests": "weighted_list",
        "interests_w": "ignore",
        "affinity": "weighted_list",
        "embedding": "ignore",
        "row_id": "ignore",
        "comment": "ignore",
        "stars": "categorical",
        "weight": "weight",
        "constant": "ignore",
        "nothing": "ignore",
        "member": "dense",
        "clicked": "label",
        "bought": "label",
    }
    columns = config["data"]["columns"]
    assert columns["user_history"] == {
        "kind": "sequence",
        "side": "user",
        "table": "item_id",
        "max_length": 50,
        "transform": columns["item_id"]["transform"],
    }
    assert columns["item_id"]["table"] == "item_id"
    assert columns["interests"]["weights"] == "interests_w"
    assert config["model"]["tables"]["affinity"] == {"rows": 1000, "weighted": True}
    text = (tmp_path / "data.yaml").read_text()
    assert "bought: {kind: label, task: binary}  # a label of 0 and 1" in text
    one = inferred(tmp_path, str(tmp_path / "a.parquet"), "--label", "stars")
    assert one["data"]["columns"]["stars"] == {"kind": "label", "task": "regression"}
    assert one["data"]["columns"]["clicked"] == {"kind": "ignore"}
    assert one["train"]["metric"] == "log_loss"


def test_what_cannot_be_inferred_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text("x,z\n1,2\n3,4\n")
    out = ["--out", str(tmp_path / "o.yaml")]
    wide = pa.table({f"c{number}": [1] for number in range(3000)})
    pq.write_table(wide, tmp_path / "wide.parquet")
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 and more")
    first = pa.table({"click": [0, 1], "x": [1.5, 2.5]})
    for name, second in (
        ("lacks", first.drop_columns(["x"])),
        ("more", first.append_column("y", first.column("x"))),
        ("other", first.set_column(1, "x", pa.array(["a", "b"]))),
    ):
        (tmp_path / name).mkdir()
        pq.write_table(first, tmp_path / name / "a.parquet")
        pq.write_table(second, tmp_path / name / "b.parquet")
    cases = {
        ("lacks",): "b.parquet: has no column 'x'; it has click",
        ("more",): "a.parquet: has no column 'y'; it has click, x",
        (
            "other",
        ): "b.parquet: its columns are not those of the files before it: Field x has incompatible",
        ("a.csv",): "no column looks like a label (such as click",
        ("a.csv", "--label", "w"): "has no column 'w'; it has x, z",
        ("a.csv", "--rows", "0"): "--rows 0: give at least 1",
        ("absent.csv",): "no such file or folder",
        ("wide.parquet",): "has 3000 columns; a schema is inferred for up to 2000",
        ("damaged.parquet",): "damaged.parquet: cannot be read",
    }
    for (name, *more), message in cases.items():
        assert main(["schema", str(tmp_path / name), *more, *out]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not (tmp_path / "o.yaml").exists()
    shutil.copy(tmp_path / "a.csv", tmp_path / "o.yaml")
    assert main(["schema", str(tmp_path / "a.csv"), "--label", "x", *out]) == 2
    assert "is there already; give another name or --overwrite" in capsys.readouterr().err


READS_AHEAD = """
import sys, threading, time
from tessera.cli import main
from tessera.training.data.table import common

def slowly(self, size, read=common.Utf8Text.read):
    block = read(self, size)
    if threading.current_thread() is not threading.main_thread():
        if common.began:
            time.sleep(2)
        common.began = True
    return block

common.began = False
common.Utf8Text.read = slowly
sys.exit(main(sys.argv[1:]))
"""


def test_the_program_ends_in_order_while_a_thread_reads_ahead(tmp_path):
    rows = tmp_path / "rows.csv"
    rows.write_text("click,price\n" + "1,22.50\n" * 3_000_000)
    arguments = ["schema", str(rows), "--label", "price", "--out", str(tmp_path / "data.yaml")]
    command = [sys.executable, "-c", READS_AHEAD, *arguments, "--rows", "10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
