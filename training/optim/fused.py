"""Settings of the optimizers that update a table inside the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum, unique
from typing import Any

from tessera.training.optim.keyed import KeyedOptimizer


@unique
class EmbOptimType(Enum):
    """The optimizers that fused tables know, under the names that FBGEMM gives them."""

    EXACT_SGD = "exact_sgd"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"


@dataclass(frozen=True, kw_only=True)
class FusedParams:
    """How fused tables are updated.

    "Exact" means that a row's gradients of one batch are added up before its one update.

    Attributes:
        optimizer: ``EXACT_SGD``: ``w -= lr * g``.  ``EXACT_ADAGRAD``: ``s += g * g``,
            ``w -= lr * g / (sqrt(s) + eps)`` per number.  ``EXACT_ROWWISE_ADAGRAD``: the same
            with one ``s`` per row, which grows by the mean of ``g * g`` over the row.
        learning_rate: ``lr``.
        eps: see above.
        weight_decay: rows that a batch touches shrink by ``lr * weight_decay`` of themselves
            before their update (decoupled, lazy).

    Raises:
        ValueError: a value that makes no sense.
    """

    optimizer: EmbOptimType = EmbOptimType.EXACT_ROWWISE_ADAGRAD
    learning_rate: float = 0.01
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "weight_decay"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"fused_params: {name} is {value}; give 0 or more")

    @classmethod
    def from_dict(cls, fused_params: Mapping[str, Any]) -> FusedParams:
        """Read a dict as TorchRec's sharders take it.

        ``optimizer`` may be an `EmbOptimType` of ours or of FBGEMM's, or its value.

        Raises:
            ValueError: an unknown key, or an optimizer that fused tables do not know.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(fused_params) - set(known))
        if unknown:
            raise ValueError(f"fused_params has key {unknown[0]!r}; it knows {', '.join(known)}")
        values = dict(fused_params)
        if "optimizer" in values:
            wanted = values["optimizer"]
            wanted = getattr(wanted, "value", wanted)
            names = {kind.value: kind for kind in EmbOptimType}
            if wanted not in names:
                raise ValueError(
                    f"fused_params: optimizer is {wanted!r}; give one of {', '.join(names)}"
                )
            values["optimizer"] = names[wanted]
        return cls(**values)


class FusedOptimizer(KeyedOptimizer):
    """An optimizer whose work is done by the backward pass.

    ``step`` and ``zero_grad`` have nothing left to do.  A change of ``lr`` or ``eps`` in
    ``param_groups`` holds from the next forward pass on.
    """

    def step(self, closure: Any = None) -> Any:
        """Only evaluate the closure, if any: the tables were updated in the backward pass."""
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Nothing to clear: fused tables have no gradients."""
