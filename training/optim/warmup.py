"""A learning rate that follows stages, each with a policy of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, unique
from typing import Any

import torch
from torch import nn

from tessera.training.optim.keyed import KeyedOptimizer, OptimizerWrapper


@unique
class WarmupPolicy(Enum):
    """How a stage's factor depends on the step's number t.

    ``NONE``: 1.  ``LINEAR``: from ``value`` at t = 0 to 1 at ``max_iters``.  ``CONSTANT``:
    ``value``.  ``POLY``: ``(1 - t / decay_iters) ** value``.  ``STEP``:
    ``value ** (t // decay_iters)``.  ``INVSQRT``: ``1 / sqrt(t)``.
    ``COSINE_ANNEALING_WARM_RESTARTS``: from 1 down to ``value`` along half a cosine, again every
    ``sgdr_period`` steps (https://arxiv.org/abs/1608.03983).  ``INTERPOLATE``: from ``value`` at
    ``start_interpolating_iters`` to ``end_value`` at ``max_iters``.
    """

    NONE = "none"
    LINEAR = "linear"
    CONSTANT = "constant"
    POLY = "poly"
    STEP = "step"
    INVSQRT = "inv_sqrt"
    COSINE_ANNEALING_WARM_RESTARTS = "cosine_annealing_warm_restarts"
    INTERPOLATE = "interpolate"


@dataclass
class WarmupStage:
    """One stage.

    Attributes:
        policy: see `WarmupPolicy`.
        max_iters: the step up to which the stage lasts, counted from the first step of all.
        value: of the policy.
        lr_scale: a factor on the policy's.
        decay_iters: of ``POLY`` (0 or less: ``max_iters``) and ``STEP`` (0 or less: 1).
        sgdr_period: of ``COSINE_ANNEALING_WARM_RESTARTS``.
        start_interpolating_iters: of ``INTERPOLATE``.
        end_value: of ``INTERPOLATE``.
    """

    policy: WarmupPolicy = WarmupPolicy.LINEAR
    max_iters: int = 1
    value: float = 1.0
    lr_scale: float = 1.0
    decay_iters: int = -1
    sgdr_period: int = 1
    start_interpolating_iters: int | None = None
    end_value: float | None = None

    def factor(self, step: int) -> float:
        """The factor on the learning rate of step number ``step`` (from 0)."""
        if self.policy is WarmupPolicy.NONE:
            factor = 1.0
        elif self.policy is WarmupPolicy.LINEAR:
            factor = self.value + (1.0 - self.value) * step / self.max_iters
        elif self.policy is WarmupPolicy.CONSTANT:
            factor = self.value
        elif self.policy is WarmupPolicy.POLY:
            factor = (1.0 - step / self.decay_iters) ** self.value
        elif self.policy is WarmupPolicy.STEP:
            factor = self.value ** (step // self.decay_iters)
        elif self.policy is WarmupPolicy.INVSQRT:
            factor = 1.0 / math.sqrt(max(step, 1))
        elif self.policy is WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS:
            around = math.cos(math.pi * (step % self.sgdr_period) / self.sgdr_period)
            factor = self.value + (1.0 - self.value) * 0.5 * (1.0 + around)
        else:
            start = self.start_interpolating_iters
            assert start is not None
            assert self.end_value is not None
            share = (step - start) / (self.max_iters - start)
            factor = self.value + (self.end_value - self.value) * share
        return factor * self.lr_scale


def checked_stages(stages: Sequence[WarmupStage]) -> list[WarmupStage]:
    """The stages with their defaults filled in, and one of factor 1 that never ends.

    Raises:
        ValueError: a stage that ends before it begins, or that lacks a value.
    """
    begin = 0
    filled = []
    for number, stage in enumerate(stages):
        if stage.max_iters <= begin:
            raise ValueError(
                f"stage {number}: max_iters is {stage.max_iters}, but the stage begins at step "
                f"{begin}; max_iters counts from the first step of all"
            )
        if stage.policy is WarmupPolicy.INTERPOLATE:
            start = stage.start_interpolating_iters
            if start is None or stage.end_value is None or start >= stage.max_iters:
                raise ValueError(
                    f"stage {number}: interpolate needs end_value and start_interpolating_iters "
                    f"below max_iters={stage.max_iters}; they are {stage.end_value} and {start}"
                )
        decay = stage.decay_iters
        if decay <= 0:
            decay = 1 if stage.policy is WarmupPolicy.STEP else stage.max_iters
        filled.append(replace(stage, decay_iters=decay))
        begin = stage.max_iters
    return [*filled, WarmupStage(policy=WarmupPolicy.NONE, max_iters=2**63 - 1)]


class WarmupOptimizer(OptimizerWrapper):
    """Sets the learning rate of every step, fused tables' included.

    The rate of step t is set when step t - 1 has ended (of the first one: at once), since fused
    tables use it in a backward pass that comes before ``step``.

    Args:
        optimizer: what is wrapped.
        stages: in order; after the last one the factor is 1.
        lr: the rate that factors multiply.
        lr_param: the groups' key of the rate.
        param_name: under which name the position is in the state dict.

    Raises:
        ValueError: stages that make no sense, or a name that a parameter has.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        stages: list[WarmupStage],
        lr: float = 0.1,
        lr_param: str = "lr",
        param_name: str = "__warmup",
    ) -> None:
        super().__init__(optimizer)
        if param_name in self.params:
            raise ValueError(f"param_name {param_name!r} is a parameter's name; give another")
        self._stages = checked_stages(stages)
        self._lr = lr
        self._lr_param = lr_param
        self._param_name = param_name
        # As a tensor, so that a checkpoint can fill it in place: number of steps done, stage.
        self._position = torch.zeros(2, dtype=torch.int64)
        self._set_rate()

    @property
    def warmup_parameter(self) -> nn.Parameter:
        """A parameter without numbers, which stands for the position among named parameters."""
        return nn.Parameter(torch.empty(0))

    def _set_rate(self) -> None:
        step, stage = self._position.tolist()
        rate = self._lr * self._stages[stage].factor(step)
        for group in self.param_groups:
            group[self._lr_param] = rate

    def step(self, closure: Any = None) -> Any:
        """One step of the wrapped optimizer; then the rate of the next one is set."""
        loss = super().step(closure)
        self._position[0] += 1
        step, stage = self._position.tolist()
        if step > self._stages[stage].max_iters:
            self._position[1] += 1
        self._set_rate()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, and the position."""
        content = super().state_dict()
        state = {**content["state"], self._param_name: {"warmup": self._position}}
        return {**content, "state": state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            ValueError: it has no position, or does not fit the wrapped optimizer.
        """
        state = dict(state_dict["state"])
        position = state.pop(self._param_name, None)
        if position is None:
            raise ValueError(
                f"the state has no {self._param_name!r}; it was saved without a WarmupOptimizer"
            )
        self._position.copy_(position["warmup"])
        super().load_state_dict({**state_dict, "state": state})

    def post_load_state_dict(self) -> None:
        """Set the rate for the position that was loaded."""
        super().post_load_state_dict()
        self._set_rate()
