"""Results that are on their way: wait for them as late as possible.

`Awaitable` has a ``wait()``.  `LazyAwaitable` can be handed to torch functions, or used like its
result, as if it had been waited for: the first use waits.
"""

from __future__ import annotations

import operator
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch.fx._symbolic_trace import ProxyableClassMeta, is_fx_symbolic_tracing

W = TypeVar("W")


class Awaitable(ABC, Generic[W]):
    """A result that ``wait()`` returns, after the callbacks."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[W], W]] = []

    @abstractmethod
    def _wait_impl(self) -> W:
        """Wait, and give the result that the callbacks then see."""

    def wait(self) -> W:
        """The result, each callback applied in turn.  Call it once."""
        result = self._wait_impl()
        for callback in self._callbacks:
            result = callback(result)
        return result

    @property
    def callbacks(self) -> list[Callable[[W], W]]:
        """What is done to the result, in order; append to it before waiting."""
        return self._callbacks


class NoWait(Awaitable[W]):
    """Wraps a result that is here already.

    Args:
        obj: the result.
    """

    def __init__(self, obj: W) -> None:
        super().__init__()
        self._obj = obj

    def _wait_impl(self) -> W:
        return self._obj


class GenericMeta(type):
    """The plain metaclass of generic classes, for building on it."""


class _LazyMeta(GenericMeta, ABCMeta, ProxyableClassMeta):
    """Lets ``torch.fx`` record the making of a lazy result from traced values."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        # What the base class asks (is_fx_tracing) logs a warning on every program's first call.
        if not is_fx_symbolic_tracing():
            return type.__call__(cls, *args, **kwargs)
        return super().__call__(*args, **kwargs)


class LazyAwaitable(Awaitable[W], metaclass=_LazyMeta):
    """An `Awaitable` that waits by itself when its result is first used.

    Used in a torch function, as operand, by index, or by an attribute of the result.  In a
    function that takes two of them the first is waited for before the second.  An attribute
    that this class has itself (``wait``, ``callbacks``) is its own, not the result's.

    ``wait()`` may be called more than once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._result: W | None = None

    def wait(self) -> W:
        """Return the result after applying each callback in turn."""
        if self._result is None:
            self._result = super().wait()
        return self._result

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        return func(*_waited(tuple(args)), **_waited(dict(kwargs or {})))

    def __getattr__(self, name: str) -> Any:
        if name in {"_result", "_callbacks"} or (name.startswith("__") and name.endswith("__")):
            # Asked before __init__, or by a protocol such as copy: the result has no say in it.
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.wait(), name)

    __hash__ = object.__hash__


def _waited(argument: Any) -> Any:
    """``argument`` with every lazy result in it waited for."""
    if isinstance(argument, LazyAwaitable):
        return argument.wait()
    if isinstance(argument, list):
        return [_waited(part) for part in argument]
    if type(argument) is tuple:
        return tuple(_waited(part) for part in argument)
    if isinstance(argument, dict):
        return {key: _waited(part) for key, part in argument.items()}
    return argument


# Python looks operators up on the class, past __getattr__.
_OPERATORS: dict[str, Callable[..., Any]] = {
    "__bool__": operator.truth,
    "__call__": lambda function, *args, **kwargs: function(*args, **kwargs),
    "__delitem__": operator.delitem,
    "__float__": float,
    "__index__": operator.index,
    "__int__": int,
    "__iter__": iter,
    "__len__": len,
    "__reversed__": reversed,
    "__setitem__": operator.setitem,
    **{
        f"__{name.strip('_')}__": getattr(operator, name)
        for name in (
            *("abs", "contains", "eq", "ge", "getitem", "gt", "invert", "le", "lt", "ne"),
            *("neg", "pos"),
        )
    },
}
_TWO_SIDED = (
    *("add", "and_", "floordiv", "lshift", "matmul", "mod", "mul", "or_", "pow", "rshift"),
    *("sub", "truediv", "xor"),
)


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: LazyAwaitable[Any], *args: Any, **kwargs: Any) -> Any:
        return function(self.wait(), *_waited(args), **kwargs)

    return method


def _reflect(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: LazyAwaitable[Any], other: Any) -> Any:
        return function(_waited(other), self.wait())

    return method


for _name, _function in _OPERATORS.items():
    setattr(LazyAwaitable, _name, _forward(_function))
for _name in _TWO_SIDED:
    _plain = _name.strip("_")
    setattr(LazyAwaitable, f"__{_plain}__", _forward(getattr(operator, _name)))
    setattr(LazyAwaitable, f"__r{_plain}__", _reflect(getattr(operator, _name)))


class LazyNoWait(NoWait[W], LazyAwaitable[W]):
    """A `LazyAwaitable` whose result is here already.

    Args:
        obj: the result.
    """
