import copy
import pickle

import pytest
import torch
from torch import nn

from tessera.training import CombinedOptimizer, KeyedOptimizerWrapper


def wrapped(model, factory=lambda params: torch.optim.Adam(params, lr=0.1)):
    return KeyedOptimizerWrapper(dict(model.named_parameters()), factory)


def train(model, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        (model(torch.ones(1, 3)) ** 2).sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_wrapped_optimizer_steps_like_the_bare_one():
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    ours = train(model, wrapped(model), 3)
    theirs = train(twin, torch.optim.Adam(twin.parameters(), lr=0.1), 3)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("prefix", ["", "dense"])
def test_state_goes_by_name_and_carries_on_exactly(prefix):
    model = nn.Linear(3, 2)
    optimizer = CombinedOptimizer([(prefix, wrapped(model))])
    train(model, optimizer, 2)
    optimizer.param_groups[0]["lr"] = 0.03
    state = optimizer.state_dict()
    weight = "dense.weight" if prefix else "weight"
    assert set(state["state"][weight]) == {"step", "exp_avg", "exp_avg_sq"}
    assert state["param_groups"][0]["params"][0] == weight
    twin = nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    again = CombinedOptimizer([(prefix, wrapped(twin))])
    again.load_state_dict(state)
    assert again.param_groups[0]["lr"] == 0.03
    assert all(map(torch.equal, train(twin, again, 2), train(model, optimizer, 2)))


def test_a_loaded_state_is_a_copy():
    model = nn.Linear(3, 2)
    optimizer = wrapped(model)
    train(model, optimizer, 1)
    saved = optimizer.state_dict()
    before = saved["state"]["weight"]["exp_avg"].clone()
    twin = nn.Linear(3, 2)
    again = wrapped(twin)
    again.load_state_dict(saved)
    train(twin, again, 2)
    assert torch.equal(saved["state"]["weight"]["exp_avg"], before)


def test_parts_keep_their_own_groups_and_step_together():
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = CombinedOptimizer(
        [
            ("a", wrapped(first, lambda params: torch.optim.SGD(params, lr=1.0))),
            ("b", wrapped(second, lambda params: torch.optim.SGD(params, lr=0.0))),
        ]
    )
    before = [parameter.detach().clone() for parameter in second.parameters()]
    for model in (first, second):
        model(torch.ones(1, 3)).sum().backward()
    bias = first.bias.detach().clone()
    calls = []
    assert optimizer.step(lambda: calls.append(1) or 7) == 7
    assert calls == [1]
    torch.testing.assert_close(first.bias, bias - 1)
    assert all(map(torch.equal, second.parameters(), before))
    optimizer.zero_grad()
    assert first.weight.grad is None
    assert [name for name, _ in optimizer.optimizers] == ["a", "b"]


def test_states_that_do_not_fit_are_refused():
    model, other = nn.Linear(3, 2), nn.Linear(4, 2)
    optimizer = wrapped(model)
    train(model, optimizer, 1)
    saved = optimizer.state_dict()
    wrong = wrapped(other)
    other(torch.ones(1, 4)).sum().backward()
    wrong.step()
    with pytest.raises(
        ValueError, match=r"'weight': exp_avg has shape \(2, 3\); expected \(2, 4\)"
    ):
        wrong.load_state_dict(saved)
    with pytest.raises(ValueError, match="parameter 'x', which is not optimized"):
        optimizer.load_state_dict({**saved, "state": {"x": {}}})
    with pytest.raises(ValueError, match="0 parameter groups, the optimizer 1"):
        optimizer.load_state_dict({**saved, "param_groups": []})
    group = {**saved["param_groups"][0], "params": ["weight"]}
    with pytest.raises(ValueError, match="hold other parameters"):
        optimizer.load_state_dict({**saved, "param_groups": [group]})
    with pytest.raises(ValueError, match="expected"):
        optimizer.load_state_dict({**saved, "state": {"weight": {"step": 1}}})
    twin = wrapped(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="two optimizers hold parameter 'weight'"):
        CombinedOptimizer([optimizer, twin])
    with pytest.raises(ValueError, match="optims is empty"):
        CombinedOptimizer([])


def test_copies_and_pickles_keep_names_and_states():
    one, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    parts = [
        ("a", KeyedOptimizerWrapper({"one": one}, lambda own: torch.optim.Adam(own, lr=0.1))),
        ("", KeyedOptimizerWrapper({"other": other}, lambda own: torch.optim.SGD(own, lr=0.2))),
    ]
    optimizer = CombinedOptimizer(parts)
    (one.sum() + other.sum()).backward()
    optimizer.step()
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        ours, found = optimizer.state_dict(), copied.state_dict()
        assert found["param_groups"] == ours["param_groups"]
        assert torch.equal(found["state"]["a.one"]["exp_avg"], ours["state"]["a.one"]["exp_avg"])
        copied.params["other"].grad = torch.ones(3)
        copied.step()
        assert copied.params["other"].tolist() == pytest.approx([0.6] * 3)
        assert other.tolist() == pytest.approx([0.8] * 3)
