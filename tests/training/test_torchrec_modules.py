"""Modules under TorchRec's paths, against their equations."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tessera.errors import UserError
from tessera.training import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    KeyedTensor,
)
from tessera.training.fx import symbolic_trace
from tessera.training.models.deepfm import SimpleDeepFMNN
from tessera.training.models.dlrm import DLRM, DLRM_Projection, DLRMWrapper
from tessera.training.modules import deepfm
from tessera.training.modules.activation import SwishLayerNorm
from tessera.training.modules.crossnet import CrossNet, LowRankMixtureCrossNet, VectorCrossNet
from tessera.training.modules.deepfm import DeepFM, FactorizationMachine
from tessera.training.modules.embedding_tower import (
    EmbeddingTower,
    EmbeddingTowerCollection,
    tower_input_params,
)
from tessera.training.modules.regroup import KTRegroupAsDict
from tessera.training.sparse.jagged_tensor import regroup_kts
from tessera.training.sparse.keyed import regrouping_of

N = 5
TWO_SAMPLES = KeyedJaggedTensor(
    ["f0", "f1"], torch.tensor([1, 2, 5]), lengths=torch.tensor([1, 0, 1, 1])
)


def same_gradients(found, expected, inputs):
    """Both give the inputs the same gradients, of a sum of squares."""
    ours, theirs = (
        torch.autograd.grad(each.square().sum(), inputs, retain_graph=True)
        for each in (found, expected)
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


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


def name_of(name, place):
    """What a weight of a network of layer ``place`` alone is called in the whole network."""
    return name if "gates" in name else name.replace(".0", f".{place}", 1)


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
def test_cross_networks_are_their_equations(make, equation, device):
    torch.manual_seed(1)
    net, x = make(2).to(device), torch.randn(4, N, device=device, requires_grad=True)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5)
    weights = dict(net.named_parameters())
    ones = [make(1).to(device) for _ in range(2)]  # a network of each layer alone
    for place, one in enumerate(ones):
        one.load_state_dict(
            {name: weights[name_of(name, place)].detach() for name in one.state_dict()}
        )
    expected = []
    for x_0 in x:
        x_l = x_0
        for one in ones:
            x_l = equation(one, x_0, x_l)
        expected.append(x_l)
    found, wanted = net(x), torch.stack(expected)
    torch.testing.assert_close(found, wanted)
    same_gradients(found, wanted, [x])
    found.square().sum().backward()
    wanted.square().sum().backward()
    by_layers = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for place, one in enumerate(ones):
        for name, weight in one.named_parameters():
            if weight.grad is not None:
                by_layers[name_of(name, place)] += weight.grad  # layers share the gates
    for name, weight in weights.items():
        own = torch.zeros_like(weight) if weight.grad is None else weight.grad
        torch.testing.assert_close(own, by_layers[name])
    assert torch.equal(symbolic_trace(net)(x), net(x))
    with pytest.raises(ValueError, match="num_layers is 0"):
        make(0)


@pytest.mark.parametrize(("dims", "axes"), [(N, [-1]), ([3, N], [-2, -1])])
def test_swish_with_a_norm_is_its_equation(dims, axes, device):
    x = torch.randn(4, 3, N, device=device, requires_grad=True)
    mean, variance = x.mean(axes, keepdim=True), x.var(axes, keepdim=True, unbiased=False)
    expected = x * torch.sigmoid((x - mean) / torch.sqrt(variance + 1e-5))
    found = SwishLayerNorm(dims).to(device)(x)
    torch.testing.assert_close(found, expected)
    same_gradients(found, expected, [x])


def test_the_machine_takes_all_pairs_of_numbers(device):
    vectors = [torch.randn(3, 2, 2), torch.randn(3, 4)]
    vectors = [given.to(device).requires_grad_() for given in vectors]
    flat = torch.cat([vectors[0].reshape(3, 4), vectors[1]], dim=1)
    pairs = [sum(row[i] * row[j] for i in range(8) for j in range(i)) for row in flat]
    found, expected = FactorizationMachine()(vectors), torch.stack(pairs).unsqueeze(1)
    torch.testing.assert_close(found, expected)
    same_gradients(found, expected, vectors)
    linear = nn.Linear(8, 2, device=device)
    assert torch.equal(DeepFM(linear)(vectors), linear(flat))


def test_the_machines_own_gradient_has_the_bits_of_autograds(device, monkeypatch):
    monkeypatch.setattr(deepfm, "_MANY", 1)
    machine = FactorizationMachine()
    vectors = [torch.randn(5, 7, device=device, requires_grad=True) for _ in range(3)]
    weights = torch.randn(5, 1, device=device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepfm._PairSums, "serves", lambda _: False)
        plain = machine(vectors)
        expected = torch.autograd.grad(plain, vectors, weights, create_graph=True)
    found = machine(vectors)
    assert torch.equal(found, plain)
    own = torch.autograd.grad(found, vectors, weights, create_graph=True)
    for each, other in zip(own, expected, strict=True):
        assert torch.equal(each, other)
    twice = [
        torch.autograd.grad(sum(g.square().sum() for g in of), vectors) for of in (own, expected)
    ]
    torch.testing.assert_close(*twice)
    narrow = [vector.detach().bfloat16().requires_grad_() for vector in vectors]
    with torch.autocast(device.type, torch.bfloat16):
        machine(narrow).sum().backward()
    assert narrow[0].grad.dtype == torch.bfloat16


def test_the_machine_is_scripted_and_traced(monkeypatch):
    monkeypatch.setattr(deepfm, "_MANY", 1)
    given, machine = [torch.randn(3, N).requires_grad_()], FactorizationMachine()
    expected = machine(given)
    assert type(expected.grad_fn).__name__ == "_PairSumsBackward"
    assert torch.equal(torch.jit.script(machine)(given), expected)
    assert torch.equal(symbolic_trace(machine)(given), expected)
    assert torch.equal(torch.func.vmap(machine)([given[0][None]])[0], expected)
    with torch.no_grad():
        assert torch.equal(machine(given), expected)


def collection(*dims, device=None):
    tables = [
        EmbeddingBagConfig(6, dim, name=f"t{place}", feature_names=[f"f{place}"])
        for place, dim in enumerate(dims)
    ]
    return EmbeddingBagCollection(tables, device=device)


def test_a_small_deepfm_puts_its_parts_together(device):
    model = SimpleDeepFMNN(3, collection(4, 4), hidden_layer_size=7, deep_fm_dimension=5).to(device)
    dense = torch.randn(2, 3, device=device)
    kjt = TWO_SAMPLES.to(device)
    found = model(dense, kjt)
    own = model.dense_arch.model(dense)
    pooled = model.sparse_arch(kjt)
    every = torch.cat([own, pooled.values()], dim=1)
    pair_sum = 0.5 * (every.sum(1).square() - every.square().sum(1))
    deep = model.inter_arch.deep_fm.dense_module(every)
    mixed = torch.cat([own, deep, pair_sum.unsqueeze(1)], dim=1)
    expected = torch.sigmoid(model.over_arch.model[0](mixed))
    torch.testing.assert_close(found, expected)
    same_gradients(found, expected, list(model.parameters()))
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


def test_groups_of_columns_by_a_module_and_by_a_function(device):
    values = [torch.arange(2.0 * n, device=device).view(2, n).requires_grad_() for n in (3, 2)]
    left = KeyedTensor(["a", "b"], [1, 2], values[0])
    right = KeyedTensor(["c"], [2], values[1])
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
        same_gradients(*(torch.cat([each["x"], each["y"]], 1) for each in (found, by_hand)), values)
    for found, expected in zip(regroup_kts([left, right], groups), by_hand.values(), strict=True):
        assert torch.equal(found, expected)
    found = torch.fx.symbolic_trace(module.regroup)([left, right])
    assert all(torch.equal(found[name], by_hand[name]) for name in by_hand)
    half = KTRegroupAsDict(groups, ["x", "y"], DataType.FP16)([left, right])
    assert half["x"].dtype is torch.float16
    with pytest.raises(ValueError, match="2 groups but 1 names"):
        KTRegroupAsDict(groups, ["x"])


def test_many_groups_of_columns_of_changing_tensors(device):
    names = [f"f{place}" for place in range(20)]
    groups = [names[::-1], names[::3], names[4:5]]
    module = KTRegroupAsDict(groups, ["reversed", "thirds", "one"])
    for dims in (list(range(1, 21)), [4] * 20):
        values = [
            torch.randn(3, sum(dims[half::2]), device=device, requires_grad=True)
            for half in range(2)
        ]
        given = [KeyedTensor(names[half::2], dims[half::2], values[half]) for half in range(2)]
        by_name = {name: own for keyed in given for name, own in keyed.to_dict().items()}
        expected = [torch.cat([by_name[name] for name in group], dim=1) for group in groups]
        for _ in range(2):
            for found in (list(module(given).values()), regroup_kts(given, groups)):
                assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
                same_gradients(torch.cat(found, 1), torch.cat(expected, 1), values)
        if device.type == "cpu":  # as it is done on a GPU
            by_operator = regrouping_of(given, groups).by_operator(values)
            assert all(torch.equal(*pair) for pair in zip(by_operator, expected, strict=True))


def test_a_dlrm_with_projections_is_its_equation_and_trains(device):
    model = DLRM_Projection(collection(4, 4), 3, [5, 4], [6, 1], [7, 8], [12]).to(device)
    dense, two_samples = torch.randn(2, 3, device=device), TWO_SAMPLES.to(device)
    found = model(dense, two_samples)
    own = model.dense_arch.model(dense)
    every = torch.cat([own, model.sparse_arch(two_samples).flatten(1)], dim=1)
    left = model.inter_arch.interaction_branch1.model(every)
    right = model.inter_arch.interaction_branch2.model(every)
    rows = []
    for sample in range(2):
        # The projections as matrices [2, 4] and [4, 3].
        products = [
            sum(left[sample, 4 * i + d] * right[sample, 3 * d + j] for d in range(4))
            for i in range(2)
            for j in range(3)
        ]
        rows.append(torch.cat([own[sample], torch.stack(products)]))
    expected = model.over_arch.model(torch.stack(rows))
    torch.testing.assert_close(found, expected)
    same_gradients(found, expected, list(model.parameters()))
    assert torch.equal(torch.jit.script(symbolic_trace(model))(dense, two_samples), found)
    with pytest.raises(ValueError, match="interaction_branch2_layer_size is 9; it must be a"):
        DLRM_Projection(collection(4, 4), 3, [5, 4], [6, 1], [8], [9])


def test_a_wrapped_dlrm_gives_its_loss_while_it_is_trained(device):
    model = DLRMWrapper(collection(4, 4), 3, [4], [6, 1]).to(device)
    plain = DLRM(collection(4, 4), 3, [4], [6, 1]).to(device)
    plain.load_state_dict(model.state_dict())
    batch = SimpleNamespace(
        float_features=torch.randn(2, 3, device=device),
        idlist_features=TWO_SAMPLES.to(device),
        label=torch.tensor([1.0, 0.0], device=device),
    )
    logits = plain(batch.float_features, batch.idlist_features)
    loss, found = model(batch)
    assert torch.equal(found, logits)
    p = torch.sigmoid(logits.double().squeeze())
    expected = -(p[0].log() + (1 - p[1]).log()) / 2
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(model.eval()(batch), logits)


class Mixing(nn.Module):
    """Takes the vectors of a keyed tensor side by side, or the mean of a jagged tensor's."""

    def __init__(self, width, columns):
        super().__init__()
        self.linear = nn.Linear(width, columns)

    def forward(self, looked_up):
        if isinstance(looked_up, dict):
            (vectors,) = looked_up.values()
            return self.linear(vectors.to_padded_dense(3).sum(1))
        return self.linear(looked_up.values())


def test_towers_stand_side_by_side(device):
    weighted = EmbeddingBagCollection(
        [EmbeddingBagConfig(6, 4, name="w", feature_names=["f0"])], is_weighted=True
    )
    sequences = EmbeddingCollection([EmbeddingConfig(6, 4, name="s", feature_names=["f1"])])
    kinds = (collection(4, 4), weighted, sequences)
    assert [tower_input_params(kind) for kind in (*kinds, nn.Identity())] == [
        (True, False),
        (False, True),
        (True, False),
        (True, True),
    ]
    towers = [
        EmbeddingTower(kind, Mixing(width, columns))
        for kind, width, columns in zip(kinds, (8, 4, 4), (3, 2, 1), strict=True)
    ]
    model = EmbeddingTowerCollection(towers).to(device)
    weights = torch.tensor([0.5, -1.0, 2.0])
    with_weights = KeyedJaggedTensor(
        TWO_SAMPLES.keys(), TWO_SAMPLES.values(), weights, lengths=TWO_SAMPLES.lengths()
    ).to(device)
    two_samples = TWO_SAMPLES.to(device)
    found = model(two_samples, with_weights)
    # f0 has the ids 1 and none, f1 the ids 2 and 5.
    table = {name: kinds[0].embedding_bags[name].weight for name in ("t0", "t1")}
    zero = torch.zeros(4, device=device)
    plain = torch.stack(
        [
            torch.cat([table["t0"][1], table["t1"][2]]),
            torch.cat([zero, table["t1"][5]]),
        ]
    )
    of_weighted = torch.stack([0.5 * weighted.embedding_bags["w"].weight[1], zero])
    rows = sequences.embeddings["s"].weight[[2, 5]]
    expected = torch.cat(
        [
            tower.interaction.linear(vectors)
            for tower, vectors in zip(towers, (plain, of_weighted, rows), strict=True)
        ],
        dim=1,
    )
    assert found.shape == (2, 6)
    torch.testing.assert_close(found, expected)
    same_gradients(found, expected, list(model.parameters()))
    with pytest.raises(ValueError, match="tower 1 needs weighted_features"):
        model(two_samples)
    EmbeddingTowerCollection(towers, torch.device("meta"))
    assert {tower.interaction.linear.weight.device.type for tower in towers} == {"meta"}
