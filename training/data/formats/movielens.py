"""``format: movielens``: a folder in MovieLens' 100K or 1M layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from tessera.errors import UserError
from tessera.training import field_checks as check
from tessera.training.data import movielens
from tessera.training.data.config import DataConfig, Paths, Split, data_format
from tessera.training.data.dataset import DataSplits
from tessera.training.data.movielens_read import find_layout
from tessera.training.data.opening import Source, open_sources


@data_format
@dataclass(frozen=True, kw_only=True)
class MovieLensConfig(DataConfig):
    """The ratings of a folder of MovieLens.

    Attributes:
        path: the folder.
        split: ``random``: the held-out rows are drawn with ``split_seed``.  ``time``: they are the
            latest ratings, first validation, then test.
        positive_rating (stars): ratings from this one on have label 1 and enter histories.
        max_history (ids): a user's history holds at most this many ids, the latest ones.
    """

    format: Literal["movielens"] = "movielens"
    path: Paths
    split: Split = "random"
    positive_rating: int = 4
    max_history: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_of(self, "split", Split)
        if len(self.paths()) != 1:
            raise UserError(f"path={self.path!r}: give MovieLens' one folder")
        remedy = "MovieLens rates from 1 to 5; give one of these"
        check.allowed(self, "positive_rating", lambda value: 1 <= value <= 5, remedy)
        check.at_least_one(self, "max_history")

    def open(self, *, progress: bool) -> DataSplits:
        """See `DataConfig.open`."""
        return open_sources(self, self._source, split=self.split, progress=progress)

    def _source(self, field: str) -> Source:
        (path,) = self.paths(field)
        source = Path(path).expanduser()
        return Source(
            files=find_layout(source).files(source),
            options={"layout": movielens.LAYOUT, "positive_rating": self.positive_rating},
            write=partial(movielens.write_movielens, source, self.positive_rating),
            opened=lambda found: movielens.MovieLensDataset(
                found.path, max_history=self.max_history
            ),
        )
