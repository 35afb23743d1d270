from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.training.data.criteo_parse import parse_block
from tessera.training.data.malformed import MAX_EXAMPLES
from tests.data import criteo_plain as plain

EMPTY_FIELDS = b"1" + b"\t" * 39


def check(text: bytes) -> None:
    rows, malformed = plain.read_text(text)
    block = parse_block(text, file="f")
    plain.assert_same(block.rows, rows)
    assert block.lines == len(rows) + len(malformed)
    assert block.malformed.total == len(malformed)
    found = [(row.line, row.column) for row in block.malformed.examples]
    assert found == malformed[:MAX_EXAMPLES]


def test_real_rows_read_as_the_plain_reader_reads_them(shared_data: Path) -> None:
    text = (shared_data / "criteo_sample_14584.tsv").read_bytes()
    check(b"".join(text.splitlines(keepends=True)[:500]))


@given(seed=st.integers(0, 2**32), lines=st.integers(0, 30), share=st.sampled_from([0, 0.3, 1]))
def test_any_mixture_of_good_and_bad_lines(seed: int, lines: int, share: float) -> None:
    check(plain.random_text(seed, lines, malformed_share=share))


@given(text=st.binary(max_size=300))
def test_any_bytes(text: bytes) -> None:
    check(text)


@given(field=st.binary(max_size=12), column=st.integers(0, 39))
def test_any_bytes_in_any_column(field: bytes, column: int) -> None:
    fields = EMPTY_FIELDS.split(b"\t")
    fields[column] = field
    check(b"\t".join(fields) + b"\n" + EMPTY_FIELDS + b"\n")


@pytest.mark.parametrize("column", [0, 1, 13, 14, 39])
def test_every_byte_alone_and_between_digits(column: int) -> None:
    lines = []
    for byte in range(256):
        for field in (bytes([byte]), b"1" + bytes([byte]) + b"2", b"000000" + bytes([byte]) + b"3"):
            fields = EMPTY_FIELDS.split(b"\t")
            fields[column] = field
            lines.append(b"\t".join(fields))
    for line in lines:  # apart, so that the ten examples of a block show each of them
        check(line + b"\n")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n",
        b"\r\n",
        EMPTY_FIELDS,
        EMPTY_FIELDS + b"\n",
        EMPTY_FIELDS + b"\r\n",
        EMPTY_FIELDS + b"\r",
        EMPTY_FIELDS + b"ffffffff\r\n" + EMPTY_FIELDS + b"0\n",
        b"\n" + EMPTY_FIELDS + b"\n\n",
    ],
    ids=repr,
)
def test_line_ends_and_empty_text(text: bytes) -> None:
    check(text)


def test_a_message_names_file_line_column_value_and_what_was_expected() -> None:
    fields = EMPTY_FIELDS.split(b"\t")
    fields[3] = b"1.5"
    block = parse_block(
        EMPTY_FIELDS + b"\n" + b"\t".join(fields) + b"\n", file="day_0.tsv", first_line=101
    )
    assert str(block.malformed.examples[0]) == (
        "day_0.tsv:102: I3='1.5': expected an integer of at most 18 digits, or nothing"
    )


def test_all_malformed_rows_are_counted_and_the_first_listed() -> None:
    text = plain.random_text(3, 40, malformed_share=1)
    block = parse_block(text, file="f")
    assert block.malformed.total == 40
    assert [row.line for row in block.malformed.examples] == list(range(1, MAX_EXAMPLES + 1))
    assert block.rows.shape == (41, 0)


def test_a_long_wrong_value_is_shortened_in_the_message() -> None:
    line = plain.random_line(random.Random(0)).split(b"\t")
    line[20] = b"x" * 5000
    block = parse_block(b"\t".join(line), file="f")
    assert block.malformed.examples[0].value == "x" * 40 + "..."
