"""Criteo's columns, and the order in which a prepared row keeps them.

A line of the text is tab-separated: ``label`` (0 or 1), 13 integers ``I1``..``I13``, 26 categories
``C1``..``C26`` of up to 8 hexadecimal digits.  An empty integer or category is a missing one.
Source: the read-me of Criteo's Kaggle Display Advertising data set.

A prepared row is 41 words of 32 bits, stored column by column:

    word 0        label, float32
    word 1        bit k is set where category C(k+1) is present
    words 2-14    the integers as float32; NaN where missing
    words 15-40   the categories' 32-bit values; 0 where missing
"""

from __future__ import annotations

from tessera.training.data.columns import DenseColumn, FeatureColumns, LabelColumn, SparseColumn

NUM_DENSE = 13
NUM_SPARSE = 26
NUM_COLUMNS = 1 + NUM_DENSE + NUM_SPARSE

DENSE_NAMES = tuple(f"I{number}" for number in range(1, NUM_DENSE + 1))
SPARSE_NAMES = tuple(f"C{number}" for number in range(1, NUM_SPARSE + 1))
COLUMNS = FeatureColumns(
    # Counts over several orders of magnitude, a few of them negative.
    dense=tuple(DenseColumn(name=name, transform=("log1p",)) for name in DENSE_NAMES),
    sparse=tuple(SparseColumn(name=name, hex=True) for name in SPARSE_NAMES),
    labels=(LabelColumn(name="label"),),
)
COLUMN_NAMES = ("label", *DENSE_NAMES, *SPARSE_NAMES)

LABEL_WORD = 0
PRESENT_WORD = 1
DENSE_WORDS = slice(2, 2 + NUM_DENSE)
SPARSE_WORDS = slice(2 + NUM_DENSE, 2 + NUM_DENSE + NUM_SPARSE)
ROW_WORDS = 2 + NUM_DENSE + NUM_SPARSE
ALL_PRESENT = (1 << NUM_SPARSE) - 1

MAX_INTEGER_DIGITS = 18
MAX_HEX_DIGITS = 8
