"""What the optimizers' constructors, steps and states share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch


def value_of(closure: Callable[[], Any] | None) -> Any:
    """What ``closure`` gives, its gradients computed; None where there is none."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def refuse_negative(settings: Mapping[str, Any]) -> None:
    """Refuse settings (numbers, or tuples of them) that are negative or no numbers.

    Raises:
        ValueError: naming the setting.
    """
    for name, value in settings.items():
        if any(not part >= 0 for part in (value if isinstance(value, tuple) else (value,))):
            raise ValueError(f"{name} is {value}; give 0 or more")


def refuse_unknown(saved: Iterable[str], there: Iterable[str]) -> None:
    """Refuse a state of parameters that an optimizer does not have.

    Raises:
        ValueError: naming the first.
    """
    unknown = set(saved) - set(there)
    if unknown:
        raise ValueError(f"the state has parameter {min(unknown)!r}, which is not optimized")
