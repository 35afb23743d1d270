from __future__ import annotations

import gzip
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tessera.errors import UserError
from tessera.training.data import BatchLoader, DataConfig, DataSplits, MalformedRowError, open_data
from tessera.training.data import criteo_read as criteo_read_module
from tessera.training.data.dataset import DatasetView
from tests.data import criteo_plain as plain


def config(path: Path | tuple[str, ...], **fields: object) -> DataConfig:
    where = path if isinstance(path, tuple) else str(path)
    return DataConfig(**{"format": "criteo", "path": where, **fields})


def open_quietly(config: DataConfig) -> DataSplits:
    return open_data(config, progress=False)


def sparse_rows(view: DatasetView) -> list[tuple[float, ...]]:
    """Label and dense values of every row, NaN as -99."""
    rows = []
    for batch in BatchLoader(view, batch_size=64, shuffle=False, seed=0).epoch(0):
        dense = np.nan_to_num(batch.dense_features.numpy(), nan=-99)
        rows += [
            (label, *row) for label, row in zip(batch.labels.tolist(), dense.tolist(), strict=True)
        ]
    return rows


def expected_rows(text: bytes) -> list[tuple[float, ...]]:
    return [
        (row.label, *np.nan_to_num(np.array(row.dense, np.float32), nan=-99).tolist())
        for row in plain.read_text(text)[0]
    ]


def test_the_real_sample(shared_data: Path, tmp_path: Path) -> None:
    splits = open_quietly(
        config(shared_data / "criteo_sample_14584.tsv", cache_dir=str(tmp_path), split="time")
    )
    assert [len(view) for view in (splits.train, splits.valid, splits.test)] == [11668, 1458, 1458]
    assert splits.malformed.total == 0
    labels = np.concatenate([splits.train.labels(), splits.valid.labels(), splits.test.labels()])
    assert labels.sum() == pytest.approx(0.234 * 14584, abs=10)  # 23.4% are positive
    text = (shared_data / "criteo_sample_14584.tsv").read_bytes()
    head = b"".join(text.splitlines(keepends=True)[:300])
    assert sparse_rows(DatasetView(splits.train.dataset, range(300))) == expected_rows(head)


def test_a_second_opening_reads_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.tsv"
    file.write_bytes(plain.random_text(0, 200))
    first = open_quietly(config(file))
    assert (tmp_path / "rows.tsv.cache").is_dir()

    def refuse(*_arguments: object) -> None:
        raise AssertionError("the text was parsed again")

    monkeypatch.setattr(criteo_read_module, "parse_block", refuse)
    second = open_quietly(config(file))
    for name in ("train", "valid", "test"):
        one, two = getattr(first, name), getattr(second, name)
        assert list(one.rows) == list(two.rows)
        assert sparse_rows(one) == sparse_rows(two)


def test_a_changed_file_is_prepared_again(tmp_path: Path) -> None:
    file = tmp_path / "rows.tsv"
    file.write_bytes(plain.random_text(0, 20))
    assert len(open_quietly(config(file)).train) == 16
    file.write_bytes(plain.random_text(0, 40))
    assert len(open_quietly(config(file)).train) == 32


def test_malformed_rows_are_reported_every_time_and_refused_under_strict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "rows.tsv"
    good = plain.random_text(0, 30)
    file.write_bytes(good + b"2" + b"\t" * 39 + b"\n" + good)
    with pytest.raises(MalformedRowError, match=r"rows\.tsv:31: label='2': expected 0 or 1"):
        open_quietly(config(file, strict=True))
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            splits = open_quietly(config(file))
        assert "1 malformed row left out" in caplog.text
        assert f"{file}:31: label='2': expected 0 or 1" in caplog.text
        assert splits.malformed.total == 1
        assert len(splits.train.dataset) == 60
    with pytest.raises(MalformedRowError) as caught:  # from the cache this time
        open_quietly(config(file, strict=True))
    assert caught.value.row.line == 31


def test_several_files_and_a_folder(tmp_path: Path) -> None:
    texts = [plain.random_text(seed, 20) for seed in range(3)]
    folder = tmp_path / "days"
    folder.mkdir()
    (folder / "a.tsv").write_bytes(texts[0])
    (folder / "b.tsv.gz").write_bytes(gzip.compress(texts[1]))
    (folder / "c.txt").write_bytes(texts[2])
    (folder / "readme.md").write_text("not data")
    whole = {"valid_fraction": 0.0, "test_fraction": 0.0}
    from_folder = open_quietly(config(folder, **whole))
    assert sparse_rows(from_folder.train) == expected_rows(b"".join(texts))
    files = tuple(str(folder / name) for name in ("c.txt", "a.tsv"))
    from_files = open_quietly(config(files, **whole))
    assert sparse_rows(from_files.train) == expected_rows(texts[2] + texts[0])


def test_files_of_their_own_for_validation_and_test(tmp_path: Path) -> None:
    texts = {name: plain.random_text(seed, 20) for seed, name in enumerate(("a", "v", "t"))}
    for name, text in texts.items():
        (tmp_path / f"{name}.tsv").write_bytes(text)
    splits = open_quietly(
        config(
            tmp_path / "a.tsv",
            valid_path=str(tmp_path / "v.tsv"),
            test_path=str(tmp_path / "t.tsv"),
            cache_dir=str(tmp_path / "cache"),
        )
    )
    assert sparse_rows(splits.train) == expected_rows(texts["a"])
    assert sparse_rows(splits.valid) == expected_rows(texts["v"])
    assert sparse_rows(splits.test) == expected_rows(texts["t"])


@pytest.mark.parametrize("text", [b"", b"no criteo\n", b"\n\n"])
def test_a_file_without_a_row_is_refused(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "rows.tsv"
    file.write_bytes(text)
    with pytest.raises(UserError, match="no line of it is a row of the format criteo") as caught:
        open_quietly(config(file))
    assert not text or f"{file}:1: line=" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [file]  # no cache is left


def test_a_path_without_rows_leaves_an_older_cache_alone(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_bytes(plain.random_text(0, 5))
    cache = tmp_path / "cache"
    open_quietly(config(tmp_path / "rows.tsv", cache_dir=str(cache)))
    before = {path.name for path in cache.iterdir() if not path.name.startswith(".")}
    (tmp_path / "bad.tsv").write_bytes(b"no criteo\n")
    with pytest.raises(UserError, match="no line of it is a row"):
        open_quietly(config(tmp_path / "bad.tsv", cache_dir=str(cache)))
    assert {path.name for path in cache.iterdir() if not path.name.startswith(".")} == before


def test_one_row_without_a_newline(tmp_path: Path) -> None:
    file = tmp_path / "rows.tsv"
    text = plain.random_text(0, 1).rstrip(b"\n")
    file.write_bytes(text)
    splits = open_quietly(config(file))
    assert sparse_rows(splits.train) == expected_rows(text)
    assert len(splits.valid) == len(splits.test) == 0
    assert splits.valid.labels().shape == (0,)


def test_a_missing_path_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"path='.*absent\.tsv': no such file or folder"):
        open_quietly(config(tmp_path / "absent.tsv"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"path='.*empty': no file in it ends in"):
        open_quietly(config(tmp_path / "empty"))


def test_movielens_in_time(shared_data: Path, tmp_path: Path) -> None:
    splits = open_quietly(
        DataConfig(
            format="movielens",
            path=str(shared_data / "ml-100k"),
            cache_dir=str(tmp_path),
            split="time",
        )
    )
    views = (splits.train, splits.valid, splits.test)
    assert [len(view) for view in views] == [80_000, 10_000, 10_000]
    labels = np.concatenate([view.labels() for view in views])
    assert labels.mean() == pytest.approx(0.554, abs=0.0005)  # 55.4% are 4 or 5
    again = open_quietly(
        DataConfig(
            format="movielens",
            path=str(shared_data / "ml-100k"),
            cache_dir=str(tmp_path),
            split="time",
            positive_rating=5,
        )
    )
    assert again.train.labels().mean() < 0.3


_STOPS_HALF_WAY = """
import sys
from tessera.training.data import DataConfig, criteo, open_data
def parts(files, workers):
    read = read_criteo(files, workers=workers)
    yield next(read)
    print("half way", flush=True)
    sys.stdin.read()
read_criteo, criteo.read_criteo = criteo.read_criteo, parts
open_data(DataConfig(format="criteo", path=sys.argv[1]))
"""


def test_a_killed_preparation_is_done_again(tmp_path: Path) -> None:
    file = tmp_path / "rows.tsv"
    text = plain.random_text(0, 300)
    file.write_bytes(text)
    with subprocess.Popen(
        [sys.executable, "-c", _STOPS_HALF_WAY, file],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half way\n"
        os.kill(process.pid, signal.SIGKILL)
    splits = open_quietly(config(file, valid_fraction=0.0, test_fraction=0.0))
    assert sparse_rows(splits.train) == expected_rows(text)
    assert list((tmp_path / "rows.tsv.cache").glob(".*.tmp")) == []
