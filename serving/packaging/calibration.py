"""The rows on which a package's activations are measured, where its dense type needs that."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from torch import Tensor

from tessera.serving.package.schema import InputSchema
from tessera.serving.packaging.evaluate import LabelledBatch, host_batch
from tessera.serving.packaging.write.golden import golden_batch

CALIBRATION_ROWS = 4096
"""About how many rows are measured."""


def calibration_samples(
    batches: Iterable[LabelledBatch], schema: InputSchema
) -> list[tuple[Tensor, ...]]:
    """A graph's six arguments for the first `CALIBRATION_ROWS` rows; the golden batch where there are none."""
    taken = [host_batch(arguments, schema).tensors() for arguments, _ in first_rows(batches)]
    return [*taken] or [golden_batch(schema).tensors()]


def first_rows(batches: Iterable[LabelledBatch]) -> Iterator[LabelledBatch]:
    """The first batches, up to the one in which `CALIBRATION_ROWS` are reached."""
    rows = 0
    for arguments, labels in batches:
        yield arguments, labels
        rows += len(labels)
        if rows >= CALIBRATION_ROWS:
            return


def looked_at(
    batches: Iterable[LabelledBatch],
) -> tuple[list[LabelledBatch], Iterable[LabelledBatch]]:
    """The first rows, and all rows once more, also where they can be gone through only once."""
    through = iter(batches)
    first = list(first_rows(through))
    return first, itertools.chain(first, through) if through is batches else batches
