"""Damaged files of every format: each is read right or refused in one line, in bounded memory.

``TESSERA_TABLE_MUTATIONS`` says how many there are (300; the long form is 1,000).
"""

from __future__ import annotations

import os
import random
import resource
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tessera.errors import UserError
from tests.data import clicks
from tests.data.test_table import WHOLE, batch_rows, expected_rows, opened, write

MUTATIONS = int(os.environ.get("TESSERA_TABLE_MUTATIONS", "300"))
NAMES = ("a.parquet", "a.csv", "a.csv.gz", "a.jsonl", "a.jsonl.gz", "a.feather", "a.arrow")
CONTENT = clicks.rows(60)
MAGICS = (b"PAR1", b"ARROW1", b"\x1f\x8b", b"PK\x03\x04", b"\xff\xfe", b"\x00" * 16, b"{")


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Some bytes changed, lost, repeated or put in."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 4, 30))):
        place = draw.randrange(len(changed) + 1)
        length = draw.choice((1, 2, 8, 64, 1000))
        kind = draw.choice(("flip", "cut", "lose", "repeat", "noise", "magic", "text"))
        if kind == "flip" and place < len(changed):
            changed[place] ^= 1 << draw.randrange(8)
        elif kind == "cut":
            del changed[place:]
        elif kind == "lose":
            del changed[place : place + length]
        elif kind == "repeat":
            changed[place:place] = changed[place : place + length]
        elif kind == "noise":
            changed[place : place + length] = draw.randbytes(length)
        elif kind == "magic":
            magic = draw.choice(MAGICS)
            changed[: len(magic)] = magic
        else:
            words = (
                b"\n",
                b",",
                b'"',
                b"\xff",
                b"9" * 400,
                b"NaN",
                b"1e999",
                b"[",
                b"null",
                b"\r\n",
            )
            changed[place:place] = draw.choice(words)
    return bytes(changed)


def test_mutated_files_are_read_right_or_refused_in_one_line(tmp_path: Path) -> None:
    draw = random.Random(7)
    whole = {name: write(tmp_path / name, CONTENT).read_bytes() for name in NAMES}
    expected = len(CONTENT)
    outcomes: Counter[str] = Counter()
    for number in range(MUTATIONS):
        name = draw.choice(NAMES)
        data = damaged(whole[name], draw)
        folder = tmp_path / f"m{number}"
        folder.mkdir()
        (folder / name).write_bytes(data)
        try:
            splits = opened(folder / name, **WHOLE)
            rows = batch_rows(splits.train)
        except UserError as error:
            text = str(error)
            assert "\n" not in text, text
            assert len(text) < 2000, text
            outcomes["refused"] += 1
            continue
        assert len(rows) == len(splits.train)
        if data == whole[name]:
            assert rows == expected_rows(CONTENT)
        if name.endswith((".feather", ".arrow", ".parquet")):
            assert len(rows) + splits.malformed.total <= 2 * expected
        outcomes["read"] += 1
    assert outcomes["refused"] > MUTATIONS // 5
    assert outcomes["read"] > MUTATIONS // 5


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


SMALL = {"id": {"kind": "categorical"}, "y": {"kind": "label"}}


def test_a_hundred_thousand_columns(tmp_path: Path) -> None:
    columns = 100_000
    path = tmp_path / "wide.csv"
    header = ",".join([*(f"c{number}" for number in range(columns)), "id", "y"])
    path.write_text(header + "\n" + ",".join(["1"] * columns + ["7", "1"]) + "\n")
    splits = opened(path, {"id": {"kind": "categorical"}, "y": {"kind": "label"}}, **WHOLE)
    assert [row[2] for row in batch_rows(splits.train)] == [{"id": [7]}]
    with pytest.raises(UserError, match="has no column 'd'") as caught:
        opened(path, {**SMALL, "d": {"kind": "dense"}})
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_a_cell_of_a_hundred_megabytes(tmp_path: Path, name: str) -> None:
    before = peak_mb()
    cell = "x" * (100 << 20)
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(pa.table({"id": [cell, "b"], "y": [1, 0]}), path)
    elif name == "a.csv":
        path.write_text(f"id,y\nb,0\n{cell},1\n")
    else:
        path.write_text(f'{{"id": "b", "y": 0}}\n{{"id": "{cell}", "y": 1}}\n')
    del cell
    message = ""
    try:
        assert len(batch_rows(opened(path, SMALL, **WHOLE).train)) == 2
    except UserError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 500
    assert peak_mb() - before < 1500
