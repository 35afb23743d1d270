"""What the metrics besides NE share that divide a cross entropy by the entropy of the mean label."""

from __future__ import annotations

from typing import Any

from tessera.training.metrics.ne import ETA
from tessera.training.metrics.sums import SumsComputation


class NESumsComputation(SumsComputation):
    """Sums of cross entropies.

    Args:
        allow_missing_label_with_zero_weight: whether a task without weights reports 1e-12 and not NaN.
    """

    def __init__(
        self, *args: Any, allow_missing_label_with_zero_weight: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._allow_missing = allow_missing_label_with_zero_weight
        self.eta = ETA
