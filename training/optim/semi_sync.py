"""Local steps by one optimizer, and after some of them a global step by another.

Workers far from each other train copies of a model by themselves and meet once in a while, as DiLoCo does
(arXiv 2311.08105): the optimizer of the meeting compares the copies of the parameters with what they were at
the last one.  That is the global optimizer's work, which this module only calls when it is due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist

from tessera.training.optim.keyed_optimizer import KeyedOptimizer
from tessera.training.optim.steps import refuse_unknown

SEMI_SYNC_GLOBAL_OPTIM_KEY = "semi_sync_global_optim"
SEMI_SYNC_LOCAL_OPTIM_KEY = "semi_sync_local_optim"
SEMI_SYNC_GLOBAL_STATE_KEY = "semi_sync_global_"
SEMI_SYNC_LOCAL_STATE_KEY = "semi_sync_local_"
SEMISYNC_GLOBAL_STEP_COUNTER_KEY = "__semisync_global_step_counter__"
SEMISYNC_LOCAL_STEP_COUNTER_KEY = "__semisync_local_step_counter__"

_COUNTERS = frozenset({SEMISYNC_GLOBAL_STEP_COUNTER_KEY, SEMISYNC_LOCAL_STEP_COUNTER_KEY})


class SemisyncOptimizer(KeyedOptimizer):
    """Steps of a local optimizer; after each ``num_local_steps`` of them one of a global optimizer.

    The state of a parameter holds the entries of both, after ``semi_sync_local_`` and
    ``semi_sync_global_``, and of a parameter that the global optimizer has a state of also both counts
    of steps, int64 tensors on the CPU.  `state_dict` has TorchRec's form.  Groups are those of the local
    optimizer, then those of the global one; they are not saved unless `save_param_groups` asks for it.

    Args:
        global_params: the parameters, or groups, that workers have in common; there must be one.
        optimizer: steps every time.
        global_optimizer: wraps (``_optimizer``, as `KeyedOptimizerWrapper` has it) an optimizer with a method
            ``global_step(local_steps, closure)``, whose first argument is the count of local steps.
        num_local_steps: local steps for a global one.
        semi_sync_worker_shard_group: the ranks of this worker, kept for who asks for it.

    Raises:
        ValueError: no parameters, no steps, a name that stands for two parameters, or a global optimizer
            without ``global_step``.
    """

    def __init__(
        self,
        global_params: Iterable[Any],
        optimizer: KeyedOptimizer,
        global_optimizer: KeyedOptimizer,
        num_local_steps: int = 16,
        semi_sync_worker_shard_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not list(global_params):
            raise ValueError("global_params is empty; give the parameters that workers share")
        if num_local_steps < 1:
            raise ValueError(f"num_local_steps is {num_local_steps}; give 1 or more")
        inner = getattr(global_optimizer, "_optimizer", None)
        if not callable(getattr(inner, "global_step", None)):
            raise ValueError(  # noqa: TRY004 - the optimizer inside is wrong, not an argument's type
                f"global_optimizer wraps {type(inner).__name__}, which has no method global_step; wrap one "
                "that has it in a KeyedOptimizerWrapper"
            )
        self._optimizer, self._global_optimizer = optimizer, global_optimizer
        self._global_step: Callable[[Tensor, Any], Any] = cast("Any", inner).global_step
        self._num_local_steps = num_local_steps
        self.semi_sync_worker_shard_group = semi_sync_worker_shard_group
        self._local_step_counter = torch.zeros((), dtype=torch.int64)
        self._global_step_counter = torch.zeros((), dtype=torch.int64)
        _ = self.params  # refuses a name that stands for two parameters
        # torch's constructor would make one group of both, and each parameter may be in one only.
        self.defaults = {"_save_param_groups": False}
        self._saves_param_groups = False

    @property
    def _parts(self) -> tuple[tuple[str, KeyedOptimizer], tuple[str, KeyedOptimizer]]:
        return (
            (SEMI_SYNC_LOCAL_STATE_KEY, self._optimizer),
            (SEMI_SYNC_GLOBAL_STATE_KEY, self._global_optimizer),
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The local optimizer's groups, then the global one's."""
        return [group for _, part in self._parts for group in part.param_groups]

    @property
    def params(self) -> dict[str, Tensor]:  # type: ignore[override]
        """Both optimizers' parameters by name, and the counts of steps.

        Raises:
            ValueError: a name that stands for two parameters.
        """
        params = dict(self._optimizer.params)
        for name, parameter in self._global_optimizer.params.items():
            if params.setdefault(name, parameter) is not parameter:
                raise ValueError(
                    f"{name!r} is one parameter of the local optimizer and another of the global one; "
                    "give them two names"
                )
        return params | self._counters()

    def _counters(self) -> dict[str, Tensor]:
        return {
            SEMISYNC_GLOBAL_STEP_COUNTER_KEY: self._global_step_counter,
            SEMISYNC_LOCAL_STEP_COUNTER_KEY: self._local_step_counter,
        }

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:  # type: ignore[override]
        """Both optimizers' states by parameter; a new dictionary of the live tensors."""
        state: dict[Tensor, dict[str, Any]] = {}
        for prefix, part in self._parts:
            for parameter, own in part.state.items():
                entries = state.setdefault(parameter, {})
                entries.update({f"{prefix}{key}": value for key, value in own.items()})
                if part is self._global_optimizer:
                    entries.update(self._counters())
        return state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One local step, and a global one if it is due."""
        self._local_step_counter += 1
        self._optimizer.step(closure)
        if int(self._local_step_counter) % self._num_local_steps == 0:
            self._global_step_counter += 1
            self._global_optimizer.zero_grad()  # its memory is free during the step
            self._global_step(self._local_step_counter, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Clear the gradients of both."""
        for _, part in self._parts:
            part.zero_grad(set_to_none=set_to_none)

    def save_param_groups(self, save: bool) -> None:  # noqa: FBT001 - the signature TorchRec users know
        """Whether state dicts hold the groups' settings, of both."""
        self.defaults["_save_param_groups"] = self._saves_param_groups = save
        for _, part in self._parts:
            part.save_param_groups(save)

    def state_dict(self) -> dict[str, Any]:
        """The states by parameter name, as the class says; tensors are the live ones, not copies."""
        state = self.state
        content: dict[str, Any] = {
            "state": {
                name: state[parameter]
                for name, parameter in self.params.items()
                if parameter in state
            }
        }
        if self._saves_param_groups:
            content["param_groups"] = [
                group for _, part in self._parts for group in part.state_dict()["param_groups"]
            ]
        return content

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; tensors that exist are filled in place.

        Raises:
            ValueError: no counts of steps, other parameters or groups, or a state of another shape.
        """
        saved: Mapping[str, Mapping[str, Any]] = state_dict["state"]
        refuse_unknown(saved, self.params)
        counts = {name: own[name] for own in saved.values() for name in _COUNTERS & own.keys()}
        missing = sorted(_COUNTERS - counts.keys())
        if missing:
            raise ValueError(f"no state has {missing[0]}; it is not one of a SemisyncOptimizer")
        for name, counter in self._counters().items():
            counter.copy_(torch.as_tensor(counts[name]))
        groups = list(state_dict.get("param_groups", []))
        for prefix, part in self._parts:
            own: dict[str, Any] = {
                "state": {
                    name: entries
                    for name, both in saved.items()
                    if name in part.params and (entries := _after(prefix, both))
                }
            }
            if groups:
                own["param_groups"] = groups[: len(part.param_groups)]
                groups = groups[len(part.param_groups) :]
            part.load_state_dict(own)

    def post_load_state_dict(self) -> None:
        """Finish the loading of both, where their tensors were filled in place."""
        for _, part in self._parts:
            part.post_load_state_dict()

    def init_state(self, sparse_grad_parameter_names: Any = None) -> None:
        """Make the state of the local optimizer; a global step makes the other's."""
        self._optimizer.init_state(sparse_grad_parameter_names)

    def set_optimizer_step(self, step: int) -> None:
        """Set the number of steps done in the states of both."""
        for _, part in self._parts:
            part.set_optimizer_step(step)

    def _add_named_group(self, _group: dict[str, Any], /) -> None:
        raise ValueError("a SemisyncOptimizer takes no new groups; give them to its parts")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group: the parts take them.

        Raises:
            ValueError: always.
        """
        self._add_named_group(param_group)

    def __repr__(self) -> str:
        return (
            f"{SEMI_SYNC_LOCAL_OPTIM_KEY}: {self._optimizer!r}, "
            f"{SEMI_SYNC_GLOBAL_OPTIM_KEY}: {self._global_optimizer!r}"
        )


def _after(prefix: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries whose names begin with a prefix, without it."""
    return {
        key.removeprefix(prefix): value for key, value in entries.items() if key.startswith(prefix)
    }
