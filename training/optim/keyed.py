"""Optimizers whose state is addressed by parameter names, and wrappers of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tessera.training.optim.combined_optimizer import CombinedOptimizer
from tessera.training.optim.keyed_optimizer import KeyedOptimizer

__all__ = ["CombinedOptimizer", "KeyedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper"]


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
        self.param_groups = self._optimizer.param_groups

    def _add_named_group(self, param_group: dict[str, Any], /) -> None:
        self._optimizer.add_param_group({**param_group, "params": self._name_new(param_group)})

    def step(self, closure: Any = None) -> Any:
        """One step of the wrapped optimizer."""
        return self._optimizer.step(closure)


class OptimizerWrapper(CombinedOptimizer):
    """An optimizer around another one, which does the work: a combination of one.

    Args:
        optimizer: shares its parameters, states and groups.
    """

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        super().__init__([optimizer])
        self._optimizer = optimizer
        self.params = optimizer.params
        self.state = optimizer.state
        self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        """One step of the wrapped optimizer."""
        return self._optimizer.step(closure)

    def _add_named_group(self, param_group: dict[str, Any], /) -> None:
        self._optimizer.add_param_group(param_group)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Into the wrapped optimizer.

        Raises:
            ValueError: other parameters, other groups, or a state of another shape.
        """
        super().load_state_dict(state_dict)
        self.post_load_state_dict()
