from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tessera.kernels import ops
from tessera.training.data import criteo_format as fmt
from tessera.training.data.batch import Batch
from tessera.training.data.criteo import CriteoDataset, unpack_rows_by_torch, write_criteo
from tests.data import criteo_plain as plain

ROWS = 150


@pytest.fixture(scope="module")
def expected() -> list[plain.PlainRow]:
    return plain.read_text(plain.random_text(11, ROWS))[0]


@pytest.fixture(scope="module")
def dataset(
    tmp_path_factory: pytest.TempPathFactory,
) -> CriteoDataset:
    folder = tmp_path_factory.mktemp("criteo")
    (folder / "rows.tsv").write_bytes(plain.random_text(11, ROWS))
    return prepare(folder)


def prepare(folder: Path) -> CriteoDataset:
    prepared = folder / "prepared"
    prepared.mkdir()
    details = write_criteo([folder / "rows.tsv"], 0, prepared, lambda _bytes, _malformed: None)
    return CriteoDataset(prepared, rows=details["rows"])


def assert_holds(batch: Batch, rows: list[plain.PlainRow]) -> None:
    assert batch.size == len(rows)
    assert batch.labels.tolist() == [row.label for row in rows]
    dense = np.array([row.dense for row in rows], np.float32).reshape(-1, fmt.NUM_DENSE)
    np.testing.assert_array_equal(batch.dense_features.numpy(), dense)
    assert batch.sparse_features.keys() == list(fmt.SPARSE_NAMES)
    columns = [[row.categories[number] for row in rows] for number in range(fmt.NUM_SPARSE)]
    lengths = [int(value is not None) for column in columns for value in column]
    assert batch.sparse_features.lengths().tolist() == lengths
    ids = [value for column in columns for value in column if value is not None]
    assert batch.sparse_features.values().tolist() == ids


@given(start=st.integers(0, ROWS), count=st.integers(0, ROWS))
def test_take(
    dataset: CriteoDataset, expected: list[plain.PlainRow], start: int, count: int
) -> None:
    stop = min(start + count, ROWS)
    assert_holds(dataset.take(start, stop), expected[start:stop])


@given(rows=st.lists(st.integers(0, ROWS - 1), max_size=60))
def test_batch(dataset: CriteoDataset, expected: list[plain.PlainRow], rows: list[int]) -> None:
    batch = dataset.batch(np.array(rows, np.int64))
    assert_holds(batch, [expected[row] for row in rows])
    labels = dataset.labels(np.array(rows, np.int64))
    assert labels.tolist() == batch.labels.tolist()


@given(rows=st.lists(st.integers(0, ROWS - 1), max_size=60))
def test_packed_rows(
    dataset: CriteoDataset, expected: list[plain.PlainRow], rows: list[int]
) -> None:
    (packed,) = dataset.packed([np.array(rows, np.int64)])
    assert packed.size == len(rows)
    batch = packed.to(torch.device("cpu"))
    assert_holds(batch, [expected[row] for row in rows])
    features = batch.sparse_features
    assert features.offsets().tolist() == [0, *np.cumsum(features.lengths().numpy())]
    assert features.lengths().dtype == torch.int32
    assert features.offsets().dtype == features.values().dtype == torch.int64
    # Its operator made them; where that was not built, torch's functions do.
    assert ops.is_built_for("unpack_rows", "cpu")
    by_torch = unpack_rows_by_torch(packed.words, packed.ids)
    by_operator = features.lengths(), features.offsets(), features.values()
    assert all(torch.equal(a, b) for a, b in zip(by_torch, by_operator, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_and_packed_rows_on_a_gpu(
    dataset: CriteoDataset, expected: list[plain.PlainRow]
) -> None:
    rows = np.random.default_rng(0).permutation(ROWS)
    (packed,), pinned = dataset.packed([rows]), dataset.batch(rows).pin_memory()
    assert packed.words.is_pinned()
    assert pinned.dense_features.is_pinned()
    assert pinned.sparse_features.values().is_pinned()
    assert_holds(pinned, [expected[row] for row in rows])
    for waiting in (packed, pinned):
        there = waiting.to(torch.device("cuda"), non_blocking=True)
        assert there.labels.is_cuda
        assert_holds(there.to(torch.device("cpu")), [expected[row] for row in rows])


def test_a_batch_without_missing_categories(tmp_path: Path) -> None:
    line = b"\t".join([b"1", *[b"7"] * 13, *[b"00ffABCD"] * 26]) + b"\n"
    (tmp_path / "rows.tsv").write_bytes(line * 3)
    dataset, expected = prepare(tmp_path), plain.read_text(line * 3)[0]
    assert_holds(dataset.take(0, 3), expected)
    assert_holds(dataset.packed([np.arange(3)])[0].to(torch.device("cpu")), expected)


def test_packed_rows_without_any_category(tmp_path: Path) -> None:
    line = b"\t".join([b"0", *[b"7"] * 13, *[b""] * 26]) + b"\n"
    (tmp_path / "rows.tsv").write_bytes(line * 3)
    (packed,) = prepare(tmp_path).packed([np.arange(3)])
    assert_holds(packed.to(torch.device("cpu")), plain.read_text(line * 3)[0])


@pytest.mark.parametrize("rows", [1, 2, 5000])
def test_files_of_several_sizes(tmp_path: Path, rows: int) -> None:
    line = plain.random_text(0, 1)
    (tmp_path / "rows.tsv").write_bytes(line * rows)
    dataset = prepare(tmp_path)
    assert len(dataset) == rows
    assert_holds(dataset.take(rows - 1, rows), plain.read_text(line)[0])


def test_batches_do_not_alias_the_prepared_file(dataset: CriteoDataset) -> None:
    # The mapping is read-only; a write through a tensor that aliases it would crash.
    batch = dataset.take(0, 5)
    before = dataset.take(0, 5)
    batch.labels += 1
    batch.dense_features += 1
    batch.sparse_features.values().add_(1)
    assert_same = dataset.take(0, 5)
    assert assert_same.labels.tolist() == before.labels.tolist()
    values = assert_same.sparse_features.values().tolist()
    assert values == before.sparse_features.values().tolist()
