"""Optimizers whose state is addressed by parameter names.

A checkpoint written from them does not depend on the order in which parameters were given to
the optimizer, nor on how the tables were laid out in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

State = MutableMapping[Tensor, Any]


class KeyedOptimizer(Optimizer):
    """A torch optimizer with ``state_dict`` keyed by names.

    Learning-rate schedulers of torch work on it: ``param_groups`` are torch's.

    Args:
        params: name to parameter, all parameters of ``param_groups``.
        state: parameter to its state; shared, not copied.
        param_groups: torch's parameter groups; shared, not copied.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        state: State,
        param_groups: Sequence[dict[str, Any]],
    ) -> None:
        super().__init__(list(param_groups), {})
        self.params: dict[str, Tensor] = dict(params)
        self.state = state  # type: ignore[assignment] # torch annotates its default, a defaultdict

    def _names(self) -> dict[Tensor, str]:
        return {parameter: name for name, parameter in self.params.items()}

    def state_dict(self) -> dict[str, Any]:
        """The state by parameter name, and the groups with names instead of parameters.

        Tensors are the live ones, not copies.
        """
        names = self._names()
        return {
            "state": {
                name: dict(self.state[parameter])
                for name, parameter in self.params.items()
                if parameter in self.state
            },
            "param_groups": [
                {
                    key: [names[parameter] for parameter in value] if key == "params" else value
                    for key, value in group.items()
                }
                for group in self.param_groups
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; tensors that exist are filled in place.

        Raises:
            ValueError: other parameters, other groups, or a state of another shape.
        """
        unknown = set(state_dict["state"]) - set(self.params)
        if unknown:
            raise ValueError(f"the state has parameter {min(unknown)!r}, which is not optimized")
        saved_groups = state_dict["param_groups"]
        if len(saved_groups) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(saved_groups)} parameter groups, the optimizer "
                f"{len(self.param_groups)}"
            )
        for name, saved in state_dict["state"].items():
            self._load_parameter(name, saved)
        names = self._names()
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            if {names[parameter] for parameter in group["params"]} != set(saved["params"]):
                raise ValueError("the state's parameter groups hold other parameters")
            group.update({key: value for key, value in saved.items() if key != "params"})

    def _load_parameter(self, name: str, saved: Mapping[str, Any]) -> None:
        parameter = self.params[name]
        known = self.state.get(parameter)
        if known is None:
            self.state[parameter] = {key: _copied(value, parameter) for key, value in saved.items()}
            return
        if known.keys() != saved.keys():
            raise ValueError(f"{name!r} has state {sorted(saved)}; expected {sorted(known)}")
        for key, value in saved.items():
            there = known[key]
            if not isinstance(there, Tensor) or not isinstance(value, Tensor):
                known[key] = value
            elif there.shape == value.shape:
                there.copy_(value)
            else:
                raise ValueError(
                    f"{name!r}: {key} has shape {tuple(value.shape)}; expected {tuple(there.shape)}"
                )


def _copied(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    # torch keeps its step counters, scalars, on the CPU.
    return value.clone() if value.dim() == 0 else value.to(parameter.device, copy=True)


class KeyedOptimizerWrapper(KeyedOptimizer):
    """Any torch optimizer, with its state addressed by names.

    Args:
        params: name to parameter.
        optim_factory: makes the optimizer from the list of parameters.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        optim_factory: Callable[[list[Tensor]], Optimizer],
    ) -> None:
        self._optimizer = optim_factory(list(params.values()))
        super().__init__(params, self._optimizer.state, self._optimizer.param_groups)

    def step(self, closure: Any = None) -> Any:
        """One step of the wrapped optimizer."""
        return self._optimizer.step(closure)


class CombinedOptimizer(KeyedOptimizer):
    """Several keyed optimizers that step together.

    Args:
        optims: optimizers, or pairs of a prefix for their parameters' names and an optimizer.

    Raises:
        ValueError: no optimizer, or a name twice.
    """

    def __init__(self, optims: Iterable[KeyedOptimizer | tuple[str, KeyedOptimizer]]) -> None:
        self._optims = [pair if isinstance(pair, tuple) else ("", pair) for pair in optims]
        if not self._optims:
            raise ValueError("optims is empty; give at least one optimizer")
        params: dict[str, Tensor] = {}
        for prefix, optim in self._optims:
            for name, parameter in optim.params.items():
                full = _join(prefix, name)
                if full in params:
                    raise ValueError(f"two optimizers hold parameter {full!r}; prefix one of them")
                params[full] = parameter
        groups = [group for _, optim in self._optims for group in optim.param_groups]
        super().__init__(params, {}, groups)

    @property
    def optimizers(self) -> list[tuple[str, KeyedOptimizer]]:
        """The parts with their prefixes."""
        return self._optims

    def step(self, closure: Any = None) -> Any:
        """One step of every part; the closure, if any, is evaluated once, before them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for _, optim in self._optims:
            optim.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Clear the gradients of every part."""
        for _, optim in self._optims:
            optim.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The parts' states under their prefixed names."""
        state: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        for prefix, optim in self._optims:
            part = optim.state_dict()
            state.update({_join(prefix, name): value for name, value in part["state"].items()})
            groups.extend(
                {**group, "params": [_join(prefix, name) for name in group["params"]]}
                for group in part["param_groups"]
            )
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            ValueError: other parameters, other groups, or a state of another shape.
        """
        unknown = set(state_dict["state"]) - set(self.params)
        if unknown:
            raise ValueError(f"the state has parameter {min(unknown)!r}, which is not optimized")
        groups = list(state_dict["param_groups"])
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(groups)} parameter groups, the optimizer "
                f"{len(self.param_groups)}"
            )
        for prefix, optim in self._optims:
            own, groups = groups[: len(optim.param_groups)], groups[len(optim.param_groups) :]
            short = {_join(prefix, name): name for name in optim.params}
            optim.load_state_dict(
                {
                    "state": {
                        short[name]: value
                        for name, value in state_dict["state"].items()
                        if name in short
                    },
                    "param_groups": [
                        {**group, "params": [short.get(name, name) for name in group["params"]]}
                        for group in own
                    ],
                }
            )


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
