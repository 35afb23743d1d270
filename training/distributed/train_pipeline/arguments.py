"""Where in a batch the arguments of a module are: steps that lead there from the batch.

Each argument is a list of steps, the first of which is given the batch and each next one what the step
before it gave.  The names are those of ``torchrec.distributed.train_pipeline.tracing`` and ``.types`` of
TorchRec 1.8; `BatchPart` is what its reference calls ``ArgInfo``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any


class BaseArgInfoStep(ABC):
    """One step on the way from a batch to an argument."""

    @abstractmethod
    def process(self, arg: Any) -> Any:
        """Return what the step makes of ``arg``, the batch or what the step before gave."""


@dataclass
class NoopArgInfoStep(BaseArgInfoStep):
    """Gives what it is given."""

    def process(self, arg: Any) -> Any:
        """Return ``arg``."""
        return arg


@dataclass
class GetAttrArgInfoStep(BaseArgInfoStep):
    """Takes an attribute.

    Attributes:
        attr_name: its name.
    """

    attr_name: str

    def process(self, arg: Any) -> Any:
        """Return the attribute of ``arg``.

        Raises:
            AttributeError: it has none of that name.
        """
        return getattr(arg, self.attr_name)


@dataclass
class GetItemArgInfoStep(BaseArgInfoStep):
    """Takes an item.

    Attributes:
        item_index: its key or its place.
    """

    item_index: Any

    def process(self, arg: Any) -> Any:
        """Return the item of ``arg``.

        Raises:
            LookupError: there is none.
        """
        return arg[self.item_index]


@dataclass
class ScalarArgInfoStep(BaseArgInfoStep):
    """Gives a value that is written in the model.

    Attributes:
        value: of any type.
    """

    value: Any

    def process(self, arg: Any) -> Any:
        """Return the value, whatever ``arg`` is."""
        del arg
        return self.value


@dataclass
class ListArgInfoStep(BaseArgInfoStep):
    """Makes a list or a tuple.

    Attributes:
        value: a list or a tuple of its elements; an `ArgInfo` is taken from the batch, everything else is
            as it is.
    """

    value: list[Any] | tuple[Any, ...]

    def process(self, arg: Any) -> list[Any] | tuple[Any, ...]:
        """Return the elements for the batch ``arg``; a tuple where ``value`` is one."""
        taken = [_taken(element, arg) for element in self.value]
        return tuple(taken) if isinstance(self.value, tuple) else taken


@dataclass
class DictArgInfoStep(BaseArgInfoStep):
    """Makes a dictionary.

    Attributes:
        value: its entries; an `ArgInfo` is taken from the batch, everything else is as it is.
    """

    value: dict[Any, Any]

    def process(self, arg: Any) -> dict[Any, Any]:
        """Return the entries for the batch ``arg``."""
        return {key: _taken(element, arg) for key, element in self.value.items()}


def _taken(element: Any, batch: Any) -> Any:
    return element.process_steps(batch) if isinstance(element, ArgInfo) else element


@dataclass
class ArgInfo:
    """Says how an argument is taken from a batch.

    Attributes:
        steps: the first is given the batch, each next one what the step before it gave.
    """

    steps: list[BaseArgInfoStep]

    def add_step(self, step: BaseArgInfoStep) -> ArgInfo:
        """Put a step before all others; return this."""
        self.steps.insert(0, step)
        return self

    def append_step(self, step: BaseArgInfoStep) -> ArgInfo:
        """Put a step behind all others; return this."""
        self.steps.append(step)
        return self

    def process_steps(self, arg: Any) -> Any:
        """Return the argument for the batch ``arg``; None without steps, as in TorchRec."""
        if not self.steps:
            return None
        for step in self.steps:
            arg = step.process(arg)
        return arg


@dataclass
class CallArgs:
    """Says what a module is called with.

    Attributes:
        args: its positional arguments.
        kwargs: its arguments by name.
    """

    args: list[ArgInfo]
    kwargs: dict[str, ArgInfo]

    def build_args_kwargs(self, initial_input: Any) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional arguments and those by name for a batch."""
        return (
            [info.process_steps(initial_input) for info in self.args],
            {name: info.process_steps(initial_input) for name, info in self.kwargs.items()},
        )
