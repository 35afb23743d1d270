"""``arch: two_tower``: its formulas against loops, its training on one rank and several."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import roc_auc_score

from tessera.cli import main
from tessera.errors import UserError
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import package_run
from tessera.training.config import load_config
from tessera.training.data.catalogue import collect
from tessera.training.data.loader import BatchLoader
from tessera.training.data.opening import open_data
from tessera.training.models.config import RetrievalSettings
from tessera.training.models.retrieval import tower_model
from tessera.training.trained import load_trained
from tessera.training.trainer.logs import read_metrics
from tessera.training.trainer.retrieval import ItemSampler, softmax_losses
from tessera.training.trainer.retrieval_metrics import best_items, gains
from tessera.training.trainer.run import train
from tessera.training.trainer.run_folder import RunFolder
from tests.trainer import likes
from tests.trainer.test_train_ranks import assert_same_bits, on_ranks, outcome


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return load_config(likes.write_config(tmp_path_factory.mktemp("likes")))


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    train(config, out, progress=False)
    return out


def test_the_softmax_is_that_of_loops():
    chance = torch.Generator().manual_seed(0)
    users, items = (torch.randn(n, 3, generator=chance) for n in (4, 9))
    ids = torch.tensor([5, 6, 5, 7, 6, 8, 9, 5, 9])
    own = torch.tensor([2, 1, 0, 6])
    log_shares = torch.rand(9, generator=chance).log()
    found = softmax_losses(users, items, own, ids, log_shares, temperature=0.3)
    for row in range(4):
        place = int(own[row])
        logits = {}
        for other in range(9):
            if other != place and ids[other] == ids[place]:
                continue
            product = sum(float(users[row, d]) * float(items[other, d]) for d in range(3))
            logits[other] = product / 0.3 - float(log_shares[other])
        expected = math.log(sum(math.exp(value) for value in logits.values())) - logits[place]
        assert float(found[row]) == pytest.approx(expected, rel=1e-5)


def test_the_catalogue_is_that_of_a_dictionary(config):
    view = open_data(config.data, progress=False).train
    columns = view.dataset.columns
    found = collect(columns, view, progress=False)
    table = likes.rows().to_pylist()[: len(view)]
    last = {row["movie"]: row for row in table}
    assert found.ids.tolist() == sorted(last)
    for place, movie in enumerate(found.ids.tolist()):
        row = last[movie]
        assert found.counts[place] == sum(other["movie"] == movie for other in table)
        year = found.dense[place, columns.dense_names.index("year")]
        assert math.isnan(year) if row["year"] is None else year == row["year"]
        assert math.isnan(found.dense[place, columns.dense_names.index("age")])
        words = found.bags["words"].at(np.array([place]))
        assert words.values.tolist() == row["words"]
        assert words.weights.tolist() == pytest.approx(row["word_weights"])
    assert set(found.bags) == {"movie", "words"}
    starts, counts = found.items_of(np.array([1003, 77]))
    mine = found.known[1][starts[0] : starts[0] + counts[0]]
    assert sorted(found.ids[mine].tolist()) == sorted(
        row["movie"] for row in table if row["user"] == 1003
    )
    assert counts[1] == 0
    assert found.places(np.array([found.ids[3], 4, 10**12])).tolist() == [3, -1, -1]


def test_shares_are_those_of_rows_and_draws_mixed(config):
    view = open_data(config.data, progress=False).train
    columns = view.dataset.columns
    catalogue = collect(columns, view, progress=False)
    batch = next(BatchLoader(view, batch_size=32, shuffle=False, seed=0).epoch(0))

    def sampled(part, **settings):
        chosen = {"sampled_negatives": 10, "popularity_correction": True} | settings
        return ItemSampler(
            catalogue=catalogue,
            item_id="movie",
            settings=RetrievalSettings(**chosen),
            seed=3,
            part=part,
        ).sampled(batch, 1, 2, 32)

    whole = sampled((0, 1))
    assert whole.sparse_features.stride() == len(whole.item_ids) == 42
    assert whole.size == 32
    for place, share in zip(whole.item_ids.tolist(), whole.item_log_shares.tolist(), strict=True):
        often = catalogue.counts[place] / len(view)
        expected = math.log(32 / 42 * often + 10 / 42 / len(catalogue))
        assert share == pytest.approx(expected, rel=1e-5)
    # Of the rows behind, the items' features are those of the catalogue and the others empty.
    assert torch.isnan(whole.dense_features[32:, columns.dense_names.index("age")]).all()
    assert whole.sparse_features["user"].lengths()[32:].tolist() == [0] * 10
    movies = whole.sparse_features["movie"].values()[32:]
    assert movies.tolist() == catalogue.ids[whole.item_ids[32:].numpy()].tolist()
    halves = [sampled((rank, 2)).item_ids[32:] for rank in (0, 1)]
    assert torch.equal(torch.cat(halves), whole.item_ids[32:])
    plain = sampled((0, 1), popularity_correction=False, sampled_negatives=0)
    assert not plain.item_log_shares.any()
    assert len(plain.item_ids) == 32


def test_best_items_and_gains_are_those_of_loops():
    chance = np.random.default_rng(1)
    users = chance.integers(-2, 3, (6, 3)).astype(np.float32)
    items = chance.integers(-2, 3, (11, 3)).astype(np.float32)
    excluded = [chance.choice(11, n, replace=False) for n in (0, 1, 3, 9, 11, 2)]
    found = best_items(users, items, 4, excluded)
    for row in range(6):
        left = [i for i in range(11) if i not in excluded[row]]
        order = sorted(left, key=lambda i: (-float(users[row] @ items[i]), i))[:4]
        assert found[row].tolist() == order + [-1] * (4 - len(order))
    relevant = [chance.choice(11, n, replace=False) for n in (1, 2, 5, 1, 1, 3)]
    missing = np.array([0, 1, 0, 2, 0, 0])
    both = gains(found, relevant, missing, 4)
    for row in range(6):
        hits = [rank for rank, item in enumerate(found[row].tolist()) if item in relevant[row]]
        total = len(relevant[row]) + missing[row]
        best = sum(1 / math.log2(rank + 2) for rank in range(min(total, 4)))
        assert both[row, 0] == pytest.approx(len(hits) / total)
        assert both[row, 1] == pytest.approx(sum(1 / math.log2(r + 2) for r in hits) / best)


def vector_of(arch, side, columns, *, dense, row_ids, row):
    """One row's vector by hand: what the tower is given, its layers, its length."""
    collection = arch.sparse_arch.embedding_bag_collection
    given = [float(dense[row, column]) for column in columns]
    for name in arch.features[side]:
        own = row_ids[name]
        start, stop = (int(own.offsets()[row + i]) for i in (0, 1))
        table = next(t.name for t in collection.embedding_bag_configs() if name in t.feature_names)
        rows = collection.embedding_bags[table].weight.double()
        total = torch.zeros(rows.size(1), dtype=torch.float64)
        for place in range(start, stop):
            weight = float(own.weights()[place]) if row_ids.weights_or_none() is not None else 1.0
            total += weight * rows[int(own.values()[place])]
        given += total.tolist()
    value = torch.tensor(given, dtype=torch.float64)
    linear = [part for part in getattr(arch, side).modules() if isinstance(part, torch.nn.Linear)]
    for number, layer in enumerate(linear):
        value = layer.weight.double() @ value + layer.bias.double()
        value = value.clamp(min=0) if number < len(linear) - 1 else value
    return value / value.norm()


def test_the_towers_are_those_of_a_row_by_hand(config, run):
    model = load_trained(run).model
    view = open_data(config.data, progress=False).valid
    batch = next(BatchLoader(view, batch_size=8, shuffle=False, seed=0).epoch(0))
    with torch.no_grad():
        scores = model(batch.dense_features, batch.sparse_features)
        dense, ids = model.preprocessor(batch.dense_features, batch.sparse_features)
        dense, rows = model.encoder(dense, 8), model.hasher(ids)
        arch = model.arch
        assert arch.features == {
            "user": ["user", "history", "age_group", "hour"],
            "item": ["movie", "words"],
        }
        # Values of age, year and price, then which of them are missing.
        columns = {"user": [0, 3], "item": [1, 2, 4, 5]}
        by_hand = {
            side: torch.stack(
                [
                    vector_of(arch, side, columns[side], dense=dense, row_ids=rows, row=row)
                    for row in range(8)
                ]
            )
            for side in columns
        }
        product = (by_hand["user"] * by_hand["item"]).sum(dim=1) / 0.2
        torch.testing.assert_close(scores.double(), product, rtol=0, atol=2e-5)
        # A tower alone, given its own features alone, has the same bits.
        user, item = arch.vectors(dense, rows, users=8)
        names = view.dataset.columns.dense_names
        for side, expected in (("user", user), ("item", item)):
            alone = tower_model(model, side)
            own = [f.name for f in alone.data_features()]
            given = batch.sparse_features.permute(
                [batch.sparse_features.keys().index(name) for name in own]
            )
            chosen = [names.index(name) for name in alone.dense_names]
            assert torch.equal(alone(batch.dense_features[:, chosen], given), expected)


def test_it_learns_what_is_liked(config, run):
    rows = [row for row in read_metrics(RunFolder(run).metrics) if row["split"] == "valid"]
    assert rows[-1]["auc"] == "nan"
    final = RunFolder(run).read_final()
    # By chance, 5 of 40 items hold an eighth of what is relevant.
    assert final["valid"]["recall@5"] > 0.25
    assert final["valid"]["queries"] > 5
    assert load_trained(run).metrics["valid"] == final["valid"]


def test_a_stop_changes_no_bit_on_one_rank_and_on_two(config, run, tmp_path):
    calls = itertools.count(1)
    alone = tmp_path / "alone"
    train(config, alone, progress=False, should_stop=lambda: next(calls) >= 7)
    assert train(config, alone, resume=True, progress=False).status == "finished"
    ours, theirs = load_trained(alone).model.state_dict(), load_trained(run).model.state_dict()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert on_ranks(2, config, straight)[0] == "finished"
    assert on_ranks(2, config, stopped, stop_after=9)[0] == "interrupted"
    assert on_ranks(2, config, stopped, resume=True)[0] == "finished"
    assert_same_bits(outcome(stopped), outcome(straight))


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise"])
def test_two_ranks_go_on_as_one_would_have(config, tmp_path, sharding):

    alone, together = tmp_path / "alone", tmp_path / "together"
    calls = itertools.count(1)
    train(config, alone, progress=False, should_stop=lambda: next(calls) >= 3)
    shutil.copytree(alone, together)
    train(config, alone, resume=True, progress=False)
    spread = dataclasses.replace(config, train=dataclasses.replace(config.train, sharding=sharding))
    assert on_ranks(2, spread, together, resume=True)[0] == "finished"
    for ours, theirs in zip(
        *(read_metrics(RunFolder(out).metrics) for out in (together, alone)), strict=True
    ):
        assert ours["step"] == theirs["step"]
        if ours["split"] == "train":
            # The same sums in another order, over 30 steps.
            assert float(ours["loss"]) == pytest.approx(float(theirs["loss"]), rel=1e-4)
    ours, theirs = load_trained(together), load_trained(alone)
    for name, value in ours.model.state_dict().items():
        torch.testing.assert_close(value, theirs.model.state_dict()[name], rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("  item_id: movie\n", "", "none has the kind label"),
        ("item_id: movie", "item_id: words", "item_id='words': no column of kind categorical"),
        ("side: user, transform: [standardize]", "transform: [standardize]", "age has no side"),
        ("[user, history]", "[user, movie]", "age_group is made of columns of the user and of"),
        ("metric: recall", "metric: auc", "set train.metric=recall or ndcg"),
        ("metric: recall", "metric: log_loss", "gives scores and no probabilities"),
        ("arch: two_tower", "arch: dlrm", "user_layers"),
        ("temperature: 0.2", "temperature: 0", "temperature"),
        ("item_id: movie", "item_id: user", "the column is not of side item"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, capsys, before, after, words):
    assert before in likes.CONFIG
    path = likes.write_config(tmp_path, change=lambda text: text.replace(before, after, 1))
    status = main(["train", "--config", str(path), "--out", str(tmp_path / "run"), "--quiet"])
    error = capsys.readouterr().err
    assert status == 2, error
    assert words in error
    assert error.count("\n") == 1


def test_an_item_without_an_id_is_refused(tmp_path):

    path = likes.write_config(tmp_path)
    table = likes.rows().to_pylist()
    table[5]["movie"] = None
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "likes.parquet")
    with pytest.raises(UserError, match="'movie' has no id in 1 of"):
        train(load_config(path), tmp_path / "run", progress=False)


def test_products_are_evaluated_as_scores(tmp_path, capsys):
    # Labels of both classes; a product of two vectors is not a probability, whatever its size.
    def labelled(text):
        return text.replace("    time: {kind", "    liked: {kind: label}\n    time: {kind")

    path = likes.write_config(tmp_path, change=labelled)
    rows = pq.read_table(tmp_path / "likes.parquet")
    liked = np.arange(len(rows)) % 3 > 0
    rows = rows.append_column("liked", pa.array(liked.astype(np.int8)))
    pq.write_table(rows, tmp_path / "likes.parquet")
    run = tmp_path / "run"
    train(load_config(path), run, progress=False)
    capsys.readouterr()
    words = ["evaluate", str(run), "--data", str(tmp_path / "likes.parquet")]
    words += ["--importance", "1", "--out", str(tmp_path / "found"), "--json", "--quiet"]
    status = main(words)
    found = json.loads(capsys.readouterr().out)
    assert status == 0
    (label,) = found["labels"].values()
    (metrics,) = label["models"].values()
    assert "auc" in metrics
    assert not {"log_loss", "normalised_entropy", "calibration", "accuracy"} & set(metrics)
    options = PackageOptions(name="pair", dtype="fp32")
    package_run(run, tmp_path / "pair.pt", options, skip_evaluation=True, progress=False)
    words = ["evaluate", str(tmp_path / "pair.pt"), "--data", str(tmp_path / "likes.parquet")]
    assert main([*words, "--label", "liked", "--json", "--quiet"]) == 0
    packaged = json.loads(capsys.readouterr().out)["labels"]["liked"]["models"]["pair.pt"]
    assert packaged.keys() == metrics.keys()
    assert packaged["auc"]["value"] == pytest.approx(metrics["auc"]["value"], abs=1e-5)
    page = (tmp_path / "found" / "report.html").read_text()
    assert "log loss" not in page
    assert "Calibration" not in page
    trained = load_trained(run)
    view = open_data(load_config(path).data, progress=False)
    products, labels = [], []
    for part in (view.train, view.valid, view.test):
        for batch in BatchLoader(part, batch_size=64, shuffle=False, seed=0).epoch(0):
            with torch.no_grad():
                products.append(trained.model(batch.dense_features, batch.sparse_features).numpy())
            labels.append(batch.labels.numpy())
    expected = roc_auc_score(np.concatenate(labels), np.concatenate(products))
    assert metrics["auc"]["value"] == pytest.approx(expected, abs=1e-6)
