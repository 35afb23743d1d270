"""What a config says under ``train.average``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tessera.training import field_checks as check


@dataclass(frozen=True, kw_only=True)
class AverageConfig:
    """An average of the weights over steps, which is evaluated and packaged in their place.

    Attributes:
        kind: ``ema``: an exponential moving average; ``swa``: the mean.
        decay: of an ``ema``, what is left of the average after one step; None: 0.999.
        start (steps): the first step whose weights may count.
        every (steps): the weights behind every so many steps count (of an ``ema`` for as many steps).  Each
            time costs a pass over all weights, tables included, and their averages.
    """

    kind: Literal["ema", "swa"] = "ema"
    decay: float | None = None
    start: int = 0
    every: int = 100

    def __post_init__(self) -> None:
        check.at_least_one(self, "every")
        check.not_negative(self, "start")
        if self.kind == "swa":
            check.allowed(self, "decay", lambda _: False, "swa is a mean; leave decay out")
        check.allowed(self, "decay", lambda value: 0 < value < 1, "give a number between 0 and 1")

    def updates(self, step: int) -> int:
        """How often weights have counted by the end of ``step``, from 1; they do at multiples of every."""
        return max(0, step // self.every - (max(self.start, 1) - 1) // self.every)

    def share(self, number: int) -> float:
        """The share of the weights in the average of update ``number``, from 1, which takes them whole."""
        if number == 1:
            return 1.0
        if self.kind == "swa":
            return 1.0 / number
        return 1.0 - (0.999 if self.decay is None else self.decay) ** self.every
