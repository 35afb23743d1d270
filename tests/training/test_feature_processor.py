"""The feature processors of older TorchRec programs, against plain loops."""

import torch

from tessera.training import KeyedJaggedTensor
from tessera.training.modules.feature_processor import (
    PositionWeightedModule,
    PositionWeightedProcessor,
    offsets_to_range_traceble,
)

KJT = KeyedJaggedTensor.from_lengths_sync(
    ["a", "b", "c"], torch.arange(8), torch.tensor([2, 0, 1, 1, 1, 3])
)


def placed(weights):
    """Weights of ids in bags of 2, 0 and of 1, 3: those of their places."""
    return {"a": [weights["a"][0], weights["a"][1]], "c": [weights["c"][i] for i in (0, 0, 1, 2)]}


def test_places_in_bags():
    offsets, values = torch.tensor([0, 2, 2, 5]), torch.zeros(5)
    assert offsets_to_range_traceble(offsets, values).tolist() == [0, 1, 0, 1, 2]


def test_weights_of_places_in_a_dictionary():
    module = PositionWeightedModule({"a": 2, "c": 4})
    with torch.no_grad():
        for weights in module.position_weights.values():
            weights.copy_(torch.rand(len(weights)))
    features = KJT.to_dict()
    weighted = module(features)
    expected = placed({name: w.tolist() for name, w in module.position_weights.items()})
    assert weighted["a"].weights().tolist() == expected["a"]
    assert weighted["c"].weights().tolist() == expected["c"]
    assert weighted["b"] is features["b"]
    module.reset_parameters()
    assert module.position_weights["c"].tolist() == [1.0] * 4


def test_weights_of_places_of_some_features():
    module = PositionWeightedProcessor({"c": 3, "a": 2})
    with torch.no_grad():
        module.position_weights["c"].copy_(torch.rand(3))
    found = module(KJT)
    assert found.keys() == ["a", "c"]
    assert found.values().tolist() == [0, 1, 4, 5, 6, 7]
    expected = placed({name: w.tolist() for name, w in module.position_weights.items()})
    assert found.weights().tolist() == [*expected["a"], *expected["c"]]
    found.weights().sum().backward()
    assert module.position_weights["c"].grad.tolist() == [2.0, 1.0, 1.0]
    assert PositionWeightedProcessor({"other": 3})(KJT) is KJT


def test_a_traced_module_gives_the_same():
    module = PositionWeightedModule({"a": 2, "c": 4})
    traced = torch.fx.symbolic_trace(module)
    assert torch.equal(traced(KJT.to_dict())["c"].weights(), module(KJT.to_dict())["c"].weights())
    alone = PositionWeightedProcessor({"c": 3, "a": 2})
    traced = torch.fx.symbolic_trace(alone)
    assert torch.equal(traced(KJT).weights(), alone(KJT).weights())
    scripted = torch.jit.script(traced)
    assert torch.equal(scripted(KJT).weights(), alone(KJT).weights())
