"""Rows to Criteo's text, many at a time: the inverse of `criteo_parse`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tessera.training.data.criteo_format import MAX_INTEGER_DIGITS, NUM_DENSE, NUM_SPARSE

_HEX_PAIRS = np.frombuffer(bytes.hex(bytes(range(256))).encode(), np.uint8).reshape(256, 2)
_TAB, _NEWLINE, _MINUS, _ZERO = b"\t\n-0"


def format_rows(
    *,
    labels: npt.NDArray[np.bool_],
    integers: npt.NDArray[np.int64],
    integer_present: npt.NDArray[np.bool_],
    categories: npt.NDArray[np.uint32],
    category_present: npt.NDArray[np.bool_],
) -> bytes:
    """The lines of ``n`` rows.

    Every row is laid out in columns of fixed width, with zero bytes where a field is shorter;
    dropping the zero bytes leaves the text.

    Args:
        labels: ``[n]``.
        integers: ``[13, n]``, below 10**18 in size.
        integer_present: ``[13, n]``; False writes an empty field.
        categories: ``[26, n]``.
        category_present: ``[26, n]``.
    """
    sizes = np.abs(integers)
    digits = len(str(sizes.max(initial=0)))
    assert digits <= MAX_INTEGER_DIGITS
    integer_width, category_width = digits + 2, 9
    out = np.zeros(
        (len(labels), 2 + NUM_DENSE * integer_width + NUM_SPARSE * category_width), np.uint8
    )
    out[:, 0] = labels + np.uint8(_ZERO)
    out[:, 1] = _TAB
    fields = out[:, 2 : 2 + NUM_DENSE * integer_width].reshape(-1, NUM_DENSE, integer_width)
    fields[:, :, 0] = np.where(integers < 0, _MINUS, 0).T
    for place in range(digits):
        unit = 10 ** (digits - 1 - place)
        written = (sizes >= unit) | (unit == 1)
        digit = (sizes // unit % 10 + _ZERO).astype(np.uint8)
        fields[:, :, 1 + place] = np.where(written, digit, 0).T
    fields *= integer_present.T[:, :, None]
    fields[:, :, -1] = _TAB
    fields = out[:, 2 + NUM_DENSE * integer_width :].reshape(-1, NUM_SPARSE, category_width)
    big_endian = np.ascontiguousarray(categories.T).astype(">u4").view(np.uint8)
    fields[:, :, :8] = _HEX_PAIRS[big_endian].reshape(-1, NUM_SPARSE, 8)
    fields *= category_present.T[:, :, None]
    fields[:, :, -1] = _TAB
    out[:, -1] = _NEWLINE
    text: bytes = out[out != 0].tobytes()
    return text
