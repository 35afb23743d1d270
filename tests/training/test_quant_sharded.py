"""Quantized collections on several devices answer as one does."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tessera.training import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from tessera.training.distributed.dist_data import (
    EmbeddingsAllToOne,
    EmbeddingsAllToOneReduce,
    KJTOneToAll,
    SeqEmbeddingsAllToOne,
)
from tessera.training.distributed.inference.lookup import InferGroupedPooledEmbeddingsLookup
from tessera.training.distributed.quant_embedding import QuantEmbeddingCollectionSharder
from tessera.training.distributed.quant_embeddingbag import (
    QuantEmbeddingBagCollectionSharder,
    create_infer_embedding_bag_sharding,
)
from tessera.training.distributed.types import (
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingEnv,
    ShardMetadata,
)
from tessera.training.fx import symbolic_trace
from tessera.training.quant.embedding_modules import EmbeddingBagCollection as QuantBags
from tessera.training.quant.embedding_modules import EmbeddingCollection as QuantCollection
from tests.training.jagged_strategies import bags_of, quick

ROWS = {"x": 7, "y": 3, "z": 5}
TYPES = ("table_wise", "column_wise", "row_wise")
CPU = torch.device("cpu")


def placed(kind, rank, world_size):
    if kind == "table_wise":
        return ParameterSharding(kind, "quant", [rank % world_size])
    if kind == "column_wise":
        return ParameterSharding(kind, "quant", [rank % world_size, (rank + 1) % world_size])
    return ParameterSharding(kind, "quant")


def bags(kind=DataType.INT8, *, weighted=False, mean=True):
    pooling = PoolingType.MEAN if mean else PoolingType.SUM
    module = QuantBags(
        [
            EmbeddingBagConfig(
                7, 8, name="big", feature_names=["x", "y"], pooling=pooling, data_type=kind
            ),
            EmbeddingBagConfig(5, 16, name="own", feature_names=["z"], data_type=kind),
            EmbeddingBagConfig(3, 8, name="small", feature_names=["y"], data_type=kind),
        ],
        weighted,
        "cpu",
    )
    module.store({part.name: torch.randn(part.rows, part.dim) for part in module.rows.parts()})
    return module


def collection(kind=DataType.INT8, *, need_indices=False):
    module = QuantCollection(
        [
            EmbeddingConfig(7, 8, name="big", feature_names=["x", "y"], data_type=kind),
            EmbeddingConfig(5, 8, name="own", feature_names=["z"], data_type=kind),
        ],
        "cpu",
        need_indices,
    )
    module.store({part.name: torch.randn(part.rows, part.dim) for part in module.rows.parts()})
    return module


def sharded(module, kinds, world_size):
    sharder = (
        QuantEmbeddingBagCollectionSharder()
        if isinstance(module, QuantBags)
        else QuantEmbeddingCollectionSharder()
    )
    names = [part.name for part in module.rows.parts()]
    plan = {
        name: placed(kind, rank, world_size)
        for rank, (name, kind) in enumerate(zip(names, kinds, strict=True))
    }
    return sharder.shard(module, plan, ShardingEnv.from_local(world_size, 0), CPU)


class Model(nn.Module):
    def __init__(self, tables):
        super().__init__()
        self.tables = tables

    def forward(self, kjt: KeyedJaggedTensor):
        return self.tables(kjt)


def scripted(module):
    return torch.jit.script(symbolic_trace(Model(module)))


@quick
@given(
    batch=bags_of(ROWS),
    kinds=st.tuples(*[st.sampled_from(TYPES)] * 3),
    world_size=st.integers(1, 3),
    weighted=st.booleans(),
    mean=st.booleans(),
    stored=st.sampled_from([DataType.INT8, DataType.INT4, DataType.FP16]),
)
def test_every_plan_answers_as_one_device(  # noqa: PLR0917 - hypothesis names them
    batch, kinds, world_size, weighted, mean, stored
):
    module = bags(stored, weighted=weighted, mean=mean)
    kjt = batch.kjt(weighted=weighted)
    expected = module(kjt)
    out = sharded(module, kinds, world_size)(kjt.permute([2, 0, 1]))
    assert out.keys() == expected.keys()
    assert out.length_per_key() == expected.length_per_key()
    if "row_wise" in kinds:
        # Sums of at most 5 numbers below 16, device by device instead of id by id.
        torch.testing.assert_close(out.values(), expected.values(), rtol=0, atol=2e-5)
    else:
        assert torch.equal(out.values(), expected.values())


@quick
@given(
    batch=bags_of(ROWS),
    kinds=st.tuples(*[st.sampled_from(TYPES)] * 2),
    world_size=st.integers(1, 3),
    need_indices=st.booleans(),
    stored=st.sampled_from([DataType.INT8, DataType.INT4, DataType.FP32]),
)
def test_every_unpooled_plan_answers_as_one_device(batch, kinds, world_size, need_indices, stored):
    module = collection(stored, need_indices=need_indices)
    kjt = batch.kjt()
    expected = module(kjt)
    out = sharded(module, kinds, world_size)(kjt)
    assert list(out) == list(expected)
    for name, jagged in out.items():
        assert torch.equal(jagged.values(), expected[name].values())
        assert torch.equal(jagged.lengths(), expected[name].lengths())
        assert (jagged.weights_or_none() is not None) == need_indices
        if need_indices:
            assert torch.equal(jagged.weights(), expected[name].weights())


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_minus_one_is_no_id_under_every_plan(kind, world_size):
    kjt = KeyedJaggedTensor(
        ["x", "y", "z"], torch.tensor([-1, 6, 2, -1, 4]), lengths=torch.tensor([2, 0, 1, 1, 0, 1])
    )
    module = bags(mean=False)
    expected = module(kjt)
    assert float(expected["y@big"][1].abs().max()) == 0
    made = sharded(module, [kind] * 3, world_size)
    assert torch.equal(made(kjt).values(), expected.values())
    assert torch.equal(scripted(made)(kjt).values(), expected.values())
    unpooled = collection()
    for name, jagged in sharded(unpooled, [kind] * 2, world_size)(kjt).items():
        assert torch.equal(jagged.values(), unpooled(kjt)[name].values())


@pytest.mark.parametrize("kind", TYPES)
def test_a_graph_reads_row_0_of_the_whole_table_for_an_id_that_is_no_row(kind):
    made = sharded(bags(mean=False), [kind] * 3, 2)
    wrong = torch.tensor([2, 7, 99, -2, 50])
    right = torch.tensor([2, 0, 0, 0, 0])
    lengths = torch.tensor([1, 0, 0, 0, 2, 2])
    keys = ["z", "x", "y"]
    assert torch.equal(
        scripted(made)(KeyedJaggedTensor(keys, wrong, lengths=lengths)).values(),
        made(KeyedJaggedTensor(keys, right, lengths=lengths)).values(),
    )


KJT = KeyedJaggedTensor(
    ["z", "x", "y"], torch.tensor([1, 2, 3, 6, 0, 1]), lengths=torch.tensor([2, 0, 0, 3, 1, 0])
)
OTHER = KeyedJaggedTensor(
    ["x", "y", "z"], torch.tensor([6, 2, 4]), lengths=torch.tensor([1, 0, 0, 1, 0, 0, 0, 0, 1])
)


@pytest.mark.parametrize("kinds", list(itertools.product(TYPES, TYPES, TYPES))[::4])
def test_a_traced_and_scripted_model_answers_alike_for_any_batch(kinds):
    module = sharded(bags(), kinds, 2)
    compiled = scripted(module)
    for kjt in (KJT, OTHER):
        assert torch.equal(compiled(kjt).values(), module(kjt).values())


@pytest.mark.parametrize("kinds", list(itertools.product(TYPES, TYPES)))
def test_a_traced_and_scripted_unpooled_model_answers_alike(kinds):
    module = sharded(collection(need_indices=True), kinds, 2)
    compiled = scripted(module)
    for kjt in (KJT, OTHER):
        expected, out = module(kjt), compiled(kjt)
        for name, jagged in expected.items():
            assert torch.equal(out[name].values(), jagged.values())
            assert torch.equal(out[name].weights(), jagged.weights())


def spec(*shards):
    return EnumerableShardingSpec(
        [
            ShardMetadata(shard_offsets=offsets, shard_sizes=sizes, placement=f"rank:{rank}/cpu")
            for offsets, sizes, rank in shards
        ]
    )


def test_uneven_blocks_of_a_spec_are_followed():
    module = bags(mean=False)
    plan = {
        "big": ParameterSharding(
            "row_wise", "quant", sharding_spec=spec(([0, 0], [1, 8], 0), ([1, 0], [6, 8], 2))
        ),
        "own": ParameterSharding(
            "column_wise", "quant", sharding_spec=spec(([0, 4], [5, 12], 0), ([0, 0], [5, 4], 1))
        ),
        "small": ParameterSharding("table_wise", "quant", [2]),
    }
    env = ShardingEnv.from_local(3, 0)
    made = QuantEmbeddingBagCollectionSharder().shard(module, plan, env, CPU)
    torch.testing.assert_close(made(KJT).values(), module(KJT).values(), rtol=0, atol=2e-5)
    shapes = {name: tuple(rows.shape) for name, rows in made.named_buffers()}
    assert shapes == {
        "embedding_bags.big.weight_0": (1, 16),
        "embedding_bags.big.weight_1": (0, 16),
        "embedding_bags.big.weight_2": (6, 16),
        "embedding_bags.own.weight_0": (5, 16),
        "embedding_bags.own.weight_1": (5, 16),
        "embedding_bags.small.weight": (3, 16),
    }
    assert set(made.shardings) == {"row_wise", "column_wise", "table_wise"}
    assert made.shardings["table_wise"].features_per_rank() == [0, 0, 1]
    assert len(made.tbes_configs()) == 3 + 2 + 1
    assert [table.name for table in made.embedding_bag_configs()] == ["big", "own", "small"]


def test_the_steps_apart_are_the_whole():
    made = sharded(bags(), TYPES, 2)
    ctx = made.create_context()
    sent = made.input_dist(ctx, KJT)
    out = made.output_dist(ctx, made.compute(ctx, sent))
    assert torch.equal(out.values(), made(KJT).values())
    assert "ShardedQuantEmbeddingBagCollection" in str(made)
    assert "InferGroupedPooledEmbeddingsLookup" in str(made)
    assert made.copy(CPU) is made
    assert made.half() is made
    infos = made.sharding_type_to_sharding_infos()
    assert [info.embedding_config.name for info in infos["table_wise"]] == ["big"]


def test_wrong_ids_and_features_are_named():
    made = sharded(bags(), TYPES, 2)
    with pytest.raises(IndexError, match="feature 'x' has id 7"):
        made(KJT.with_values(torch.tensor([1, 2, 7, 6, 0, 1])))
    with pytest.raises(KeyError, match="feature 'z' is missing"):
        made(KJT.permute([1, 2]))
    varying = KeyedJaggedTensor(
        ["x", "y", "z"], torch.tensor([1]), lengths=torch.tensor([1]), stride_per_key=[1, 0, 0]
    )
    with pytest.raises(ValueError, match="different numbers of bags"):
        made(varying)
    with pytest.raises(ValueError, match="different numbers of bags"):
        bags()(varying)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (None, "the plan says nothing of table 'own'"),
        (ParameterSharding("table_wise", "quant", [2]), "table 'own': rank is 2; give 0 to 1"),
        (
            ParameterSharding("column_wise", "quant"),
            "table 'own': ranks and size_per_rank are both None",
        ),
        (
            ParameterSharding("column_wise", "quant", [0, 1, 0]),
            "table 'own': ranks is .*16 columns do not divide",
        ),
        (ParameterSharding("data_parallel", "quant"), "sharding_type is 'data_parallel'"),
        (ParameterSharding("rowwise", "quant"), "did you mean row_wise"),
        (
            ParameterSharding(
                "row_wise", "quant", sharding_spec=spec(([0, 0], [2, 16], 1), ([2, 0], [3, 16], 0))
            ),
            "table 'own' is row_wise: .*they begin at .2, 0",
        ),
    ],
)
def test_plans_that_cannot_be_followed_are_refused(placement, message):
    plan = {name: placed("table_wise", 0, 2) for name in ("big", "small")}
    if placement is not None:
        plan["own"] = placement
    sharder = QuantEmbeddingBagCollectionSharder()
    with pytest.raises(ValueError, match=message):
        sharder.shard(bags(), plan, ShardingEnv.from_local(2, 0), CPU)


def test_other_mistakes_are_named():
    made = sharded(bags(), TYPES, 2)
    with pytest.raises(ValueError, match="stays on its devices"):
        made.to("meta")
    with pytest.raises(ValueError, match="fused_params holds 'speed'"):
        QuantEmbeddingBagCollectionSharder({"speed": 1}).shard(
            bags(),
            {name: placed("table_wise", 0, 1) for name in ("big", "own", "small")},
            ShardingEnv.from_local(1, 0),
            CPU,
        )
    with pytest.raises(ValueError, match="sharding_type is 'grid_shard'"):
        create_infer_embedding_bag_sharding("grid_shard", [], ShardingEnv.from_local(1, 0), CPU)
    with pytest.raises(ValueError, match="splits has 1 entries for 2 devices"):
        KJTOneToAll([3], 2, CPU)
    with pytest.raises(ValueError, match="1 tensors of 2 devices"):
        EmbeddingsAllToOne(CPU, 2, 1)([torch.ones(1, 1)])


def test_vectors_come_to_one_device():
    kjts = KJTOneToAll([1, 2], 2, CPU)(KJT)
    assert [kjt.keys() for kjt in kjts] == [["z"], ["x", "y"]]
    left, right = torch.ones(2, 1), torch.full((2, 1), 2.0)
    assert EmbeddingsAllToOne(CPU, 2, 1)([left, right]).tolist() == [[1, 2], [1, 2]]
    assert EmbeddingsAllToOneReduce(CPU, 2)([left, right]).tolist() == [[3], [3]]
    moved = SeqEmbeddingsAllToOne(CPU, 2)
    moved.set_device("meta")
    assert all(tensor.is_meta for tensor in moved([left, right]))


def test_a_plan_sees_the_tables_own_sizes():
    sharder = QuantEmbeddingBagCollectionSharder(shardable_params=["own"])
    assert {n: tuple(p.shape) for n, p in sharder.shardable_parameters(bags()).items()} == {
        "own": (5, 16)
    }
    assert sharder.module_type is QuantBags
    assert sharder.sharding_types("cpu") == ["table_wise", "row_wise", "column_wise"]
    assert isinstance(
        sharded(bags(), TYPES, 1).shardings["row_wise"].lookup(), InferGroupedPooledEmbeddingsLookup
    )
