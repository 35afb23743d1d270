"""Local steps and a global one after some of them, against a loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera.training.optim.keyed import KeyedOptimizerWrapper
from tessera.training.optim.semi_sync import SemisyncOptimizer


class TowardsLast(torch.optim.Optimizer):
    """A global step goes back a part of the way to where the last one ended, with momentum."""

    def __init__(self, params: list[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self._last = [parameter.detach().clone() for parameter in params]

    def global_step(self, local_steps: Tensor, closure: Any) -> None:
        del closure, local_steps
        for group in self.param_groups:
            for parameter, last in zip(group["params"], self._last, strict=True):
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.5).add_(last - parameter)
                parameter.copy_(last - group["lr"] * momentum)
                last.copy_(parameter)


def made(weight: Tensor, steps: int = 3) -> tuple[nn.Parameter, SemisyncOptimizer]:
    """A parameter and its optimizer."""
    parameter = nn.Parameter(weight.clone())
    local = KeyedOptimizerWrapper({"w": parameter}, lambda params: torch.optim.Adam(params, lr=0.1))
    far = KeyedOptimizerWrapper({"w": parameter}, lambda params: TowardsLast(params, lr=0.7))
    return parameter, SemisyncOptimizer([parameter], local, far, num_local_steps=steps)


def train(parameter: nn.Parameter, optimizer: SemisyncOptimizer, steps: int) -> None:
    """Some steps of a quadratic loss."""
    for _ in range(steps):
        optimizer.zero_grad()
        (parameter**2).sum().backward()
        optimizer.step()


def test_steps_equal_those_of_a_loop() -> None:
    weight = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    parameter, optimizer = made(weight)
    train(parameter, optimizer, 8)
    plain = nn.Parameter(weight.clone())
    adam, last, momentum = torch.optim.Adam([plain], lr=0.1), weight.clone(), 0.0
    for step in range(1, 9):
        adam.zero_grad()
        (plain**2).sum().backward()
        adam.step()
        if step % 3 == 0:
            momentum = 0.5 * momentum + (last - plain.detach())
            last = last - 0.7 * momentum
            with torch.no_grad():
                plain.copy_(last)
    torch.testing.assert_close(parameter, plain, rtol=0, atol=0)


def test_a_state_dict_goes_on_where_it_was_taken() -> None:
    parameter, optimizer = made(torch.ones(3))
    train(parameter, optimizer, 4)
    saved = copy.deepcopy(optimizer.state_dict())
    assert set(saved) == {"state"}
    assert set(saved["state"]["w"]) == {
        "semi_sync_local_step",
        "semi_sync_local_exp_avg",
        "semi_sync_local_exp_avg_sq",
        "semi_sync_global_momentum",
        "__semisync_global_step_counter__",
        "__semisync_local_step_counter__",
    }
    other, again = made(parameter.detach())
    again.load_state_dict(saved)
    for one in (optimizer, again):
        assert int(one.params["__semisync_local_step_counter__"]) == 4
        assert int(one.params["__semisync_global_step_counter__"]) == 1
    train(parameter, optimizer, 1)
    train(other, again, 1)
    torch.testing.assert_close(other, parameter, rtol=0, atol=0)


def test_groups_are_saved_where_that_is_asked_for() -> None:
    parameter, optimizer = made(torch.ones(3))
    train(parameter, optimizer, 3)
    optimizer.save_param_groups(True)
    optimizer.update_hyper_parameters({"lr": 0.25})
    saved = copy.deepcopy(optimizer.state_dict())
    _, again = made(torch.ones(3))
    again.save_param_groups(True)
    again.load_state_dict(saved)
    assert [group["lr"] for group in again.param_groups] == [0.25, 0.25]


def test_what_does_not_fit_is_refused() -> None:
    parameter, optimizer = made(torch.ones(3))
    local, far = optimizer._optimizer, optimizer._global_optimizer
    with pytest.raises(ValueError, match="global_params is empty"):
        SemisyncOptimizer([], local, far)
    with pytest.raises(ValueError, match="num_local_steps is 0"):
        SemisyncOptimizer([parameter], local, far, num_local_steps=0)
    with pytest.raises(ValueError, match="wraps Adam, which has no method global_step"):
        SemisyncOptimizer([parameter], local, local)
    other, _ = made(torch.ones(3))
    another = KeyedOptimizerWrapper({"w": other}, lambda params: TowardsLast(params, lr=0.7))
    with pytest.raises(ValueError, match="'w' is one parameter of the local optimizer"):
        SemisyncOptimizer([parameter], local, another)
    with pytest.raises(ValueError, match="is not one of a SemisyncOptimizer"):
        optimizer.load_state_dict({"state": {"w": {"semi_sync_local_step": torch.tensor(1)}}})
    with pytest.raises(ValueError, match="no parameter group has 'beta'"):
        optimizer.update_hyper_parameters({"beta": 1})
    with pytest.raises(ValueError, match="takes no new groups"):
        optimizer.add_param_group({"params": []})


def test_states_and_weights_are_those_of_torchrec() -> None:
    theirs = pytest.importorskip("torchrec.optim.semi_sync", reason="TorchRec is a peer")
    keyed = pytest.importorskip("torchrec.optim.keyed", reason="TorchRec is a peer")
    parameter, optimizer = made(torch.ones(3))
    peer = nn.Parameter(torch.ones(3))
    wrap = keyed.KeyedOptimizerWrapper
    other = theirs.SemisyncOptimizer(
        [peer],
        wrap({"w": peer}, lambda params: torch.optim.Adam(params, lr=0.1)),
        wrap({"w": peer}, lambda params: TowardsLast(params, lr=0.7)),
        num_local_steps=3,
    )
    train(parameter, optimizer, 7)
    train(peer, other, 7)
    torch.testing.assert_close(parameter, peer, rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict(), other.state_dict(), rtol=0, atol=0)
