"""Several keyed optimizers as one."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

from torch import Tensor

from tessera.training.optim.keyed_optimizer import (
    KeyedOptimizer,
    State,
    grouped_as_here,
    names_per_group,
)
from tessera.training.optim.steps import refuse_unknown, value_of


class CombinedOptimizer(KeyedOptimizer):
    """Several keyed optimizers that step together.

    Args:
        optims: optimizers, or pairs of a prefix for their parameters' names and an optimizer.

    Raises:
        ValueError: no optimizer, or a name twice.
    """

    def __init__(self, optims: Iterable[KeyedOptimizer | tuple[str, KeyedOptimizer]]) -> None:
        groups, states = self._combine(optims)
        super().__init__(self._named(), ChainMap(*states), groups)

    def _combine(
        self, optims: Iterable[KeyedOptimizer | tuple[str, KeyedOptimizer]]
    ) -> tuple[list[dict[str, Any]], list[State]]:
        """Take the optimizers; return their groups and states."""
        self._optims = [pair if isinstance(pair, tuple) else ("", pair) for pair in optims]
        if not self._optims:
            raise ValueError("optims is empty; give at least one optimizer")
        groups = [group for _, optim in self._optims for group in optim.param_groups]
        return groups, [cast("State", optim.state) for _, optim in self._optims]

    def _named(self) -> dict[str, Tensor]:
        params: dict[str, Tensor] = {}
        for prefix, optim in self._optims:
            for name, parameter in optim.params.items():
                full = _join(prefix, name)
                if full in params:
                    raise ValueError(f"two optimizers hold parameter {full!r}; prefix one of them")
                params[full] = parameter
        return params

    def replace_parts(self, optims: Iterable[KeyedOptimizer | tuple[str, KeyedOptimizer]]) -> None:
        """Stand for other optimizers from now on; arguments and errors as of the constructor."""
        groups, states = self._combine(optims)
        self.params = self._named()
        self.state = ChainMap(*states)  # type: ignore[assignment] # torch annotates its default, a defaultdict
        self.param_groups[:] = groups

    def _add_named_group(self, _group: dict[str, Any], /) -> None:
        raise ValueError(
            "a combined optimizer takes no new groups; combine it with one more optimizer"
        )

    def save_param_groups(self, save: bool) -> None:  # noqa: FBT001 - the signature TorchRec users know
        """Whether `state_dict` holds the groups' settings, of every part."""
        super().save_param_groups(save)
        for _, optim in self._optims:
            optim.save_param_groups(save)

    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        """Initialise the state of every part; names are the prefixed ones."""
        sparse = set(sparse_grad_parameter_names or ())
        for prefix, optim in self._optims:
            optim.init_state({name for name in optim.params if _join(prefix, name) in sparse})

    def post_load_state_dict(self) -> None:
        """Finish the loading of every part."""
        for _, optim in self._optims:
            optim.post_load_state_dict()

    @staticmethod
    def prepend_opt_key(name: str, opt_key: str) -> str:
        """The name that a part's parameter has here."""
        return _join(opt_key, name)

    @property
    def optimizers(self) -> list[tuple[str, KeyedOptimizer]]:
        """The parts with their prefixes."""
        return self._optims

    def step(self, closure: Any = None) -> Any:
        """One step of every part; the closure, if any, is evaluated once, before them."""
        loss = value_of(closure)
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
                for group in part.get("param_groups", [])
            )
        return {"state": state, **({"param_groups": groups} if self._saves_param_groups else {})}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            ValueError: other parameters, other groups, or a state of another shape.
        """
        refuse_unknown(state_dict["state"], self.params)
        has_groups = "param_groups" in state_dict
        groups = list(state_dict.get("param_groups", []))
        if has_groups:
            there = [
                {_join(prefix, name) for name in names}
                for prefix, optim in self._optims
                for names in names_per_group(optim)
            ]
            groups = grouped_as_here(groups, there)
        for prefix, optim in self._optims:
            own, groups = groups[: len(optim.param_groups)], groups[len(optim.param_groups) :]
            short = {_join(prefix, name): name for name in optim.params}
            states = state_dict["state"].items()
            part: dict[str, Any] = {
                "state": {short[name]: state for name, state in states if name in short}
            }
            if has_groups:
                part["param_groups"] = [
                    {**group, "params": [short.get(name, name) for name in group["params"]]}
                    for group in own
                ]
            optim.load_state_dict(part)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
