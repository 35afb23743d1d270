"""Keyed optimizers beyond saving and loading: groups, first states, warm-up, clipping."""

import math

import pytest
import torch
from torch import nn

from tessera.training import CombinedOptimizer, KeyedOptimizerWrapper
from tessera.training.optim.clipping import GradientClipping, GradientClippingOptimizer
from tessera.training.optim.fused import EmptyFusedOptimizer
from tessera.training.optim.keyed import OptimizerWrapper
from tessera.training.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from tests.training.ranks import rank_device, run_on_ranks


def wrapped(model, factory=lambda params: torch.optim.Adam(params, lr=0.1)):
    return KeyedOptimizerWrapper(dict(model.named_parameters()), factory)


def sgd(model, lr=1.0):
    return wrapped(model, lambda params: torch.optim.SGD(params, lr=lr))


@pytest.mark.parametrize("around", [lambda o: o, OptimizerWrapper])
def test_a_new_group_is_stepped_and_saved(around):
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = around(sgd(first))
    optimizer.add_param_group({"params": [("more", second.weight)], "lr": 0.5})
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.5]
    before = second.weight.detach().clone()
    (first(torch.ones(1, 3)).sum() + second(torch.ones(1, 3)).sum()).backward()
    optimizer.step()
    torch.testing.assert_close(before - second.weight.detach(), torch.full((2, 3), 0.5))
    assert optimizer.state_dict()["param_groups"][1]["params"] == ["more"]
    with pytest.raises(ValueError, match="'more' is optimized already"):
        optimizer.add_param_group({"params": [("more", second.bias)]})
    with pytest.raises(ValueError, match="without names"):
        optimizer.add_param_group({"params": [second.bias]})
    with pytest.raises(ValueError, match="takes no new groups"):
        CombinedOptimizer([optimizer]).add_param_group({"params": [("bias", second.bias)]})
    with pytest.raises(ValueError, match="fused tables take no new parameters"):
        EmptyFusedOptimizer().add_param_group({"params": [("bias", second.bias)]})


def test_group_settings_can_be_left_out_of_the_state():
    model = nn.Linear(3, 2)
    optimizer = CombinedOptimizer([OptimizerWrapper(wrapped(model))])
    optimizer.save_param_groups(False)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    assert set(saved) == {"state"}
    twin = CombinedOptimizer([wrapped(model, lambda p: torch.optim.Adam(p, lr=0.7))])
    twin.load_state_dict(saved)
    assert twin.param_groups[0]["lr"] == 0.7
    assert float(twin.state_dict()["state"]["weight"]["step"]) == 1


@pytest.mark.parametrize(
    "factory",
    [
        lambda params: torch.optim.Adam(params, lr=0.1, weight_decay=0.5),
        lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.3),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.5),
    ],
)
def test_a_first_state_is_that_of_no_step(factory):
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    prepared = CombinedOptimizer([("net", OptimizerWrapper(wrapped(model, factory)))])
    prepared.init_state()
    torch.testing.assert_close(model.weight, twin.weight)
    assert model.weight.grad is None
    assert prepared.state_dict()["state"]
    plain = wrapped(twin, factory)
    for part, optimizer in ((model, prepared), (twin, plain)):
        for _ in range(2):
            optimizer.zero_grad()
            part(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(model.weight, twin.weight)


def test_a_first_state_of_sparse_gradients():
    bag = nn.EmbeddingBag(4, 3, sparse=True)
    optimizer = KeyedOptimizerWrapper({"weight": bag.weight}, torch.optim.SparseAdam)
    optimizer.init_state({"weight"})
    assert set(optimizer.state_dict()["state"]["weight"]) == {"step", "exp_avg", "exp_avg_sq"}


def test_values_of_groups_and_steps_are_set_by_name():
    model = nn.Linear(3, 2)
    optimizer = OptimizerWrapper(wrapped(model))
    optimizer.update_hyper_parameters({"lr": 0.7, "eps": 0.2})
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["eps"]) == (0.7, 0.2)
    with pytest.raises(ValueError, match="no parameter group has 'speed'"):
        optimizer.update_hyper_parameters({"speed": 1})
    optimizer.init_state()
    optimizer.set_optimizer_step(41)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert float(optimizer.state_dict()["state"]["weight"]["step"]) == 42


STAGES = [
    WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.2),
    WarmupStage(WarmupPolicy.CONSTANT, max_iters=6, value=0.5, lr_scale=3.0),
    WarmupStage(WarmupPolicy.POLY, max_iters=9, value=2.0, decay_iters=20),
    WarmupStage(WarmupPolicy.STEP, max_iters=13, value=0.5, decay_iters=3),
    WarmupStage(WarmupPolicy.INVSQRT, max_iters=15),
    WarmupStage(
        WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS, max_iters=19, value=0.1, sgdr_period=4
    ),
    WarmupStage(
        WarmupPolicy.INTERPOLATE,
        max_iters=22,
        value=1.0,
        start_interpolating_iters=20,
        end_value=3.0,
    ),
]
# What each stage's own sentence says, written out.  A stage lasts to max_iters inclusive.
FACTORS = [
    *(0.2 + 0.8 * t / 4 for t in range(5)),
    *(1.5 for _ in range(5, 7)),
    *((1 - t / 20) ** 2 for t in range(7, 10)),
    *(0.5 ** (t // 3) for t in range(10, 14)),
    *(1 / math.sqrt(t) for t in range(14, 16)),
    *(0.1 + 0.9 * (1 + math.cos(math.pi * (t % 4) / 4)) / 2 for t in range(16, 20)),
    *(1.0 + 2.0 * (t - 20) / 2 for t in range(20, 23)),
    1.0,
    1.0,
]


def test_the_rate_goes_through_the_stages():
    optimizer = WarmupOptimizer(sgd(nn.Linear(3, 2)), STAGES, lr=10.0)
    rates = []
    for _ in FACTORS:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
    assert rates == pytest.approx([10.0 * factor for factor in FACTORS])


@pytest.mark.parametrize("before", [0, 3, 8])
def test_warmup_goes_on_where_it_was(before):
    optimizer = WarmupOptimizer(sgd(nn.Linear(3, 2)), STAGES, lr=10.0)
    for _ in range(before):
        optimizer.step()
    saved = optimizer.state_dict()
    again = WarmupOptimizer(sgd(nn.Linear(3, 2)), STAGES, lr=10.0)
    again.load_state_dict(saved)
    assert again.param_groups[0]["lr"] == pytest.approx(10.0 * FACTORS[before])
    again.step()
    assert again.param_groups[0]["lr"] == pytest.approx(10.0 * FACTORS[before + 1])
    # Filled in place, as distributed checkpoints do.
    third = WarmupOptimizer(sgd(nn.Linear(3, 2)), STAGES, lr=10.0)
    third.state_dict()["state"]["__warmup"]["warmup"].copy_(
        optimizer.state_dict()["state"]["__warmup"]["warmup"]
    )
    third.post_load_state_dict()
    assert third.param_groups[0]["lr"] == pytest.approx(10.0 * FACTORS[before])


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([WarmupStage(max_iters=3), WarmupStage(max_iters=3)], "stage 1: max_iters is 3, but"),
        ([WarmupStage(WarmupPolicy.INTERPOLATE, max_iters=3)], "interpolate needs end_value"),
    ],
)
def test_stages_that_make_no_sense_are_refused(stages, message):
    with pytest.raises(ValueError, match=message):
        WarmupOptimizer(sgd(nn.Linear(3, 2)), stages)
    with pytest.raises(ValueError, match="'weight' is a parameter's name"):
        WarmupOptimizer(sgd(nn.Linear(3, 2)), [], param_name="weight")
    optimizer = WarmupOptimizer(sgd(nn.Linear(3, 2)), [])
    with pytest.raises(ValueError, match="saved without a WarmupOptimizer"):
        optimizer.load_state_dict(sgd(nn.Linear(3, 2)).state_dict())


@pytest.mark.parametrize("norm_type", [1.0, 2.0, "inf"])
@pytest.mark.parametrize("bound", [0.3, 1e6])
def test_clipping_by_norm_is_torchs(norm_type, bound):
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    optimizer = GradientClippingOptimizer(
        sgd(model), GradientClipping.NORM, max_gradient=bound, norm_type=norm_type
    )
    for part in (model, twin):
        part(torch.tensor([[1.0, -2.0, 3.0]])).square().sum().backward()
    norm = nn.utils.clip_grad_norm_(twin.parameters(), bound, norm_type=norm_type)
    optimizer.step()
    sgd(twin).step()
    torch.testing.assert_close(optimizer.last_total_grad_norm, norm)
    torch.testing.assert_close(model.weight, twin.weight)


def test_clipping_by_value_and_not_at_all():
    model = nn.Linear(1, 1, bias=False)
    before = model.weight.detach().clone()
    optimizer = GradientClippingOptimizer(sgd(model), GradientClipping.VALUE, max_gradient=0.25)

    def closure():
        optimizer.zero_grad()
        loss = 4 * model(torch.ones(1, 1)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(4 * float(before))
    torch.testing.assert_close(before - model.weight.detach(), torch.tensor([[0.25]]))
    bare = GradientClippingOptimizer(sgd(model))
    bare.step(closure)
    torch.testing.assert_close(before - model.weight.detach(), torch.tensor([[4.25]]))
    assert bare.last_total_grad_norm is None
    tracking = GradientClippingOptimizer(sgd(model), track_grad_norm=True)
    tracking.step(closure)
    assert float(tracking.last_total_grad_norm) == pytest.approx(4.0)
    model.weight.grad = torch.full((1, 1), 8.0)
    assert float(bare.clip_grad_norm_()) == pytest.approx(8.0)  # to 0.1, the default bound
    torch.testing.assert_close(model.weight.grad, torch.full((1, 1), 0.1))
    nothing = GradientClippingOptimizer(sgd(model), GradientClipping.NORM, max_gradient=0)
    before = model.weight.detach().clone()
    nothing.step(closure)
    assert torch.equal(model.weight.detach(), before)
    with pytest.raises(ValueError, match="max_gradient is -1"):
        GradientClippingOptimizer(sgd(model), GradientClipping.NORM, max_gradient=-1)
    with pytest.raises(ValueError, match="norm_type is -1"):
        GradientClippingOptimizer(sgd(model), norm_type=-1)
    with pytest.raises(ValueError, match="set it to True"):
        GradientClippingOptimizer(sgd(model), param_to_pgs={model.weight: []})


def clip_on_rank(norm_type):
    """One replicated and one spread parameter; rank 1 has no gradient for its part."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    device = rank_device()
    whole = nn.Parameter(torch.zeros(3, device=device))
    part = nn.Parameter(torch.zeros(2, device=device))
    optimizer = GradientClippingOptimizer(
        KeyedOptimizerWrapper(
            {"whole": whole, "part": part}, lambda params: torch.optim.SGD(params, lr=1.0)
        ),
        GradientClipping.NORM,
        max_gradient=1.0,
        norm_type=norm_type,
        enable_global_grad_clip=True,
        param_to_pgs={part: [torch.distributed.group.WORLD]},
    )
    whole.grad = torch.tensor([1.0, -2.0, 2.0], device=device)
    if rank != 1:
        part.grad = torch.tensor([3.0, 4.0 + rank], device=device)
    optimizer.step()
    assert world > 1
    return float(optimizer.last_total_grad_norm), whole.detach().cpu(), part.detach().cpu()


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("norm_type", [2.0, "inf"])
def test_a_norm_over_ranks_counts_every_part_once(world_size, norm_type):
    whole = torch.tensor([1.0, -2.0, 2.0])
    parts = [torch.tensor([3.0, 4.0 + rank]) * (rank != 1) for rank in range(world_size)]
    norm = float(torch.linalg.vector_norm(torch.cat([whole, *parts]), float(norm_type)))
    results = run_on_ranks(world_size, clip_on_rank, norm_type)
    for (found, whole_after, part_after), part in zip(results, parts, strict=True):
        assert found == pytest.approx(norm)
        torch.testing.assert_close(whole_after, -whole / norm, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(part_after, -part / norm, rtol=1e-5, atol=1e-6)
