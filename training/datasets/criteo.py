"""Criteo's click logs as streams of rows, and as batches from numpy files.

The text, tab-separated, is described in `tessera.training.data.criteo_format`; here its columns have
TorchRec's names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import IterDataPipe, get_worker_info

from tessera.training.data.criteo_format import NUM_DENSE, NUM_SPARSE
from tessera.training.datasets.criteo_binary import (
    DEFAULT_CAT_NAMES,
    BinaryCriteoUtils,
    InMemoryBinaryCriteoIterDataPipe,
)
from tessera.training.datasets.utils import LoadFiles, ReadLinesFromCSV, safe_cast

__all__ = [
    "CAT_FEATURE_COUNT",
    "COLUMN_TYPE_CASTERS",
    "DAYS",
    "DEFAULT_CAT_NAMES",
    "DEFAULT_COLUMN_NAMES",
    "DEFAULT_INT_NAMES",
    "DEFAULT_LABEL_NAME",
    "INT_FEATURE_COUNT",
    "TOTAL_TRAINING_SAMPLES",
    "BinaryCriteoUtils",
    "CriteoIterDataPipe",
    "InMemoryBinaryCriteoIterDataPipe",
    "criteo_kaggle",
    "criteo_terabyte",
]

INT_FEATURE_COUNT = NUM_DENSE
CAT_FEATURE_COUNT = NUM_SPARSE
DAYS = 24
"""Files of the 1 TB set; the last one is for validation and tests."""
TOTAL_TRAINING_SAMPLES = 4_195_197_692
"""Rows of the 1 TB set's days 0 to 22."""
DEFAULT_LABEL_NAME = "label"
DEFAULT_INT_NAMES = [f"int_{number}" for number in range(INT_FEATURE_COUNT)]
DEFAULT_COLUMN_NAMES = [DEFAULT_LABEL_NAME, *DEFAULT_INT_NAMES, *DEFAULT_CAT_NAMES]

_to_number = partial(safe_cast, dest_type=int, default=0)
_to_text = partial(safe_cast, dest_type=str, default="")
COLUMN_TYPE_CASTERS: list[Callable[[Any], Any]] = [
    *[_to_number] * (1 + INT_FEATURE_COUNT),
    *[_to_text] * CAT_FEATURE_COUNT,
]
"""These turn the texts of `DEFAULT_COLUMN_NAMES` into numbers where they stand for one."""


def _as_dict(row: list[str]) -> dict[str, int | str]:
    """A line's columns by name; one without a label, as in Kaggle's test set, has the others."""
    first = len(DEFAULT_COLUMN_NAMES) - len(row)
    named = zip(DEFAULT_COLUMN_NAMES[first:], COLUMN_TYPE_CASTERS[first:], row, strict=True)
    return {name: cast(text) for name, cast, text in named}


class CriteoIterDataPipe(IterDataPipe[Any]):
    """The rows of Criteo's text files, one file after the other.

    Processes of a DataLoader read some of the files each.

    Args:
        paths: the files.
        row_mapper: a line's texts to a sample; without one given, to a dict by column name; None: the
            texts themselves.
        **open_kw: further arguments of ``open``.
    """

    def __init__(
        self,
        paths: Iterable[str],
        *,
        row_mapper: Callable[[list[str]], Any] | None = _as_dict,
        **open_kw: Any,
    ) -> None:
        super().__init__()
        self.paths = paths
        self.row_mapper = row_mapper
        self._open_kw = open_kw

    def __iter__(self) -> Iterator[Any]:
        """The samples of this process's files."""
        worker = get_worker_info()
        paths = list(self.paths)
        own = paths if worker is None else paths[worker.id :: worker.num_workers]
        files = LoadFiles(own, mode="r", **self._open_kw)
        for row in ReadLinesFromCSV(files, delimiter="\t"):
            yield row if self.row_mapper is None else self.row_mapper(row)


def criteo_terabyte(
    paths: Iterable[str],
    *,
    row_mapper: Callable[[list[str]], Any] | None = _as_dict,
    **open_kw: Any,
) -> IterDataPipe[Any]:
    """The rows of Criteo's 1 TB click logs; see `CriteoIterDataPipe`."""
    return CriteoIterDataPipe(paths, row_mapper=row_mapper, **open_kw)


def criteo_kaggle(
    path: str,
    *,
    row_mapper: Callable[[list[str]], Any] | None = _as_dict,
    **open_kw: Any,
) -> IterDataPipe[Any]:
    """The rows of a file of Kaggle's Display Advertising Challenge; see `CriteoIterDataPipe`."""
    return CriteoIterDataPipe((path,), row_mapper=row_mapper, **open_kw)
