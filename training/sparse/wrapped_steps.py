"""Functions marked with ``torch.fx.wrap`` as single steps, also where they are given sparse types.

torch keeps such a call as one step if an argument is a proxy.  A jagged tensor that a traced model
builds is none, it holds some (see `outside_script`), so torch would enter the function, whose
branches and loops over values cannot be traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.fx._symbolic_trace as torchs
from torch.fx import Proxy

from tessera.training.sparse.outside_script import OutsideScript

_OF_TORCH = "_create_wrapped_func"
"""torch's function that a tracer calls with each marked function, for what takes its place."""


def _proxy_inside(argument: Any) -> Proxy | None:
    """A proxy that a sparse type in ``argument`` holds; None: there is none."""
    parts: list[Any] = []
    if isinstance(argument, OutsideScript):
        proxies = (part for part in vars(argument).values() if isinstance(part, Proxy))
        return next(proxies, None)
    if isinstance(argument, (list, tuple)):
        parts = list(argument)
    elif isinstance(argument, Mapping):
        parts = list(argument.values())
    return next((found for part in parts if (found := _proxy_inside(part)) is not None), None)


@contextmanager
def wrapped_functions_take_sparse_types() -> Iterator[None]:
    """While a tracer works, keep calls with sparse types that hold proxies as one step.

    The library's own functions are entered as before: what they do is operations on tensors.
    """
    of_torch: Callable[[Any], Callable[..., Any]] = getattr(torchs, _OF_TORCH)

    def create(function: Callable[..., Any]) -> Callable[..., Any]:
        whole = of_torch(function)
        if str(getattr(function, "__module__", "")).partition(".")[0] == "tessera":
            return whole

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            proxy = _proxy_inside((args, kwargs))
            if proxy is None:
                return whole(*args, **kwargs)
            step = proxy.tracer.create_proxy("call_function", function, args, kwargs)
            step.node.meta["is_wrapped"] = True
            return step

        return wrapped

    setattr(torchs, _OF_TORCH, create)
    try:
        yield
    finally:
        setattr(torchs, _OF_TORCH, of_torch)
