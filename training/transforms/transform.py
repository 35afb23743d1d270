"""What a transform is, the registry of all of them, and how a column's YAML items are read.

A column's ``transform`` is a list of items, applied in order.  An item is a transform's name
(``log1p``), or a mapping of the name to its settings (``{clip: {low: 0, high: 1000}}``); a value that is
not a mapping is the transform's main setting (``{clip: [0, 1000]}``).

Each transform is one file of `tessera.training.transforms.kinds`: a frozen dataclass with the settings
of one column, and how all columns that have it are computed at once.

Shapes: ``B`` samples, ``F`` dense columns, ``N`` ids of all features.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.training.config_source import ConfigSource
from tessera.training.transforms import kinds
from tessera.training.typed_config import build

Item = str | Mapping[str, Any]
"""One entry of a column's ``transform``, as YAML gives it."""


class DenseAccumulator(Protocol):
    """What one pass over the training rows tells a fitted transform."""

    def update(self, values: Tensor, rows: Tensor) -> None:
        """Take a batch: ``[B, F]`` float32, as the transforms before give them, and ``[B]`` row numbers."""

    def merge(self, later: Any) -> None:
        """Take what another accumulator of the same stage learned from the rows behind this one's."""

    def state(self) -> dict[str, Tensor]:
        """The stage's buffers of these names, fitted."""


class DenseStage(nn.Module):
    """One transform applied to all columns that have it at the same place of their lists.

    Args:
        settings: by column, its settings; None where the column does not have the transform.
        names: the columns' names.
    """

    def __init__(self, settings: Sequence[DenseTransform | None], names: Sequence[str]) -> None:
        super().__init__()
        self.settings = tuple(settings)
        self.names = tuple(names)
        self._everywhere = None not in self.settings
        self.where_F: Tensor
        has = torch.tensor([own is not None for own in settings], dtype=torch.bool)
        self.register_buffer("where_F", has, persistent=False)

    def constant(self, name: str, values: Sequence[float], dtype: torch.dtype) -> None:
        """Register the buffer ``name`` ``[F]``, which follows from the settings."""
        self.register_buffer(name, torch.tensor(values, dtype=dtype), persistent=False)

    def chosen(self, new: Tensor, old: Tensor) -> Tensor:
        """``new`` in the columns that have the transform, ``old`` in the others; ``[B, F]`` both."""
        return new if self._everywhere else torch.where(self.where_F, new, old)

    def forward(self, values: Tensor, raw: Tensor) -> Tensor:
        """``[B, F]`` float32 to the same shape and type; NaN means missing.

        ``values`` are what the transforms before gave, ``raw`` what the data holds.
        """
        raise NotImplementedError

    def steps(self) -> Tensor | None:
        """The same as a step of ``tessera::dense_steps``, ``[F, 3]`` float64; None: it is not one."""
        return None

    def accumulator(self) -> DenseAccumulator | None:
        """What learns the stage's buffers from the training rows; None: nothing is learned."""
        return None


def step_table(steps: Iterable[tuple[float, float, float]]) -> Tensor:
    """``[F, 3]`` float64: by column, the kind and the settings of a step."""
    return torch.tensor(list(steps), dtype=torch.float64).view(-1, 3)


class Transform:
    """The settings of one transform of one column; subclasses are frozen dataclasses.

    Attributes:
        name: what a YAML file calls it.
        takes: ``dense`` or ``ids``: what kind of column has it.
        main: the setting that a value which is not a mapping stands for; empty: there is none.
    """

    name: ClassVar[str]
    takes: ClassVar[str]
    main: ClassVar[str] = ""


class DenseTransform(Transform):
    """A transform of float values.

    Attributes:
        stage: the module for all columns that have it.
    """

    takes: ClassVar[str] = "dense"
    stage: ClassVar[type[DenseStage]]

    @property
    def rows(self) -> int | None:
        """Ids ``[0, rows)`` that the values become; None where they stay values."""
        return None

    @property
    def reads(self) -> tuple[str, ...]:
        """Other dense columns whose raw values it reads."""
        return ()


class IdTransform(Transform):
    """A rule for the ids of a feature; `Preprocessor` knows each of them."""

    takes: ClassVar[str] = "ids"


T = TypeVar("T", bound=type[Transform])
_TRANSFORMS: dict[str, type[Transform]] = {}


def transform(cls: T) -> T:
    """Register a transform under its name; a decorator.

    Raises:
        ValueError: another one has that name.
    """
    if _TRANSFORMS.get(cls.name, cls).__qualname__ != cls.__qualname__:
        raise ValueError(f"transform {cls.name!r} is registered twice; give {cls} another name")
    _TRANSFORMS[cls.name] = cls
    return cls


def transforms_by_name(takes: str) -> dict[str, type[Transform]]:
    """The transforms of ``dense`` columns or of ``ids``, by their names."""
    for found in pkgutil.iter_modules(kinds.__path__):
        importlib.import_module(f"{kinds.__name__}.{found.name}")
    return {name: cls for name, cls in sorted(_TRANSFORMS.items()) if cls.takes == takes}


def parse_chain(field: str, takes: str, items: Sequence[Item]) -> tuple[Transform, ...]:
    """The transforms of one column, in order.

    Args:
        field: the dotted key for messages, such as ``columns.price.transform``.
        takes: ``dense`` or ``ids``.
        items: the list of the YAML file.

    Raises:
        UserError: an unknown transform or setting, or a value that it cannot have; the message
            names the field, the value and the remedy.
    """
    if isinstance(items, str | Mapping) or not isinstance(items, Sequence):
        raise UserError(f"{field}={items!r}: give a list, such as [log1p, standardize]")
    return tuple(_parse(f"{field}[{place}]", takes, item) for place, item in enumerate(items))


def _parse(field: str, takes: str, item: Item) -> Transform:
    if isinstance(item, Mapping) and len(item) == 1:
        ((name, settings),) = item.items()
    elif isinstance(item, str):
        name, settings = item, {}
    else:
        raise UserError(f"{field}={item!r}: give one transform's name, or {{name: settings}}")
    cls = _find(field, takes, str(name))
    if not isinstance(settings, Mapping):
        if not cls.main:
            known = ", ".join(own.name for own in dataclasses.fields(cls))  # type: ignore[arg-type] # every one is a dataclass
            remedy = f"give its settings ({known}) as a mapping" if known else f"write {name} alone"
            raise UserError(f"{field}.{name}={settings!r}: {remedy}")
        settings = {cls.main: settings}
    return build(cls, ConfigSource(values=dict(settings), origins={(): f"{field}.{name}"}))


def _find(field: str, takes: str, name: str) -> type[Transform]:
    known = transforms_by_name(takes)
    if name in known:
        return known[name]
    other = transforms_by_name("ids" if takes == "dense" else "dense")
    words = {"dense": "dense columns", "ids": "columns of ids"}
    if name in other:
        raise UserError(
            f"{field}={name!r} is for {words[other[name].takes]}; {words[takes]} take"
            f" {', '.join(known)}"
        )
    near = difflib.get_close_matches(name, [*known, *other], n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"{field}={name!r}: no such transform; give one of {', '.join(known)}{hint}")
