"""What programs say of single options of a planner: constraints, kernels, hashes, balance."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from tessera.training import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingCollection,
    EmbeddingConfig,
)
from tessera.training.distributed.planner import (
    EmbeddingEnumerator,
    EmbeddingShardingPlanner,
    ParameterConstraints,
    PlannerError,
    Topology,
    constants,
)
from tessera.training.distributed.planner.cache_stats import EmbeddingOffloadStats
from tessera.training.distributed.planner.partitioners import (
    GreedyPerfPartitioner,
    MemoryBalancedPartitioner,
)
from tessera.training.distributed.planner.plan_checks import validate_compute_kernels
from tessera.training.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
)
from tessera.training.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from tessera.training.distributed.planner.types import (
    Perf,
    PlannerErrorType,
    Shard,
    ShardingOption,
    Storage,
    hash_planner_context_inputs,
    hash_planner_context_inputs_str,
)
from tessera.training.distributed.types import CacheParams
from tests.training.test_planner import PlannedTables, tables


def option(name="t", kind="table_wise", kernel="fused", path="m", storage=None, **more):
    shard = Shard([8, 4], [0, 0], storage or Storage(100, 0), Perf(1.0), rank=0)
    return ShardingOption(
        name=name,
        tensor=torch.empty(8, 4, device="meta"),
        module=(path, nn.Module()),
        input_lengths=[2.0, 3.0],
        batch_size=16,
        sharding_type=kind,
        compute_kernel=kernel,
        shards=[shard],
        **more,
    )


def test_an_option_takes_what_its_constraints_may_say():
    cache = CacheParams(load_factor=0.3)
    given = option(
        cache_params=cache, output_dtype=DataType.FP16, num_poolings=[1.0, 2.0], enforce_hbm=None
    )
    assert given.constraints == ParameterConstraints(
        cache_params=cache, output_dtype=DataType.FP16, num_poolings=[1.0, 2.0]
    )
    assert (given.cache_load_factor, given.output_dtype) == (0.3, DataType.FP16)
    assert given.bags_per_sample == [1.0, 2.0]
    assert (given.num_inputs, given.get_shards_assignment()) == (2, [0])
    assert given.module_type_key == "torch.nn.modules.module.Module"
    given.cache_params = None
    assert given.cache_load_factor is None
    assert given.output_dtype is DataType.FP16
    assert option().constraints is option().cache_params is None
    with pytest.raises(TypeError, match="cache_parameters"):
        option(cache_parameters=cache)


def test_an_option_pools_as_its_module_does():
    ids = EmbeddingCollection(
        tables=[EmbeddingConfig(8, 4, name="s", feature_names=["f"])], device=torch.device("meta")
    )
    both = nn.ModuleDict({"bags": tables((8, 4)), "ids": ids})
    assert isinstance(both["bags"], EmbeddingBagCollection)
    assert ShardingOption.module_pooled(both, "t0")
    assert not ShardingOption.module_pooled(both, "s")
    assert not replace(option(), module=("", ids), is_pooled=None).is_pooled


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kernel": "fuzed"}, "unknown compute kernel 'fuzed'"),
        ({"kernel": "dense"}, "DENSE kernel requires DATA_PARALLEL"),
        (
            {"kernel": "fused_uvm_caching", "cache_params": CacheParams(load_factor=1.0)},
            "cache_load_factor is 1.0",
        ),
        ({"storage": Storage(-1, 0)}, r"negative HBM storage \(-1\)"),
        ({"storage": Storage(0, -2)}, r"negative DDR storage \(-2\)"),
    ],
)
def test_kernels_that_do_not_fit_their_options(wrong, message):
    good = [option(), option(kernel="dense", kind="data_parallel")]
    validate_compute_kernels([*good, option(kernel="fused_uvm_caching")])
    with pytest.raises(PlannerError, match=message) as raised:
        validate_compute_kernels([*good, option(**wrong)])
    assert raised.value.error_type is PlannerErrorType.INVALID_COMPUTE_KERNEL
    with pytest.raises(PlannerError, match=r"2 violation\(s\)"):
        validate_compute_kernels([option("a", **wrong), option("b", **wrong)])


def test_a_planner_refuses_a_kernel_that_a_callback_made_up():
    def spoil(plan):
        return [replace(each, compute_kernel="fuzed") for each in plan]

    planner = EmbeddingShardingPlanner(Topology(2, "cuda"), callbacks=[spoil])
    with pytest.raises(PlannerError, match="unknown compute kernel 'fuzed'"):
        planner.plan(tables((100, 8)), [PlannedTables()])


def test_estimators_take_constraints_of_their_own():
    topology = Topology(2, "cuda")
    (plain, *_) = EmbeddingEnumerator(topology, 64).enumerate(tables((1000, 64)), [PlannedTables()])

    def bytes_and_ms(given):
        constraints = {"t0": given} if given else None
        EmbeddingStorageEstimator(topology, constraints).estimate([plain])
        EmbeddingPerfEstimator(topology, constraints=constraints).estimate([plain])
        return plain.shards[0].storage.hbm, plain.shards[0].perf.fwd_compute

    usual = bytes_and_ms(None)
    twice = bytes_and_ms(ParameterConstraints(num_poolings=[2.0]))
    weighted = bytes_and_ms(ParameterConstraints(is_weighted=True))
    assert twice[1] == pytest.approx(2 * usual[1])
    assert min(twice[0], weighted[0]) > usual[0]
    assert weighted[1] > usual[1]
    assert plain.constraints is None
    with pytest.raises(ValueError, match="num_poolings has 2 entries for 1"):
        bytes_and_ms(ParameterConstraints(num_poolings=[1.0, 1.0]))


def test_modules_with_few_tables_are_placed_first():
    def three():
        large = [option(f"t{i}", path="many", storage=Storage(100, 0)) for i in range(2)]
        return [*large, option("t2", path="one", storage=Storage(10, 0))]

    topology = Topology(2, "cuda", hbm_cap=1000)

    def ranks(partitioner):
        return [each.shards[0].rank for each in partitioner.partition(three(), topology)]

    assert ranks(GreedyPerfPartitioner())[:2] == [0, 1]  # the largest first
    assert ranks(GreedyPerfPartitioner(balance_modules=True))[2] == 0
    assert ranks(MemoryBalancedPartitioner(tolerance=9, balance_modules=True))[2] == 0


def inputs_of(topology, *, given=None, sizes=((100, 8),)):
    enumerator = EmbeddingEnumerator(topology, 64, given)
    enumerator.enumerate(tables(*sizes), [PlannedTables()])
    reservation = FixedPercentageStorageReservation(0.1)
    reservation.reserve(topology, 64, nn.Module(), [])
    return topology, 64, enumerator, reservation, given


def test_inputs_of_equal_plans_have_one_hash():
    gib = constants.GIB
    usual = hash_planner_context_inputs(*inputs_of(Topology(2, "cuda", hbm_cap=gib)))
    # A host has some bytes more than the other.
    assert usual == hash_planner_context_inputs(*inputs_of(Topology(2, "cuda", hbm_cap=gib + 1000)))
    stats = EmbeddingOffloadStats(0.5, 4, torch.ones(2), height=100)
    cached = {"t0": ParameterConstraints(cache_params=CacheParams(load_factor=0.5, stats=stats))}
    others = [
        inputs_of(Topology(2, "cuda", hbm_cap=2 * gib)),
        inputs_of(Topology(4, "cuda", hbm_cap=gib)),
        inputs_of(Topology(2, "cuda", hbm_cap=gib), given=cached),
        inputs_of(Topology(2, "cuda", hbm_cap=gib), sizes=((100, 16),)),
    ]
    assert len({usual, *(hash_planner_context_inputs(*each) for each in others)}) == 5
    again = {"t0": replace(cached["t0"], cache_params=deepcopy(cached["t0"].cache_params))}
    same = inputs_of(Topology(2, "cuda", hbm_cap=gib), given=again)
    assert hash_planner_context_inputs(*same) == hash_planner_context_inputs(*others[2])
    text = hash_planner_context_inputs_str(*same)
    assert int(text, 16) == hash_planner_context_inputs(*same)
    topology, batch_size, enumerator, reservation, given = same
    with pytest.raises(ValueError, match="call enumerate first"):
        hash_planner_context_inputs(
            topology, batch_size, EmbeddingEnumerator(topology, 64), reservation, given
        )
    with pytest.raises(ValueError, match="call reserve first"):
        hash_planner_context_inputs(
            topology, batch_size, enumerator, FixedPercentageStorageReservation(0.1), given
        )


def test_a_planners_hash_is_a_number_too():
    planner = EmbeddingShardingPlanner(Topology(2, "cuda"))
    number = planner.hash_planner_context_inputs()
    assert number == int(planner.hash_planner_context_inputs_str(), 16)


def test_a_copied_topology_may_be_changed_in_place():
    """As reservations that were written for TorchRec do."""
    topology = Topology(2, "cuda", hbm_cap=100)
    left = deepcopy(topology)
    for device in left.devices:
        device.storage.hbm -= 40
    assert [device.storage.hbm for device in left.devices] == [60, 60]
    assert [device.storage.hbm for device in topology.devices] == [100, 100]
    assert left.hbm_mem_bw == topology.hbm_mem_bw
    options = EmbeddingEnumerator(topology, 8).enumerate(tables((99, 8)), [PlannedTables()])
    shards = [shard for each in options for shard in each.shards]
    shards[0].storage.hbm += 1
    assert all(shard.storage is not shards[0].storage for shard in shards[1:])
