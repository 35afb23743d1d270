"""Fitting a run's transforms: one or more passes over the training rows, in their own order."""

from __future__ import annotations

from collections.abc import Iterator

from tqdm import tqdm

from tessera.training.data.batch import Batch
from tessera.training.data.dataset import View
from tessera.training.data.loader import BatchLoader
from tessera.training.transforms.description import Transforms
from tessera.training.transforms.fitting import Fitted, fit, fitting_passes

BATCH_ROWS = 1 << 15
"""Rows of a batch, whatever the run's: sums are then added in the same order by every run."""


def fit_transforms(transforms: Transforms, train: View, *, progress: bool) -> Fitted:
    """What ``transforms`` learn from the rows of ``train``, and the dense columns' ranges.

    No rows are read where nothing is learned and there are no dense columns.

    ``progress`` shows a progress bar on a terminal.
    """
    loader = BatchLoader(train, batch_size=BATCH_ROWS, shuffle=False, seed=0, numbered=True)
    passes = fitting_passes(transforms)
    with tqdm(
        total=passes * len(train),
        unit=" rows",
        unit_scale=True,
        desc="Fitting transforms",
        disable=None if progress and passes else True,  # None: only on a terminal
    ) as bar:

        def epoch() -> Iterator[Batch]:
            for batch in loader.epoch(0):
                yield batch
                bar.update(batch.size)

        return fit(transforms, epoch)
