"""Sharding without a wrapper, and the two calls from a trained model to a sharded quantized one."""

import pytest
import torch
from torch import nn

from tessera.training import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    ShardingPlan,
)
from tessera.training.distributed.comm.awaitable import LazyNoWait
from tessera.training.distributed.embeddingbag import ShardedEmbeddingBagCollection
from tessera.training.distributed.quant_embedding import ShardedQuantEmbeddingCollection
from tessera.training.distributed.quant_embeddingbag import ShardedQuantEmbeddingBagCollection
from tessera.training.distributed.shard import init_parameters, shard, shard_modules
from tessera.training.distributed.sharding_plan import column_wise, row_wise, table_wise
from tessera.training.distributed.types import ParameterSharding, ShardingEnv
from tessera.training.fx import Tracer, is_fx_tracing, symbolic_trace
from tessera.training.inference.modules import (
    quant_sharders,
    quantize_embeddings,
    quantize_inference_model,
    shard_quant_model,
)
from tessera.training.modules.feature_processor_ import PositionWeightedModuleCollection
from tessera.training.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

CPU = torch.device("cpu")
KJT = KeyedJaggedTensor(
    ["y", "x"], torch.tensor([1, 2, 3, 6, 0]), lengths=torch.tensor([2, 0, 0, 2, 1, 0])
)


def bags(**options):
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(7, 8, name="tx", feature_names=["x"]),
            EmbeddingBagConfig(5, 8, name="ty", feature_names=["y"]),
        ],
        **options,
    )


class Model(nn.Module):
    """Two collections and a layer."""

    def __init__(self):
        super().__init__()
        self.pooled = bags()
        self.unpooled = EmbeddingCollection([EmbeddingConfig(7, 8, name="t", feature_names=["x"])])
        self.layer = nn.Linear(16, 1)

    def forward(self, kjt: KeyedJaggedTensor):
        return self.layer(self.pooled(kjt).values()), self.unpooled(kjt)["x"].values()


@pytest.mark.parametrize(
    "plan",
    [
        table_wise(rank=0),
        {"tx": row_wise(), "ty": column_wise(ranks=[0])},
        {"tx": ParameterSharding("table_wise", "fused", [0]), "ty": table_wise(rank=0)},
    ],
    ids=["one for all", "one for each", "placements and generators"],
)
def test_one_collection_is_sharded_as_the_plan_says(plan):
    module = bags()
    ids = KJT.permute([1, 0]).with_values(torch.tensor([3, 6, 0, 1, 2]))
    expected = module(ids).values()
    sharded = shard(module, plan, ShardingEnv.from_local(1, 0), CPU)
    assert isinstance(sharded, ShardedEmbeddingBagCollection)
    torch.testing.assert_close(sharded(ids).wait().values(), expected, rtol=0, atol=1e-6)


def test_what_nothing_shards_is_named():
    with pytest.raises(ValueError, match="module is Linear, which no default sharder takes"):
        shard(nn.Linear(2, 2), table_wise(rank=0), device=CPU)
    with pytest.raises(ValueError, match="the plan names module 'layer'"):
        shard_modules(Model(), device=CPU, plan=ShardingPlan({"layer": {}}))


@pytest.mark.parametrize("world_size", [1, 2])
def test_from_a_trained_model_to_a_scripted_sharded_one(world_size):
    model = Model()
    expected = model(KJT)
    quantized = quantize_inference_model(
        model, per_table_weight_dtype={"ty": torch.float16}, output_dtype=torch.float32
    )
    assert isinstance(model.pooled, EmbeddingBagCollection)
    assert [t.data_type for t in quantized.pooled.embedding_bag_configs()] == [
        DataType.INT8,
        DataType.FP16,
    ]
    one_device = quantized(KJT)
    for got, wanted in zip(one_device, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0.02)
    sharded, plan = shard_quant_model(quantized, world_size, "cpu")
    assert isinstance(sharded.pooled, ShardedQuantEmbeddingBagCollection)
    assert isinstance(sharded.unpooled, ShardedQuantEmbeddingCollection)
    assert set(plan.plan) == {"pooled", "unpooled"}
    compiled = torch.jit.script(symbolic_trace(sharded))
    for got, wanted in zip(sharded(KJT), one_device, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)
    for got, wanted in zip(compiled(KJT), sharded(KJT), strict=True):
        assert torch.equal(got, wanted)


def test_a_given_plan_is_followed():
    quantized = quantize_embeddings(Model(), torch.int8, inplace=True)
    plan = ShardingPlan(
        {"unpooled": {"t": ParameterSharding("row_wise", "quant")}},
    )
    sharded, used = shard_quant_model(quantized, 3, "cpu", sharding_plan=plan)
    assert used is plan
    assert set(sharded.unpooled.shardings) == {"row_wise"}
    assert not isinstance(sharded.pooled, ShardedQuantEmbeddingBagCollection)


def test_a_collection_by_itself_is_quantized_and_sharded():
    module = quantize_embeddings(bags(), torch.int8)
    expected = module(KJT).values()
    sharded = shard_modules(module, ShardingEnv.from_local(2, 0), CPU, sharders=quant_sharders())
    assert isinstance(sharded, ShardedQuantEmbeddingBagCollection)
    torch.testing.assert_close(sharded(KJT).values(), expected, rtol=0, atol=1e-6)


def test_position_weights_stay_when_the_tables_are_quantized():
    processors = PositionWeightedModuleCollection({"x": 3, "y": 3})
    with torch.no_grad():
        for weights in processors.parameters():
            weights.copy_(torch.tensor([1.0, 0.5, 0.25]))
    model = FeatureProcessedEmbeddingBagCollection(bags(is_weighted=True), processors)
    quantized = quantize_embeddings(model, torch.int8)
    torch.testing.assert_close(quantized(KJT).values(), model(KJT).values(), rtol=0, atol=0.02)
    one_device = quantized(KJT).values()
    env = ShardingEnv.from_local(2, 0)
    sharded = shard_modules(quantized, env, CPU, sharders=quant_sharders())
    compiled = torch.jit.script(symbolic_trace(sharded))
    assert torch.equal(compiled(KJT).values(), sharded(KJT).values())
    torch.testing.assert_close(compiled(KJT).values(), one_device, rtol=0, atol=1e-6)


def test_types_of_tables_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="per_table_weight_dtype names table 'nobody'"):
        quantize_embeddings(Model(), torch.int8, per_table_weight_dtype={"nobody": torch.int8})


def test_parts_on_the_meta_device_get_memory():
    model = nn.Sequential(nn.Linear(2, 3, device="meta"), bags(device="meta"))
    model = shard_modules(
        model, ShardingEnv.from_local(1, 0), CPU, ShardingPlan({}), init_params=True
    )
    assert not model[0].weight.is_meta
    assert float(model[1].embedding_bags["tx"].weight.abs().max()) <= 7**-0.5

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2, device="meta"))

    with pytest.raises(ValueError, match="Odd is on the meta device and has no reset_parameters"):
        init_parameters(Odd(), CPU)


class Leaf(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if is_fx_tracing() else x + 2


class WithLeaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.leaf = Leaf()
        self.outside = [Leaf()]

    def forward(self, x: torch.Tensor):
        return LazyNoWait(self.outside[0](self.leaf(x)))


def test_leaves_stay_whole_and_awaitables_are_waited_for():
    model = WithLeaf()
    assert not is_fx_tracing()
    traced = symbolic_trace(model)
    assert not is_fx_tracing()
    assert "self.leaf" not in traced.code
    assert float(traced(torch.zeros(()))) == 2
    whole = symbolic_trace(model, leaf_modules=["Nobody"])
    assert float(whole(torch.zeros(()))) == 2
    graph = Tracer(leaf_modules=["Leaf"]).trace(nn.Sequential(Leaf(), Leaf()))
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["0", "1"]


def test_a_leaf_that_is_no_part_of_the_model_cannot_stay_whole():
    with pytest.raises(NameError, match="not installed as a submodule"):
        Tracer(leaf_modules=["Leaf"]).trace(WithLeaf())


def test_functions_are_traced_too():
    def double(x: "torch.Tensor", times: "int") -> "torch.Tensor":
        return x * times

    traced = symbolic_trace(double, {"times": 3})
    assert float(traced(torch.ones(()), 3)) == 3
    assert float(torch.jit.script(symbolic_trace(double))(torch.ones(()), 2)) == 2
