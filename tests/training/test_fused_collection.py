"""FusedEmbeddingBagCollection: a plain collection with an optimizer, in one."""

import pytest
import torch

from tessera.training.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from tessera.training.optim.rowwise_adagrad import RowWiseAdagrad
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


def tables():
    # Two poolings make two kernels, whose outputs are put in the tables' order.
    return [
        EmbeddingBagConfig(name="a", embedding_dim=4, num_embeddings=7, feature_names=["f", "g"]),
        EmbeddingBagConfig(
            name="b",
            embedding_dim=8,
            num_embeddings=5,
            feature_names=["h"],
            pooling=PoolingType.MEAN,
        ),
        EmbeddingBagConfig(name="c", embedding_dim=4, num_embeddings=6, feature_names=["f"]),
    ]


def batch(seed, *, weighted):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (4 * 3,), generator=generator)
    count = int(lengths.sum())
    return KeyedJaggedTensor.from_lengths_sync(
        ["other", "h", "f", "g"],  # not the tables' order, and one too many
        torch.randint(0, 5, (count,), generator=generator),
        lengths,
        torch.rand(count, generator=generator) if weighted else None,
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-8}),
        (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-8}),
    ],
)
def test_it_trains_as_a_plain_collection_with_the_optimizer(optimizer, settings, weighted, device):
    plain = EmbeddingBagCollection(tables(), is_weighted=weighted, device=device)
    fused = FusedEmbeddingBagCollection(
        tables(), optimizer, settings, is_weighted=weighted, device=device
    )
    assert list(fused.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in fused.named_parameters()] == list(plain.state_dict())
    fused.load_state_dict(plain.state_dict())
    own = optimizer(plain.parameters(), **settings)
    for seed in range(4):
        given = batch(seed, weighted=weighted).to(device)
        expected, found = plain(given), fused(given)
        assert found.keys() == expected.keys() == ["f@a", "g", "h", "f@c"]
        assert found.length_per_key() == expected.length_per_key()
        torch.testing.assert_close(found.values(), expected.values())
        (expected.values() ** 2).sum().backward()
        own.step()
        own.zero_grad()
        (found.values() ** 2).sum().backward()
    for name, values in plain.state_dict().items():
        torch.testing.assert_close(fused.state_dict()[name], values, atol=1e-5, rtol=1e-5)
    assert fused.embedding_bag_configs() == tables()
    assert (fused.is_weighted(), fused.device) == (weighted, device)
    assert (fused.optimizer_type(), fused.optimizer_kwargs()) == (optimizer, settings)


def test_its_optimizer_sets_the_rate_and_has_the_state():
    fused = FusedEmbeddingBagCollection(tables(), RowWiseAdagrad, {"lr": 0.1})
    optimizer = fused.fused_optimizer()
    assert set(optimizer.params) == {f"embedding_bags.{t.name}.weight" for t in tables()}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = {name: values.clone() for name, values in fused.state_dict().items()}
    fused(batch(0, weighted=False)).values().sum().backward()
    for name, values in fused.state_dict().items():
        torch.testing.assert_close(values, before[name], atol=0, rtol=0)
    state = optimizer.state_dict()["state"]["embedding_bags.a.weight"]
    sums = next(value for name, value in state.items() if name.endswith("momentum1"))
    assert float(sums.max()) > 0


def test_first_values_are_within_each_tables_range():
    torch.manual_seed(0)
    fused = FusedEmbeddingBagCollection(tables(), torch.optim.SGD, {"lr": 0.1})
    for table in tables():
        values = fused.embedding_bags[table.name].weight
        assert 0 < float(values.detach().abs().max()) <= table.get_weight_init_max()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"optimizer_type": torch.optim.RMSprop}, "RMSprop has no fused form"),
        (
            {"device": torch.device("meta"), "location": "DEVICE"},
            "location is DEVICE and device is meta",
        ),
        ({"location": "MANAGED"}, "location is MANAGED and device is cpu; give HOST"),
        ({"location": "ELSEWHERE"}, "location is ELSEWHERE"),
        ({"tables": [*tables(), *tables()]}, "two tables are called 'a'"),
    ],
)
def test_what_does_not_fit_is_refused(changes, error):
    given = {
        "tables": tables(),
        "optimizer_type": torch.optim.SGD,
        "optimizer_kwargs": {"lr": 0.1},
        **changes,
    }
    with pytest.raises(ValueError, match=error):
        FusedEmbeddingBagCollection(**given)


def test_a_missing_feature_is_told():
    fused = FusedEmbeddingBagCollection(tables(), torch.optim.SGD, {"lr": 0.1})
    with pytest.raises(KeyError, match="g"):
        fused(batch(0, weighted=False).split([3, 1])[0])


def test_fbgemms_place_of_host_tables_is_taken():
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import EmbeddingLocation

    fused = FusedEmbeddingBagCollection(
        tables(), torch.optim.SGD, {"lr": 0.1}, location=EmbeddingLocation.HOST
    )
    assert fused(batch(0, weighted=False)).values().shape == (3, 20)
