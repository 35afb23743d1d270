"""What the open loops of `tessera.serving.bench.freshness` found, by kind of phase."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass
class Calls:
    """What the open loops' calls of one kind of phase came to.

    Attributes:
        p99_ms: of each phase.
        stolen: what the host took of the CPUs in each phase, 0 to 1.
        right: answers with the bits of the commit that they name.
        near: on a GPU, other answers that differ from these by no more than a rounding.
        wrong: other answers.
        failed: calls without one.
        late: of each call in the order of the phases, milliseconds after the last commit and of its latency.
    """

    p99_ms: list[float] = field(default_factory=list)
    stolen: list[float] = field(default_factory=list)
    right: int = 0
    near: int = 0
    wrong: int = 0
    failed: int = 0
    late: list[tuple[float, float]] | None = None


def median_p99_ms(calls: Calls, most_stolen: float) -> float:
    """The median p99 of the phases in which the host took at most ``most_stolen`` of the CPUs; of all where there is none."""
    of_phases = zip(calls.p99_ms, calls.stolen, strict=True)
    counted = [p99_ms for p99_ms, stolen in of_phases if stolen <= most_stolen]
    return statistics.median(counted or calls.p99_ms)
