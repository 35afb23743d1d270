"""How the scores of a model are spread, by output.

Scores wait until there are many, as the values of `feature_counts` do.  The buckets are the same for every model and in
both servers, so that models and versions can be compared and added.  Owned by the event loop's thread, as all counters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tessera.serving.server.metrics.histogram import Histogram

# fmt: off
SCORE_BUCKETS = (
    0.0, .001, .002, .005, .01, .02, .05, .1, .15, .2, .25, .3, .4,
    .5, .6, .7, .8, .9, .95, .98, .99, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 100.0, 1000.0,
)
# fmt: on
"""Upper bounds: narrow where probabilities of rare events lie, narrower again towards 1, and wide above 1 for ratings and
amounts.  None is below 0, as OpenMetrics forbids such a histogram a sum."""

NUMBERS_OF_OUTPUT = len(SCORE_BUCKETS) + 3
"""What is counted of one output: its buckets with the one above every bound, their sum, and what is not finite."""

_BOUNDS = np.array(SCORE_BUCKETS)
_MOST_SCORES = 8_192
"""Scores that wait: looking at them takes a fraction of a millisecond."""


class ScoreCounts:
    """Counts the scores of a model's passes.

    Attributes:
        histograms: by output, of the finite scores that were looked at.
        not_finite: by output, how many were NaN or infinite.

    Args:
        outputs: those with one number for each sample; others are not counted.
    """

    def __init__(self, outputs: Sequence[str]) -> None:
        self.histograms = {name: Histogram(SCORE_BUCKETS) for name in outputs}
        self.not_finite = dict.fromkeys(outputs, 0)
        self._waiting: dict[str, list[bytes]] = {name: [] for name in outputs}
        self._bytes = 0

    def take(self, scores: Mapping[str, bytes]) -> None:
        """Count the scores of some samples, by output as little-endian float32, at the latest when somebody asks."""
        for name, waiting in self._waiting.items():
            content = scores[name]
            waiting.append(content)
            self._bytes += len(content)
        if self._bytes > 4 * _MOST_SCORES:
            self.count()

    def count(self) -> None:
        """Count those that wait."""
        if not self._bytes:
            return
        self._bytes = 0
        for name, waiting in self._waiting.items():
            scores = np.frombuffer(b"".join(waiting), "<f4")
            waiting.clear()
            finite = scores[np.isfinite(scores)].astype(np.float64)
            self.not_finite[name] += len(scores) - len(finite)
            histogram = self.histograms[name]
            buckets = np.searchsorted(_BOUNDS, finite, side="left")
            for bucket, more in enumerate(np.bincount(buckets).tolist()):
                histogram.counts[bucket] += more
            histogram.sum += float(finite.sum())

    def counted(self) -> list[list[float]]:
        """By output its buckets, their sum and what is not finite, as `add` takes it."""
        self.count()
        return [
            [*histogram.counts, histogram.sum, self.not_finite[name]]
            for name, histogram in self.histograms.items()
        ]

    def add(self, counted: Sequence[Sequence[float]]) -> None:
        """Count what another one has counted, too."""
        for (name, histogram), (*buckets, total, not_finite) in zip(
            self.histograms.items(), counted, strict=True
        ):
            for bucket, more in enumerate(buckets):
                histogram.counts[bucket] += int(more)
            histogram.sum += total
            self.not_finite[name] += int(not_finite)
