"""Fitting a run's transforms by partitions of the training rows, on all cores or on a Ray cluster.

A partition is a range of `PART_ROWS` rows in the rows' own order, read in batches of `BATCH_ROWS`; the sums of
all are merged in their order.  So what is learned is a function of the rows alone: it has the same bits in
any number of processes, on any engine, and whatever the run's batches are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from tessera.errors import UserError
from tessera.partitions import Engine, LocalEngine
from tessera.training.data.config import DataConfig
from tessera.training.data.dataset import View
from tessera.training.data.loader import BatchLoader
from tessera.training.data.opening import open_data
from tessera.training.data.remote import RemoteFile
from tessera.training.data.table.view import TableDataset, TableView
from tessera.training.transforms.description import Transforms
from tessera.training.transforms.fitting import (
    Fitted,
    FittingPass,
    Sums,
    fit_in_parts,
    fitting_passes,
)

BATCH_ROWS = 1 << 15
"""Rows of a batch, whatever the run's: sums are then added in the same order by every run."""

PART_ROWS = 8 * BATCH_ROWS
"""Rows of a partition."""


@dataclass
class FittingWork:
    """Sums partitions, by their numbers, for one pass; see `tessera.partitions.Work`.

    Attributes:
        one: the pass.
        data: where another machine finds the rows; None: nowhere.
        rows: how many there are.
        view: the rows, on this machine; they do not travel.
    """

    one: FittingPass
    data: DataConfig | None
    rows: int
    view: View | None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "view": None}

    def start(self) -> Callable[[int], Sums]:
        """See `tessera.partitions.Work.start`."""
        if self.view is None:
            if self.data is None:
                raise UserError(
                    "these rows can be read by this machine alone; fit with the local engine"
                )
            self.view = open_data(self.data, progress=False).train
            if len(self.view) != self.rows:
                raise UserError(
                    f"data.path has {len(self.view)} training rows on one machine of the cluster and"
                    f" {self.rows} on another; give all the same files"
                )
        view = self.view
        if isinstance(view, TableView) and not self.one.looks_at_ids:
            view = view.of_dense()
        loader = BatchLoader(
            view, batch_size=BATCH_ROWS, shuffle=False, seed=0, prefetch=0, numbered=True
        )

        def sums(number: int) -> Sums:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # with more, sums over rows are added in another order
            try:
                per_part = PART_ROWS // BATCH_ROWS
                first = number * per_part
                last = min(first + per_part, loader.num_batches)
                found = self.one.sums(loader.epoch(0, first, last))
                found.settle()
            finally:
                torch.set_num_threads(threads)
            return found

        return sums


def fit_transforms(
    transforms: Transforms,
    train: View,
    *,
    progress: bool,
    engine: Engine | None = None,
    data: DataConfig | None = None,
) -> Fitted:
    """What ``transforms`` learn from the rows of ``train``, and the dense columns' ranges.

    No rows are read where nothing is learned and there are no dense columns.

    Args:
        transforms: what is fitted.
        train: the rows.
        progress: whether to show a progress bar on a terminal.
        engine: where partitions are worked on; None: processes over all cores.
        data: where other machines of an engine find the rows.

    Raises:
        UserError: the engine cannot be used, or a process was killed too often.
    """
    engine = engine or LocalEngine()
    if isinstance(engine, LocalEngine) and _is_remote(train):
        engine = LocalEngine(processes=1)
    passes = fitting_passes(transforms)
    with tqdm(
        total=passes * len(train),
        unit=" rows",
        unit_scale=True,
        desc="Fitting transforms",
        disable=None if progress and passes else True,  # None: only on a terminal
    ) as bar:

        def parts(one: FittingPass) -> Iterator[Sums]:
            work = FittingWork(one, data, len(train), train)
            for number, sums in engine.map(work, range(-(-len(train) // PART_ROWS))):
                yield sums
                bar.update(min(PART_ROWS, len(train) - number * PART_ROWS))

        return fit_in_parts(transforms, parts)


def _is_remote(view: View) -> bool:
    """Whether rows are read from a remote file system, whose threads would not be in a forked process."""
    dataset = view.dataset
    return isinstance(dataset, TableDataset) and any(
        isinstance(file.path, RemoteFile) for file in dataset.files
    )
