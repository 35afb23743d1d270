"""`tessera evaluate`: against the way that rows go in serving, scikit-learn, and plain loops."""

from __future__ import annotations

import csv
import json
import math
import re

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import torch
from sklearn import metrics as sk

from tessera.cli import main
from tessera.serving.client.row_files import read_row_batches
from tessera.serving.client.rows import rows_to_parts
from tessera.serving.package.loading import load_package
from tessera.serving.package.runner import HostBatch
from tessera.training.data.datagen import generate
from tests.offline.evaluated import CLICK, HEADER, SPENT, shop_rows, train_and_package, write_table


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A folder with shop.csv, new.csv, new.parquet, and the runs and packages `one` and `two`."""
    folder = tmp_path_factory.mktemp("shop")
    write_table(folder / "shop.csv", shop_rows(900, 1))
    write_table(folder / "new.csv", shop_rows(700, 2))
    pq.write_table(pa_csv.read_csv(folder / "new.csv"), folder / "new.parquet")
    train_and_package(folder, "one", labels=(CLICK,), tags="categorical_list")
    train_and_package(folder, "two", labels=(CLICK, SPENT), tags="sequence")
    return folder


def evaluated(capsys, *words):
    """The results of a call as JSON."""
    capsys.readouterr()
    status = main(["evaluate", *map(str, words), "--json", "--quiet"])
    out, error = capsys.readouterr()
    assert status == 0, error
    return json.loads(out)


def served(package, path, *, ignore=("user_id", "spent", "click", "day", "half", "weight")):
    """Each output's scores of the rows of a CSV, as a server computes them from raw rows."""
    loaded = load_package(package)
    schema = loaded.manifest.schema
    parts = []
    for batch in read_row_batches(path, batch_size=100, schema=schema):
        dense, bags = rows_to_parts(batch.rows, schema, ignore=ignore)
        ids = [bags[feature.name] for feature in schema.features]
        lengths = torch.from_numpy(np.concatenate([each.lengths for each in ids]))
        values = torch.from_numpy(np.concatenate([each.values for each in ids]))
        parts.append(
            loaded.runner.forward(HostBatch.of(torch.from_numpy(dense), (lengths, values)))
        )
    return {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}


def column(path, name):
    with path.open(encoding="utf-8", newline="") as file:
        return [row[name] for row in csv.DictReader(file)]


def plain_metrics(y, p):
    """By scikit-learn."""
    entropy = sk.log_loss(y, np.full(len(y), np.mean(y)))
    loss = sk.log_loss(y, p.astype(np.float64))
    return {
        "auc": sk.roc_auc_score(y, p),
        "log_loss": loss,
        "normalised_entropy": loss / entropy,
        "calibration": p.astype(np.float64).mean() / np.mean(y),
        "accuracy": sk.accuracy_score(y, p >= 0.5),
    }


def values_of(metrics):
    return {name: measured["value"] for name, measured in metrics.items()}


def test_a_package_on_raw_rows_has_the_metrics_of_what_a_server_answers(shop, capsys):
    path = shop / "new.csv"
    found = evaluated(
        capsys, shop / "one.pt", "--data", path, "--label", "click", "--cluster", "user_id",
        "--by", "country", "--group", "day", "--k", "3",
    )  # fmt: skip
    p = served(shop / "one.pt", path)["default"]
    y = np.array(column(path, "click"), float)
    label = found["labels"]["click"]
    own = values_of(label["models"]["one.pt"])
    assert (label["rows"], label["positives"]) == (700, int(y.sum()))
    expected = plain_metrics(y, p)
    assert {name: own[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    days = column(path, "day")
    assert own["gauc"] == pytest.approx(plain_gauc(y, p, days), rel=1e-9)
    assert found["data"]["groups"] == len(set(days))
    # The clustered error of a mean, written out.
    users = column(path, "user_id")
    losses = -(y * np.log(p.astype(float)) + (1 - y) * np.log1p(-p.astype(float)))
    sums = [
        sum((losses[n] - losses.mean()) for n, u in enumerate(users) if u == one)
        for one in set(users)
    ]
    count = len(sums)
    error = math.sqrt(count / (count - 1) * np.square(sums).sum()) / 700
    assert label["models"]["one.pt"]["log_loss"]["standard_error"] == pytest.approx(error, rel=1e-6)
    assert found["data"]["clusters"] == count
    # Every country, of which there are fewer than are shown.
    countries = np.array(column(path, "country"))
    slices = {part["value"]: part for part in found["slices"]}
    assert set(slices) == set(countries)
    for value, part in slices.items():
        rows = countries == value
        expected = plain_metrics(y[rows], p[rows])
        of_slice = values_of(part["models"]["one.pt"])
        assert {name: of_slice[name] for name in expected} == pytest.approx(expected, rel=1e-9)
        assert part["share"] == pytest.approx(rows.mean())


def plain_gauc(y, p, groups):
    total = weighted = 0.0
    for group in set(groups):
        rows = np.array([one == group for one in groups])
        if 0 < y[rows].sum() < rows.sum():
            weighted += rows.sum() * sk.roc_auc_score(y[rows], p[rows])
            total += rows.sum()
    return weighted / total


def test_parquet_and_csv_give_the_same(shop, capsys):
    words = [shop / "two.pt", "--by", "half", "--buckets", "7", "--weight", "weight"]
    found = [evaluated(capsys, *words, "--data", shop / f"new.{end}") for end in ("csv", "parquet")]
    assert found[0]["labels"] == found[1]["labels"]
    # A text is shown as it is written, a number as a number.
    slices = [
        {(float(part.pop("value")), part["label"]): part for part in one["slices"]} for one in found
    ]
    assert slices[0] == slices[1]
    spent = np.array(column(shop / "new.csv", "spent"), float)
    weights = np.array(column(shop / "new.csv", "weight"), float)
    p = served(shop / "two.pt", shop / "new.csv")["spent"].astype(float)
    own = values_of(found[0]["labels"]["spent"]["models"]["two.pt"])
    labels = spent.astype(np.float32).astype(float)
    expected = sk.root_mean_squared_error(labels, p, sample_weight=weights)
    assert own["root_mean_squared_error"] == pytest.approx(expected, rel=1e-9)
    assert found[0]["labels"]["spent"]["task"] == "regression"
    assert len(slices[0]) == 14


def test_a_run_is_evaluated_on_its_test_split_and_beside_its_package(shop, capsys, tmp_path):
    out = tmp_path / "out"
    words = [
        "evaluate",
        shop / "one",
        shop / "one.pt",
        "--by",
        "country",
        "--top",
        "2",
        "--out",
        out,
    ]
    assert main([*map(str, words), "--quiet"]) == 0
    text = capsys.readouterr().out
    assert "split test" in text
    assert "clustered by user_id" in text
    assert "one.pt - one" in text
    found = json.loads((out / "evaluation.json").read_text())
    final = json.loads((shop / "one" / "final.json").read_text())
    label = found["labels"]["click"]
    for name in ("auc", "log_loss", "normalised_entropy", "calibration"):
        # The run's own pass computes them from logits; a package's scores are float32.
        assert label["models"]["one"][name]["value"] == pytest.approx(final["test"][name], rel=1e-5)
        difference = label["differences"]["one.pt"][name]
        ours, others = (label["models"][one][name] for one in ("one.pt", "one"))
        assert difference["value"] == pytest.approx(ours["value"] - others["value"], abs=1e-12)
        # Their errors are large and alike, so that the paired one is small.
        assert difference["standard_error"] < 0.2 * ours["standard_error"]
    assert found["data"]["available_rows"] == label["rows"] == final["test"]["rows"]
    buckets = label["calibration_buckets"]["one"]
    assert sum(bucket["rows"] for bucket in buckets) == label["rows"]
    with (out / "slices.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 3 * len(found["slices"]) == 9  # two models and their difference
    assert lines[-1]["value"] == "(the rest: 3 values)"
    first = found["slices"][0]
    assert float(lines[0]["auc"]) == first["models"]["one"]["auc"]["value"]
    assert lines[2]["minus"] == "one"
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 6  # three curves, two histograms, slices
    # Nothing is loaded from anywhere: addresses are only names of XML's kinds.
    assert not re.search(r"(src|href)=\"(?!#)", page)
    assert "prefers-color-scheme: dark" in page


def test_models_that_read_other_columns_answer_the_same_rows(shop, capsys):
    """`one` cuts tags at their first two, `two` at their last two; alone or together is the same."""
    both = evaluated(capsys, shop / "one", shop / "two.pt", "--data", shop / "new.csv")
    alone = evaluated(capsys, shop / "two.pt", "--data", shop / "new.csv", "--label", "click")
    click = both["labels"]["click"]["models"]
    for name in ("auc", "log_loss"):
        assert (
            click["two.pt"][name]["value"]
            == alone["labels"]["click"]["models"]["two.pt"][name]["value"]
        )
    p = served(shop / "one.pt", shop / "new.csv")["default"]
    y = np.array(column(shop / "new.csv", "click"), float)
    assert click["one"]["auc"]["value"] == pytest.approx(sk.roc_auc_score(y, p), abs=5e-3)
    assert set(both["labels"]) == {"click"}


def test_the_config_of_a_run_says_how_a_package_reads_data(shop, capsys):
    found = evaluated(capsys, shop / "one.pt", "--config", shop / "one", "--split", "valid")
    final = json.loads((shop / "one" / "final.json").read_text())
    own = found["labels"]["click"]
    assert own["rows"] == final["valid"]["rows"]
    assert own["models"]["one.pt"]["auc"]["value"] == pytest.approx(final["valid"]["auc"], abs=5e-3)


def test_importance_is_what_shuffling_the_file_costs(shop, capsys, tmp_path):
    """The same permutations, done to the file's columns, and answered from the changed files."""
    found = evaluated(
        capsys, shop / "one.pt", "--data", shop / "new.csv", "--label", "click", "--cluster", "rows",
        "--importance", "2", "--seed", "3", "--batch-size", "256",
    )  # fmt: skip
    by_column = {one["column"]: one for one in found["importance"]}
    assert set(by_column) == {"price", "country", "item", "tags"}
    # Both features of the price are shuffled as one: the file has it once.
    table = pa_csv.read_csv(shop / "new.csv", convert_options=pa_csv.ConvertOptions(
        column_types=dict.fromkeys(HEADER, pa.string()), strings_can_be_null=True))  # fmt: skip
    y = np.array(column(shop / "new.csv", "click"), float)
    auc = sk.roc_auc_score(y, served(shop / "one.pt", shop / "new.csv")["default"])
    for name in ("price", "tags"):
        losses = []
        for repeat in range(2):
            order = np.random.default_rng((3, repeat)).permutation(700)
            place = table.schema.get_field_index(name)
            changed = table.set_column(place, name, table.column(name).take(order))
            pa_csv.write_csv(changed, tmp_path / "changed.csv")
            p = served(shop / "one.pt", tmp_path / "changed.csv")["default"]
            losses.append(auc - sk.roc_auc_score(y, p))
        own = by_column[name]["losses"]
        assert own["auc"]["value"] == pytest.approx(np.mean(losses), abs=1e-9)
        assert own["auc"]["standard_error"] > 0
    # Clicks depend on the country and the price, and on no item.
    assert (
        by_column["country"]["losses"]["auc"]["value"]
        > 3 * by_column["country"]["losses"]["auc"]["standard_error"]
    )
    order = [one["column"] for one in found["importance"]]
    assert order[0] == "country"


def test_rows_are_bounded_by_spreading_batches(shop, capsys):
    found = evaluated(
        capsys, shop / "one.pt", "--data", shop / "new.csv", "--label", "click",
        "--max-rows", "350", "--batch-size", "50", "--importance", "1", "--importance-rows", "100",
    )  # fmt: skip
    assert (found["data"]["rows"], found["data"]["available_rows"]) == (350, 700)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["one.pt"], "give --data PATH"),
        (["one.pt", "--data", "new.csv"], "give the label's column with --label COLUMN"),
        (["one.pt", "--data", "new.csv", "--label", "clik"], "did you mean click?"),
        (["two.pt", "--data", "new.csv", "--label", "clik"], "two.pt has no such output"),
        (["one", "--data", "no.csv"], "no.csv"),
        (["one", "--by", "contry"], "did you mean country?"),
        (["one", "--by", "tags"], "lists of values"),
        (["one", "--weight", "country"], "--weight country"),
        (["one", "--label", "spent"], "is not a label of the run"),
        (["one", "--label", "click=spent"], "no row of it can be read"),
        (["one", "--split", "all"], "--split all"),
        (["one", "--task", "regression", "--label", "country"], "country"),
        (["nowhere"], "no such file or folder"),
        (["."], "holds no checkpoint"),
        (["new.csv"], "neither a package nor a checkpoint"),
        (["one.pt", "--data", "zeros.csv", "--label", "click"], "is 0 in all 50 rows"),
        (["one.pt", "--data", "new.csv", "--label", "spent", "--task", "binary"], "0 or 1"),
        (["one.pt", "--data", "narrow.csv", "--label", "click"], "has no column 'item'"),
        (["one.pt", "--data", "words.csv", "--label", "click"], "expected an integer"),
        (["one.pt", "--data", "words.parquet", "--label", "click"], "this data has strings"),
        (["one.pt", "--data", "empty.csv", "--label", "click"], "empty.csv"),
        (["one", "--label", "="], "give COLUMN or OUTPUT=COLUMN"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(shop, capsys, monkeypatch, words, says):
    monkeypatch.chdir(shop)
    rows = shop_rows(50, 3)
    zero, item = HEADER.index("click"), HEADER.index("item")
    write_table(shop / "zeros.csv", [[*row[:zero], 0, *row[zero + 1 :]] for row in rows])
    table = pa_csv.read_csv(shop / "zeros.csv")
    pa_csv.write_csv(table.drop_columns(["item"]), shop / "narrow.csv")
    write_table(
        shop / "words.csv", [[*row[:item], f"x{row[item]}", *row[item + 1 :]] for row in rows]
    )
    pq.write_table(pa_csv.read_csv(shop / "words.csv"), shop / "words.parquet")
    (shop / "empty.csv").write_text(",".join(HEADER) + "\n")
    assert main(["evaluate", *words, "--quiet"]) == 2
    out, error = capsys.readouterr()
    assert not out
    assert error.count("\n") == 1, error
    assert says in error


def test_raw_rows_of_criteo_go_to_a_package_that_was_trained_on_them(tmp_path, capsys):
    clicks = tmp_path / "clicks.tsv"
    generate(clicks, rows=600, seed=7, probabilities=False, progress=False)
    tiny = [
        "model.embedding_dim=4",
        "model.rows=50",
        "model.dense_layers=[4]",
        "model.over_layers=[4]",
    ]
    tiny += ["train.epochs=1", "train.batch_size=64", "run.report=false", "run.tensorboard=false"]
    run, package = tmp_path / "run", tmp_path / "model.pt"
    config = ["--config", "criteo_sample", f"data.path={clicks}", *tiny]
    assert main(["train", *config, "--out", str(run), "--quiet"]) == 0
    assert main(["package-model", str(run), "--out", str(package)]) == 0
    found = evaluated(
        capsys, package, "--data", clicks, "--label", "label", "--by", "C9", "--top", "1"
    )
    lines = [line.split("\t") for line in clicks.read_text().splitlines()]
    assert found["data"]["format"] == "criteo"
    assert found["labels"]["label"]["positives"] == sum(line[0] == "1" for line in lines)
    # A category is shown as the file writes it.
    values = [line[13 + 9] for line in lines]
    first = found["slices"][0]
    most = max(set(values), key=values.count)
    assert (first["value"], first["rows"]) == (most or "(missing)", values.count(most))
