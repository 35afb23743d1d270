"""``data.negatives``: which rows are added, and that nothing but (seed, epoch, row) decides it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tessera.cli import main
from tessera.training.config import load_config
from tessera.training.data.loader import BatchLoader
from tessera.training.data.opening import open_data
from tessera.training.trained import load_trained
from tessera.training.trainer.run import train
from tests.trainer import likes


def config_of(folder, negatives, change=lambda text: text):
    """The likes, ranked by ``dlrm_dcn`` with these negatives."""

    def changed(text):
        data = text.partition("model:\n")[0] + f"  negatives: {negatives}\n"
        rest = text.partition("train:\n")[2].replace("metric: recall", "metric: auc")
        model = "model: {arch: dlrm_dcn, embedding_dim: 8, rows: 50, dense_layers: [8],"
        model += " over_layers: [8], tables: {words: {weighted: true}}}\n"
        return change(data + model + "train:\n" + rest)

    return load_config(likes.write_config(folder, change=changed))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return config_of(tmp_path_factory.mktemp("likes"), "{per_positive: 3}")


def rows_of(view, *, batch_size, epoch=0, seed=None, part=(0, 1), start=0):
    """By row number: label, user and movie, in the order that a loader gives them."""
    loader = BatchLoader(
        view,
        batch_size=batch_size,
        shuffle=seed is not None,
        seed=seed or 0,
        part=part,
        numbered=True,
    )
    found = {}
    for batch in loader.epoch(epoch, start):
        numbers, ids = batch.row_numbers.tolist(), batch.sparse_features
        facts = (
            batch.labels.tolist(),
            ids["user"].values().tolist(),
            ids["movie"].values().tolist(),
        )
        found |= dict(zip(numbers, zip(*facts, strict=True), strict=True))
    return found


def test_each_row_is_followed_by_rows_with_another_item(config):
    view = open_data(config.data, progress=False).train
    table = likes.rows().to_pylist()[: len(view) // 4]
    assert len(view) == 4 * len(table)
    of_movie = {}
    for row in table:
        of_movie[row["movie"]] = row
    columns = view.dataset.columns
    age, year = (columns.dense_names.index(name) for name in ("age", "year"))
    assert view.labels().tolist() == [1, 0, 0, 0] * len(table)
    batch = next(BatchLoader(view, batch_size=39, shuffle=False, seed=0, numbered=True).epoch(0))
    assert batch.row_numbers.tolist() == list(range(39))
    ids = batch.sparse_features
    for place in range(39):
        row, slot = table[place // 4], place % 4
        assert batch.labels[place] == (slot == 0)
        movie = int(ids["movie"].values()[place])
        assert (movie == row["movie"]) == (slot == 0)
        # What is the user's stays; what is the item's is the other item's.
        assert float(batch.dense_features[place, age]) == row["age"]
        assert int(ids["user"].values()[place]) == row["user"]
        history = ids["history"]
        bounds = history.offsets()[place : place + 2].tolist()
        assert history.values()[slice(*bounds)].tolist() == row["history"]
        other = row if slot == 0 else of_movie[movie]
        found = float(batch.dense_features[place, year])
        assert np.isnan(found) if other["year"] is None else found == other["year"]
        words = ids["words"]
        bounds = words.offsets()[place : place + 2].tolist()
        assert words.values()[slice(*bounds)].tolist() == other["words"]
        assert words.weights()[slice(*bounds)].tolist() == pytest.approx(other["word_weights"])


def test_only_seed_epoch_and_row_decide(config):
    splits = open_data(config.data, progress=False)
    whole = rows_of(splits.train, batch_size=64, epoch=1, seed=5)
    assert len(whole) == len(splits.train)
    assert rows_of(splits.train, batch_size=37, epoch=1, seed=5) == whole
    halves = [rows_of(splits.train, batch_size=64, epoch=1, seed=5, part=(r, 2)) for r in (0, 1)]
    assert halves[0] | halves[1] == whole
    assert not set(halves[0]) & set(halves[1])
    later = rows_of(splits.train, batch_size=64, epoch=1, seed=5, start=11)
    assert later == {row: whole[row] for row in later}
    assert len(later) == len(whole) - 11 * 64
    for other in ({"epoch": 2, "seed": 5}, {"epoch": 1, "seed": 6}):
        changed = rows_of(splits.train, batch_size=64, **other)
        same = np.mean([changed[row] == whole[row] for row in whole if row % 4])
        assert same < 0.1
    # What is evaluated is the same in every epoch.
    valid = rows_of(splits.valid, batch_size=64)
    assert rows_of(splits.valid, batch_size=50, epoch=3) == valid


@pytest.mark.parametrize(
    ("by", "power"), [("uniform", None), ("popularity", 1), ("popularity", 0.5)]
)
def test_items_are_drawn_as_often_as_said(tmp_path, by, power):
    more = "" if power is None else f", power: {power}"
    config = config_of(tmp_path, f"{{per_positive: 40, by: {by}{more}}}")
    view = open_data(config.data, progress=False).train
    rows = rows_of(view, batch_size=4096)
    table = likes.rows().to_pylist()[: len(view) // 41]
    movies = sorted({row["movie"] for row in table})
    counts = np.array([sum(row["movie"] == movie for row in table) for movie in movies], float)
    weights = np.ones(len(movies)) if power is None else counts**power
    # Of each row its own item is left out, and the others stay in proportion.
    expected = np.zeros(len(movies))
    for row in table:
        left = weights * (np.array(movies) != row["movie"])
        expected += 40 * left / left.sum()
    drawn = [movie for label, _, movie in rows.values() if not label]
    found = np.array([drawn.count(movie) for movie in movies])
    assert len(drawn) == 40 * len(table)
    # Five standard deviations of a count; the draws are fixed.
    assert (np.abs(found - expected) < 5 * np.sqrt(expected)).all()


def test_known_positives_are_not_drawn(tmp_path):
    config = config_of(tmp_path, "{per_positive: 5, exclude_known: true}")
    splits = open_data(config.data, progress=False)
    table = likes.rows().to_pylist()[: len(splits.train) // 6]
    known = {(row["user"], row["movie"]) for row in table}
    for view in (splits.train, splits.valid):
        rows = rows_of(view, batch_size=500)
        negatives = [(user, movie) for label, user, movie in rows.values() if not label]
        assert negatives
        assert not known & set(negatives)
    plain = open_data(config_of(tmp_path, "{per_positive: 5}").data, progress=False)
    rows = rows_of(plain.train, batch_size=500)
    assert known & {(user, movie) for label, user, movie in rows.values() if not label}


def test_a_ranking_model_learns_and_a_stop_changes_no_bit(config, tmp_path):
    calls = itertools.count(1)
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    final = train(config, straight, progress=False).final
    assert final["valid"]["rows"] == 4 * final["valid"]["positives"]
    assert final["valid"]["auc"] > 0.65
    train(config, stopped, progress=False, should_stop=lambda: next(calls) >= 20)
    assert train(config, stopped, resume=True, progress=False).final["valid"] == final["valid"]
    ours, theirs = load_trained(stopped).model, load_trained(straight).model
    for name, value in ours.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name]), name


@pytest.mark.parametrize(
    ("negatives", "change", "words"),
    [
        ("{per_positive: 0}", ("", ""), "per_positive=0: give at least 1"),
        ("{per_positive: 1, by: chance}", ("", ""), "expected 'uniform' or 'popularity'"),
        ("{per_positive: 1, power: 0.5}", ("", ""), "uniform draws all items alike"),
        (
            "{per_positive: 1, exclude_known: true}",
            ("  user_id: user\n", ""),
            "no user_id says whose a row is",
        ),
        ("{per_positive: 1}", ("arch: dlrm_dcn, ", "arch: two_tower, "), "dense_layers"),
        (
            "{per_positive: 1}",
            ("time: {kind: timestamp}", "time: {kind: label, task: regression}"),
            "other labels than 1",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, capsys, negatives, change, words):
    def changed(text):
        assert change[0] in text
        text = text.replace(*change, 1)
        return text if "kind: timestamp" in text else text.replace("split: time", "split: random")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.data.test_negatives.load_config", lambda path: path)
        path = config_of(tmp_path, negatives, changed)
    status = main(["train", "--config", str(path), "--out", str(tmp_path / "run"), "--quiet"])
    error = capsys.readouterr().err
    assert status == 2, error
    assert words in error
    assert error.count("\n") == 1
