"""One model's counters: plain values that the event loop's thread owns, no locks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.serving.server.batching.policy import CutReason
from tessera.serving.server.errors import REQUEST_CODES, Code, RejectReason
from tessera.serving.server.metrics.counted_names import NO_NAMES, CountedNames
from tessera.serving.server.metrics.feature_counts import FeatureCounter
from tessera.serving.server.metrics.histogram import Histogram
from tessera.serving.server.metrics.range_counts import RANGE_BUCKETS
from tessera.serving.server.metrics.score_counts import ScoreCounts
from tessera.serving.server.request.decoded_request import PassTimings

# fmt: off
LATENCY_BUCKETS = (
    .0001, .0002, .0003, .0006, .001, .002, .003, .004, .005, .006, .008, .01, .013, .016, .02,
    .025, .03, .04, .05, .065, .08, .1, .2, .5, 1.0, 2.0, 5.0,
)
# fmt: on
"""Upper bounds in seconds."""

REQUEST_BUCKETS = tuple(float(1 << power) for power in range(13))
SAMPLE_BUCKETS = tuple(float(1 << power) for power in range(17))
ID_BUCKETS = tuple(float(1 << power) for power in range(23))

_NUMBERS = ("answered_seconds", "answered_samples", "ids", "out_of_range_ids")

STAGES = ("decode", "queue", "assemble", "transfer", "forward", "split", "encode")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The facts of ``tessera_model_info``.

    Attributes:
        sha256: of the package's file, once it is known; the label is empty until then.
        torch: the version that made it.
        dtype: the weight type of its tables.
    """

    sha256: Callable[[], str | None]
    torch: str
    dtype: str


class ModelMetrics:
    """One model's counters.

    Args:
        model: the name that requests use.
        version: the version that is loaded.
        names: the features and outputs whose values are counted.

    Attributes:
        missing_values: by feature, in the order of ``names.missing``.
        outside_values: by feature, in the order of ``names.outside``.
        positions: by feature of ``names.ranged``, where its values lie in the range of the training rows.
        scores: how its scores are spread, by output.
        feature_counter: counts them where requests are answered; None elsewhere.
        answered_seconds: of the calls that got scores, what ``duration`` counts of all.
        answered_samples: samples of those calls.
        was_loaded: whether the model is not loaded any more.
        last_answer_ms: when the last of them ended, milliseconds since 1970.
    """

    def __init__(self, model: str, version: str, names: CountedNames = NO_NAMES) -> None:
        self.model = model
        self.version = version
        self.names = names
        self.feature_counter: FeatureCounter | None = None
        self.reset()
        self.info: ModelInfo | None = None
        self.unload()

    def unload(self) -> None:
        """Show that the model is not loaded, and refer to nothing of it; what was counted stays."""
        if self.feature_counter is not None:
            self.look_at_features()
        self.was_loaded = self.info is not None
        self.feature_counter = None
        self.load_seconds = 0.0
        self.ready = False
        self.device = "cpu"
        self.info = None
        self.queue_requests: Callable[[], int] = _zero
        self.queue_samples: Callable[[], int] = _zero
        self.inflight_batches: Callable[[], int] = _zero
        # Of those, by device; empty while the model is not loaded.
        self.inflight_by_device: dict[str, Callable[[], int]] = {}
        # By device and kind.
        self.memory_bytes: dict[tuple[str, str], Callable[[], int]] = {}

    def reset(self) -> None:
        """Begin to count anew."""
        self.requests: dict[Code, int] = dict.fromkeys(REQUEST_CODES, 0)
        self.rejected = dict.fromkeys(RejectReason, 0)
        self.batches = dict.fromkeys(CutReason, 0)
        self.duration = Histogram(LATENCY_BUCKETS)
        self.answered_seconds = 0.0
        self.answered_samples = 0
        self.last_answer_ms = 0
        self.stages = {stage: Histogram(LATENCY_BUCKETS) for stage in STAGES}
        self.batch_requests = Histogram(REQUEST_BUCKETS)
        self.batch_samples = Histogram(SAMPLE_BUCKETS)
        self.batch_ids = Histogram(ID_BUCKETS)
        self.ids = 0
        self.out_of_range_ids = 0
        self.missing_values = [0] * len(self.names.missing)
        self.outside_values = [0] * len(self.names.outside)
        self.positions = {name: Histogram(RANGE_BUCKETS) for name in self.names.ranged}
        self.scores = ScoreCounts(self.names.outputs)

    def look_at_features(self) -> None:
        """Count the values of the requests that wait for it."""
        if (counter := self.feature_counter) is None:
            return
        counter.count()
        for own, found in (
            (self.missing_values, counter.missing),
            (self.outside_values, counter.outside),
        ):
            own[:] = [past + new for past, new in zip(own, found.tolist(), strict=True)]
            found[:] = 0
        numbers_GN = counter.ranges.numbers_GN
        _add_each(self.positions.values(), numbers_GN.tolist())
        numbers_GN[:] = 0

    def counted(self) -> dict[str, Any]:
        """Everything that only grows, as `add` takes it and JSON can write it."""
        self.look_at_features()
        return {
            "features": [self.missing_values, self.outside_values],
            "positions": [[*one.counts, one.sum] for one in self.positions.values()],
            "scores": self.scores.counted(),
            "tables": [list(table.values()) for table in self._tables()],
            "histograms": [[*histogram.counts, histogram.sum] for histogram in self._histograms()],
            "numbers": [getattr(self, name) for name in _NUMBERS],
            "last_answer_ms": self.last_answer_ms,
        }

    def add(self, counted: dict[str, Any]) -> None:
        """Count what another one has counted, too."""
        for table, counts in zip(self._tables(), counted["tables"], strict=True):
            for key, count in zip(list(table), counts, strict=True):
                table[key] += count
        _add_each(self._histograms(), counted["histograms"])
        _add_each(self.positions.values(), counted["positions"])
        for name, number in zip(_NUMBERS, counted["numbers"], strict=True):
            setattr(self, name, getattr(self, name) + number)
        for own, counts in zip(
            (self.missing_values, self.outside_values), counted["features"], strict=True
        ):
            own[:] = [past + new for past, new in zip(own, counts, strict=True)]
        self.scores.add(counted["scores"])
        self.last_answer_ms = max(self.last_answer_ms, counted["last_answer_ms"])

    def _tables(self) -> tuple[dict[Any, int], ...]:
        return self.requests, self.rejected, self.batches

    def _histograms(self) -> tuple[Histogram, ...]:
        batches = (self.batch_requests, self.batch_samples, self.batch_ids)
        return (self.duration, *self.stages.values(), *batches)

    def observe_call(self, code: Code, seconds: float, samples: int) -> None:
        """Count one call that has ended."""
        self.requests[code] += 1
        self.duration.observe(seconds)
        if code is Code.OK:
            self.answered_seconds += seconds
            self.answered_samples += samples
            self.last_answer_ms = time.time_ns() // 1_000_000

    def observe_pass(self, timings: PassTimings) -> None:
        """Count one forward pass."""
        stages = self.stages
        stages["assemble"].observe(timings.assemble)
        stages["transfer"].observe(timings.transfer)
        stages["forward"].observe(timings.forward)
        stages["split"].observe(timings.split)
        self.batch_requests.observe(timings.requests)
        self.batch_samples.observe(timings.samples)
        self.batch_ids.observe(timings.ids)
        self.ids += timings.ids


def _add_each(histograms: Iterable[Histogram], counted: Sequence[Sequence[float]]) -> None:
    """Add to each histogram its buckets' counts and, behind them, the sum."""
    for histogram, (*buckets, total) in zip(histograms, counted, strict=True):
        for bucket, count in enumerate(buckets):
            histogram.counts[bucket] += int(count)
        histogram.sum += total


def _zero() -> int:
    return 0
