"""Where in a batch the arguments of a module are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class ArgInfo:
    """Says which part of the batch an argument is.

    Attributes:
        input_attrs: names or keys on the way into the batch; empty: the batch itself.
        is_getitems: for each of them, whether it is ``[key]`` rather than ``.name``.
        name: of a keyword argument; None for a positional one.
        constant: the argument itself, where it is not a part of the batch but written in the model.
        is_constant: whether it is.
        source: gives what the way starts from, called with the batch; None: the batch itself.
    """

    input_attrs: list[Any]
    is_getitems: list[bool]
    name: str | None
    constant: Any = None
    is_constant: bool = False
    source: Callable[[Any], Any] | None = None

    def take(self, batch: Any) -> Any:
        """Return the argument for this batch."""
        if self.is_constant:
            return self.constant
        value = batch if self.source is None else self.source(batch)
        for attribute, is_item in zip(self.input_attrs, self.is_getitems, strict=True):
            value = value[attribute] if is_item else getattr(value, attribute)
        return value
