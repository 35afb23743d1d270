from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tessera.training.data import splits
from tessera.training.data.splits import split_rows, split_sizes


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    folder = tmp_path / "prepared"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    return folder


fractions = st.tuples(st.floats(0, 0.49), st.floats(0, 0.49))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    rows=st.integers(0, 200), held_out=fractions, seed=st.integers(0, 3), chunk=st.integers(1, 90)
)
def test_a_random_split_is_a_partition_of_the_sizes_asked_for(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, *, rows: int, held_out: tuple[float, float],
    seed: int, chunk: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(splits, "CHUNK_ROWS", chunk)
    # Another chunk size gives another split under the same name, so each example has a folder.
    folder = prepared.with_name(f"prepared-{chunk}")
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text("{}")
    parts = split_rows(rows, split="random", held_out=held_out, seed=seed, prepared=folder)
    assert tuple(map(len, parts)) == split_sizes(rows, *held_out)
    for part in parts:
        assert list(part) == sorted(part)
    assert sorted(np.concatenate([np.asarray(part) for part in parts]).tolist()) == [*range(rows)]


def test_a_split_is_its_seeds(prepared: Path) -> None:
    def valid(seed: int) -> list[int]:
        parts = split_rows(100, split="random", held_out=(0.2, 0.1), seed=seed, prepared=prepared)
        return list(parts[1])

    assert valid(1) == valid(1)
    assert valid(1) != valid(2)


def test_every_row_is_as_likely_to_be_held_out(prepared: Path) -> None:
    counts = np.zeros(20)
    for seed in range(200):
        valid = split_rows(20, split="random", held_out=(0.25, 0), seed=seed, prepared=prepared)[1]
        counts[valid] += 1
    # 200 draws at 1/4: within 4.5 standard deviations of 50 for each of 20 rows.
    assert np.abs(counts - 50).max() < 4.5 * np.sqrt(200 * 0.25 * 0.75)


def test_every_chunk_gives_its_share(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "CHUNK_ROWS", 100)
    _, valid, _ = split_rows(1000, split="random", held_out=(0.1, 0), seed=0, prepared=prepared)
    assert np.bincount(np.asarray(valid) // 100, minlength=10).tolist() == [10] * 10


def test_in_time_the_last_rows_are_held_out(prepared: Path) -> None:
    parts = split_rows(10, split="time", held_out=(0.2, 0.1), seed=0, prepared=prepared)
    assert parts == (range(7), range(7, 9), range(9, 10))


def test_sizes_are_rounded_to_the_nearest_row() -> None:
    assert split_sizes(14584, 0.1, 0.1) == (11668, 1458, 1458)
    assert split_sizes(1, 0.1, 0.1) == (1, 0, 0)
    assert split_sizes(1, 0.9, 0.05) == (0, 1, 0)
    assert split_sizes(0, 0.1, 0.1) == (0, 0, 0)
