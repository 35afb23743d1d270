"""How often a cache of a table's rows has an id, from a histogram of how soon ids come again."""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.training.distributed.plan.plan_types import CacheStatistics


class EmbeddingOffloadStats(CacheStatistics):
    """What a recorded stream of ids tells of caches that drop the row used longest ago.

    An id that comes again after ``d`` other distinct ids is in every such cache of more than ``d`` rows
    (Mattson et al., "Evaluation techniques for storage hierarchies", 1970).  The planner's estimates take
    the hit rate from here where a table's ``cache_params`` have it.

    Args:
        cacheability: area under the curve of miss rates over cache sizes, 0 (easy) to 1.
        expected_lookups: distinct ids of a step, of all ranks together.
        mrc_hist_counts: ``[n]``; the ``i``-th number counts the lookups whose distance ``d`` is in the
            ``i``-th of ``n`` equal ranges from 0 to the table's rows.
        height: rows of the table.

    Raises:
        ValueError: ``mrc_hist_counts`` has another number of dimensions, or no entry.
    """

    def __init__(
        self, cacheability: float, expected_lookups: int, mrc_hist_counts: Tensor, height: int
    ) -> None:
        if mrc_hist_counts.dim() != 1:
            raise ValueError(
                f"mrc_hist_counts has {mrc_hist_counts.dim()} dimensions; expected 1d tensor"
            )
        if not mrc_hist_counts.numel():
            raise ValueError("mrc_hist_counts has no entry; expected non-empty tensor")
        self._cacheability = cacheability
        self._expected_lookups = expected_lookups
        self.height = height
        self.hist = mrc_hist_counts
        self.bins = torch.linspace(0, height, len(mrc_hist_counts) + 1)

    def __repr__(self) -> str:
        # The same in every process, for hashes of planners' inputs.
        return (
            f"EmbeddingOffloadStats(cacheability={self._cacheability}, "
            f"expected_lookups={self._expected_lookups}, mrc_hist_counts={self.hist.tolist()}, "
            f"height={self.height})"
        )

    @property
    def expected_lookups(self) -> int:
        """Distinct ids of a step, of all ranks together."""
        return self._expected_lookups

    @property
    def cacheability(self) -> float:
        """Area under the curve of miss rates over cache sizes, 0 (easy) to 1."""
        return self._cacheability

    def expected_miss_rate(self, clf: float) -> float:
        """Share of the lookups that a cache of ``clf`` times the rows does not hold."""
        size = torch.tensor(clf * self.height)
        return float(self.estimate_cache_miss_rate(size, self.hist, self.bins))

    @staticmethod
    def estimate_cache_miss_rate(cache_sizes: Tensor, hist: Tensor, bins: Tensor) -> Tensor:
        """Miss rates of caches of several sizes; a range of distances counts as a hit as a whole.

        Args:
            cache_sizes: rows, of any shape.
            hist: ``[n]``, lookups by their distance.
            bins: ``[n + 1]``, the limits of the ranges of distances.

        Returns:
            Float32 of the shape of ``cache_sizes``; 0 where there are no lookups.
        """
        total = hist.sum()
        if total == 0:
            return torch.zeros_like(cache_sizes, dtype=torch.float32)
        # By the number of limits at or below the largest distance that hits: before the first, then after
        # each range, then beyond the last.
        after = 1 - hist.cumsum(0) / total
        rates = torch.cat([after.new_ones(1), after, after.new_zeros(1)])
        return rates[torch.bucketize(cache_sizes - 1, bins, right=True)]
