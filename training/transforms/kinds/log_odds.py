"""``{log_odds: COUNT_COLUMN}``: the log-odds of a count among the count of another column."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tessera.errors import UserError
from tessera.training.transforms.transform import DenseStage, DenseTransform, transform


class _Stage(DenseStage):
    def __init__(self, settings: Sequence[DenseTransform | None], names: Sequence[str]) -> None:
        super().__init__(settings, names)
        self.of_F: Tensor
        self.added_F: Tensor
        own = [one if isinstance(one, LogOdds) else None for one in settings]
        self.constant("of_F", [names.index(o.of) if o else 0 for o in own], torch.int64)
        self.constant("added_F", [o.added if o else 1.0 for o in own], torch.float64)

    def forward(self, values: Tensor, raw: Tensor) -> Tensor:
        some = values.double()
        rest = raw.index_select(1, self.of_F).double() - some
        odds = (some + self.added_F) / (rest + self.added_F)
        return self.chosen(torch.log(odds).float(), values)


@transform
@dataclass(frozen=True, kw_only=True)
class LogOdds(DenseTransform):
    """``log((x + added) / (n - x + added))`` where ``n`` is the raw value of the column ``of``.

    Attributes:
        of: the dense column that holds ``n``.
        added: draws small counts towards even odds.
    """

    name: ClassVar[str] = "log_odds"
    stage: ClassVar[type[DenseStage]] = _Stage
    main: ClassVar[str] = "of"

    of: str
    added: float = 0.5

    def __post_init__(self) -> None:
        if not (math.isfinite(self.added) and self.added > 0):
            raise UserError(f"added={self.added}: give a finite number above 0")

    @property
    def reads(self) -> tuple[str, ...]:
        """The column that counts all."""
        return (self.of,)
