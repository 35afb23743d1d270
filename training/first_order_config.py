"""What a config says under ``train.first_order_optimizer``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tessera.training import field_checks as check


@dataclass(frozen=True, kw_only=True)
class FirstOrderOptimizerConfig:
    """The optimizer of the weights of ids in a first-order term, fused into its backward pass.

    A list's weights are summed, so that the term's slope grows with the length of lists and its learning
    rate is best a good deal below that of the tables.

    Attributes:
        name: which one.  ``sgd`` keeps no state, ``adagrad`` one number per weight.
        learning_rate: its peak; see `ScheduleConfig`.
        weight_decay: a weight that a batch touches first shrinks by ``learning_rate *
            weight_decay`` of itself.
    """

    name: Literal["sgd", "adagrad"] = "adagrad"
    learning_rate: float = 0.02
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check.positive(self, "learning_rate")
        check.not_negative(self, "weight_decay")
