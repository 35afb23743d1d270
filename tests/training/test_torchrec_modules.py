"""Modules under TorchRec's paths, against their equations."""

import pytest
import torch
from torch import nn

from tessera.errors import UserError
from tessera.training import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    KeyedTensor,
)
from tessera.training.fx import symbolic_trace
from tessera.training.models.deepfm import SimpleDeepFMNN
from tessera.training.modules.activation import SwishLayerNorm
from tessera.training.modules.crossnet import CrossNet, LowRankMixtureCrossNet, VectorCrossNet
from tessera.training.modules.deepfm import DeepFM, FactorizationMachine
from tessera.training.modules.regroup import KTRegroupAsDict
from tessera.training.sparse.jagged_tensor import regroup_kts

N = 5


def cross(layer, x_0, x_l):
    return x_0 * (layer.kernels[0] @ x_l + layer.bias[0].squeeze(1)) + x_l


def cross_by_a_vector(layer, x_0, x_l):
    return x_0 * (layer.kernels[0].squeeze(1) @ x_l) + layer.bias[0].squeeze(1) + x_l


def cross_by_experts(layer, x_0, x_l):
    def one(expert):
        inner = torch.tanh(layer.V_kernels[0][expert] @ x_l)
        wide = layer.U_kernels[0][expert] @ torch.tanh(layer.C_kernels[0][expert] @ inner)
        return x_0 * (wide + layer.bias[0].squeeze(1))

    count = len(layer.U_kernels[0])
    if count == 1:
        return one(0) + x_l
    gates = torch.stack([gate.weight[0] @ x_l for gate in layer.gates])
    return sum(gates.softmax(0)[expert] * one(expert) for expert in range(count)) + x_l


def mixture(experts):
    return lambda layers: LowRankMixtureCrossNet(N, layers, experts, 2, torch.tanh)


@pytest.mark.parametrize(
    ("make", "equation"),
    [
        (lambda layers: CrossNet(N, layers), cross),
        (lambda layers: VectorCrossNet(N, layers), cross_by_a_vector),
        (mixture(1), cross_by_experts),
        (mixture(3), cross_by_experts),
    ],
    ids=["full", "vector", "one expert", "experts"],
)
def test_cross_networks_are_their_equations(make, equation):
    torch.manual_seed(1)
    net, x = make(2), torch.randn(4, N)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5)
    expected = []
    for x_0 in x:
        x_l = x_0
        for place in range(2):
            one = make(1)  # a network of layer ``place`` alone
            held = net.state_dict()
            one.load_state_dict(
                {
                    name: held[name.replace(".0", f".{place}", 1)]
                    for name in one.state_dict()
                    if "gates" not in name
                }
                | {name: tensor for name, tensor in held.items() if "gates" in name}
            )
            x_l = equation(one, x_0, x_l)
        expected.append(x_l)
    torch.testing.assert_close(net(x), torch.stack(expected))
    assert torch.equal(symbolic_trace(net)(x), net(x))
    with pytest.raises(ValueError, match="num_layers is 0"):
        make(0)


@pytest.mark.parametrize(("dims", "axes"), [(N, [-1]), ([3, N], [-2, -1])])
def test_swish_with_a_norm_is_its_equation(dims, axes):
    x = torch.randn(4, 3, N)
    mean, variance = x.mean(axes, keepdim=True), x.var(axes, keepdim=True, unbiased=False)
    expected = x * torch.sigmoid((x - mean) / torch.sqrt(variance + 1e-5))
    torch.testing.assert_close(SwishLayerNorm(dims)(x), expected)


def test_the_machine_takes_all_pairs_of_numbers():
    vectors = [torch.randn(3, 2, 2), torch.randn(3, 4)]
    flat = torch.cat([vectors[0].reshape(3, 4), vectors[1]], dim=1)
    pairs = [sum(row[i] * row[j] for i in range(8) for j in range(i)) for row in flat]
    torch.testing.assert_close(FactorizationMachine()(vectors), torch.stack(pairs).unsqueeze(1))
    linear = nn.Linear(8, 2)
    assert torch.equal(DeepFM(linear)(vectors), linear(flat))


def collection(*dims):
    tables = [
        EmbeddingBagConfig(6, dim, name=f"t{place}", feature_names=[f"f{place}"])
        for place, dim in enumerate(dims)
    ]
    return EmbeddingBagCollection(tables)


def test_a_small_deepfm_puts_its_parts_together():
    model = SimpleDeepFMNN(3, collection(4, 4), hidden_layer_size=7, deep_fm_dimension=5)
    dense = torch.randn(2, 3)
    kjt = KeyedJaggedTensor(
        ["f0", "f1"], torch.tensor([1, 2, 5]), lengths=torch.tensor([1, 0, 1, 1])
    )
    found = model(dense, kjt)
    own = model.dense_arch.model(dense)
    pooled = model.sparse_arch(kjt)
    every = torch.cat([own, pooled.values()], dim=1)
    pair_sum = 0.5 * (every.sum(1).square() - every.square().sum(1))
    deep = model.inter_arch.deep_fm.dense_module(every)
    mixed = torch.cat([own, deep, pair_sum.unsqueeze(1)], dim=1)
    torch.testing.assert_close(found, torch.sigmoid(model.over_arch.model[0](mixed)))
    assert torch.equal(torch.jit.script(symbolic_trace(model))(dense, kjt), found)
    for dims in ((), (4, 8)):
        with pytest.raises(UserError, match="give at least one table, and all the same"):
            SimpleDeepFMNN(3, collection(*dims), 7, 5)


class Groups(nn.Module):
    def __init__(self, regroup):
        super().__init__()
        self.regroup = regroup

    def forward(self, left: KeyedTensor, right: KeyedTensor) -> dict[str, torch.Tensor]:
        return self.regroup([left, right])


def test_groups_of_columns_by_a_module_and_by_a_function():
    left = KeyedTensor(["a", "b"], [1, 2], torch.arange(6.0).view(2, 3))
    right = KeyedTensor(["c"], [2], torch.arange(4.0).view(2, 2))
    groups = [["c", "a"], ["b"]]
    by_hand = {
        "x": torch.cat([right["c"], left["a"]], dim=1),
        "y": left["b"],
    }
    module = Groups(KTRegroupAsDict(groups, ["x", "y"]))
    for way in (module, torch.jit.script(module), symbolic_trace(module)):
        found = way(left, right)
        assert list(found) == ["x", "y"]
        assert all(torch.equal(found[name], by_hand[name]) for name in by_hand)
    for found, expected in zip(regroup_kts([left, right], groups), by_hand.values(), strict=True):
        assert torch.equal(found, expected)
    half = KTRegroupAsDict(groups, ["x", "y"], DataType.FP16)([left, right])
    assert half["x"].dtype is torch.float16
    with pytest.raises(ValueError, match="2 groups but 1 names"):
        KTRegroupAsDict(groups, ["x"])
