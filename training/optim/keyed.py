"""Optimizers whose state is addressed by parameter names, and wrappers of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer

from tessera.training.optim.combined_optimizer import CombinedOptimizer
from tessera.training.optim.keyed_optimizer import KeyedOptimizer, State

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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One more group; its ``params`` are pairs of name and parameter.

        Raises:
            ValueError: parameters without names, or a name that is there already.
        """
        if not hasattr(self, "params"):
            super().add_param_group(param_group)
            return
        self._optimizer.add_param_group({**param_group, "params": self._name_new(param_group)})

    def step(self, closure: Any = None) -> Any:
        """One step of the wrapped optimizer."""
        return self._optimizer.step(closure)


class OptimizerWrapper(KeyedOptimizer):
    """An optimizer around another one, which does the work.

    Args:
        optimizer: shares its parameters, states and groups.
    """

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        super().__init__(optimizer.params, cast("State", optimizer.state), optimizer.param_groups)
        self._optimizer = optimizer
        self.params = optimizer.params
        self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        """One step of the wrapped optimizer."""
        return self._optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Clear the gradients."""
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One more group of the wrapped optimizer."""
        if hasattr(self, "_optimizer"):
            self._optimizer.add_param_group(param_group)
        else:
            super().add_param_group(param_group)

    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        """The wrapped optimizer's."""
        self._optimizer.init_state(sparse_grad_parameter_names)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Into the wrapped optimizer.

        Raises:
            ValueError: other parameters, other groups, or a state of another shape.
        """
        self._optimizer.load_state_dict(state_dict)
        self.post_load_state_dict()

    def save_param_groups(self, save: bool) -> None:  # noqa: FBT001 - the signature TorchRec users know
        """Whether `state_dict` holds the groups' settings."""
        super().save_param_groups(save)
        self._optimizer.save_param_groups(save)

    def post_load_state_dict(self) -> None:
        """The wrapped optimizer's."""
        self._optimizer.post_load_state_dict()

    def set_optimizer_step(self, step: int) -> None:
        """Set the number of steps done, in every state that has one."""
        self._optimizer.set_optimizer_step(step)

    def update_hyper_parameters(self, params_dict: Mapping[str, Any]) -> None:
        """Set values (``lr``, ``eps``, ...) in every group that has them."""
        self._optimizer.update_hyper_parameters(params_dict)
