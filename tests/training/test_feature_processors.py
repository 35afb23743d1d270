import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tessera.training import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    PoolingType,
)
from tessera.training.modules.feature_processor_ import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from tessera.training.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from tests.training.jagged_strategies import bags_of, quick
from tests.training.references import pooled_reference

ROWS = {"a": 9, "b": 9, "c": 5}


def weights_of(length):
    return [0.5 + 0.25 * place for place in range(length)]


def fill(parameter):
    with torch.no_grad():
        parameter.copy_(torch.tensor(weights_of(parameter.numel())))


def tables(*, mean=False, weighted=True):
    pooling = PoolingType.MEAN if mean else PoolingType.SUM
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(9, 3, name="ab", feature_names=["a", "b"], pooling=pooling),
            EmbeddingBagConfig(5, 2, name="c", feature_names=["c"]),
        ],
        is_weighted=weighted,
    )


@quick
@given(bags=bags_of(ROWS, max_length=4), mean=st.booleans(), single=st.booleans())
def test_ids_weigh_what_their_place_does(bags, mean, single):
    ebc = tables(mean=mean)
    if single:
        processors = {key: PositionWeightedModule(4) for key in "abc"}
        for module in processors.values():
            fill(module.position_weight)
    else:
        processors = PositionWeightedModuleCollection(dict.fromkeys("abc", 4))
        for parameter in processors.parameters():
            fill(parameter)
    out = FeatureProcessedEmbeddingBagCollection(ebc, processors)(bags.kjt())
    for key in "abc":
        expected = pooled_reference(
            ebc.embedding_bags["c" if key == "c" else "ab"].weight,
            bags.ids[key],
            mean=mean and key != "c",
            weights=[weights_of(len(bag)) for bag in bags.ids[key]],
        )
        # At most 4 additions of numbers below 2, in another order.
        torch.testing.assert_close(out[key], expected, rtol=0, atol=5e-6)


def test_places_learn():
    module = PositionWeightedModule(3)
    jagged = JaggedTensor(torch.tensor([4, 5, 6]), lengths=torch.tensor([2, 0, 1]))
    (module(jagged).weights() * torch.tensor([1.0, 2.0, 4.0])).sum().backward()
    assert module.position_weight.grad.tolist() == [5.0, 2.0, 0.0]
    module.reset_parameters()
    assert module.position_weight.tolist() == [1.0, 1.0, 1.0]


def test_features_without_position_weights_keep_theirs():
    module = PositionWeightedModuleCollection({"a": 2})
    fill(module.position_weights["a"])
    ids, lengths = torch.tensor([1, 2, 3, 4]), torch.tensor([2, 0, 1, 1])
    plain = module(KeyedJaggedTensor(["a", "b"], ids, lengths=lengths))
    assert plain.weights().tolist() == [0.5, 0.75, 1.0, 1.0]
    weighted = KeyedJaggedTensor(["a", "b"], ids, weights=torch.full((4,), 3.0), lengths=lengths)
    assert module(weighted).weights().tolist() == [0.5, 0.75, 3.0, 3.0]
    assert module(KeyedJaggedTensor.empty()).weights().numel() == 0


def test_features_that_no_table_serves_are_left_out():
    processors = PositionWeightedModuleCollection(dict.fromkeys("abc", 2))
    module = FeatureProcessedEmbeddingBagCollection(tables(), processors)
    kjt = KeyedJaggedTensor(
        ["z", "c", "b", "a"], torch.tensor([100, 1, 2, 3]), lengths=torch.tensor([1, 1, 1, 1])
    )
    assert module(kjt).keys() == ["a", "b", "c"]
    assert module.is_weighted()
    assert [table.name for table in module.embedding_bag_configs()] == ["ab", "c"]
    assert list(module.state_dict()) == [
        "_embedding_bag_collection.embedding_bags.ab.weight",
        "_embedding_bag_collection.embedding_bags.c.weight",
        *(f"_feature_processors.position_weights.{key}" for key in "abc"),
    ]
    each = {key: PositionWeightedModule(2) for key in "abc"}
    assert list(FeatureProcessedEmbeddingBagCollection(tables(), each).state_dict())[2:] == [
        f"_feature_processors.{key}.position_weight" for key in "abc"
    ]


def test_mistakes_are_named():
    jagged = JaggedTensor(torch.tensor([4, 5, 6]), lengths=torch.tensor([3]))
    with pytest.raises(ValueError, match="a bag of 3 ids but 2 position weights"):
        PositionWeightedModule(2)(jagged)
    with pytest.raises(ValueError, match="feature a has a bag of 3 ids"):
        PositionWeightedModuleCollection({"a": 2})(KeyedJaggedTensor.from_jt_dict({"a": jagged}))
    with pytest.raises(ValueError, match=r"max_feature_lengths\['a'\] is 0"):
        PositionWeightedModuleCollection({"a": 0})
    with pytest.raises(ValueError, match="build it with is_weighted=True"):
        FeatureProcessedEmbeddingBagCollection(tables(weighted=False), {})
    with pytest.raises(ValueError, match="feature 'b' has no processor in feature_processors"):
        FeatureProcessedEmbeddingBagCollection(tables(), {"a": PositionWeightedModule(2)})


@pytest.mark.parametrize("single", [False, True])
def test_processors_and_collection_alone(single):
    tables = EmbeddingBagCollection(
        [EmbeddingBagConfig(9, 4, name="t", feature_names=["a", "b"])], is_weighted=True
    )
    processors = {name: PositionWeightedModule(3) for name in "ab"}
    for processor in processors.values():
        fill(processor.position_weight)
    if single:
        processors = PositionWeightedModuleCollection({"a": 3, "b": 3})
        assert set(processors.position_weights_dict) == {"a", "b"}
    both = FeatureProcessedEmbeddingBagCollection(tables, processors)
    weigh, look_up = both.split()
    features = KeyedJaggedTensor(
        ["a", "b"], torch.tensor([1, 8, 3, 3]), lengths=torch.tensor([2, 0, 1, 1])
    )
    assert look_up is tables
    assert torch.equal(look_up(weigh(features)).values(), both(features).values())
