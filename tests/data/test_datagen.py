from __future__ import annotations

import errno
import gzip
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from tessera.cli import run_command
from tessera.errors import UserError
from tessera.training.data import criteo_format as fmt
from tessera.training.data import datagen
from tessera.training.data.criteo_parse import parse_block
from tessera.training.data.criteo_write import format_rows
from tessera.training.data.datagen import generate, probabilities_path, truth_path
from tessera.training.data.generating_model import CARDINALITIES, PAIRS, GeneratingModel
from tests.data import criteo_plain as plain


def test_text_of_rows() -> None:
    integers = np.zeros((13, 3), np.int64)
    integers[0] = [0, -3, 10**17]
    integers[12] = [9, 10, 11]
    present = np.zeros((13, 3), np.bool_)
    present[0], present[12, :2] = True, True
    categories = np.zeros((26, 3), np.uint32)
    categories[25] = [0, 0xFFFFFFFF, 0x0012ABCD]
    category_present = np.zeros((26, 3), np.bool_)
    category_present[25] = [True, True, True]
    text = format_rows(
        labels=np.array([True, False, True]),
        integers=integers,
        integer_present=present,
        categories=categories,
        category_present=category_present,
    )
    assert text.decode().split("\n") == [
        "1\t0" + "\t" * 12 + "9" + "\t" * 26 + "00000000",
        "0\t-3" + "\t" * 12 + "10" + "\t" * 26 + "ffffffff",
        "1\t100000000000000000" + "\t" * 12 + "" + "\t" * 26 + "0012abcd",
        "",
    ]


def test_no_rows_have_no_text() -> None:
    wide = {"integers": np.zeros((13, 0), np.int64), "categories": np.zeros((26, 0), np.uint32)}
    masks = {
        "integer_present": np.zeros((13, 0), np.bool_),
        "category_present": np.zeros((26, 0), np.bool_),
    }
    assert format_rows(labels=np.zeros(0, np.bool_), **wide, **masks) == b""


def slow_logit(model: GeneratingModel, rank_of: list[dict[int, int]], row: plain.PlainRow) -> float:
    """The documented formula, term by term, from what the text shows."""
    dense = categories = pairs = 0.0
    for column, value in zip(model.dense, row.dense, strict=True):
        if math.isnan(value):
            dense += column.missing_effect
            continue
        t = (math.log1p(value + column.shift) - column.location) / column.spread
        dense += column.slope * t + column.curvature * (t * t - 1)
    ranks = [
        None if value is None else ranks[value]
        for ranks, value in zip(rank_of, row.categories, strict=True)
    ]
    for number, rank in enumerate(ranks):
        effects = model.effects[number]
        categories += model.sparse[number].missing_effect if rank is None else effects[rank]
    for (left, right), vectors in zip(PAIRS, model.pair_vectors, strict=True):
        if ranks[left] is not None and ranks[right] is not None:
            pairs += sum(vectors[0][ranks[left]] * vectors[1][ranks[right]])
    scaled = zip(model.scales, (dense, categories, pairs), strict=True)
    return model.bias + sum(scale * term for scale, term in scaled)


def test_probabilities_are_those_of_the_documented_formula(tmp_path: Path) -> None:
    out = tmp_path / "rows.tsv"
    generate(out, rows=150, seed=5, probabilities=True)
    model = GeneratingModel(5, 0.25)
    every_rank = np.zeros((26, max(CARDINALITIES)), np.int64) + np.arange(max(CARDINALITIES))
    ids = model.ids(every_rank)
    rank_of = [
        {int(value): rank for rank, value in enumerate(ids[column, :size])}
        for column, size in enumerate(CARDINALITIES)
    ]
    assert [len(ranks) for ranks in rank_of] == list(CARDINALITIES)  # ids are one-to-one
    rows, malformed = plain.read_text(out.read_bytes())
    assert malformed == []
    expected = [1 / (1 + math.exp(-slow_logit(model, rank_of, row))) for row in rows]
    found = np.load(probabilities_path(out))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_truth_is_what_the_probabilities_score(tmp_path: Path) -> None:
    out = tmp_path / "rows.tsv"
    truth = generate(out, rows=40_000, seed=2, probabilities=True)
    probability = np.load(probabilities_path(out)).astype(np.float64)
    labels = parse_block(out.read_bytes(), file="").rows[fmt.LABEL_WORD].view(np.float32)
    assert truth.rows == 40_000
    assert truth.positive_rate == pytest.approx(labels.mean())
    # Probabilities agree to 20 bits in the one and to float32 in the other.
    assert truth.auc == pytest.approx(roc_auc_score(labels, probability), abs=1e-6)
    assert truth.log_loss == pytest.approx(log_loss(labels, probability), abs=1e-6)
    assert 0.77 < truth.auc < 0.81
    # The labels are draws from these probabilities: within 4.5 standard deviations.
    spread = math.sqrt((probability * (1 - probability)).sum())
    assert abs(labels.sum() - probability.sum()) < 4.5 * spread
    written = json.loads(truth_path(out).read_text())
    assert written["auc"] == truth.auc
    assert written["model"]["seed"] == 2
    assert len(written["model"]["categories"]) == 26


@pytest.mark.parametrize("name", ["rows.tsv", "rows.tsv.gz"])
def test_bytes_are_the_seeds_and_not_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(datagen, "CHUNK_ROWS", 400)
    texts, truths = [], []
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        folder.mkdir()
        generate(folder / name, rows=1900, seed=9, workers=workers)
        texts.append((folder / name).read_bytes())
        truths.append(truth_path(folder / name).read_bytes())
    assert texts[0] == texts[1]
    assert truths[0] == truths[1]
    generate(tmp_path / name, rows=1900, seed=10)
    assert (tmp_path / name).read_bytes() != texts[0]


def test_a_compressed_file_holds_the_same_text(tmp_path: Path) -> None:
    generate(tmp_path / "a.tsv", rows=100, seed=0)
    generate(tmp_path / "a.tsv.gz", rows=100, seed=0)
    text = (tmp_path / "a.tsv").read_bytes()
    assert gzip.decompress((tmp_path / "a.tsv.gz").read_bytes()) == text
    assert text.count(b"\n") == 100


def test_more_rows_begin_with_the_same_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datagen, "CHUNK_ROWS", 50)
    generate(tmp_path / "a.tsv", rows=100, seed=0)
    generate(tmp_path / "b.tsv", rows=130, seed=0)
    assert (tmp_path / "b.tsv").read_bytes().startswith((tmp_path / "a.tsv").read_bytes())


def test_columns_follow_their_power_law_and_missing_rate(tmp_path: Path) -> None:
    rows = 30_000
    generate(tmp_path / "a.tsv", rows=rows, seed=4)
    words = parse_block((tmp_path / "a.tsv").read_bytes(), file="").rows
    model = GeneratingModel(4, 0.25)
    first_ids = model.ids(np.zeros((26, 1), np.int64))[:, 0]
    for number, column in enumerate(model.sparse):
        present = (words[fmt.PRESENT_WORD] >> np.uint32(number)) & 1 == 1
        first = words[fmt.SPARSE_WORDS][number][present] == first_ids[number]
        # Shares of thousands of draws: within 4.5 standard deviations, at most 0.5 / sqrt(n).
        assert abs(1 - present.mean() - column.missing_rate) < 4.5 * 0.5 / math.sqrt(rows)
        expected = column.probabilities()[0]
        assert abs(first.mean() - expected) < 4.5 * 0.5 / math.sqrt(present.sum())


@pytest.mark.parametrize("rows", [0, 1])
def test_hardly_any_rows(tmp_path: Path, rows: int) -> None:
    out = tmp_path / "rows.tsv"
    truth = generate(out, rows=rows, seed=0, probabilities=True)
    assert out.read_bytes().count(b"\n") == rows
    assert np.load(probabilities_path(out)).shape == (rows,)
    assert math.isnan(truth.auc)
    assert json.loads(truth_path(out).read_text())["auc"] is None


def test_an_error_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.tsv"
    generate(out, rows=10, seed=0)
    before = out.read_bytes()

    def fail(_chunk: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(datagen, "_make", fail)
    with pytest.raises(OSError, match="no space left"):
        generate(out, rows=10, seed=1)
    assert out.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.tsv", "rows.tsv.truth.json"]


def test_a_full_disk_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_file: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"a\.tsv.*cannot be written .No space left on device"):
        generate(tmp_path / "a.tsv", rows=10, seed=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": -1}, "rows=-1"),
        ({"workers": -1}, "workers=-1"),
        ({"out": Path("/")}, "exists and is not a file"),
        ({"out": Path("/dev/null")}, "exists and is not a file"),
        ({"seed": -1}, "seed=-1"),
        ({"positive_rate": 1.0}, r"positive_rate=1\.0"),
        ({"out": Path("/absent/rows.tsv")}, "the folder /absent is not there"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate(**{"out": tmp_path / "a.tsv", "rows": 1, "seed": 0, **arguments})


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.tsv.gz"
    assert run_command("datagen", ["--rows", "2000", "--out", str(out), "--workers", "1"]) == 0
    said = capsys.readouterr().out
    assert "2000 rows" in said
    assert "best possible AUC 0." in said
    assert gzip.decompress(out.read_bytes()).count(b"\n") == 2000
    assert run_command("datagen", ["--rows", "-5", "--out", str(out)]) == 2
    assert "rows=-5" in capsys.readouterr().err


def test_the_command_has_no_auc_to_tell_of_one_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("datagen", ["--rows", "1", "--out", str(tmp_path / "rows.tsv")]) == 0
    said = capsys.readouterr().out
    assert "1 rows" in said
    assert "no AUC" in said
    assert "nan" not in said


def test_the_positive_rate_is_reached(tmp_path: Path) -> None:
    truth = generate(tmp_path / "a.tsv", rows=20_000, seed=3, positive_rate=0.05)
    # Within 4.5 standard deviations of the draw, and as much again for the pilot's.
    assert abs(truth.positive_rate - 0.05) < 9 * math.sqrt(0.05 * 0.95 / 20_000)
