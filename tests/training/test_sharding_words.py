"""The words of sharding: plans that print, environments, what sharders say by default."""

import copy

import pytest
import torch
from torch import nn

from tessera.training.distributed.types import (
    CacheAlgorithm,
    CacheParams,
    CommOp,
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    LazyNoWait,
    ModuleSharder,
    NoOpQuantizedCommCodec,
    NoWait,
    NullShardedModuleContext,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardedModule,
    ShardingEnv,
    ShardingPlan,
    ShardMetadata,
    get_tensor_size_bytes,
    rank_device,
)


def test_a_plan_prints_as_tables():
    spec = EnumerableShardingSpec(
        [ShardMetadata([0, 0], [4, 8], "rank:0/cpu"), ShardMetadata([4, 0], [3, 8], "rank:1/cpu")]
    )
    tables = EmbeddingModuleShardingPlan(
        rows=ParameterSharding("row_wise", "fused", [0, 1], spec),
        copies=ParameterSharding("data_parallel", "dense"),
    )
    assert str(ShardingPlan({"sparse.bags": tables})).splitlines() == [
        "module: sparse.bags",
        "",
        "table  | sharding type | compute kernel | ranks",
        "-------+---------------+----------------+-------",
        "rows   | row_wise      | fused          | [0, 1]",
        "copies | data_parallel | dense          | None",
        "",
        "table | shard offsets | shard sizes | placement",
        "------+---------------+-------------+-----------",
        "rows  | [0, 0]        | [4, 8]      | rank:0/cpu",
        "rows  | [4, 0]        | [3, 8]      | rank:1/cpu",
    ]


def test_a_plan_takes_plain_dicts():
    plan = ShardingPlan({"bags": {"t": ParameterSharding()}})
    assert isinstance(plan.get_plan_for_module("bags"), EmbeddingModuleShardingPlan)
    assert plan.get_plan_for_module("elsewhere") is None


def test_cache_settings_are_compared_by_value():
    first, second = (CacheParams(CacheAlgorithm.LFU, load_factor=0.1) for _ in range(2))
    assert len({first, second, CacheParams(CacheAlgorithm.LRU)}) == 2


def test_an_environment_knows_its_ranks():
    env = ShardingEnv.from_local(4, 3)
    assert (env.world_size, env.rank, env.process_group) == (4, 3, None)
    with pytest.raises(ValueError, match="rank is 4 in a world of 4; give 0 to world_size - 1"):
        ShardingEnv.from_local(4, 4)


class _Doubled(ShardedModule):
    def __init__(self, registry=None):
        super().__init__(registry)
        self.factor = nn.Parameter(torch.tensor(2.0))

    def create_context(self):
        return NullShardedModuleContext()

    def input_dist(self, ctx, *inputs, **kwargs):
        ctx.record_stream(None)
        return NoWait(NoWait(inputs[0] + kwargs.get("plus", 0)))

    def compute(self, ctx, dist_input):
        return dist_input * self.factor

    def output_dist(self, ctx, output):
        return LazyNoWait(output)

    @property
    def unsharded_module_type(self):
        return nn.Identity


def test_a_sharded_modules_forward_is_its_steps():
    module = _Doubled()
    out = module(torch.ones(2), plus=2)
    assert isinstance(out, LazyNoWait)
    assert torch.equal(out + 0, torch.full((2,), 6.0))
    assert list(module.sharded_parameter_names("m")) == ["m.factor"]
    assert copy.deepcopy(module) is module


def test_codecs_that_nobody_chose_change_nothing():
    own = QuantizedCommCodecs()
    registry = _Doubled({CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name: own}).qcomm_codecs_registry
    assert set(registry) == {op.name for op in CommOp}
    assert registry["SEQUENCE_EMBEDDINGS_ALL_TO_ALL"] is own
    codec = registry["POOLED_EMBEDDINGS_ALL_TO_ALL"].forward
    assert isinstance(codec, NoOpQuantizedCommCodec)
    numbers = torch.randn(3, 4)
    assert torch.equal(codec.decode(codec.encode(numbers)), numbers.flatten())
    assert codec.calc_quantized_size(12) == 12
    assert codec.quantized_dtype() == torch.float32
    assert codec.create_context() is None


class _LinearSharder(ModuleSharder):
    @property
    def module_type(self):
        return nn.Linear

    def shard(self, module, params, env, device=None):
        return module


def test_what_a_sharder_says_by_default():
    sharder = _LinearSharder()
    linear = nn.Linear(3, 2)
    assert list(sharder.shardable_parameters(linear)) == ["weight", "bias"]
    assert sharder.sharding_types("cpu") == ["data_parallel"]
    assert sharder.compute_kernels("data_parallel", "cpu") == ["default"]
    assert sharder.storage_usage(linear.weight, "cpu", "default") == {"ddr": 24}
    assert sharder.storage_usage(linear.weight, "cuda", "default") == {"hbm": 24}
    assert sharder.qcomm_codecs_registry is None


def test_sizes_and_devices():
    assert get_tensor_size_bytes(torch.zeros(3, 5, dtype=torch.int16)) == 30
    assert rank_device("cpu", 3) == torch.device("cpu")
    assert rank_device("cuda", 3) == torch.device("cuda:3")
