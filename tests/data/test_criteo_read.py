from __future__ import annotations

import gzip
import io
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tessera.errors import UserError
from tessera.training.data import criteo_read
from tessera.training.data.criteo_read import read_criteo
from tessera.training.data.malformed import MalformedReport
from tests.data import criteo_plain as plain


def read(files: list[Path], workers: int = 0) -> tuple[np.ndarray, MalformedReport]:
    rows, malformed = [np.empty((41, 0), np.uint32)], MalformedReport()
    for part in read_criteo(files, workers=workers):
        rows.append(part.rows)
        malformed += part.malformed
    return np.concatenate(rows, axis=1), malformed


def faults(malformed: MalformedReport) -> list[tuple[str, int, str]]:
    return [(row.file, row.line, row.column) for row in malformed.examples]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    lines=st.integers(0, 25),
    task=st.integers(1, 4000),
    tile=st.integers(1, 2000),
    ending=st.sampled_from([b"", b"\n", b"half a line", b"\n\n"]),
    compressed=st.booleans(),
)
def test_rows_and_line_numbers_do_not_depend_on_where_the_text_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, seed: int, lines: int, task: int, tile: int,
    ending: bytes, compressed: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(criteo_read, "TASK_BYTES", task)
    monkeypatch.setattr(criteo_read, "TILE_BYTES", tile)
    text = plain.random_text(seed, lines, malformed_share=0.2) + ending
    file = tmp_path / ("text.tsv.gz" if compressed else "text.tsv")
    file.write_bytes(gzip.compress(text) if compressed else text)
    rows, malformed = plain.read_text(text)
    found, report = read([file])
    plain.assert_same(found, rows)
    assert report.total == len(malformed)
    expected = [(str(file), line, column) for line, column in malformed]
    assert faults(report) == expected[: len(report.examples)]


def test_several_processes_read_what_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo_read, "TASK_BYTES", 20_000)
    monkeypatch.setattr(criteo_read, "SERIAL_BYTES", 0)
    files = [tmp_path / "a.tsv", tmp_path / "b.tsv.gz", tmp_path / "c.tsv"]
    texts = [plain.random_text(seed, 300, malformed_share=0.01) for seed in (1, 2, 3)]
    files[0].write_bytes(texts[0])
    files[1].write_bytes(gzip.compress(texts[1]))
    files[2].write_bytes(texts[2])
    found, report = read(files, workers=2)
    expected_rows, expected_faults = [], []
    for file, text in zip(files, texts, strict=True):
        rows, malformed = plain.read_text(text)
        expected_rows += rows
        expected_faults += [(str(file), *fault) for fault in malformed]
    plain.assert_same(found, expected_rows)
    assert report.total == len(expected_faults)
    assert faults(report) == expected_faults[:10]
    assert len({file for file, _, _ in faults(report)}) > 1  # lines are counted file by file


def test_memory_does_not_grow_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, tile = 128 << 10, 32 << 10
    monkeypatch.setattr(criteo_read, "TASK_BYTES", task)
    monkeypatch.setattr(criteo_read, "TILE_BYTES", tile)
    lines = plain.random_text(0, 2000)
    plain_file, compressed = tmp_path / "big.tsv", tmp_path / "big.tsv.gz"
    with plain_file.open("wb") as out, gzip.open(compressed, "wb", compresslevel=1) as packed:
        for _ in range(20):
            out.write(lines)
            packed.write(lines)
    for file in (plain_file, compressed):
        tracemalloc.start()
        rows = sum(part.rows.shape[1] for part in read_criteo([file]))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert rows == 40_000
        # The module's bound for one process: a task's text and its rows (twice while they are
        # joined), and a tile at work, whose lines are shorter here than Criteo's.  The text is
        # 50 times a task.  Buffers of the compressed file are besides: 8 KiB each, 128 KiB from Python 3.14 on.
        bound = 4 * task + 30 * tile + 3 * io.DEFAULT_BUFFER_SIZE
        assert peak < bound < plain_file.stat().st_size / 3


def test_an_endless_line_is_one_malformed_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo_read, "TASK_BYTES", 50_000)
    good = plain.random_text(0, 3)
    text = good + b"0" + b"\t" * 39 + b"a" * 400_000 + b"\n" + good
    for file, data in (("a.tsv", text), ("a.tsv.gz", gzip.compress(text))):
        (tmp_path / file).write_bytes(data)
        rows, report = read([tmp_path / file])
        plain.assert_same(rows, plain.read_text(good + good)[0])
        assert report.total == 1
        assert report.examples[0].line == 4
        assert report.examples[0].column == "C26"


def test_a_cut_gzip_file_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "cut.tsv.gz"
    file.write_bytes(gzip.compress(plain.random_text(0, 100))[:-20])
    with pytest.raises(UserError, match=r"cut\.tsv\.gz.*not a whole gzip file"):
        read([file])


def test_a_file_that_is_no_gzip_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "plain.tsv.gz"
    file.write_bytes(plain.random_text(0, 10))
    with pytest.raises(UserError, match=r"plain\.tsv\.gz.*not a whole gzip file"):
        read([file])


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.tsv"):
        read([tmp_path / "absent.tsv"])
