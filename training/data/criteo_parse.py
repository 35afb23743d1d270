"""Criteo's text to prepared rows, many fields at a time.

No field is looked at by itself.  Tabs and newlines give every field's start and length; the 8 bytes
from its start are one 64-bit word, shifted so that the digits stand at its end and filled with
``'0'`` before; a handful of word operations then check and convert 8 digits at once ("SIMD within a
register").  Only integers of more than 8 digits go through Python's ``int``.

``tests/data/test_criteo_parse.py`` holds the obvious version that this one must agree with.

Shapes: ``n`` lines of 40 columns, ``k`` columns of one kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tessera.training.data import criteo_format as fmt
from tessera.training.data.malformed import MAX_EXAMPLES, MalformedReport, MalformedRow, shorten

Words = npt.NDArray[np.uint64]
Word = np.uint64
Places = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_TAB, _NEWLINE, _RETURN, _MINUS, _ZERO = b"\t\n\r-0"


def _each_byte(value: int) -> Word:
    return np.uint64(value * 0x0101_0101_0101_0101)


_FILL = np.array([0x3030_3030_3030_3030 >> (8 * size) for size in range(8)] + [0], np.uint64)
_SHIFT = np.array([8 * (8 - size) for size in range(9)], np.uint64)
_LOW_NIBBLES, _HIGH_NIBBLES = _each_byte(0x0F), _each_byte(0xF0)
_ONES, _SIXES, _SIXTEENS = _each_byte(0x01), _each_byte(0x06), _each_byte(0x10)
_DIGIT_ZEROS = _each_byte(0x30)


@dataclass(frozen=True)
class ParsedBlock:
    """What a block of lines held.

    Attributes:
        rows: ``[41, n]`` uint32: the well-formed lines' prepared rows (see `criteo_format`), in
            the order of the text.
        lines: number of lines in the block, malformed ones too.
        malformed: the others; lines are counted from ``first_line``.
        well_formed: ``[lines]``: which lines ``rows`` are of; None: all.
    """

    rows: npt.NDArray[np.uint32]
    lines: int
    malformed: MalformedReport
    well_formed: Mask | None = None


def parse_block(text: bytes, *, file: str, first_line: int = 1) -> ParsedBlock:
    r"""Parse whole lines.

    Works in about 15 times the text's size of memory for Criteo's own lines; see `criteo_read`.

    Args:
        text: lines that each end in ``\n`` or ``\r\n``; the last may end in neither.
        file: the file's name for messages.
        first_line: number of the first line for messages.
    """
    if text and text[-1] != _NEWLINE:
        text += b"\n"
    bytes_ = np.zeros(len(text) + 8, np.uint8)  # 8 more: a word may begin at the last byte
    bytes_[: len(text)] = np.frombuffer(text, np.uint8)
    separators = np.flatnonzero((bytes_[: len(text)] - _TAB) <= _NEWLINE - _TAB)
    starts = np.empty_like(separators)
    starts[:1] = 0
    starts[1:] = separators[:-1] + 1
    line_ends = np.flatnonzero(bytes_[separators] == _NEWLINE)
    columns = np.diff(line_ends, prepend=-1)  # per line
    right_count = columns == fmt.NUM_COLUMNS
    if not right_count.all():
        keep = np.repeat(right_count, columns)
        starts, separators = starts[keep], separators[keep]
    fields = _Fields(bytes_, starts, separators)
    rows, bad = fields.convert()
    well_formed = ~bad.any(axis=0)
    if right_count.all() and well_formed.all():
        return ParsedBlock(rows, len(columns), MalformedReport())
    report = _report(fields, bad, columns, file=file, first_line=first_line)
    kept = right_count.copy()
    kept[right_count] = well_formed
    return ParsedBlock(rows[:, well_formed], len(columns), report, kept)


class _Fields:
    """The fields of lines that have 40 columns.

    ``starts`` and ``ends`` are ``[40, n]`` places in the text; ``ends`` is one past the last byte.
    """

    def __init__(self, bytes_: npt.NDArray[np.uint8], starts: Places, ends: Places) -> None:
        self._bytes = bytes_
        # Every 8 neighbouring bytes as one little-endian word.
        self._words: Words = np.ndarray(
            (len(bytes_) - 7,), np.dtype("<u8"), buffer=bytes_, strides=(1,)
        )
        self.starts = np.ascontiguousarray(starts.reshape(-1, fmt.NUM_COLUMNS).T)
        self.ends = np.ascontiguousarray(ends.reshape(-1, fmt.NUM_COLUMNS).T)
        last = self.ends[-1]
        last -= bytes_[last - 1] == _RETURN

    def text(self, column: int, line: int) -> bytes:
        """One field's bytes."""
        return self._bytes[self.starts[column, line] : self.ends[column, line]].tobytes()

    def convert(self) -> tuple[npt.NDArray[np.uint32], Mask]:
        """``[41, n]`` prepared rows and, ``[40, n]``, which fields are malformed."""
        num_lines = self.starts.shape[1]
        rows = np.empty((fmt.ROW_WORDS, num_lines), np.uint32)
        bad = np.empty((fmt.NUM_COLUMNS, num_lines), np.bool_)
        dense, sparse = slice(1, 1 + fmt.NUM_DENSE), slice(1 + fmt.NUM_DENSE, fmt.NUM_COLUMNS)
        floats = rows.view(np.float32)
        floats[fmt.LABEL_WORD], bad[0] = self._label()
        floats[fmt.DENSE_WORDS], bad[dense] = self._integers(dense)
        rows[fmt.SPARSE_WORDS], present, bad[sparse] = self._categories(sparse)
        bits = np.uint32(1) << np.arange(fmt.NUM_SPARSE, dtype=np.uint32)
        rows[fmt.PRESENT_WORD] = np.where(present, bits[:, None], np.uint32(0)).sum(
            axis=0, dtype=np.uint32
        )
        return rows, bad

    def _label(self) -> tuple[npt.NDArray[np.uint8], Mask]:
        digit = self._bytes[self.starts[0]] - np.uint8(_ZERO)
        return digit, (self.ends[0] - self.starts[0] != 1) | (digit > 1)

    def _digits(self, starts: Places, sizes: Places) -> Words:
        """``[k, n]`` fields of up to 8 bytes, right-aligned after ``'0'`` (first byte lowest)."""
        capped = np.minimum(sizes, 8)
        return (self._words[starts] << _SHIFT[capped]) | _FILL[capped]

    def _integers(self, columns: slice) -> tuple[npt.NDArray[np.float32], Mask]:
        starts, ends = self.starts[columns], self.ends[columns]
        missing = starts == ends
        negative = self._bytes[starts] == _MINUS
        starts = starts + negative
        sizes = ends - starts
        word = self._digits(starts, sizes)
        # A digit's high nibble is 3, and still is when 6 is added.
        digits = ((word | (word + _SIXES)) & _HIGH_NIBBLES) == _DIGIT_ZEROS
        digits &= (word & _HIGH_NIBBLES) == _DIGIT_ZEROS
        value = _decimal(word).astype(np.float64)
        bad = ~digits | (negative & (sizes == 0))
        for column, line in np.argwhere(sizes > 8):
            text = self._bytes[starts[column, line] : ends[column, line]].tobytes()
            bad[column, line] = not text.isdigit() or len(text) > fmt.MAX_INTEGER_DIGITS
            if not bad[column, line]:
                value[column, line] = int(text)
        numbers = value.astype(np.float32)
        np.negative(numbers, out=numbers, where=negative)
        numbers[missing] = np.nan
        return numbers, bad

    def _categories(self, columns: slice) -> tuple[npt.NDArray[np.uint32], Mask, Mask]:
        starts = self.starts[columns]
        sizes = self.ends[columns] - starts
        word = self._digits(starts, sizes)
        value, bad = _hexadecimal(word)
        return value, sizes > 0, bad | (sizes > fmt.MAX_HEX_DIGITS)


def _decimal(word: Words) -> Words:
    """The number that 8 decimal digits write; each step joins neighbours in twice the width."""
    word = (word & _LOW_NIBBLES) * np.uint64(2561) >> np.uint64(8)
    word = (word & np.uint64(0x00FF_00FF_00FF_00FF)) * np.uint64(6553601) >> np.uint64(16)
    return (word & np.uint64(0x0000_FFFF_0000_FFFF)) * np.uint64(42949672960001) >> np.uint64(32)


def _hexadecimal(word: Words) -> tuple[npt.NDArray[np.uint32], Mask]:
    """The number that 8 hexadecimal digits write, and where one of the bytes is not such a digit."""
    letter = (word >> np.uint64(6)) & _ONES  # bit 6 is set in letters, clear in digits
    nibble = (word & _LOW_NIBBLES) + letter * np.uint64(9)  # up to 24 where it is not a digit
    # Write the digit again, in lower case; a byte that is a digit gives itself.
    again = _DIGIT_ZEROS + nibble + letter * np.uint64(0x27)
    wrong: Words = again ^ (word | (letter << np.uint64(5)))
    # ... but so do ':'..'?' (no letter, nibble over 9) and '@', '`' (letter, nibble 9).
    over_nine = ((nibble + _SIXES) >> np.uint64(4)) & _ONES
    wrong |= over_nine ^ letter
    wrong |= nibble & _SIXTEENS
    word = _joined(nibble, 4) & np.uint64(0x00FF_00FF_00FF_00FF)
    word = _joined(word, 8) & np.uint64(0x0000_FFFF_0000_FFFF)
    return _joined(word, 16).astype(np.uint32), wrong != 0


def _joined(word: Words, bits: int) -> Words:
    """Numbers of ``bits`` bits, each in twice the room, joined in twos: the lower one leads."""
    joined: Words = word << np.uint64(bits)
    joined |= word >> np.uint64(2 * bits)
    return joined


def _report(
    fields: _Fields, bad: Mask, columns: Places, *, file: str, first_line: int
) -> MalformedReport:
    right_count = columns == fmt.NUM_COLUMNS
    place_among_right = np.cumsum(right_count) - 1
    malformed = ~right_count
    malformed[np.flatnonzero(right_count)] = bad.any(axis=0)
    examples = []
    for line in np.flatnonzero(malformed)[:MAX_EXAMPLES]:
        if right_count[line]:
            place = int(place_among_right[line])
            column = int(np.argmax(bad[:, place]))
            name, value = fmt.COLUMN_NAMES[column], shorten(fields.text(column, place))
            reason = _expected(column)
        else:
            name, value = "line", f"{columns[line]} columns"
            reason = f"expected {fmt.NUM_COLUMNS} tab-separated columns"
        examples.append(
            MalformedRow(
                file=file, line=first_line + int(line), column=name, value=value, reason=reason
            )
        )
    return MalformedReport(int(malformed.sum()), tuple(examples))


def _expected(column: int) -> str:
    if column == 0:
        return "expected 0 or 1"
    if column <= fmt.NUM_DENSE:
        return f"expected an integer of at most {fmt.MAX_INTEGER_DIGITS} digits, or nothing"
    return f"expected at most {fmt.MAX_HEX_DIGITS} hexadecimal digits, or nothing"
