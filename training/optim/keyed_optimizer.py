"""Optimizers whose state is addressed by parameter names.

A checkpoint written from them does not depend on the order in which parameters were given to
the optimizer, nor on how the tables were laid out in memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.optim import Optimizer

from tessera.training.optim.steps import refuse_unknown

State = MutableMapping[Tensor, Any]


class KeyedOptimizer(Optimizer):
    """A torch optimizer with ``state_dict`` keyed by names.

    Learning-rate schedulers of torch work on it: ``param_groups`` are torch's.  Parameters and
    states may be ``ShardedTensor``s: what is loaded into one has the same shards.

    Args:
        params: name to parameter, all parameters of ``param_groups``.
        state: parameter to its state; shared, not copied.
        param_groups: torch's parameter groups; shared, not copied.
    """

    params: dict[str, Tensor]

    def __init__(
        self,
        params: Mapping[str, Tensor],
        state: State,
        param_groups: Sequence[dict[str, Any]],
    ) -> None:
        with warnings.catch_warnings():
            # Torch's constructor looks at each parameter, and a ShardedTensor that is looked at
            # warns that DTensor is to follow it; it has no form for uneven shards yet.
            warnings.filterwarnings("ignore", "Please use DTensor", FutureWarning)
            super().__init__(list(param_groups), {})
        self.params = dict(params)
        self.state = state  # type: ignore[assignment] # torch annotates its default, a defaultdict
        self._saves_param_groups = True

    def __getstate__(self) -> dict[str, Any]:
        """All attributes, for copies and pickles; torch's own would leave the names out."""
        return dict(self.__dict__)

    def save_param_groups(self, save: bool) -> None:  # noqa: FBT001 - the signature TorchRec users know
        """Whether `state_dict` holds the groups' settings (it does unless told otherwise)."""
        self._saves_param_groups = save

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One more group; its ``params`` are pairs of name and parameter.

        Raises:
            ValueError: parameters without names, a name that is there already, or an optimizer whose
                parameters are fixed.
        """
        if hasattr(self, "params"):
            self._add_named_group(param_group)
        else:  # torch's constructor brings the first groups
            super().add_param_group(param_group)

    def _add_named_group(self, param_group: dict[str, Any], /) -> None:
        super().add_param_group({**param_group, "params": self._name_new(param_group)})

    def _name_new(self, param_group: Mapping[str, Any]) -> list[Tensor]:
        pairs = list(param_group["params"])
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise ValueError(
                "params of a new group has parameters without names; give pairs of name and parameter"
            )
        twice = sorted({name for name, _ in pairs} & set(self.params))
        if twice:
            raise ValueError(f"parameter {twice[0]!r} is optimized already; give another name")
        self.params.update(pairs)
        return [parameter for _, parameter in pairs]

    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        """Make the state that the first step would make, so that one can be loaded in place.

        Weights stay as they are, and the state is that of no step.

        Args:
            sparse_grad_parameter_names: parameters whose gradients are sparse tensors.
        """
        sparse = set(sparse_grad_parameter_names or ())
        for name, parameter in self.params.items():
            if not parameter.requires_grad:
                continue
            zero = torch.zeros_like(parameter)
            parameter.grad = zero.to_sparse(1) if name in sparse else zero
        held = [
            {key: group[key] for key in ("lr", "weight_decay") if key in group}
            for group in self.param_groups
        ]
        for group, values in zip(self.param_groups, held, strict=True):
            group.update(dict.fromkeys(values, 0.0))
        self.step()
        for group, values in zip(self.param_groups, held, strict=True):
            group.update(values)
        self.zero_grad(set_to_none=True)
        self.set_optimizer_step(0)

    def set_optimizer_step(self, step: int) -> None:
        """Set the number of steps done, in every state that has one."""
        for state in self.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"].fill_(step)
            elif "step" in state:
                state["step"] = step

    def update_hyper_parameters(self, params_dict: Mapping[str, Any]) -> None:
        """Set values (``lr``, ``eps``, ...) in every group that has them.

        Raises:
            ValueError: no group has one of them.
        """
        for name, value in params_dict.items():
            groups = [group for group in self.param_groups if name in group]
            if not groups:
                raise ValueError(f"no parameter group has {name!r}; there is nothing to set")
            for group in groups:
                group[name] = value

    def post_load_state_dict(self) -> None:
        """What must happen after a state was loaded, in place or by `load_state_dict`."""

    def _names(self) -> dict[Tensor, str]:
        return {parameter: name for name, parameter in self.params.items()}

    def state_dict(self) -> dict[str, Any]:
        """The state by parameter name, and the groups with names instead of parameters.

        Tensors are the live ones, not copies.
        """
        names = self._names()
        content: dict[str, Any] = {
            "state": {
                name: dict(self.state[parameter])
                for name, parameter in self.params.items()
                if parameter in self.state
            }
        }
        if self._saves_param_groups:
            content["param_groups"] = [
                {
                    key: [names[parameter] for parameter in value] if key == "params" else value
                    for key, value in group.items()
                }
                for group in self.param_groups
            ]
        return content

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; tensors that exist are filled in place.

        Raises:
            ValueError: other parameters, other groups, or a state of another shape.
        """
        refuse_unknown(state_dict["state"], self.params)
        saved_groups = state_dict.get("param_groups")
        if saved_groups is not None:
            saved_groups = grouped_as_here(saved_groups, names_per_group(self))
        for name, saved in state_dict["state"].items():
            self._load_parameter(name, saved)
        names = self._names()
        for group, saved in zip(self.param_groups, saved_groups or [], strict=False):
            if {names[parameter] for parameter in group["params"]} != set(saved["params"]):
                raise ValueError("the state's parameter groups hold other parameters")
            group.update({key: value for key, value in saved.items() if key != "params"})
        self.post_load_state_dict()

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
            if isinstance(there, ShardedTensor) and isinstance(value, ShardedTensor):
                _copy_shards(f"{name!r}: {key}", value, there)
            elif not isinstance(there, Tensor) or not isinstance(value, Tensor):
                known[key] = value
            elif there.shape == value.shape:
                there.copy_(value)
            else:
                raise ValueError(
                    f"{name!r}: {key} has shape {tuple(value.shape)}; expected {tuple(there.shape)}"
                )


def names_per_group(optimizer: KeyedOptimizer) -> list[set[str]]:
    """The names of each group's parameters."""
    names = {parameter: name for name, parameter in optimizer.params.items()}
    return [{names[parameter] for parameter in group["params"]} for group in optimizer.param_groups]


def grouped_as_here(
    saved: Sequence[dict[str, Any]], there: Sequence[set[str]]
) -> list[dict[str, Any]]:
    """The groups of a state, one for each group of the optimizer, in its order.

    Tables that one operator serves are a group.  A state has more groups than the optimizer, or other
    places for them, where it was saved with table-wise and column-wise tables in operators of their own,
    which are in one now.  Groups that are parts of one count as one, if they have the same settings.
    A state with as many groups and other parameters is returned as it is.

    Args:
        saved: groups of a state, with names for ``params``.
        there: the names in each of the optimizer's groups.

    Raises:
        ValueError: the state has another number of groups, and they are not parts of these.
    """
    if [set(group["params"]) for group in saved] == list(there):
        return list(saved)
    left, joined = list(saved), []
    for names in there:
        parts = [group for group in left if names.issuperset(group["params"])]
        parts = [group for group in parts if group["params"]] if names else parts[:1]
        settings = [{**group, "params": None} for group in parts]
        params = [name for group in parts for name in group["params"]]
        if not parts or set(params) != names or any(own != settings[0] for own in settings):
            break
        left = [group for group in left if all(group is not part for part in parts)]
        joined.append({**settings[0], "params": params})
    if left or len(joined) < len(there):
        if len(saved) == len(there):
            return list(saved)
        raise ValueError(f"the state has {len(saved)} parameter groups, the optimizer {len(there)}")
    return joined


def _copy_shards(what: str, source: ShardedTensor, target: ShardedTensor) -> None:
    """Fill the local shards of ``target``."""
    given = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in source.local_shards()}
    for shard in target.local_shards():
        found = given.get(tuple(shard.metadata.shard_offsets))
        if found is None or found.shape != shard.tensor.shape:
            raise ValueError(
                f"{what} has other shards than the optimizer; load it through "
                "tessera.training.distributed.checkpoint, which cuts it anew"
            )
        shard.tensor.copy_(found)


def _copied(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    # torch keeps its step counters, scalars, on the CPU.
    return value.clone() if value.dim() == 0 else value.to(parameter.device, copy=True)
