"""What a checkpoint holds, whichever library wrote it, and what of it is converted to what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from tessera.errors import UserError

State = Tensor | float
"""One state of a parameter's optimizer: a tensor, or a plain number such as a count of steps."""


class ConversionError(UserError):
    """A checkpoint that cannot be converted; the text names the entry and what to do."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """Holds the tensors of a checkpoint by the names that its library gives them.

    Attributes:
        model: entries of the model's state dict, whole tensors.
        states: of optimizers, by the parameter's name and the state's.
        columns: by the name of a table whose columns are cut into k > 1 shards, where each shard
            begins, and the number of columns at the end.
        cut_both_ways: names of tables that are cut into blocks of rows and of columns.
        left_out: what the checkpoint holds besides, each as a text with the reason.
    """

    model: dict[str, Tensor]
    states: dict[str, dict[str, State]] = field(default_factory=dict)
    columns: dict[str, list[int]] = field(default_factory=dict)
    cut_both_ways: frozenset[str] = frozenset()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Line:
    """Says what became of one entry.

    Attributes:
        name: in the source.
        shape: in the source; None: a plain number.
        new_name: in the result.
        new_shape: in the result.
        change: what was done to the numbers; empty: nothing.
    """

    name: str
    shape: tuple[int, ...] | None
    new_name: str
    new_shape: tuple[int, ...] | None
    change: str = ""

    @property
    def changed(self) -> bool:
        """Whether anything differs."""
        return bool(self.change) or self.name != self.new_name or self.shape != self.new_shape

    def __str__(self) -> str:
        """The line of the listing."""
        old, new = _with_shape(self.name, self.shape), _with_shape(self.new_name, self.new_shape)
        said = f" ({self.change})" if self.change else ""
        return f"{old} -> {new}{said}" if self.changed else f"{old}: as it is"


def _with_shape(name: str, shape: tuple[int, ...] | None) -> str:
    return name if shape is None else f"{name} {list(shape)}"


def shape_of(value: State) -> tuple[int, ...] | None:
    """The shape of a tensor; None of a number."""
    return tuple(value.shape) if isinstance(value, Tensor) else None


def parameter_of(name: str, model: Mapping[str, Tensor]) -> str:
    """The entry of ``model`` that an optimizer's name belongs to; empty: there is none.

    A combined optimizer may put the name of one of its parts before a parameter's name.
    """
    while name:
        if name in model:
            return name
        name = name.partition(".")[2]
    return ""
