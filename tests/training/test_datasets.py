"""The streams under TorchRec's paths: random batches, Criteo's rows and files, MovieLens."""

import math
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import IterDataPipe, functional_datapipe

from tessera.errors import UserError
from tessera.training import Pipelineable
from tessera.training.data.batch import Batch
from tessera.training.datasets import criteo, movielens, utils
from tessera.training.datasets.random import RandomRecDataset

CATEGORIES = criteo.CAT_FEATURE_COUNT


def same(left, right):
    return (
        torch.equal(left.dense_features, right.dense_features)
        and torch.equal(left.sparse_features.values(), right.sparse_features.values())
        and torch.equal(left.sparse_features.lengths(), right.sparse_features.lengths())
        and torch.equal(left.labels, right.labels)
    )


def test_a_batch_is_the_librarys_and_goes_through_pipelines():
    assert utils.Batch is Batch
    assert issubclass(Batch, Pipelineable)
    batch = next(iter(RandomRecDataset(["a"], 3, num_dense=2)))
    assert same(batch.to(torch.device("cpu")), batch)


def test_random_batches_have_the_sizes_that_were_asked_for():
    dataset = RandomRecDataset(
        ["a", "b"],
        50,
        hash_sizes=[3, 9],
        ids_per_features=[1, 4],
        min_ids_per_features=[1, 2],
        num_dense=5,
        manual_seed=1,
        num_batches=7,
        num_generated_batches=2,
    )
    batches = list(dataset)
    assert len(batches) == len(dataset) == 7
    assert batches[2] is batches[0]
    assert batches[1] is not batches[0]
    batch = batches[0]
    assert batch.dense_features.shape == (50, 5)
    assert batch.labels.unique().tolist() == [0, 1]
    a, b = batch.sparse_features["a"], batch.sparse_features["b"]
    assert a.lengths().unique().tolist() == [1]
    assert b.lengths().unique().tolist() == [2, 3, 4]
    assert (int(a.values().max()), int(b.values().max())) == (2, 8)


def test_random_batches_follow_from_their_seed():
    def first(**more):
        return next(iter(RandomRecDataset(["a"], 4, num_dense=2, manual_seed=3, **more)))

    assert same(first(), first(num_generated_batches=-1))
    fresh = RandomRecDataset(["a"], 4, num_dense=2, manual_seed=3, num_generated_batches=-1)
    assert len(fresh) == sys.maxsize
    one, two = next(iter(fresh)), next(iter(fresh))
    assert not same(one, two)
    with pytest.raises(ValueError, match="hash_sizes has 1 entries for 2 keys"):
        RandomRecDataset(["a", "b"], 4, hash_sizes=[5])


def write_criteo(path, rows=6):
    lines = []
    for row in range(rows):
        integers = ["" if (row + place) % 4 == 0 else str(row * place - 2) for place in range(13)]
        categories = [
            "" if (row + place) % 5 == 0 else f"{row * 100 + place:x}" for place in range(26)
        ]
        lines.append("\t".join([str(row % 2), *integers, *categories]))
    path.write_text("\n".join(lines) + "\n")
    return [line.split("\t") for line in lines]


def test_rows_of_criteo_are_dicts_texts_or_what_a_program_makes_of_them(tmp_path):
    path = tmp_path / "day_0"
    texts = write_criteo(path)
    rows = list(criteo.criteo_kaggle(str(path)))
    assert list(rows[1]) == criteo.DEFAULT_COLUMN_NAMES
    assert [row["label"] for row in rows] == [0, 1, 0, 1, 0, 1]
    assert (rows[1]["int_1"], rows[1]["int_3"], rows[1]["cat_3"]) == (-1, 0, "67")
    both = criteo.criteo_terabyte([str(path), str(path)], row_mapper=None)
    assert list(both) == texts + texts
    assert list(both.limit(2)) == texts[:2]
    assert [len(part) for part in both.batch(5)] == [5, 5, 2]
    without_label = criteo.criteo_kaggle(str(path)).row_mapper(texts[0][1:])
    assert list(without_label) == criteo.DEFAULT_COLUMN_NAMES[1:]


def test_another_library_may_register_limit_afterwards(monkeypatch):
    """As TorchRec does where a process imports both libraries, in either order."""
    monkeypatch.setattr(IterDataPipe, "functions", dict(IterDataPipe.functions))
    functional_datapipe("limit")(type("Other", (IterDataPipe,), {}))
    assert list(utils.Limit(range(9), 3).limit(2)) == [0, 1]


def test_workers_read_different_files(tmp_path):
    paths = []
    for day in range(3):
        paths.append(str(tmp_path / f"day_{day}"))
        (tmp_path / f"day_{day}").write_text(f"{day}\n")
    pipe = criteo.criteo_terabyte(paths, row_mapper=int_of_first)
    loader = torch.utils.data.DataLoader(pipe, batch_size=None, num_workers=2)
    assert sorted(loader) == [0, 1, 2]
    joined = utils.ParallelReadConcat(*[utils.Limit([number], 1) for number in range(3)])
    assert list(joined) == [0, 1, 2]
    loader = torch.utils.data.DataLoader(joined, batch_size=None, num_workers=2)
    assert sorted(loader) == [0, 1, 2]


def int_of_first(row):
    return int(row[0])


@pytest.mark.parametrize("split", [utils.rand_split_train_val, utils.idx_split_train_val])
def test_splits_share_no_sample_and_are_the_same_in_each_pass(split):
    numbers = utils.Limit(range(1000), 300)
    training, validation = split(numbers, 0.7)
    assert list(training) == list(training)
    assert sorted([*training, *validation]) == list(range(300))
    assert 0.6 < len(list(training)) / 300 < 0.8
    with pytest.raises(ValueError, match=r"train_perc is 1\.0"):
        split(numbers, 1.0)


def test_files_are_opened_to_read():
    with pytest.raises(ValueError, match="mode is 'w'"):
        utils.LoadFiles([], mode="w")
    assert len(utils.LoadFiles([], length=3)) == 3
    with pytest.raises(TypeError, match="give length="):
        len(utils.LoadFiles([]))
    assert utils.safe_cast("x", int, 7) == 7


def test_criteos_text_becomes_numpy_files(tmp_path):
    path = tmp_path / "day_0"
    texts = write_criteo(path)
    files = [str(tmp_path / f"{kind}.npy") for kind in ("dense", "sparse", "labels")]
    criteo.BinaryCriteoUtils.tsv_to_npys(str(path), *files)
    dense, sparse, labels = (np.load(file) for file in files)
    integers = [[int(text or 0) for text in row[1:14]] for row in texts]
    lowest = min(map(min, integers))
    expected = [[math.log(value - lowest + 2) for value in row] for row in integers]
    np.testing.assert_allclose(dense, expected, rtol=1e-6)
    assert sparse.tolist() == [[int(text or "0", 16) for text in row[14:]] for row in texts]
    assert labels.tolist() == [[int(row[0])] for row in texts]
    assert [array.dtype.name for array in (dense, sparse, labels)] == ["float32", "int64", "int32"]
    assert criteo.BinaryCriteoUtils.get_shape_from_npy(files[1]) == (6, 26)
    part = criteo.BinaryCriteoUtils.load_npy_range(files[0], 2, 3)
    assert np.array_equal(part, dense[2:5])
    for start, count in ((6, 1), (4, 3)):
        with pytest.raises(ValueError, match=r"is .*; .* has"):
            criteo.BinaryCriteoUtils.load_npy_range(files[0], start, count)
    path.write_text("1\t2\n")
    with pytest.raises(UserError, match="1 malformed row"):
        criteo.BinaryCriteoUtils.tsv_to_npys(str(path), *files)


def test_ranks_share_the_rows_of_files_evenly():
    ranges = criteo.BinaryCriteoUtils.get_file_row_ranges_and_remainder
    assert ranges([5, 3, 8], 0, 3) == ({0: (0, 4), 1: (0, 0)}, 1)
    assert ranges([5, 3, 8], 1, 3) == ({1: (1, 2), 2: (0, 2)}, 1)
    assert ranges([5, 3, 8], 2, 3) == ({2: (3, 7)}, 1)
    assert ranges([5, 3], 1, 2, start_row=2, last_row=5) == ({0: (4, 4), 1: (0, 0)}, 0)
    assert ranges([1], 1, 2) == ({}, 1)


@pytest.fixture(scope="module")
def npy_files(tmp_path_factory):
    """Files of 11, 5 and 9 rows; all of row ``i`` is made of ``i``."""
    folder, first = tmp_path_factory.mktemp("npy"), 0
    paths = {"dense": [], "sparse": [], "labels": []}
    for day, rows in enumerate((11, 5, 9)):
        numbers = np.arange(first, first + rows).reshape(-1, 1)
        for kind, array in (
            ("dense", np.repeat(numbers, 13, axis=1).astype(np.float32)),
            ("sparse", numbers * 100 + np.arange(CATEGORIES)),
            ("labels", numbers.astype(np.int32)),
        ):
            paths[kind].append(str(folder / f"{kind}{day}.npy"))
            np.save(paths[kind][-1], array)
        first += rows
    return paths["dense"], paths["sparse"], paths["labels"]


def rows_of(batch):
    """The rows that a batch is made of, after a look at all of its parts."""
    rows = batch.labels.tolist()
    assert batch.dense_features[:, 12].tolist() == rows
    kjt = batch.sparse_features
    assert kjt.keys() == criteo.DEFAULT_CAT_NAMES
    assert kjt["cat_7"].values().tolist() == [row * 100 + 7 for row in rows]
    assert kjt["cat_25"].lengths().tolist() == [1] * len(rows)
    return rows


@pytest.mark.parametrize(
    ("world_size", "batch_size", "per_rank"),
    [
        (1, 10, [[10, 10, 5]]),
        (2, 5, [[5, 5, 3], [5, 5, 2]]),
        (2, 12, [[13], [12]]),  # one row is left: fewer than ranks
        (3, 30, [[9], [8], [8]]),
    ],
)
def test_ranks_take_turns_with_batches(npy_files, world_size, batch_size, per_rank):
    pipes = [
        criteo.InMemoryBinaryCriteoIterDataPipe("train", *npy_files, batch_size, rank, world_size)
        for rank in range(world_size)
    ]
    taken = [[rows_of(batch) for batch in pipe] for pipe in pipes]
    assert [[len(rows) for rows in own] for own in taken] == per_rank
    assert [len(pipe) for pipe in pipes] == [len(own) for own in per_rank]
    turns = [row for turn in zip(*taken, strict=True) for rows in turn for row in rows]
    assert turns == list(range(25))
    short = criteo.InMemoryBinaryCriteoIterDataPipe(
        "train", *npy_files, batch_size, 0, world_size, drop_last=True, mmap_mode=True
    )
    assert all(len(rows_of(batch)) == batch_size for batch in short)


def test_halves_orders_and_hashes(npy_files):
    def rows(stage, rank=0, world_size=1, **more):
        pipe = criteo.InMemoryBinaryCriteoIterDataPipe(
            stage, *npy_files, 4, rank, world_size, **more
        )
        return [row for batch in pipe for row in rows_of(batch)]

    first_half, second_half = rows("val"), rows("test")
    assert first_half == [0, 1, 2, 3, 4, 5, *range(11, 25)]
    assert second_half == list(range(6, 25))
    shuffled = [rows("train", rank, 2, shuffle_training_set=True) for rank in range(2)]
    assert sorted(shuffled[0] + shuffled[1]) == list(range(25))
    assert shuffled[0] != sorted(shuffled[0])
    inside = rows("train", shuffle_batches=True)
    assert inside != list(range(25))
    assert sorted(inside[:4]) == [0, 1, 2, 3]
    hashed = criteo.InMemoryBinaryCriteoIterDataPipe("train", *npy_files, 4, 0, 1, hashes=[7] * 26)
    ids = next(iter(hashed)).sparse_features["cat_1"].values()
    assert ids.tolist() == [(row * 100 + 1) % 7 for row in range(4)]
    with pytest.raises(UserError, match="stage is 'tset'"):
        rows("tset")


def test_ratings_with_and_without_their_movies(tmp_path):
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,7,3.5,12\n2,8,x,13\n")
    (tmp_path / "movies.csv").write_text('movieId,title,genres\n7,"A, B (1999)",X|Y\n')
    ratings = list(movielens.movielens_20m(str(tmp_path)))
    assert ratings[0] == {"userId": 1, "movieId": 7, "rating": 3.5, "timestamp": 12}
    assert ratings[1]["rating"] == 0.0
    assert list(movielens.movielens_25m(str(tmp_path), row_mapper=None))[1] == ["2", "8", "x", "13"]
    joined = iter(movielens.movielens_25m(str(tmp_path), include_movies_data=True))
    assert next(joined)["title"] == "A, B (1999)"
    with pytest.raises(UserError, match=r"movies.csv: movie 8 of ratings.csv is not in it"):
        next(joined)
