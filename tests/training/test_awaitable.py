"""Awaitables: waited for once, as late as possible, callbacks in order."""

import copy
import pickle

import pytest
import torch
from torch import nn

from tessera.training.distributed.types import (
    Awaitable,
    GenericMeta,
    LazyAwaitable,
    LazyNoWait,
    NoWait,
)


class Counted(LazyAwaitable):
    def __init__(self, result):
        super().__init__()
        self.result = result
        self.waits = 0

    def _wait_impl(self):
        self.waits += 1
        return self.result


def test_callbacks_run_in_order_on_the_result():
    awaitable = NoWait(3)
    awaitable.callbacks.append(lambda value: value + 1)
    awaitable.callbacks.append(lambda value: value * 10)
    assert awaitable.wait() == 40
    lazy = Counted(3)
    lazy.callbacks.append(lambda value: value + 1)
    assert lazy + 0 == 4
    assert lazy.wait() == 4
    assert lazy.waits == 1


def test_an_awaitable_says_how_it_waits():
    with pytest.raises(TypeError, match="abstract"):
        Awaitable()
    assert isinstance(LazyAwaitable, GenericMeta)


@pytest.mark.parametrize(
    "use",
    [
        torch.add,
        lambda a, t: torch.cat([a, t]),
        lambda a, t: torch.cat((t, a)),
        lambda a, t: torch.nn.functional.linear(input=a, weight=t.unsqueeze(0)),
        lambda a, t: a + t,
        lambda a, t: t + a,
        lambda a, t: t - a,
        lambda a, t: 2.0 - a,
        lambda a, t: a @ t,
        lambda a, t: -a,
        lambda a, t: a[1:],
        lambda a, t: a == t,
        lambda a, t: torch.stack(list(a)),
        lambda a, t: a.sum(),
        lambda a, t: torch.tensor(len(a)),
        lambda a, t: torch.tensor(a.shape),
        lambda a, t: torch.where(t > 1, a, t),
    ],
)
def test_a_lazy_result_is_used_like_the_result(use):
    tensor = torch.tensor([1.0, 2.0, 4.0])
    other = torch.tensor([2.0, 3.0, 5.0])
    lazy = Counted(tensor)
    assert torch.equal(use(lazy, other), use(tensor, other))
    assert lazy.waits == 1


def test_two_lazy_results_in_one_call():
    first, second = LazyNoWait(torch.ones(2)), Counted(torch.ones(2))
    assert torch.equal(torch.add(first, second), torch.full((2,), 2.0))
    assert torch.equal(first * second, torch.ones(2))


def test_a_module_takes_a_lazy_result():
    module = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    tensor = torch.randn(4, 3)
    lazy = Counted(tensor)
    assert torch.equal(module(lazy), module(tensor))
    assert lazy.waits == 1


def test_a_lazy_mapping():
    lazy = Counted({"a": 1, "b": 2})
    assert lazy["a"] == 1
    assert "b" in lazy
    assert sorted(lazy) == ["a", "b"]
    lazy["c"] = 3
    assert dict(lazy.items()) == {"a": 1, "b": 2, "c": 3}
    del lazy["c"]
    assert len(lazy) == 2
    assert bool(lazy)
    assert lazy.waits == 1


def test_a_lazy_function_and_a_lazy_number():
    assert LazyNoWait(max)(3, 4) == 4
    number = LazyNoWait(3)
    assert (int(number), float(number), [0, 1, 2, 9][number]) == (3, 3.0, 9)
    assert list(reversed(LazyNoWait([1, 2]))) == [2, 1]
    assert {number: "by identity"}[number] == "by identity"


def test_nothing_waits_before_the_first_use():
    lazy = Counted(torch.ones(1))
    held = [lazy, {"key": lazy}]
    assert isinstance(held[0], LazyAwaitable)
    assert hasattr(lazy, "callbacks")
    assert not hasattr(lazy, "__nonsense__")
    assert lazy.waits == 0


def test_protocols_do_not_reach_into_the_result():
    lazy = LazyNoWait(torch.ones(2))
    assert isinstance(copy.copy(lazy), LazyNoWait)
    assert torch.equal(pickle.loads(pickle.dumps(lazy)).wait(), torch.ones(2))


def test_a_missing_attribute_is_the_results():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = LazyNoWait(torch.ones(1)).nonsense
