"""Vectors of files, the search for each user's best items, and docs/retrieval.md."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import torch

from tessera.cli import main
from tessera.serving.offline.search import best, make_index
from tessera.serving.package.loading import load_package
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import package_run
from tessera.training.config import load_config
from tessera.training.data.loader import BatchLoader
from tessera.training.data.opening import open_data
from tessera.training.trained import load_trained
from tessera.training.trainer.run import train
from tests import REPOSITORY
from tests.trainer import likes

PAGE = REPOSITORY / "docs" / "retrieval.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run, the packages of its towers, and the items' vectors as the run's tower gives them."""
    folder = tmp_path_factory.mktemp("likes")
    train(load_config(likes.write_config(folder)), folder / "run", progress=False)
    for tower in ("user", "item"):
        options = PackageOptions(name=tower, dtype="fp32")
        package_run(folder / "run", folder / f"{tower}.pt", options, tower=tower, progress=False)
    run(folder, "export-embeddings run --data likes.parquet --unique --out items.parquet")
    return folder


def run(folder, line, status=0):
    """A command whose words with a dot, and `run`, are files of the folder."""
    words = [
        str(folder / word) if "." in word or word == "run" else word for word in shlex.split(line)
    ]
    assert main(words) == status


def vectors(path, name="vector"):
    column = pq.read_table(path).column(name).combine_chunks()
    return np.stack([np.array(one, np.float32) for one in column.to_pylist()])


def test_vectors_are_those_of_the_trained_tower(folder):
    config = load_config(folder / "likes.yaml")
    model = load_trained(folder / "run").model
    view = open_data(config.data, progress=False).train
    batch = next(BatchLoader(view, batch_size=len(view), shuffle=False, seed=0).epoch(0))
    with torch.no_grad():
        dense, ids = model.preprocessor(batch.dense_features, batch.sparse_features)
        rows = model.hasher(ids)
        user, item = model.arch.vectors(model.encoder(dense, len(view)), rows, users=len(view))
    for tower, expected, name in (("user", user, "user"), ("item", item, "movie")):
        out = folder / "all.parquet"
        for source in ("run", f"{tower}.pt"):
            run(
                folder,
                f"export-embeddings {source} --tower {tower} --batch-size 97"
                " --data likes.parquet --out all.parquet",
            )
            table = pq.read_table(out)
            assert table.schema.names == [name, "vector"]
            assert table.schema.field("vector").type == pa.list_(pa.float32(), 8)
            assert table.column(name).to_pylist() == likes.rows().column(name).to_pylist()
            # Sums of a few products in another order.
            assert vectors(out)[: len(view)] == pytest.approx(expected.numpy(), abs=1e-5)


@pytest.mark.parametrize("name", ["likes.jsonl", "likes.csv", "likes*.parquet"])
def test_vectors_and_ids_are_the_same_of_every_format(folder, tmp_path, name):
    """The user's tower, whose history of films is left out of the search; CSV has no lists with weights."""
    rows = likes.rows().drop_columns(["words", "word_weights", "year", "price"])
    if name.endswith(".jsonl"):
        lines = [json.dumps({n: v for n, v in row.items() if v != []}) for row in rows.to_pylist()]
        (tmp_path / name).write_text("\n".join(lines))
    elif name.endswith(".csv"):
        texts = ["|".join(map(str, own)) for own in rows.column("history").to_pylist()]
        place = rows.schema.get_field_index("history")
        pa_csv.write_csv(rows.set_column(place, "history", pa.array(texts)), tmp_path / name)
    else:
        pq.write_table(rows.slice(0, 250), tmp_path / "likes0.parquet", row_group_size=99)
        pq.write_table(rows.slice(250), tmp_path / "likes1.parquet")
    line = "search --embeddings items.parquet --package user.pt --k 4 --exclude history"
    run(folder, f"{line} --data likes.parquet --out expected.parquet")
    run(folder, f"{line} --data {tmp_path / name} --out found.parquet --batch-size 64")
    found, expected = (pq.read_table(folder / f"{one}.parquet") for one in ("found", "expected"))
    assert found.equals(expected)


def test_an_id_is_written_once_with_its_last_row(folder):
    run(folder, "export-embeddings item.pt --data likes.parquet --out all.parquet")
    every = pq.read_table(folder / "all.parquet").column("movie").to_pylist()
    last = {movie: row for row, movie in enumerate(every)}
    found = pq.read_table(folder / "items.parquet").column("movie").to_pylist()
    assert found == sorted(last, key=last.__getitem__)
    expected = vectors(folder / "all.parquet")[[last[movie] for movie in found]]
    assert vectors(folder / "items.parquet") == pytest.approx(expected, abs=1e-5)


def test_a_tables_rows_have_the_ids_of_its_vocabulary(folder):
    run(folder, "export-embeddings run --table movies --out table.parquet")
    table = pq.read_table(folder / "table.parquet")
    model = load_trained(folder / "run").model
    weight = model.arch.sparse_arch.embedding_bag_collection.embedding_bags["movies"].weight
    assert np.array_equal(vectors(folder / "table.parquet"), weight.detach().numpy())
    ids = table.column("id").to_pylist()
    assert ids[0] is None
    view = open_data(load_config(folder / "likes.yaml").data, progress=False).train
    train_rows = likes.rows().slice(0, len(view))
    known = {*train_rows.column("movie").to_pylist()}
    known |= {movie for history in train_rows.column("history").to_pylist() for movie in history}
    assert ids[1:] == sorted(known)
    run(folder, "export-embeddings item.pt --table movies --out packaged.parquet")
    assert pq.read_table(folder / "packaged.parquet").equals(table)


@pytest.mark.parametrize(
    ("dtype", "sharding"), [("int4", "row_wise"), ("int8", "column_wise"), ("int8", None)]
)
def test_a_packages_rows_are_those_that_its_lookups_see(folder, dtype, sharding, capsys):
    """Cut by rows or by columns, the rows come out whole, as far from the trained ones as is said."""
    shards = {} if sharding is None else {"shards": 2, "sharding": sharding}
    options = PackageOptions(name="item", dtype=dtype, **shards)
    package_run(folder / "run", folder / "cut.pt", options, tower="item", progress=False)
    run(folder, "export-embeddings run --table movies --out table.parquet")
    run(folder, "export-embeddings cut.pt --table movies --out cut.parquet")
    found, trained = (pq.read_table(folder / f"{name}.parquet") for name in ("cut", "table"))
    assert found.drop_columns(["vector"]).equals(trained.drop_columns(["vector"]))
    manifest = load_package(folder / "cut.pt").manifest
    (error,) = [table.max_abs_error for table in manifest.tables if table.name == "movies"]
    far = np.abs(vectors(folder / "cut.parquet") - vectors(folder / "table.parquet")).max()
    assert far == pytest.approx(error, rel=1e-5)
    assert far > 0


@pytest.mark.parametrize("kind", ["flat", "hnsw", "ivf"])
def test_the_best_items_are_those_of_numpy(folder, capsys, kind):
    run(
        folder,
        "search --embeddings items.parquet --package user.pt --data likes.parquet --k 6"
        f" --exclude history --index {kind} --effort 40 --out top.parquet",
    )
    said = capsys.readouterr().out
    run(folder, "export-embeddings user.pt --data likes.parquet --out users.parquet")
    users, items = vectors(folder / "users.parquet"), vectors(folder / "items.parquet")
    ids = pq.read_table(folder / "items.parquet").column("movie").to_pylist()
    top = pq.read_table(folder / "top.parquet")
    assert top.schema.names == ["row", "user", "items", "scores"]
    assert top.column("row").to_pylist() == list(range(600))
    hits = 0
    rows = zip(top.to_pylist(), likes.rows().to_pylist(), users @ items.T, strict=True)
    for found, given, scores in rows:
        assert found["user"] == given["user"]
        left = [place for place, movie in enumerate(ids) if movie not in given["history"]]
        order = sorted(left, key=lambda place: -scores[place])[:6]
        assert not {*found["items"]} & {*given["history"]}
        assert found["scores"] == pytest.approx(
            [scores[ids.index(movie)] for movie in found["items"]], abs=1e-5
        )
        hits += len({*found["items"]} & {ids[place] for place in order})
        if kind == "flat":
            # Equal scores may stand in another order.
            assert found["scores"] == pytest.approx([scores[p] for p in order], abs=1e-5)
    assert hits / 3600 > 0.95
    assert ("of the 6 best items of the exact search" in said) == (kind != "flat")


def test_too_few_items_that_are_left_make_a_shorter_list():
    items = np.eye(4, dtype=np.float32)
    index = make_index(items, "flat", effort=1)
    users = np.array([[4, 3, 2, 1], [1, 2, 3, 4]], np.float32)
    scores, places = best(index, users, 3, [np.array([0, 1]), np.array([], np.int64)])
    assert places.tolist() == [[2, 3, -1], [3, 2, 1]]
    assert scores[0, :2].tolist() == [2, 1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("export-embeddings item.pt --tower user --data likes.parquet", "the user's is needed"),
        ("export-embeddings run --table t_nothing", "it has t_user, movies"),
        (
            "export-embeddings item.pt --table films",
            "--table films: the model has no such table; it",
        ),
        ("export-embeddings item.pt --id nothing --data likes.parquet", "no column 'nothing'"),
        ("export-embeddings run --table movies --unique", "--unique is for --data"),
        (
            "search --embeddings likes.parquet --package user.pt --data likes.parquet",
            "is not a file of vectors",
        ),
        (
            "search --embeddings items.parquet --package item.pt --data likes.parquet",
            "package it with tessera package-model RUN --tower user",
        ),
        (
            "search --embeddings items.parquet --package user.pt --data likes.parquet --exclude x",
            "no column 'x'",
        ),
        (
            "search --embeddings missing.parquet --package user.pt --data likes.parquet",
            "cannot be read as Parquet",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(folder, capsys, line, words):
    run(folder, f"{line} --out refused.parquet", status=2)
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not (folder / "refused.parquet").exists()


def test_without_faiss_it_is_said_what_to_install(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    line = "search --embeddings items.parquet --package user.pt --data likes.parquet"
    run(folder, f"{line} --out refused.parquet", status=2)
    assert "pip install 'tessera-rec[search]'" in capsys.readouterr().err


def test_every_block_of_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert [kind for kind, _ in blocks] == ["python", "yaml", "bash", "bash", "bash", "python"]
    for kind, text in blocks:
        if kind == "yaml":
            Path(text.splitlines()[0].removeprefix("# ")).write_text(text, encoding="utf-8")
        elif kind == "python":
            exec(compile(text, str(PAGE), "exec"), {})
        else:
            for line in text.splitlines():
                words = shlex.split(line.partition("#")[0])
                quiet = ["--quiet", "run.report=false"] if words[1] == "train" else []
                assert main(words[1:] + quiet) == 0, capsys.readouterr().err
