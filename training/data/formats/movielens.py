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

FeaturesUntil = Literal["train", "row"]


@data_format
@dataclass(frozen=True, kw_only=True)
class MovieLensConfig(DataConfig):
    """The ratings of a folder of MovieLens.

    Attributes:
        path: the folder.
        split: ``random``: the held-out rows are drawn with ``split_seed``.  ``time``: they are the
            latest ratings, first validation, then test.
        positive_rating (stars): ratings from this one on have label 1 and enter histories.
        max_history (ids): a user's history holds at most this many ids, the latest ones, and as many
            dislikes.
        features: the sparse features, in this order; see `tessera.training.data.movielens`.
        labels: what is predicted: ``positive``, ``top`` (the rating is 5), ``rating`` (a regression).
        features_until: which earlier ratings a row's histories and counts hold.  ``row``: all of them,
            held-out ones, too, as if the server were told of every rating at once.  ``train``: those
            that are trained on, as if nothing were told to the server after training.
    """

    format: Literal["movielens"] = "movielens"
    path: Paths
    split: Split = "random"
    positive_rating: int = 4
    max_history: int = 50
    features: tuple[movielens.Feature, ...] = movielens.SPARSE_NAMES
    labels: tuple[movielens.Label, ...] = ("positive",)
    features_until: FeaturesUntil = "row"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_of(self, "split", Split)
        if len(self.paths()) != 1:
            raise UserError(f"path={self.path!r}: give MovieLens' one folder")
        remedy = "MovieLens rates from 1 to 5; give one of these"
        check.allowed(self, "positive_rating", lambda value: 1 <= value <= 5, remedy)
        check.at_least_one(self, "max_history")
        check.one_of(self, "features_until", FeaturesUntil)
        check.one_of(self, "features", movielens.Feature)
        check.one_of(self, "labels", movielens.Label)
        for name in ("features", "labels"):
            value = getattr(self, name)
            if not value or len(set(value)) != len(value):
                raise UserError(f"{name}={list(value)}: give one or more different names")

    def open(self, *, progress: bool) -> DataSplits:
        """See `DataConfig.open`."""
        return open_sources(self, self._source, split=self.split, progress=progress)

    def _source(self, field: str) -> Source:
        (path,) = self.paths(field)
        source = Path(path).expanduser()
        known = movielens.EVERY_RATING
        if self.features_until == "train":
            known = movielens.Known(self.split, self.held_out(), self.split_seed)
        return Source(
            files=find_layout(source).files(source),
            options={
                "layout": movielens.LAYOUT,
                "positive_rating": self.positive_rating,
                **known.options(),
            },
            write=partial(movielens.write_movielens, source, self.positive_rating, known),
            opened=lambda found: movielens.MovieLensDataset(
                found.path,
                max_history=self.max_history,
                features=self.features,
                labels=self.labels,
            ),
        )
