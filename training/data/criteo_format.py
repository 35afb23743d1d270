"""Criteo's columns, and the order in which a prepared row keeps them.

A line of the text is tab-separated: ``label`` (0 or 1), 13 integers ``I1``..``I13``, 26 categories
``C1``..``C26`` of up to 8 hexadecimal digits.  An empty integer or category is a missing one.
Source: the read-me of Criteo's Kaggle Display Advertising data set.

A prepared row is 41 words of 32 bits, stored column by column:

    word 0        label, float32
    word 1        bit k is set where category C(k+1) is present
    words 2-14    sign(x) * log1p(|x|) of the integers, float32; NaN where missing
    words 15-40   the categories' 32-bit values; 0 where missing
"""

from __future__ import annotations

NUM_DENSE = 13
NUM_SPARSE = 26
NUM_COLUMNS = 1 + NUM_DENSE + NUM_SPARSE

DENSE_NAMES = tuple(f"I{number}" for number in range(1, NUM_DENSE + 1))
SPARSE_NAMES = tuple(f"C{number}" for number in range(1, NUM_SPARSE + 1))
COLUMN_NAMES = ("label", *DENSE_NAMES, *SPARSE_NAMES)

DENSE_TRANSFORM = "sign(x) * log1p(|x|) of the raw integer; NaN where it is missing"

LABEL_WORD = 0
PRESENT_WORD = 1
DENSE_WORDS = slice(2, 2 + NUM_DENSE)
SPARSE_WORDS = slice(2 + NUM_DENSE, 2 + NUM_DENSE + NUM_SPARSE)
ROW_WORDS = 2 + NUM_DENSE + NUM_SPARSE
ALL_PRESENT = (1 << NUM_SPARSE) - 1

MAX_INTEGER_DIGITS = 18
MAX_HEX_DIGITS = 8
