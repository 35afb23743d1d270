from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import UserError
from tessera.training.data.batch import Batch
from tessera.training.data.config import DataConfig
from tessera.training.data.dataset import DatasetView, DataSplits
from tessera.training.data.malformed import MalformedReport, MalformedRowError, shorten
from tessera.training.data.movielens import (
    CHOSEN_NAMES,
    COLUMNS,
    EVERY_RATING,
    SPARSE_NAMES,
    Known,
    MovieLensDataset,
    build_arrays,
    write_movielens,
    zip_prefix,
    zip_region,
)
from tessera.training.data.movielens_read import Item, MovieLens, User, read_movielens
from tessera.training.data.opening import open_data
from tessera.training.transforms.preprocessor import Preprocessor


def bags(batch: Batch, row: int) -> dict[str, list[int]]:
    """One row's ids by feature."""
    names = batch.sparse_features.keys()
    lengths = batch.sparse_features.lengths().reshape(len(names), -1)
    ends = np.cumsum(lengths.numpy().ravel()).reshape(lengths.shape)
    values = batch.sparse_features.values().tolist()
    return {
        name: values[ends[f, row] - int(lengths[f, row]) : ends[f, row]]
        for f, name in enumerate(names)
    }


def write_100k(folder: Path, ratings: str) -> None:
    (folder / "u.data").write_text(ratings)
    (folder / "u.user").write_text("1|24|M|technician|85711\n2|7|F|other|94043\n")
    flags = {1: "0001110000000000000", 2: "0" * 19, 3: "1" + "0" * 18}
    (folder / "u.item").write_bytes(
        "".join(
            f"{item}|{title}|01-Jan-1995||http://x|{'|'.join(flags[item])}\n"
            for item, title in ((1, "Toy Story (1995)"), (2, "Le Caf\u00e9 (1996)"), (3, "unknown"))
        ).encode("latin-1")
    )


def open_folder(source: Path, prepared: Path, *, max_history: int = 50) -> MovieLensDataset:
    prepared.mkdir()
    write_movielens(source, 4, EVERY_RATING, prepared, lambda _bytes, _malformed: None)
    return MovieLensDataset(prepared, max_history=max_history)


def test_the_100k_layout(tmp_path: Path) -> None:
    write_100k(tmp_path, "1\t1\t5\t100\n1\t2\t4\t200\n2\t1\t3\t150\n1\t3\t2\t300\r\n")
    dataset = open_folder(tmp_path, tmp_path / "prepared")
    batch = dataset.take(0, 4)  # in the order of time: 100, 150, 200, 300
    assert batch.labels.tolist() == [1, 0, 1, 0]
    assert bags(batch, 0) == {
        "user": [1],
        "item": [1],
        "gender": [1],
        "age": [1],
        "occupation": [19],
        "year": [1995],
        "genres": [3, 4, 5],
        "history": [],
    }
    assert bags(batch, 1) == {
        "user": [2],
        "item": [1],
        "gender": [0],
        "age": [0],
        "occupation": [13],
        "year": [1995],
        "genres": [3, 4, 5],
        "history": [],
    }
    assert bags(batch, 2)["history"] == [1]
    assert bags(batch, 2)["genres"] == []
    assert bags(batch, 2)["year"] == [1996]
    assert bags(batch, 3)["history"] == [1, 2]
    assert bags(batch, 3)["year"] == []
    # Row 3, of user 1, after two positive ratings, of an item that nobody rated before.
    assert batch.dense_features[3].tolist() == [2, 2, 0, 0]
    dense, _ = Preprocessor(dataset.columns.transforms())(
        batch.dense_features, batch.sparse_features
    )
    np.testing.assert_allclose(dense[3], [math.log(3), math.log(4.5 / 2.5), 0.0, 0.0], rtol=1e-6)


def test_the_1m_layout(tmp_path: Path) -> None:
    (tmp_path / "ratings.dat").write_text("1::1193::5::978300760\n1::661::3::978302109\n")
    (tmp_path / "users.dat").write_text("1::F::25::10::48067\n")
    (tmp_path / "movies.dat").write_bytes(
        "1193::One Flew: Over (1975)::Drama\n661::Am\u00e9lie (2001)::Animation|Comedy\n".encode(
            "latin-1"
        )
    )
    batch = open_folder(tmp_path, tmp_path / "prepared").take(0, 2)
    assert batch.labels.tolist() == [1, 0]
    assert bags(batch, 1) == {
        "user": [1],
        "item": [661],
        "gender": [0],
        "age": [2],
        "occupation": [10],
        "year": [2001],
        "genres": [3, 5],
        "history": [1193],
    }


def test_histories_keep_the_latest_items(tmp_path: Path) -> None:
    write_100k(tmp_path, "1\t1\t5\t1\n1\t2\t5\t2\n1\t3\t5\t3\n1\t1\t1\t4\n")
    dataset = open_folder(tmp_path, tmp_path / "prepared", max_history=2)
    assert [bags(dataset.take(row, row + 1), 0)["history"] for row in range(4)] == [
        [],
        [1],
        [1, 2],
        [2, 3],
    ]


def slow_features(
    tables: MovieLens, max_history: int, known: set[int] | None = None
) -> list[dict[str, object]]:
    """Histories and counts of every rating, each looked up by itself among all ratings.

    ``known`` are the places, in the order of time, of the ratings that count; None: all.
    """
    ratings = [tuple(map(int, rating)) for rating in tables.ratings]
    ratings.sort(key=lambda rating: rating[3])  # stable: equal times stay in the file's order
    features = []
    for user, item, rating, time in ratings:
        past = [
            other
            for place, other in enumerate(ratings)
            if other[3] < time and (known is None or place in known)
        ]
        mine = [other for other in past if other[0] == user]
        its = [other for other in past if other[1] == item]
        positive = [other[1] for other in mine if other[2] >= 4]
        liked = sum(other[2] >= 4 for other in its)
        features.append(
            {
                "user": user,
                "item": item,
                "labels": [float(rating >= 4), float(rating == 5), float(rating)],
                "history": positive[-max_history:],
                "dislikes": [other[1] for other in mine if other[2] < 4][-max_history:],
                "dense": [
                    math.log1p(len(mine)),
                    math.log((len(positive) + 2.5) / (len(mine) - len(positive) + 2.5)),
                    math.log1p(len(its)),
                    math.log((liked + 2.5) / (len(its) - liked + 2.5)),
                ],
            }
        )
    return features


def assert_features(dataset: MovieLensDataset, expected: list[dict[str, object]]) -> None:
    assert len(dataset) == len(expected)
    batch = dataset.batch(np.arange(len(expected)))
    preprocessor = Preprocessor(dataset.columns.transforms())
    dense, _ = preprocessor(batch.dense_features, batch.sparse_features)
    for row, features in enumerate(expected):
        found = bags(batch, row)
        assert found["user"] == [features["user"]]
        assert found["item"] == [features["item"]]
        assert found["history"] == features["history"]
        assert found["dislikes"] == features["dislikes"]
        assert batch.labels[row].tolist() == features["labels"]
        np.testing.assert_allclose(dense[row], features["dense"], rtol=1e-6, atol=1e-6)


def open_whole(tables: MovieLens, folder: Path, max_history: int, known: Known) -> MovieLensDataset:
    """All features and labels of the ratings."""
    folder.mkdir(exist_ok=True)
    for name, array in build_arrays(tables, positive_rating=4, known=known).items():
        np.save(folder / f"{name}.npy", array)
    return MovieLensDataset(
        folder,
        max_history=max_history,
        features=(*SPARSE_NAMES, *CHOSEN_NAMES),
        labels=("positive", "top", "rating"),
    )


ratings_strategy = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(0, 6)),
    max_size=30,
)


@given(
    ratings=ratings_strategy,
    max_history=st.integers(1, 4),
    known=st.sampled_from(
        [
            EVERY_RATING,
            Known("time", (0.2, 0.3)),
            Known("random", (0.2, 0.3), 1),
            Known("random", (0.2, 0.3), 2),
        ]
    ),
)
def test_nothing_comes_from_the_future(
    tmp_path_factory: pytest.TempPathFactory,
    ratings: list[tuple[int, int, int, int]],
    max_history: int,
    known: Known,
) -> None:
    # Seven moments for thirty ratings: ties everywhere.
    tables = MovieLens(
        np.array(ratings, np.int64).reshape(-1, 4),
        {user: User(0, 0, 0) for user in (1, 2, 3)},
        {item: Item(None, ()) for item in (1, 2, 3)},
        MalformedReport(),
    )
    dataset = open_whole(tables, tmp_path_factory.mktemp("prepared"), max_history, known)
    counted = set(np.flatnonzero(known.mask(len(ratings))).tolist())
    assert_features(dataset, slow_features(tables, max_history, counted))


def test_nothing_comes_from_the_future_in_the_real_data(shared_data: Path, tmp_path: Path) -> None:
    tables = read_movielens(shared_data / "ml-100k")
    assert tables.malformed.total == 0
    assert tables.ratings.shape == (100_000, 4)
    users = np.unique(tables.ratings[:, 0])[:12]  # all the ratings of a few users
    part = MovieLens(
        tables.ratings[np.isin(tables.ratings[:, 0], users)],
        tables.users,
        tables.items,
        tables.malformed,
    )
    assert_features(open_whole(part, tmp_path, 20, EVERY_RATING), slow_features(part, 20))


def known_until(source: Path, cache: Path, until: str, split: str) -> DataSplits:
    return open_data(
        DataConfig(
            format="movielens",
            path=str(source),
            cache_dir=str(cache),
            split=split,
            features=("user", "history", "dislikes"),
            features_until=until,
            valid_fraction=0.25,
            test_fraction=0.25,
        ),
        progress=False,
    )


def test_held_out_rows_know_what_the_config_says(tmp_path: Path) -> None:
    # In the order of time the items 1, 2, 3, 1, 2, 3, 1, 2 of one user, each second one liked.
    lines = [f"1\t{1 + row % 3}\t{5 - row % 2 * 3}\t{row}\n" for row in range(8)]
    write_100k(tmp_path, "".join(lines))
    for until, liked, disliked in (
        ("row", [1, 3, 2, 1], [2, 1, 3]),
        ("train", [1, 3], [2, 1]),
    ):
        splits = known_until(tmp_path, tmp_path / "cache", until, "time")
        assert [len(splits.train), len(splits.valid), len(splits.test)] == [4, 2, 2]
        assert isinstance(splits.test, DatasetView)
        last = splits.test.dataset.take(7, 8)
        assert bags(last, 0) == {"user": [1], "history": liked, "dislikes": disliked}
        counts = [len(liked) + len(disliked), len(liked)]
        assert last.dense_features[0, :2].tolist() == counts
        # What is trained on is the same either way.
        third = splits.train.dataset.take(3, 4)
        assert bags(third, 0) == {"user": [1], "history": [1, 3], "dislikes": [2]}


def test_a_random_split_hides_the_rows_that_it_holds_out(tmp_path: Path) -> None:
    lines = [f"1\t{1 + row % 3}\t5\t{row}\n" for row in range(8)]
    write_100k(tmp_path, "".join(lines))
    splits = known_until(tmp_path, tmp_path / "cache", "train", "random")
    assert isinstance(splits.train, DatasetView)
    trained = splits.train.slice(0, 4).tolist()
    assert trained != [0, 1, 2, 3]
    batch = splits.train.dataset.take(0, 8)
    for row in range(8):
        past = [1 + other % 3 for other in trained if other < row]
        assert bags(batch, row)["history"] == past


@pytest.mark.parametrize(
    ("zip_code", "region", "prefix"),
    [
        ("85711", [8], [857]),
        ("02146-1234", [0], [21]),
        ("V3N4P", [31], []),
        ("t8H1N", [29], []),
        ("9", [9], []),
        ("", [], []),
        ("-1234", [], []),
        ("\xb2345", [], []),  # a digit to Python, not to ASCII
    ],
)
def test_zip_codes(zip_code: str, region: list[int], prefix: list[int]) -> None:
    user = User(0, 0, 0, zip_code)
    assert list(zip_region(user)) == region
    assert list(zip_prefix(user)) == prefix


def test_zip_codes_are_read_from_both_layouts(tmp_path: Path) -> None:
    write_100k(tmp_path, "")
    assert read_movielens(tmp_path).users[1].zip_code == "85711"
    (tmp_path / "u.data").unlink()
    (tmp_path / "ratings.dat").write_text("")
    (tmp_path / "users.dat").write_text("1::F::25::10::48067\n")
    (tmp_path / "movies.dat").write_text("")
    assert read_movielens(tmp_path).users[1].zip_code == "48067"


def test_the_columns_of_a_config_that_names_none_stay_those_of_older_checkpoints() -> None:
    assert COLUMNS.sparse_names == SPARSE_NAMES
    assert COLUMNS.label_names == ("positive",)
    assert DataConfig(format="movielens", path="a").features == SPARSE_NAMES


@pytest.mark.parametrize(
    ("line", "column", "value"),
    [
        ("1\t1\t5", "line", "3 columns"),
        ("1\t1\t6\t100", "rating", "6"),
        ("1\t1\t4.5\t100", "rating", "4.5"),
        ("1\t1\t5\t-1", "time", "-1"),
        (f"1\t1\t5\t{'9' * 5000}", "time", shorten(b"9" * 5000)),
        ("9\t1\t5\t100", "user", "9"),
        ("1\t9\t5\t100", "item", "9"),
        ("x\t1\t5\t100", "user", "x"),
        ("", "line", "1 columns"),
    ],
)
def test_a_malformed_rating_is_left_out_and_reported(
    tmp_path: Path, line: str, column: str, value: str
) -> None:
    write_100k(tmp_path, f"1\t1\t5\t100\n{line}\n2\t1\t5\t100\n")
    tables = read_movielens(tmp_path)
    assert tables.ratings[:, 0].tolist() == [1, 2]
    assert tables.malformed.total == 1
    (example,) = tables.malformed.examples
    assert (example.file, example.line) == (str(tmp_path / "u.data"), 2)
    assert (example.column, example.value) == (column, value)
    with pytest.raises(MalformedRowError, match=r"u\.data:2"):
        open_data(DataConfig(format="movielens", path=str(tmp_path), strict=True))


def test_a_malformed_user_takes_its_ratings_along(tmp_path: Path) -> None:
    write_100k(tmp_path, "1\t1\t5\t100\n2\t1\t5\t100\n")
    (tmp_path / "u.user").write_text("1|24|M|technician|85711\n2|old|F|other|94043\n")
    tables = read_movielens(tmp_path)
    assert tables.ratings[:, 0].tolist() == [1]
    assert [str(row) for row in tables.malformed.examples] == [
        f"{tmp_path}/u.user:2: age='old': expected an integer from 0 to 150",
        f"{tmp_path}/u.data:2: user='2': no such user in u.user",
    ]


def test_a_folder_without_ratings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no u\.data or ratings\.dat in it"):
        read_movielens(tmp_path)


def test_a_folder_without_items_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ratings.dat").write_text("")
    with pytest.raises(UserError, match=r"it has ratings\.dat but no movies\.dat"):
        read_movielens(tmp_path)
