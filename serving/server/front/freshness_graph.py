"""How fresh the scores of followed versions were in the last ten minutes, as the status page draws it.

Freshness is the age of the newest training example that a version has seen.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tessera.serving.server.metrics.follow_metrics import FollowedVersion

GRAPH_SECONDS = 600
GRAPH_HEIGHT = 60
_LEAST_SECONDS = 0.001  # of the graph's height


@dataclass(frozen=True, kw_only=True)
class FreshnessGraph:
    """One version's.

    Attributes:
        model: its model's name.
        version: its number and commit, such as ``3.42``.
        seconds: now.
        most: the largest of what is drawn.
        points: of an SVG's polyline, `GRAPH_SECONDS` wide and `GRAPH_HEIGHT` high.
    """

    model: str
    version: str
    seconds: float
    most: float
    points: str


class FreshnessHistory:
    """Notes the freshness of each followed version.

    Args:
        clock: seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._noted: dict[tuple[str, str], deque[tuple[float, float]]] = {}

    def note(self, versions: Sequence[FollowedVersion]) -> None:
        """Note them as they are; to be called about once a second."""
        now = self._clock()
        kept = {}
        for row in versions:
            if row.commit is None or row.newest_example_s is None:
                continue
            place = row.model, row.version
            noted = kept[place] = self._noted.get(place, deque())
            noted.append((now, now - row.newest_example_s))
            while now - noted[0][0] > GRAPH_SECONDS:
                noted.popleft()
        self._noted = kept

    def graphs(self, versions: Sequence[FollowedVersion]) -> list[FreshnessGraph]:
        """What is drawn of ``versions``, of those that were noted."""
        found = []
        for row in versions:
            noted = self._noted.get((row.model, row.version))
            if not noted or row.newest_example_s is None:
                continue
            now = self._clock()
            most = max(*(age for _, age in noted), _LEAST_SECONDS)
            points = " ".join(
                f"{GRAPH_SECONDS - (now - at):.0f},{GRAPH_HEIGHT * (1 - max(age, 0) / most):.1f}"
                for at, age in noted
            )
            found.append(
                FreshnessGraph(
                    model=row.model,
                    version=f"{row.version}.{row.commit}",
                    seconds=now - row.newest_example_s,
                    most=most,
                    points=points,
                )
            )
        return found
