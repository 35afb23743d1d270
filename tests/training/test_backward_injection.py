"""Hooks within a backward pass: on parameters and on what modules take and give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera.training import KeyedJaggedTensor
from tessera.training.distributed.train_pipeline.backward_injection import (
    FirstGradTensorFinder,
    InjectionSite,
    InjectionTargetType,
    register_backward_hook,
)
from tessera.training.distributed.train_pipeline.train_pipelines import TrainPipelineBase

PARAMETER = InjectionTargetType.PARAM_GRAD


def model() -> nn.Sequential:
    """Two layers with a ReLU between them, whose parameters are powers of two of ones."""
    made = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    for place, parameter in enumerate(made.parameters()):
        nn.init.constant_(parameter, 2.0**place)
    return made


def test_the_first_tensor_with_a_gradient_is_found_wherever_it_is() -> None:
    weights, plain = torch.ones(2, requires_grad=True), torch.ones(2)
    ids = torch.arange(2)
    kjt = KeyedJaggedTensor(["a"], ids, lengths=ids, weights=weights, validate=False)
    find = FirstGradTensorFinder()
    assert find(weights, None, (plain, {"k": [plain, weights]})) is weights
    assert find(weights, {"x": weights}, "text") is None
    assert find(None, None, kjt) is weights
    of_input = FirstGradTensorFinder(use_input=True)
    assert of_input((plain,), {"features": kjt}, None) is weights
    assert of_input(plain, {}, weights) is None


@pytest.mark.parametrize(
    ("frozen", "position", "shape"),
    [
        ((), 0.0, (2, 3)),
        ((), 1.0, (1,)),
        ((), 0.5, (1, 2)),
        ((0,), -1.0, (2,)),
        ((3,), 7.0, (1, 2)),
        ((2,), 0.5, (1,)),
    ],
)
def test_the_parameter_nearest_to_a_position_calls(
    frozen: tuple[int, ...], position: float, shape: tuple[int, ...]
) -> None:
    made = model()
    for place in frozen:
        list(made.parameters())[place].requires_grad_(False)
    got: list[Tensor] = []
    site = InjectionSite("", FirstGradTensorFinder(), PARAMETER, position)
    handle = register_backward_hook(site, made, lambda gradient: got.append(gradient.clone()))
    made(torch.ones(4, 3)).sum().backward()
    assert [tuple(gradient.shape) for gradient in got] == [shape]
    parameter = next(each for each in made.parameters() if tuple(each.shape) == shape)
    torch.testing.assert_close(got[0], parameter.grad)
    handle.remove()
    made(torch.ones(4, 3)).sum().backward()
    assert len(got) == 1


@pytest.mark.parametrize("use_input", [False, True])
def test_a_hook_on_a_tensor_gets_its_gradient_and_leaves_it(use_input: Any) -> None:
    made, got = model(), []
    site = InjectionSite("2", FirstGradTensorFinder(use_input))
    handle = register_backward_hook(
        site, made, lambda gradient: got.append(gradient) or gradient * 9
    )
    x = torch.ones(4, 3, requires_grad=True)
    made(x).sum().backward()
    (gradient,) = got
    expected = torch.full((4, 2), 4.0) if use_input else torch.ones(4, 1)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(x.grad, torch.full((4, 3), 8.0))
    handle.remove()
    made(x)
    assert len(got) == 1


def test_what_cannot_be_hooked_is_refused() -> None:
    made = model()
    with pytest.raises(ValueError, match="the model has no module 'far'"):
        register_backward_hook(InjectionSite("far", FirstGradTensorFinder()), made, print)
    with pytest.raises(ValueError, match="none of the 0 parameters of '1'"):
        register_backward_hook(InjectionSite("1", FirstGradTensorFinder(), PARAMETER), made, print)
    register_backward_hook(InjectionSite("0", FirstGradTensorFinder(use_input=True)), made, print)
    with pytest.raises(RuntimeError, match="the tensor_finder of '0' found no tensor"):
        made(torch.ones(4, 3))


def test_a_pipeline_is_given_to_the_work() -> None:
    class Losses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = model()

        def forward(self, batch: Tensor) -> tuple[Tensor, Tensor]:
            scores = self.dense(batch)
            return scores.sum(), scores

    losses = Losses()
    pipeline = TrainPipelineBase(
        losses, torch.optim.SGD(losses.parameters(), lr=0.1), torch.device("cpu")
    )
    given: list[Any] = []
    handle = pipeline.register_backward_hook(
        InjectionSite("dense.0", FirstGradTensorFinder(), PARAMETER), given.append
    )
    batches = iter([torch.ones(4, 3), torch.ones(4, 3)])
    pipeline.progress(batches)
    assert given == [pipeline]
    handle.remove()
    pipeline.progress(batches)
    assert given == [pipeline]
