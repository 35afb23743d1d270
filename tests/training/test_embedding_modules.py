import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tessera.training import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from tessera.training.modules.embedding_configs import (
    EmbeddingConfig,
    data_type_to_dtype,
    dtype_to_data_type,
    pooling_type_to_str,
)
from tessera.training.modules.embedding_modules import EmbeddingCollection
from tests.training.jagged_strategies import bags_of, quick
from tests.training.references import pooled_reference

ROWS = {"x": 7, "y": 7, "z": 5}


def collection(*, mean_z=True, weighted=False, device=None):
    """Table ``shared`` serves x and y, table ``own`` serves z with another size."""
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(7, 3, name="shared", feature_names=["y", "x"]),
            EmbeddingBagConfig(
                5,
                2,
                name="own",
                feature_names=["z"],
                pooling=PoolingType.MEAN if mean_z else PoolingType.SUM,
            ),
        ],
        is_weighted=weighted,
        device=device,
    )


@quick
@given(bags_of(ROWS), st.booleans(), st.booleans(), st.sampled_from([torch.int32, torch.int64]))
def test_lookups_equal_a_plain_loop(bags, weighted, mean_z, values_dtype):
    ebc = collection(mean_z=mean_z, weighted=weighted)
    out = ebc(bags.kjt(weighted=weighted, values_dtype=values_dtype))
    assert out.keys() == ["y", "x", "z"]
    assert out.values().shape == (bags.batch_size, 8)
    for key in out.index_per_key():
        table = ebc.embedding_bags["own" if key == "z" else "shared"].weight
        expected = pooled_reference(
            table,
            bags.ids[key],
            mean=mean_z and key == "z",
            weights=bags.weights[key] if weighted else None,
        )
        # At most 5 additions of numbers below 2, in another order.
        torch.testing.assert_close(out[key], expected, rtol=0, atol=5e-6)


def test_a_feature_of_two_tables_has_a_vector_from_each():
    ebc = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(4, 2, name="s", feature_names=["x"]),
            EmbeddingBagConfig(4, 3, name="t", feature_names=["x", "y"]),
        ]
    )
    kjt = KeyedJaggedTensor(["y", "x"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    out = ebc(kjt)
    assert out.keys() == ["x@s", "x@t", "y"]
    assert torch.equal(out["x@s"][0], ebc.embedding_bags["s"].weight[2])
    assert torch.equal(out["x@t"][0], ebc.embedding_bags["t"].weight[2])
    assert torch.equal(out["y"][0], ebc.embedding_bags["t"].weight[1])


@pytest.mark.parametrize(("ids", "named"), [([0, 7, -1], -1), ([0, 7, 1], 7)])
def test_an_id_that_is_no_row_is_named(ids, named):
    kjt = KeyedJaggedTensor(["x", "y", "z"], torch.tensor(ids), lengths=torch.tensor([2, 1, 0]))
    with pytest.raises(IndexError, match=f"has id {named}, but table 'shared' has rows 0 to 6"):
        collection()(kjt)


def test_missing_features_and_weights_are_named():
    kjt = KeyedJaggedTensor(["x"], torch.tensor([1]), lengths=torch.tensor([1]))
    with pytest.raises(KeyError, match="y"):
        collection()(kjt)
    with pytest.raises(ValueError, match="no weights"):
        collection(weighted=True)(
            KeyedJaggedTensor(["x", "y", "z"], torch.tensor([1]), lengths=torch.tensor([1, 0, 0]))
        )


def test_first_values_are_uniform_within_the_bounds_asked_for():
    def fill(weights):
        return weights.fill_(3.0)

    ebc = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(10_000, 4, name="a", feature_names=["a"]),
            EmbeddingBagConfig(
                9, 4, name="b", feature_names=["b"], weight_init_min=2.0, weight_init_max=2.5
            ),
            EmbeddingBagConfig(9, 4, name="c", feature_names=["c"], init_fn=fill),
        ]
    )
    a, b, c = (ebc.embedding_bags[name].weight.detach() for name in "abc")
    assert float(a.abs().max()) <= 0.01
    # A uniform variable on (-w, w) has variance w*w/3; 40,000 draws stay well within 5% of it.
    assert float(a.var()) == pytest.approx(0.01**2 / 3, rel=0.05)
    assert 2.0 <= float(b.min()) <= float(b.max()) <= 2.5
    assert bool((c == 3.0).all())


def test_the_meta_device_takes_no_memory():
    ebc = collection(device="meta")
    assert ebc.device.type == "meta"
    assert ebc.embedding_bags["own"].weight.is_meta


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([("a", 3, ["x"]), ("a", 3, ["y"])], "two tables are called 'a'"),
        ([("", 3, ["x"])], "table name ''"),
        ([("a.b", 3, ["x"])], "without a dot"),
        ([("items", 3, ["x"])], "'items' is a word that torch's modules use"),
        ([("a", 3, [])], "has no feature_names"),
        ([("a", 3, ["x", "x"])], "lists a feature twice"),
        ([("a", 0, ["x"])], "num_embeddings is 0"),
    ],
)
def test_tables_that_make_no_collection_are_refused(tables, message):
    with pytest.raises(ValueError, match=message):
        EmbeddingBagCollection(
            [
                EmbeddingBagConfig(rows, 2, name=name, feature_names=features)
                for name, rows, features in tables
            ]
        )


def test_stored_types_are_not_trained():
    config = EmbeddingBagConfig(3, 2, name="a", feature_names=["x"], data_type=DataType.INT8)
    with pytest.raises(
        ValueError, match="data_type is INT8; tables are trained as FP32, FP16, BF16"
    ):
        EmbeddingBagCollection([config])


@pytest.mark.parametrize(("kind", "rel"), [(DataType.FP16, 2**-11), (DataType.BF16, 2**-8)])
def test_tables_of_half_the_bytes_give_fp32_vectors(kind, rel):
    ebc = EmbeddingBagCollection(
        [EmbeddingBagConfig(9, 4, name="t", feature_names=["x"], data_type=kind)]
    )
    kjt = KeyedJaggedTensor(["x"], torch.tensor([1, 2, 8]), lengths=torch.tensor([2, 0, 1]))
    out = ebc(kjt).values()
    table = ebc.embedding_bags["t"].weight
    assert table.dtype == data_type_to_dtype(kind)
    assert dtype_to_data_type(table.dtype) is kind
    assert out.dtype == torch.float32
    rows = table.float()
    expected = torch.stack([rows[1] + rows[2], torch.zeros(4), rows[8]])
    # One rounding to the stored type, of a sum of two numbers below 1/3.
    torch.testing.assert_close(out, expected, rtol=rel, atol=rel)


class TestEmbeddingCollection:
    def collection(self, **options):
        return EmbeddingCollection(
            [
                EmbeddingConfig(7, 3, name="shared", feature_names=["y", "x"]),
                EmbeddingConfig(7, 3, name="own", feature_names=["z", "x"]),
            ],
            **options,
        )

    @quick
    @given(bags=bags_of(ROWS), need_indices=st.booleans())
    def test_every_id_gets_its_row(self, bags, need_indices):
        ec = self.collection(need_indices=need_indices)
        out = ec(bags.kjt())
        assert list(out) == ["y", "x@shared", "z", "x@own"]
        for name, jagged in out.items():
            feature, _, table = name.partition("@")
            table = table or ("own" if feature == "z" else "shared")
            rows = ec.embeddings[table].weight
            ids = bags.ids[feature]
            assert [bag.tolist() for bag in jagged.to_dense()] == [
                [rows[i].tolist() for i in bag] for bag in ids
            ]
            assert (jagged.weights_or_none() is not None) == need_indices
            if need_indices:
                assert [bag.tolist() for bag in jagged.to_dense_weights()] == ids

    def test_gradients_reach_the_rows_that_were_looked_up(self):
        ec = self.collection()
        kjt = KeyedJaggedTensor(
            ["x", "y", "z"], torch.tensor([1, 1, 2]), lengths=torch.tensor([2, 1, 0])
        )
        ec(kjt)["x@own"].values().sum().backward()
        assert ec.embeddings["own"].weight.grad.tolist() == [
            [2.0 if row == 1 else 0.0] * 3 for row in range(7)
        ]

    def test_what_it_says_of_itself(self):
        ec = self.collection(need_indices=True, device="meta")
        assert (ec.embedding_dim(), ec.need_indices(), ec.device.type) == (3, True, "meta")
        assert ec.embedding_names_by_table() == [["y", "x@shared"], ["z", "x@own"]]
        assert [config.name for config in ec.embedding_configs()] == ["shared", "own"]
        assert list(ec.state_dict()) == ["embeddings.shared.weight", "embeddings.own.weight"]

    def test_tables_have_one_width(self):
        with pytest.raises(ValueError, match=r"embedding_dim are \[3, 4\]"):
            EmbeddingCollection(
                [
                    EmbeddingConfig(7, 3, name="a", feature_names=["x"]),
                    EmbeddingConfig(7, 4, name="b", feature_names=["y"]),
                ]
            )

    def test_an_id_that_is_no_row_is_named(self):
        kjt = KeyedJaggedTensor(["x", "y", "z"], torch.tensor([7]), lengths=torch.tensor([1, 0, 0]))
        with pytest.raises(IndexError, match="feature 'x' has id 7"):
            self.collection()(kjt)


@quick
@given(bags=bags_of(ROWS, min_batch=1), weighted=st.booleans())
def test_scripted_and_traced_collections_look_up_alike(bags, weighted):
    kjt = bags.kjt(weighted=weighted)
    for make_scripted in (torch.jit.script, lambda m: torch.jit.script(torch.fx.symbolic_trace(m))):
        ebc = collection(weighted=weighted)
        assert torch.equal(make_scripted(ebc)(kjt).values(), ebc(kjt).values())
        ec = TestEmbeddingCollection().collection(need_indices=weighted)
        expected = ec(kjt)
        for name, jagged in make_scripted(ec)(kjt).items():
            assert torch.equal(jagged.values(), expected[name].values())
            assert torch.equal(jagged.lengths(), expected[name].lengths())


def test_names_of_types_and_poolings():
    assert dtype_to_data_type(torch.quint8) is DataType.UINT8
    with pytest.raises(ValueError, match=r"dtype is torch.complex64"):
        dtype_to_data_type(torch.complex64)
    assert pooling_type_to_str(PoolingType.MEAN) == "mean"
    with pytest.raises(ValueError, match="pooling is NONE"):
        pooling_type_to_str(PoolingType.NONE)
    with pytest.raises(ValueError, match="pooling is NONE; give SUM or MEAN"):
        EmbeddingBagConfig(3, 3, name="a", feature_names=["x"], pooling=PoolingType.NONE)
