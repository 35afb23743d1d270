"""`FusedEmbeddingCollection` against the plain collection with torch's optimizer, and the exchange of collections."""

import pytest
import torch
from torch import nn

from tessera.training import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from tessera.training.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    fuse_embedding_optimizer,
)

FEATURES = KeyedJaggedTensor(
    ["b", "a", "c"],
    torch.tensor([1, 2, 0, 3, 3, 1, 4]),
    lengths=torch.tensor([2, 0, 1, 1, 1, 2]),
)


def tables():
    return [
        EmbeddingConfig(6, 4, name="one", feature_names=["a", "b"]),
        EmbeddingConfig(5, 4, name="two", feature_names=["c", "a"]),
    ]


@pytest.mark.parametrize(
    ("kind", "more"),
    [(torch.optim.SGD, {}), (torch.optim.Adagrad, {"eps": 1e-8}), (torch.optim.Adam, {})],
)
def test_three_steps_are_those_of_the_plain_collection(kind, more):
    plain = EmbeddingCollection(tables(), need_indices=True)
    fused = FusedEmbeddingCollection(tables(), kind, {"lr": 0.1, **more}, need_indices=True)
    assert list(fused.state_dict()) == ["embeddings.one.weight", "embeddings.two.weight"]
    fused.load_state_dict(plain.state_dict())
    optimizer = kind(plain.parameters(), lr=0.1, **more)
    for seed in range(3):
        optimizer.zero_grad()
        ours, theirs = fused(FEATURES), plain(FEATURES)
        assert list(ours) == list(theirs) == ["a@one", "b", "c", "a@two"]
        generator = torch.Generator().manual_seed(seed)
        for name, found in theirs.items():
            torch.testing.assert_close(ours[name].values(), found.values())
            assert ours[name].lengths().tolist() == found.lengths().tolist()
            assert ours[name].weights().tolist() == found.weights().tolist()
            factor = torch.rand(found.values().shape, generator=generator)
            (found.values() * factor).sum().backward(retain_graph=True)
        generator = torch.Generator().manual_seed(seed)
        total = torch.zeros(())
        for found in ours.values():
            factor = torch.rand(found.values().shape, generator=generator)
            total = total + (found.values() * factor).sum()
        total.backward()
        optimizer.step()
    if kind is not torch.optim.Adam:  # which moves rows of no id, too, where it is not fused
        for name, weight in plain.state_dict().items():
            torch.testing.assert_close(fused.state_dict()[name], weight)
    assert list(fused.fused_optimizer().params) == list(plain.state_dict())
    assert fused.optimizer_type() is kind
    assert fused.optimizer_kwargs() == {"lr": 0.1, **more}
    assert fused.embedding_dim() == 4


def test_wrong_arguments_are_told():
    with pytest.raises(ValueError, match="location is DEVICE and device is meta"):
        FusedEmbeddingCollection(
            tables(), torch.optim.SGD, {"lr": 0.1}, torch.device("meta"), location="DEVICE"
        )
    fused = FusedEmbeddingCollection(tables(), torch.optim.SGD, {"lr": 0.1})
    with pytest.raises(KeyError):
        fused(KeyedJaggedTensor(["a"], torch.tensor([1]), lengths=torch.tensor([1])))


class Model(nn.Module):
    """Has a collection of each kind, one of them deeper."""

    def __init__(self):
        super().__init__()
        bags = EmbeddingBagConfig(6, 4, name="bags", feature_names=["a"])
        self.inner = nn.Sequential(EmbeddingBagCollection([bags], is_weighted=True))
        self.sequences = EmbeddingCollection(tables(), need_indices=True)
        self.linear = nn.Linear(2, 2)


def test_collections_of_a_model_are_exchanged():
    model = Model()
    linear, names = model.linear, list(model.state_dict())
    cpu = torch.device("cpu")
    fused = fuse_embedding_optimizer(model, torch.optim.SGD, {"lr": 0.1}, cpu)
    assert fused is model
    assert model.linear is linear
    assert isinstance(model.inner[0], FusedEmbeddingBagCollection)
    assert model.inner[0].is_weighted()
    assert isinstance(model.sequences, FusedEmbeddingCollection)
    assert model.sequences.need_indices()
    assert list(model.state_dict()) == names
    alone = fuse_embedding_optimizer(EmbeddingCollection(tables()), torch.optim.SGD, {"lr": 1}, cpu)
    assert isinstance(alone, FusedEmbeddingCollection)
