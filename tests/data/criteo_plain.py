"""Criteo's text read the obvious way: what the fast parser must agree with."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

import numpy as np

from tessera.training.data import criteo_format as fmt


@dataclass
class PlainRow:
    label: float
    dense: list[float]
    categories: list[int | None]


def read_line(line: bytes) -> PlainRow | str:
    """The row, or the name of the first column that is wrong."""
    fields = line.removesuffix(b"\r").split(b"\t")
    if len(fields) != 40:
        return "line"
    if fields[0] not in (b"0", b"1"):
        return "label"
    dense, categories = [], []
    for name, text in zip(fmt.DENSE_NAMES, fields[1:14], strict=True):
        if text == b"":
            dense.append(math.nan)
            continue
        if not re.fullmatch(rb"-?[0-9]{1,18}", text):
            return name
        dense.append(float(text))
    for name, text in zip(fmt.SPARSE_NAMES, fields[14:], strict=True):
        if not re.fullmatch(rb"[0-9a-fA-F]{0,8}", text):
            return name
        categories.append(int(text, 16) if text else None)
    return PlainRow(float(fields[0]), dense, categories)


def read_text(text: bytes) -> tuple[list[PlainRow], list[tuple[int, str]]]:
    """The rows, and (line, column) of those that are malformed."""
    lines = text.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    rows, malformed = [], []
    for number, line in enumerate(lines, start=1):
        row = read_line(line)
        if isinstance(row, str):
            malformed.append((number, row))
        else:
            rows.append(row)
    return rows, malformed


def assert_same(words: np.ndarray, expected: list[PlainRow]) -> None:
    """``words``: ``[41, n]`` prepared rows."""
    assert words.shape == (fmt.ROW_WORDS, len(expected))
    floats = words.view(np.float32)
    for place, row in enumerate(expected):
        assert floats[fmt.LABEL_WORD, place] == row.label
        np.testing.assert_array_equal(
            floats[fmt.DENSE_WORDS, place], np.array(row.dense, np.float32)
        )
        present = [category is not None for category in row.categories]
        assert int(words[fmt.PRESENT_WORD, place]) == sum(
            1 << bit for bit, there in enumerate(present) if there
        )
        assert words[fmt.SPARSE_WORDS, place].tolist() == [c or 0 for c in row.categories]


def random_line(rng: random.Random, *, malformed: bool = False) -> bytes:
    """A well-formed line, or one with a single fault."""
    fields = [str(rng.randint(0, 1))]
    fields += [
        rng.choice(["", "0", "-1", str(rng.randint(0, 99)), str(rng.randint(-3, 10**12))])
        for _ in range(13)
    ]
    fields += [
        rng.choice(["", f"{rng.getrandbits(32):08x}", f"{rng.getrandbits(9):X}"]) for _ in range(26)
    ]
    if malformed:
        fault = rng.randrange(4)
        if fault == 0:
            fields.insert(rng.randrange(40), "1")
        elif fault == 1:
            fields[0] = rng.choice(["", "2", "01", "a"])
        elif fault == 2:
            fields[rng.randint(1, 13)] = rng.choice(["1.5", "-", "+1", " 1", "1" * 19, "abcdefghi"])
        else:
            fields[rng.randint(14, 39)] = rng.choice(["g", "0x12", "123456789", "-1", ":", "@"])
    return "\t".join(fields).encode()


def random_text(seed: int, lines: int, *, malformed_share: float = 0.0) -> bytes:
    rng = random.Random(seed)
    return b"".join(
        random_line(rng, malformed=rng.random() < malformed_share) + b"\n" for _ in range(lines)
    )
