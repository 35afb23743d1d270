"""Torch optimizers of ours against the row-at-a-time reference, and in the backward pass."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn

from tessera.training.optim import optimizers
from tessera.training.optim.apply_optimizer_in_backward import (
    apply_optimizer_in_backward,
    convert_optimizer_type_and_kwargs,
    fused_params_of,
)
from tessera.training.optim.fused import EmbOptimType, FusedParams
from tessera.training.optim.row_updates import HyperParameters
from tessera.training.optim.rowwise_adagrad import RowWiseAdagrad
from tests.training.optimizer_reference import STATES, new_states, update_row

OURS = {
    "exact_sgd": optimizers.SGD,
    "exact_adagrad": optimizers.Adagrad,
    "adam": optimizers.Adam,
    "partial_row_wise_adam": optimizers.PartialRowWiseAdam,
    "lamb": optimizers.LAMB,
    "partial_row_wise_lamb": optimizers.PartialRowWiseLAMB,
    "lars_sgd": optimizers.LarsSGD,
    "lion": optimizers.Lion,
}
OWN_DEFAULTS = {"exact_adagrad": {"eps": 1e-8}}


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("weight_decay", [0.0, 0.2])
@pytest.mark.parametrize("sparse", [False, True])
def test_three_steps_equal_the_reference(kind, weight_decay, sparse):
    weight = nn.Parameter(torch.randn(6, 5))
    double = weight.detach().double()
    states = new_states(kind, 6, 5)
    optimizer = OURS[kind]([weight], lr=0.05, weight_decay=weight_decay)
    for step in range(1, 4):
        rows = torch.randint(0, 6, (4,)) if sparse else torch.arange(6)
        values = torch.randn(len(rows), 5)
        gradient = torch.sparse_coo_tensor(rows[None], values, (6, 5), check_invariants=True)
        weight.grad = gradient if sparse else values.clone()
        summed = gradient.to_dense().double()
        optimizer.step()
        for row in set(rows.tolist()):
            update_row(
                kind,
                double[row],
                summed[row],
                [state[row] for state in states],
                step=step,
                lr=0.05,
                weight_decay=weight_decay,
            )
        # float32 rounding of three steps of size 0.05.
        torch.testing.assert_close(weight.detach().double(), double, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_parameters_of_any_shape_are_rows(shape):
    weight = nn.Parameter(torch.randn(shape))
    weight.grad = torch.ones(shape)
    before = weight.detach().clone()
    optimizers.PartialRowWiseAdam([weight], lr=0.1).step()
    # Adam's first step is of size lr, whatever the gradient.
    torch.testing.assert_close(before - weight.detach(), torch.full(shape, 0.1))


def test_a_closure_is_evaluated_and_bad_values_are_refused():
    weight = nn.Parameter(torch.zeros(2))

    def closure():
        weight.grad = torch.ones(2)
        return 7.0

    assert optimizers.SGD([weight], lr=1.0).step(closure) == 7.0
    assert weight.tolist() == [-1.0, -1.0]
    with pytest.raises(ValueError, match="lr is -1"):
        optimizers.SGD([weight], lr=-1.0)
    with pytest.raises(ValueError, match="betas is"):
        optimizers.Adam([weight], betas=(-0.1, 0.9))
    with pytest.raises(ValueError, match="lr_decay is -1"):
        RowWiseAdagrad([weight], lr_decay=-1)


def test_rowwise_adagrad_is_adagrad_with_equal_columns():
    # Where all numbers of a row have one gradient, its mean of squares is each one's square.
    mine, theirs = nn.Parameter(torch.randn(4, 3)), None
    theirs = nn.Parameter(mine.detach().clone())
    settings = {"lr": 0.1, "lr_decay": 0.3, "initial_accumulator_value": 0.2, "eps": 1e-4}
    ours = RowWiseAdagrad([mine], **settings)
    torchs = torch.optim.Adagrad([theirs], **settings)
    for _ in range(3):
        mine.grad = torch.randn(4, 1).expand(4, 3).clone()
        theirs.grad = mine.grad.clone()
        ours.step()
        torchs.step()
    torch.testing.assert_close(mine, theirs)
    assert ours.state[mine]["momentum1"].shape == (4,)


def test_rowwise_adagrad_with_l2_equals_the_reference():
    weight = nn.Parameter(torch.randn(3, 4))
    double = weight.detach().double()
    states = new_states("exact_row_wise_adagrad", 3, 4)
    optimizer = RowWiseAdagrad([weight], lr=0.1, weight_decay=0.3, eps=1e-3)
    for step in (1, 2):
        weight.grad = torch.randn(3, 4)
        for row in range(3):
            update_row(
                "exact_row_wise_adagrad",
                double[row],
                weight.grad[row].double(),
                [states[0][row]],
                step=step,
                lr=0.1,
                eps=1e-3,
                weight_decay=0.3,
                l2=True,
            )
        assert optimizer.step(lambda: 3) == 3
    torch.testing.assert_close(weight.detach().double(), double, rtol=0, atol=1e-6)


def test_an_optimizer_in_backward_steps_there_and_drops_the_gradient():
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    apply_optimizer_in_backward(optimizers.Adam, model.parameters(), {"lr": 0.1})
    optimizer = optimizers.Adam(twin.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.zero_grad()
        twin(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
        assert model.weight.grad is None
    torch.testing.assert_close(model.weight, twin.weight)
    assert fused_params_of(model.weight)["optimizer"] is EmbOptimType.ADAM
    assert fused_params_of(twin.weight) is None
    apply_optimizer_in_backward(optimizers.SGD, [model.weight], {"lr": 0.1})
    with pytest.raises(ValueError, match="called twice for one table"):
        fused_params_of(model.weight)


@pytest.mark.parametrize(
    ("optimizer", "arguments", "expected"),
    [
        (torch.optim.SGD, {"lr": 0.2}, {"optimizer": "exact_sgd", "learning_rate": 0.2}),
        (
            torch.optim.Adagrad,
            {"weight_decay": 0.1},
            {
                "optimizer": "exact_adagrad",
                "learning_rate": 0.01,
                "eps": 1e-8,  # of fused tables, not the 1e-10 of torch's Adagrad
                "weight_decay": 0.1,
                "weight_decay_mode": "l2",
            },
        ),
        (
            torch.optim.Adam,
            {"lr": 0.3, "betas": (0.5, 0.6), "foreach": True},
            {"optimizer": "adam", "learning_rate": 0.3, "beta1": 0.5, "beta2": 0.6},
        ),
        (
            torch.optim.AdamW,
            {},
            {
                "optimizer": "adam",
                "learning_rate": 0.001,
                "weight_decay": 0.01,
                "weight_decay_mode": "decouple",
            },
        ),
        (RowWiseAdagrad, {"eps": 0.5}, {"optimizer": "exact_row_wise_adagrad", "eps": 0.5}),
        (
            optimizers.LarsSGD,
            {"eta": 0.5, "momentum": 0.25},
            {"optimizer": "lars_sgd", "eta": 0.5, "momentum": 0.25},
        ),
        (optimizers.Lion, {"lr": 0.5}, {"optimizer": "lion", "learning_rate": 0.5, "beta2": 0.99}),
        (optimizers.Adam, {"beta1": 0.5}, {"optimizer": "adam", "beta1": 0.5, "beta2": 0.999}),
        (optimizers.Lion, {"beta2": 0.5}, {"optimizer": "lion", "beta1": 0.9, "beta2": 0.5}),
        (
            optimizers.Adagrad,
            {"gradient_clipping": True, "max_gradient": 0.5},
            {"optimizer": "exact_adagrad", "gradient_clipping": True, "max_gradient": 0.5},
        ),
        (
            optimizers.SGD,
            {"gradient_clipping": False, "max_gradient": 0.5},
            {"optimizer": "exact_sgd", "gradient_clipping": None, "max_gradient": None},
        ),
    ],
)
def test_arguments_become_fused_params(optimizer, arguments, expected):
    params = FusedParams.from_dict(convert_optimizer_type_and_kwargs(optimizer, arguments))
    expected = {**expected, "optimizer": EmbOptimType(expected["optimizer"])}
    assert {name: getattr(params, name) for name in expected} == expected


def test_only_fused_tables_clip_the_gradient_of_the_output():
    weight = torch.nn.Parameter(torch.ones(2, 3))
    weight.grad = torch.ones(2, 3)
    optimizers.SGD([weight], lr=1.0, max_gradient=0.5).step()
    assert torch.equal(weight, torch.zeros(2, 3))
    clipping = optimizers.SGD([weight], gradient_clipping=True)
    for one in (clipping, copy.deepcopy(clipping), pickle.loads(pickle.dumps(clipping))):
        with pytest.raises(ValueError, match=r"SGD\(gradient_clipping=True\) cuts .* shard them"):
            one.step()
    copied = pickle.loads(pickle.dumps(optimizers.SGD([weight], lr=1.0)))
    (own,) = copied.param_groups[0]["params"]
    own.grad = torch.ones(2, 3)
    copied.step()
    assert torch.equal(own, torch.full((2, 3), -1.0))
    with pytest.raises(ValueError, match=r"max_gradient is -1\.0; give 0 or more"):
        optimizers.SGD([weight], max_gradient=-1.0)


@pytest.mark.parametrize("kind", OURS)
def test_every_optimizer_of_ours_has_its_fused_form(kind):
    params = FusedParams.from_dict(convert_optimizer_type_and_kwargs(OURS[kind], {"lr": 0.3}))
    assert params.optimizer.value == kind
    assert params.learning_rate == 0.3


def test_every_kind_is_covered_here():
    assert set(STATES) == {kind.value for kind in EmbOptimType} == {*OURS, "exact_row_wise_adagrad"}


@pytest.mark.parametrize(
    ("optimizer", "arguments", "message"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, r"SGD\(momentum=0.9\) has no fused form; leave"),
        (torch.optim.Adam, {"amsgrad": True}, r"Adam\(amsgrad=True\) has no fused form"),
        (RowWiseAdagrad, {"lr_decay": 0.1}, r"\(lr_decay=0.1\) has no fused form"),
        (torch.optim.RMSprop, {}, "RMSprop has no fused form; give one of Adagrad, Adam"),
        (torch.optim.SGD, {"learning_rate": 1.0}, "SGD has no argument 'learning_rate'"),
    ],
)
def test_what_has_no_fused_form_is_refused(optimizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        convert_optimizer_type_and_kwargs(optimizer, arguments)


@pytest.mark.parametrize(
    ("fused_params", "message"),
    [
        ({"optimizer": "exact_sgd", "beta1": 0.9}, "exact_sgd has none; leave it out"),
        ({"optimizer": "adam", "betas": (0.9, 1.5)}, "beta2 is 1.5; give 0 or more, below 1"),
        ({"optimizer": "adam", "momentum": 0.9}, "adam has none"),
        ({"weight_decay_mode": "l2"}, "there is no weight_decay"),
        ({"weight_decay": 0.1, "weight_decay_mode": "cowclip"}, "is 'cowclip'; give one of"),
        ({"weight_decay": 0.1, "weight_decay_mode": 4}, "weight_decay_mode is 4"),
        ({"gradient_clipping": False, "max_gradient": 1.0}, "leave one out"),
        ({"max_gradient": -1.0}, "max_gradient is -1.0; give 0 or more"),
        ({"cache_load_factor": 1.5}, "cache_load_factor is 1.5"),
        ({"output_dtype": "int8"}, "output_dtype is 'int8'; give one of fp32"),
        ({"bounds_check_mode": "perhaps"}, "bounds_check_mode is 'perhaps'"),
    ],
)
def test_fused_params_that_make_no_sense_are_refused(fused_params, message):
    with pytest.raises(ValueError, match=message):
        FusedParams.from_dict(fused_params)


def test_fused_params_take_the_words_of_others():
    from fbgemm_gpu.split_embedding_configs import EmbOptimType as Theirs
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

    params = FusedParams.from_dict(
        {
            "optimizer": Theirs.EXACT_ADAGRAD,
            "bounds_check_mode": BoundsCheckMode.WARNING,
            "weight_decay": 0.1,
            "weight_decay_mode": WeightDecayMode.L2,
            "gradient_clipping": True,
        }
    )
    assert params.optimizer is EmbOptimType.EXACT_ADAGRAD
    assert (params.bounds_check_mode, params.weight_decay_mode) == ("warning", "l2")
    assert params.clip_to == 1.0
    assert FusedParams.from_dict({"weight_decay_mode": WeightDecayMode.NONE}) == FusedParams()


def test_row_wise_adagrad_takes_sparse_gradients():
    tables = [nn.Embedding(9, 4, sparse=sparse) for sparse in (False, True)]
    tables[1].load_state_dict(tables[0].state_dict())
    for table in tables:
        optimizer = RowWiseAdagrad(table.parameters(), lr=0.1, lr_decay=0.5)
        for ids in ([1, 1, 3], [3, 8]):
            optimizer.zero_grad()
            table(torch.tensor(ids)).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(tables[0].weight, tables[1].weight, rtol=0, atol=0)


def test_numbers_of_a_group_are_taken_over_where_they_differ():
    known = HyperParameters(lr=0.1, beta1=0.8, beta2=0.99)
    assert known.read({"lr": 0.1, "eps": known.eps, "betas": (0.8, 0.99), "params": []}) is known
    assert known.read({"lr": 0.1}) is known
    for group, changed in (
        ({"lr": 0.2}, {"lr": 0.2}),
        ({"betas": (0.8, 0.9)}, {"beta2": 0.9}),
        ({"betas": (0.7, 0.99), "weight_decay": 1}, {"beta1": 0.7, "weight_decay": 1.0}),
    ):
        assert known.read(group) == dataclasses.replace(known, **changed)
