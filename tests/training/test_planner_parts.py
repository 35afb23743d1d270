"""Reservations, bandwidths, loaders, callbacks, time limits, hardware by name, caches that grow."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch

from tessera.errors import UserError
from tessera.training import EmbeddingBagCollection, EmbeddingBagConfig
from tessera.training.distributed.planner import (
    EmbeddingEnumerator,
    EmbeddingShardingPlanner,
    ParameterConstraints,
    PlannerError,
    Topology,
    constants,
    utils,
)
from tessera.training.distributed.planner.estimator import (
    EmbeddingPerfEstimatorFactory,
    HardwarePerfConfig,
)
from tessera.training.distributed.planner.plan_checks import (
    validate_modules_inclusion_in_sharding_plan,
)
from tessera.training.distributed.planner.plan_loaders import PlanFile, extract_plan
from tessera.training.distributed.planner.proposers import (
    DynamicProgrammingProposer,
    EmbeddingOffloadScaleupProposer,
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from tessera.training.distributed.planner.refine import (
    MOST_TRIALS,
    WAYS,
    neighbours,
    trials_for,
)
from tessera.training.distributed.planner.search import options_by_table
from tessera.training.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from tessera.training.distributed.planner.storage_reservations import (
    FixedAbsoluteStorageReservation,
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
    InferenceStorageReservation,
)
from tessera.training.distributed.planner.types import (
    BasicCommsBandwidths,
    CollectiveType,
    CustomTopologyData,
    GeneralizedCommsBandwidth,
    PlannerErrorType,
    Storage,
)
from tests.training.test_planner import PlannedTables, tables

GIB = constants.GIB


def gpus(world_size=2, gib=1, **options):
    return Topology(world_size, "cuda", hbm_cap=int(gib * GIB), **options)


# Reservations


def left_of(reservation, topology, module=None, batch_size=1):
    found = reservation.reserve(
        topology, batch_size, module or torch.nn.Module(), [PlannedTables()]
    )
    assert reservation.last_reserved_topology is found
    return [device.storage.hbm for device in found.devices]


def test_a_fixed_number_of_bytes_is_reserved():
    assert left_of(FixedAbsoluteStorageReservation(1000), gpus()) == [GIB - 1000] * 2
    assert left_of(FixedAbsoluteStorageReservation.from_gb(0.5), gpus()) == [GIB // 2] * 2
    assert FixedAbsoluteStorageReservation(0).last_reserved_topology is None
    with pytest.raises(PlannerError, match="1\\.00 GiB too much"):
        left_of(FixedAbsoluteStorageReservation(2 * GIB), gpus())
    with pytest.raises(ValueError, match="hbm_reserved_bytes is -1"):
        FixedAbsoluteStorageReservation(-1)


def test_inference_holds_the_dense_part_once_and_one_batch():
    model = torch.nn.Sequential(torch.nn.Linear(10, 10, bias=False), tables((1000, 64)))
    ids = 8 * (constants.ID_BYTES + constants.WEIGHT_BYTES)
    assert left_of(InferenceStorageReservation(0.0), gpus(), model, 8) == [GIB - 400 - ids] * 2
    trained = left_of(HeuristicalStorageReservation(0.0), gpus(), model, 8)
    assert trained == [GIB - 6 * 400 - 3 * ids] * 2
    estimate = InferenceStorageReservation(0.25, dense_tensor_estimate=7)
    assert left_of(estimate, gpus(), model, 8) == [int(0.75 * GIB) - 7 - ids] * 2


# Topologies


def test_memory_that_differs_from_rank_to_rank():
    data = CustomTopologyData({"hbm_cap": [5, 7]}, world_size=2)
    topology = gpus(custom_topology_data=data)
    assert [device.storage.hbm for device in topology.devices] == [5, 7]
    assert [device.storage.ddr for device in topology.devices] == [constants.DDR_CAP] * 2
    assert data.has_data("hbm_cap")
    assert not data.has_data("ssd_cap")
    with pytest.raises(ValueError, match="3 ranks; give one for each"):
        CustomTopologyData({"hbm_cap": [5, 7]}, world_size=3)
    with pytest.raises(ValueError, match="there are 3 ranks"):
        gpus(3, custom_topology_data=data)
    with pytest.raises(ValueError, match="hbm_bw"):
        CustomTopologyData({"hbm_bw": [5]}, world_size=1)


def test_a_big_table_goes_to_the_rank_that_has_room():
    data = CustomTopologyData({"hbm_cap": [GIB // 8, GIB, GIB // 8, GIB // 8]}, world_size=4)
    planner = EmbeddingShardingPlanner(
        gpus(4, custom_topology_data=data),
        storage_reservation=FixedPercentageStorageReservation(0.0),
        constraints={
            "t0": ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
        },
    )
    plan = planner.plan(tables((1_000_000, 64)), [PlannedTables()])
    assert plan.plan[""]["t0"].ranks == [1]


class Slow(GeneralizedCommsBandwidth):
    """One collective is slow."""

    intra_host_bw = inter_host_bw = 1e9

    def __init__(self, slow):
        self.slow = slow

    def get_bw(self, local_world_size, world_size, collective_type):
        assert local_world_size <= world_size
        return 1e8 if collective_type is self.slow else 1e9


@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    [
        ("table_wise", {"ALL_TO_ALL"}, {"ALL_TO_ALL"}),
        ("row_wise", {"ALL_TO_ALL", "REDUCE_SCATTER"}, {"ALL_GATHER"}),
        ("table_row_wise", {"ALL_TO_ALL", "REDUCE_SCATTER"}, {"ALL_TO_ALL", "ALL_GATHER"}),
        ("data_parallel", set(), {"ALL_REDUCE"}),
    ],
)
def test_each_strategy_pays_for_its_collectives(kind, forward, backward):
    def comms(slow):
        topology = gpus(4, local_world_size=2, generalized_comms_bandwidths=Slow(slow))
        kernel = "dense" if kind == "data_parallel" else "fused"
        constraints = {"t0": ParameterConstraints(sharding_types=[kind], compute_kernels=[kernel])}
        enumerator = EmbeddingEnumerator(topology, 512, constraints)
        (option,) = enumerator.enumerate(tables((1000, 64)), [PlannedTables()])
        return option.shards[0].perf

    usual = comms(None)
    slow = {each: comms(each) for each in CollectiveType}
    assert {c.name for c, perf in slow.items() if perf.fwd_comms > usual.fwd_comms} == forward
    assert {c.name for c, perf in slow.items() if perf.bwd_comms > usual.bwd_comms} == backward


def test_basic_bandwidths_tell_hosts_apart():
    basic = BasicCommsBandwidths(inter_host_bw=1.0, intra_host_bw=2.0)
    assert basic.get_bw(8, 8, CollectiveType.ALL_TO_ALL) == 2.0
    assert basic.get_bw(8, 16, CollectiveType.ALL_REDUCE) == 1.0
    topology = gpus(intra_host_bw=2.0, inter_host_bw=1.0)
    assert topology.comms_bandwidths == basic
    with pytest.raises(ValueError, match="inter_host_bw is 0"):
        BasicCommsBandwidths(inter_host_bw=0)


# Hardware by name


def test_hardware_is_estimated_by_its_name():
    @EmbeddingPerfEstimatorFactory.register("Half")
    class Half(HardwarePerfConfig):
        hbm_mem_bw = constants.H200_HBM_MEM_BW / 2

    topology, model = gpus(1), tables((1000, 128))

    def forward_ms(estimator):
        enumerator = EmbeddingEnumerator(topology, 512, estimator=estimator)
        return enumerator.enumerate(model, [PlannedTables()])[0].shards[0].perf.fwd_compute

    usual = forward_ms(EmbeddingPerfEstimator(topology))
    assert (
        forward_ms(EmbeddingPerfEstimatorFactory.create("default_estimator", topology=topology))
        == usual
    )
    half = EmbeddingPerfEstimatorFactory.create("HALF", topology=topology)
    assert forward_ms(half) == 2 * usual
    assert topology.hbm_mem_bw == constants.H200_HBM_MEM_BW
    with pytest.raises(ValueError, match="hardware_name"):
        EmbeddingPerfEstimatorFactory.create("halve", topology=topology)


# Callbacks, time, loaders


def planner_of(**options):
    options.setdefault("topology", gpus())
    options.setdefault("storage_reservation", FixedPercentageStorageReservation(0.0))
    return EmbeddingShardingPlanner(**options)


def test_callbacks_change_what_was_chosen():
    seen = []

    def to_the_last_rank(options):
        seen.append([option.name for option in options])
        return [option.placed([1] * option.num_shards) for option in options]

    only = ParameterConstraints(sharding_types=["table_wise"])
    planner = planner_of(callbacks=[to_the_last_rank], constraints={"t0": only, "t1": only})
    plan = planner.plan(tables((100, 64), (200, 64)), [PlannedTables()])
    assert seen == [["t0", "t1"]]
    assert [where.ranks for where in plan.plan[""].values()] == [[1], [1]]
    assert [o.shards[0].rank for o in planner.report.best] == [1, 1]


def test_a_module_that_a_callback_drops_is_named():
    planner = planner_of(callbacks=[lambda options: options[:1]])
    model = torch.nn.ModuleDict({"a": tables((100, 64)), "b": tables((200, 64))})
    with pytest.raises(PlannerError, match=r"^b: not present in the sharding plan") as error:
        planner.plan(model, [PlannedTables()])
    assert error.value.error_type is PlannerErrorType.MISSING_MODULE_IN_PLAN
    whole = planner_of().plan(model, [PlannedTables()])
    validate = validate_modules_inclusion_in_sharding_plan
    validate(whole, model, [PlannedTables()])
    del whole.plan["a"]
    on_cpus = {"t0": ParameterConstraints(device_group="cpu")}
    validate(whole, model, [PlannedTables()], on_cpus, "cuda")
    with pytest.raises(PlannerError, match=r"^a: not present"):
        validate(whole, model, [PlannedTables()], on_cpus, "cpu")
    with pytest.raises(PlannerError, match="device_group is given without constraints"):
        validate(whole, model, [PlannedTables()], device_group="cpu")


def test_the_ranks_of_options_can_be_forgotten():
    planner = planner_of()
    planner.plan(tables((100, 64)), [PlannedTables()])
    best = planner.report.best
    assert all(shard.rank is not None for option in best for shard in option.shards)
    utils.reset_shard_rank(best)
    assert all(shard.rank is None for option in best for shard in option.shards)


class Clock:
    """Proposals that each take a second of a clock of their own."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(
            "tessera.training.distributed.planner.planners.time.monotonic", lambda: self.now
        )

    def search(self):
        clock = self

        class Slow(GridSearchProposer):
            def propose(self):
                clock.now += 1.0
                return super().propose()

        return Slow()


def test_the_best_plan_in_time_is_taken(monkeypatch):
    clock = Clock(monkeypatch)
    planner = planner_of(proposer=clock.search(), timeout_seconds=2.5)
    planner.plan(tables((1000, 64)), [PlannedTables()])
    assert planner.report.num_proposals == 2
    planner = planner_of(proposer=clock.search(), timeout_seconds=0.5)
    with pytest.raises(PlannerError, match=r"none of 0 proposals fitted in timeout_seconds=0\.5"):
        planner.plan(tables((1000, 64)), [PlannedTables()])
    with pytest.raises(ValueError, match="timeout_seconds is 0"):
        planner_of(timeout_seconds=0)


def test_a_plan_of_an_earlier_run_is_used_again(tmp_path):
    model, file = tables((1000, 64), (2_000_000, 128), (50, 32)), tmp_path / "options.json"
    first = planner_of(plan_loader=PlanFile(file))  # there is no file yet
    plan = first.plan(model, [PlannedTables()])
    PlanFile(file).save(first.report.best, first.hash_planner_context_inputs_str())
    again = planner_of(plan_loader=PlanFile(file), proposer=[])  # would find nothing by itself
    with pytest.raises(PlannerError, match="made for another topology, batch size, constraints"):
        again.plan(model, [PlannedTables()])
    again = planner_of(plan_loader=PlanFile(file))
    again._search = None  # is not called
    assert str(again.plan(model, [PlannedTables()])) == str(plan)
    assert again.report.perf_rating == first.report.perf_rating
    with pytest.raises(PlannerError, match="table 't3' is not in it"):
        again.plan(tables((1000, 64), (2_000_000, 128), (50, 32), (9, 8)), [PlannedTables()])
    with pytest.raises(PlannerError, match="options of other tables"):
        again.plan(tables((1000, 64), (2_000_000, 128)), [PlannedTables()])
    content = json.loads(file.read_text())
    for wrong in ("{}", "[", json.dumps({**content, "options": [{}]})):
        file.write_text(wrong)
        with pytest.raises(UserError, match="does not hold placed options"):
            PlanFile(file).load()


def test_what_changes_a_plan_changes_the_hash_of_its_inputs():
    hashes = {
        planner_of(**options).hash_planner_context_inputs_str()
        for options in (
            {},
            {"topology": gpus(4)},
            {"topology": gpus(gib=2)},
            {"batch_size": 7},
            {"constraints": {"t0": ParameterConstraints(min_partition=16)}},
            {"proposer": GreedyProposer()},
        )
    }
    assert len(hashes) == 6
    assert planner_of().hash_planner_context_inputs_str() in hashes


def test_a_loaded_option_takes_the_estimates_of_the_search_space():
    enumerator = EmbeddingEnumerator(gpus(), 512)
    space = enumerator.enumerate(tables((1000, 64)), [PlannedTables()])
    placed = space[0].placed([1] * space[0].num_shards)
    bare = replace(placed, shards=[replace(s, perf=None, storage=None) for s in placed.shards])
    (found,) = extract_plan(space, {bare.storage_hash(): bare})
    assert [shard.rank for shard in found.shards] == [1] * found.num_shards
    assert found.total_perf == space[0].total_perf
    assert len({option.storage_hash() for option in space}) == len(space)


# Caches that grow into what is left


def cached_plan(gib, *sizes, poolings):
    caches = {
        f"t{i}": ParameterConstraints(
            sharding_types=["table_wise"],
            compute_kernels=["fused", "fused_uvm_caching"],
            pooling_factors=[pooling],
        )
        for i, pooling in enumerate(poolings)
    }
    model = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(rows, columns, name=f"t{i}", feature_names=[f"f{i}"])
            for i, (rows, columns) in enumerate(sizes)
        ],
    )

    def plan(proposer):
        planner = planner_of(
            topology=gpus(1, gib), constraints=caches, proposer=proposer, batch_size=512
        )
        kernels = PlannedTables(["fused", "fused_uvm_caching"])
        return planner.plan(model, [kernels]).plan[""], planner.report

    return plan


def load_of(where):
    cache = where.cache_params
    return 1.0 if where.compute_kernel == "fused" else cache.load_factor if cache else 0.2


def test_memory_that_is_left_goes_to_the_caches_that_gain_most():
    plan = cached_plan(0.5, (1_000_000, 128), (1_000_000, 128), poolings=[1.0, 30.0])
    usual, before = plan(None)
    grown, report = plan(EmbeddingOffloadScaleupProposer())
    assert {where.compute_kernel for where in usual.values()} == {"fused_uvm_caching"}
    # The table with more lookups has all that fits.
    assert load_of(grown["t0"]) == pytest.approx(0.2)
    assert 0.7 < load_of(grown["t1"]) < 1.0
    assert report.perf_rating < before.perf_rating
    used = sum(option.total_storage.hbm for option in report.best)
    assert 0.99 * 0.5 * GIB < used <= 0.5 * GIB


def test_a_cache_that_would_hold_its_table_is_none():
    plan = cached_plan(0.8, (1_000_000, 128), (1_000_000, 128), poolings=[1.0, 30.0])
    grown, _ = plan(EmbeddingOffloadScaleupProposer())
    assert grown["t1"].compute_kernel == "fused"
    assert 0.2 < load_of(grown["t0"]) < 1.0


def test_without_caches_or_without_an_enumerator_nothing_grows():
    space = EmbeddingEnumerator(gpus(), 512).enumerate(tables((1000, 64)), [PlannedTables()])
    search = EmbeddingOffloadScaleupProposer()
    search.load(space)
    assert search.propose() is None
    search.load(space, EmbeddingEnumerator(gpus(), 512))
    assert len(search.propose()) == 1
    search.feedback(partitionable=True, perf_rating=1.0, storage_constraint=gpus())
    assert search.propose() is None


def test_units():
    assert utils.gb_to_bytes(utils.bytes_to_gb(GIB)) == GIB
    assert utils.mb_to_bytes(utils.bytes_to_mb(3 * 1024**2)) == 3 * 1024**2
    assert utils.prod([2, 3, 4]) == 24
    assert utils.storage_repr_in_gb(Storage(GIB, 2 * GIB)) == (
        "Storage(hbm: 1.0 GB, ddr: 2.0 GB, ssd: 0.0 GB)"
    )
    assert utils.sharder_name(torch.nn.Linear) == "torch.nn.modules.linear.Linear"


# Plans near a good one


@pytest.mark.parametrize("seed", [0, 3])
def test_other_ways_for_tables_of_the_busiest_rank_make_a_better_plan(seed, monkeypatch):
    # What is asked is how much better the estimates get, which ways add to in equal parts.
    monkeypatch.setattr(constants, "WAY_MS_ON_GPU", 0.0)
    draw = random.Random(seed)
    sizes = [
        (draw.choice([1000, 30_000, 300_000]), draw.choice([32, 64, 128, 256])) for _ in range(12)
    ]
    ids = {
        f"t{i}": ParameterConstraints(pooling_factors=[float(draw.choice([1, 2, 5, 20, 50]))])
        for i in range(len(sizes))
    }

    def rating(**options):
        planner = planner_of(topology=gpus(4), constraints=ids, batch_size=2048, **options)
        planner.plan(tables(*sizes), [PlannedTables()])
        return planner.report.perf_rating

    alone = rating(proposer=[UniformProposer(), GreedyProposer(), DynamicProgrammingProposer()])
    assert rating() < 0.97 * alone


def test_what_is_tried_near_a_plan():
    enumerator = EmbeddingEnumerator(gpus(2), 512)
    space = enumerator.enumerate(tables((1000, 64), (1000, 128)), [PlannedTables()])
    ways = options_by_table(space)
    proposal = [
        next(o for o in ways[name] if o.sharding_type == "table_wise") for name in ("t0", "t1")
    ]
    plan = [proposal[0].placed([0]), proposal[1].placed([1])]
    near = list(neighbours(proposal, plan, ways, 2))
    # The wider table's rank is the busiest.
    assert all(other[0] is proposal[0] for other in near)
    assert [other[1] for other in near] == [
        way for way in ways["t1"][:WAYS] if way is not proposal[1]
    ]
    assert trials_for(plan) == MOST_TRIALS
    assert trials_for(plan * 20_000) == 1
