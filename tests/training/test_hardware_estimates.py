"""Estimates for kinds of hardware: coefficients, marked methods, bandwidths, caches."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tessera.training.distributed.comm.codec_types import CommOp
from tessera.training.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tessera.training.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from tessera.training.distributed.planner import (
    EmbeddingEnumerator,
    ParameterConstraints,
    Topology,
    constants,
)
from tessera.training.distributed.planner.cache_stats import EmbeddingOffloadStats
from tessera.training.distributed.planner.estimator import (
    EmbeddingPerfEstimatorFactory,
    EmbeddingPerfEstimatorV2,
    EstimatorPerfCoefficients,
    HardwarePerfConfig,
    PerfCoefficient,
    PerfCoefficientConfig,
    PrefetchCoefficients,
    ShardPerfContext,
)
from tessera.training.distributed.planner.estimator import annotations as marks
from tessera.training.distributed.planner.estimator.estimator import (
    TRAINING_EVALUATORS,
    compute_block_usage_penalty,
    get_embedding_perf_sharding_evaluator,
)
from tessera.training.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from tessera.training.distributed.planner.sharder_data import (
    SharderData,
    build_sharder_data,
    build_sharder_data_map,
    extract_comm_data_type_size,
)
from tessera.training.distributed.types import (
    CacheParams,
    StorageUsageType,
    compute_storage_usage,
)
from tests.training.test_planner import PlannedTables, tables


def context(kind="table_wise", **changes):
    fields = {
        "sharding_type": kind,
        "compute_kernel": "fused",
        "hash_size": 1000,
        "emb_dim": 128,
        "batch_sizes": [64],
        "num_poolings": [1.0],
        "input_lengths": [10.0],
        "world_size": 4,
        "local_world_size": 2,
        "intra_group_size": 2,
        "device_bw": 1e9,
    }
    return ShardPerfContext(**{**fields, **changes})


def times(hardware, kind="table_wise", **changes):
    evaluator = get_embedding_perf_sharding_evaluator(kind)
    return evaluator.compute_perf(context(kind, **changes), hardware)


def test_a_lookup_by_hand():
    ids, vectors = 64 * 10 * 4, 64 * 4
    usual = times(HardwarePerfConfig())
    assert usual.fwd_compute == pytest.approx((ids * (8 + 128 * 4) + vectors * 128 * 4) / 1e6)
    assert usual.bwd_compute == pytest.approx(2 * usual.fwd_compute)
    rows = times(HardwarePerfConfig(), "row_wise")
    assert rows.fwd_compute == pytest.approx((ids / 4 * (8 + 128 * 4) + vectors * 128 * 4) / 1e6)
    narrow = times(HardwarePerfConfig(), emb_dim=16)
    expected = ids * (8 + 32 * 4) + vectors * 16 * 4
    assert narrow.fwd_compute == pytest.approx(constants.QUARTER_BLOCK_PENALTY * expected / 1e6)
    assert [compute_block_usage_penalty(n) for n in (256, 128, 127, 64, 63)] == [
        1, 1, 1.15, 1.15, 1.75
    ]  # fmt: skip


def test_weights_cost_their_bytes_and_their_gradients():
    usual, weighted = times(HardwarePerfConfig()), times(HardwarePerfConfig(), is_weighted=True)
    more = weighted.fwd_compute - usual.fwd_compute
    assert more == pytest.approx(64 * 10 * 4 * 8 / 1e6)
    assert weighted.bwd_compute == pytest.approx((2 + 1.1) * weighted.fwd_compute)
    assert weighted.input_dist_comms > usual.input_dist_comms


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "table_row_wise", "column_wise"])
@pytest.mark.parametrize("is_pooled", [True, False])
def test_default_hardware_takes_what_the_topology_says(kind, is_pooled):
    """Wide rows without weights take the same time as `EmbeddingPerfEstimator` says."""
    topology = Topology(4, "cuda", local_world_size=2)
    constraints = {"t0": ParameterConstraints(sharding_types=[kind], compute_kernels=["fused"])}
    enumerator = EmbeddingEnumerator(topology, 64, constraints)
    option, *_ = enumerator.enumerate(tables((1000, 512)), [PlannedTables()])
    option = replace(option, is_pooled=is_pooled)

    def perf(estimator):
        estimator.estimate([option])
        return option.shards[0].perf

    whole = perf(EmbeddingPerfEstimator(topology))
    parts = perf(EmbeddingPerfEstimatorFactory.create("default_estimator", topology=topology))
    assert parts.fwd_compute == pytest.approx(whole.fwd_compute)
    assert parts.fwd_comms + parts.input_dist_comms == pytest.approx(whole.fwd_comms)
    assert parts.bwd_comms == pytest.approx(whole.bwd_comms)
    assert parts.total == pytest.approx(whole.total)
    assert parts.comms == pytest.approx(whole.comms)


def test_copies_on_all_ranks_average_gradients_alone():
    perf = times(HardwarePerfConfig(), "data_parallel")
    assert perf.fwd_comms == perf.input_dist_comms == 0.0
    assert perf.bwd_comms > 0
    lookup = 2 * perf.fwd_compute
    table = 1000 * 128 * 4
    assert perf.bwd_compute == pytest.approx(lookup + constants.DENSE_PASSES * table / 1e6)


def test_inference_has_no_backward_pass():
    evaluator = get_embedding_perf_sharding_evaluator("row_wise", is_inference=True)
    perf = evaluator.compute_perf(context("row_wise"), HardwarePerfConfig())
    assert perf.bwd_compute == perf.bwd_comms == 0.0
    assert perf.fwd_compute == times(HardwarePerfConfig(), "row_wise").fwd_compute


class Fitted(HardwarePerfConfig):
    name = "fitted"

    @marks.fwd_coefficient("row_wise")
    def rows(self):
        return PerfCoefficient(0.0, 0.0, 0.0, hash_size_multiplier=3.0)

    @marks.bwd_coefficient(["row_wise", "table_wise"])
    def back(self):
        return PerfCoefficient(lookup_size_multiplier=0.0, embedding_output_multiplier=0.0)

    @marks.forward_compute
    def any_lookup(self, ctx):
        return 7.0

    @marks.forward_compute(sharding_type="column_wise")
    def column_lookup(self, ctx):
        return ctx.emb_dim / 2

    @marks.input_dist_comms("table_wise")
    @marks.fwd_comms("table_wise")
    def travel(self, ctx):
        return 1.5


def test_marked_methods_compute_the_parts_that_they_name():
    fitted = Fitted()
    column = times(fitted, "column_wise")
    assert column.fwd_compute == 64.0  # the one that names the strategy, though another is for all
    table = times(fitted)
    assert (table.fwd_compute, table.fwd_comms, table.input_dist_comms) == (7.0, 1.5, 1.5)
    assert table.bwd_compute == pytest.approx(64 * 10 * 4 * 8 / 1e6)
    assert table.bwd_comms == times(HardwarePerfConfig()).bwd_comms
    assert fitted.get_coefficients_for_sharding("row_wise").fwd.of(1, 1, 1, 10) == 30.0
    assert fitted.coefficients.row_wise is not None
    assert fitted.coefficients.column_wise is None
    assert marks.get_bwd_comms(fitted) is None
    with pytest.raises(ValueError, match="sharding_type is 'by_rows'"):
        marks.fwd_coefficient("by_rows")


def test_other_parts_may_be_computed_too():
    class Own(HardwarePerfConfig):
        @marks.backward_compute
        def back(self, ctx):
            return 3.0

        @marks.bwd_comms
        def gradients(self, ctx):
            return 4.0

        @marks.prefetch_compute
        def cache(self, ctx):
            return 5.0

        @marks.output_write_size
        def written(self, ctx, *, is_fwd):
            return 0.0 if is_fwd else 1.0

    perf = times(Own())
    assert (perf.bwd_compute, perf.bwd_comms, perf.prefetch_compute) == (3.0, 4.0, 5.0)
    assert perf.fwd_compute == pytest.approx(64 * 10 * 4 * (8 + 128 * 4) / 1e6)


def test_figures_of_a_class():
    @marks.supported_sharding_types("table_wise", "ROW_WISE")
    @marks.device_bw(5.0)
    @marks.device_bw(6.0, device="cuda", compute_kernel=["fused", "dense"])
    @marks.hbm_mem_bw(1e12)
    @marks.ddr_mem_bw(2e12)
    @marks.ssd_mem_bw(3e12)
    @marks.hbm_to_ddr_mem_bw(4e12)
    @marks.intra_host_bw(5e12)
    @marks.inter_host_bw(6e12)
    @marks.use_min_dim_for_lookup(False)
    @marks.use_block_usage_penalty(False)
    @marks.use_bytes_for_input_read_size(False)
    @marks.input_data_type_size(4.0)
    class Own(HardwarePerfConfig):
        pass

    own, bandwidths = Own(), (1.0, 2.0, 3.0, 4.0)
    assert own.get_device_bw("cuda", "fused", *bandwidths) == 6.0
    assert own.get_device_bw("cuda", "fused_uvm", *bandwidths) == 5.0
    assert own.get_device_bw("cuda", "fused_uvm_caching", *bandwidths, 0.5, True) == 6.0
    assert not HardwarePerfConfig.kernel_device_bandwidths
    topology = own.on(Topology(4, "cuda"))
    assert (topology.hbm_mem_bw, topology.ddr_mem_bw) == (1e12, 2e12)
    assert (topology.ssd_mem_bw, topology.hbm_to_ddr_mem_bw) == (3e12, 4e12)
    assert (topology.intra_host_bw, topology.inter_host_bw) == (5e12, 6e12)
    ids, vectors = 64 * 10 * 4, 64 * 4
    plain = times(own, emb_dim=16)
    assert plain.fwd_compute == pytest.approx((ids * (1 + 16 * 4) + vectors * 16 * 4) / 1e6)
    own.validate_sharding_type("row_wise")
    estimator = EmbeddingPerfEstimatorV2(Topology(4, "cuda"), config=own)
    options = EmbeddingEnumerator(Topology(4, "cuda"), 8).enumerate(
        tables((100, 512)), [PlannedTables()]
    )
    with pytest.raises(ValueError, match="'column_wise'"):
        estimator.estimate([o for o in options if o.sharding_type == "column_wise"])
    with pytest.raises(ValueError, match="give both or neither"):
        marks.device_bw(1.0, device="cuda")


def test_a_kernel_that_no_device_has():
    with pytest.raises(ValueError, match="'cpu' does not have"):
        HardwarePerfConfig().get_device_bw("cpu", "fused_uvm", 1.0, 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="compute_kernel is 'fuzed'"):
        HardwarePerfConfig().get_device_bw("cuda", "fuzed", 1.0, 1.0, 1.0, 1.0)


def test_bandwidths_of_kernels():
    def of(device, kernel, *more):
        return constants.kernel_bw_lookup(device, kernel, 100.0, 10.0, 20.0, *more)

    assert of("cuda", "fused") == of("cuda", "fused_uvm_caching", 0.1, True) == 100.0
    assert of("cuda", "dense") == 50.0
    assert of("cpu", "fused") == 10.0
    assert of("cuda", "fused_uvm") == pytest.approx(2.0)
    assert of("cuda", "fused_uvm_caching", 0.25) == pytest.approx(4.0)
    assert of("cuda", "key_value", None, False, 3.0) == 3.0
    assert of("cpu", "fused_uvm") is of("tpu", "fused") is None


def test_coefficients_of_a_kernel_come_before_those_of_its_strategy():
    def of(number):
        return EstimatorPerfCoefficients(PerfCoefficient(number))

    given = PerfCoefficientConfig(
        column_wise=of(1), table_row_wise=of(2), by_kernel={("row_wise", "fused"): of(3)}
    )
    assert given.get_coefficients("TABLE_COLUMN_WISE") == of(1)
    assert given.get_coefficients("grid_shard", "fused") == of(2)
    assert given.get_coefficients("row_wise", "FUSED") == of(3)
    assert given.get_coefficients("row_wise", "dense") == of(1.0)

    class Own(HardwarePerfConfig):
        coefficients = PerfCoefficientConfig(
            bwd_compute_multiplier=5.0, weighted_feature_bwd_compute_multiplier=2.0
        )

    perf = times(Own(), is_weighted=True)
    assert perf.bwd_compute == pytest.approx((5 * 2 + 1.1) * perf.fwd_compute)
    own = Own()
    own.bwd_compute_multiplier = own.weighted_feature_bwd_compute_multiplier = 1.0
    assert times(own, is_weighted=True).bwd_compute == pytest.approx(2.1 * perf.fwd_compute)


def test_filling_a_cache():
    cache = {
        "compute_kernel": "fused_uvm_caching",
        "caching_ratio": 0.2,
        "cache_stats_expected_lookups": 500.0,
        "expected_miss_rate": 0.1,
        "hbm_to_ddr_mem_bw": 1e9,
        "hash_size_for_clamping": 1000,
    }
    usual = HardwarePerfConfig()
    assert times(usual, **cache).prefetch_compute == pytest.approx(50 * 128 * 4 / 1e6)
    rows = {**cache, "hash_size": 250}
    assert times(usual, "row_wise", **rows).prefetch_compute == pytest.approx(50 * 128 / 1e6)
    every = {**cache, "use_batch_inputs_for_expected_cache_fetches": True}
    assert times(usual, **every).prefetch_compute == pytest.approx(256 * 128 * 4 / 1e6)
    assert times(usual).prefetch_compute == 0.0

    class Own(HardwarePerfConfig):
        @marks.prefetch_coefficient()
        def cache(self):
            return PrefetchCoefficients(1e-3, 1e-2, 1e-4)

    fitted = {**cache, "use_linear_regression_prefetch_estimate": True}
    expected = 1e-3 * 2560 + 1e-2 * 500 + 1e-4 * 50 * 128
    assert times(Own(), **fitted).prefetch_compute == pytest.approx(expected)
    with pytest.raises(ValueError, match="no PrefetchCoefficients"):
        times(usual, **fitted)


def test_an_estimator_reads_constraints_and_sharders():
    topology = Topology(2, "cuda")
    stats = EmbeddingOffloadStats(0.5, 40, torch.ones(10), height=1000)
    constraints = {
        "t0": ParameterConstraints(
            sharding_types=["table_wise"],
            compute_kernels=["fused_uvm_caching"],
            cache_params=CacheParams(load_factor=0.3, stats=stats),
        )
    }
    (option,) = EmbeddingEnumerator(topology, 64, constraints).enumerate(
        tables((1000, 128)), [PlannedTables(["fused_uvm_caching"])]
    )
    key = f"{type(option.module[1]).__module__}.{type(option.module[1]).__qualname__}"

    def perf(sharder=None, **options):
        estimator = EmbeddingPerfEstimatorV2(topology, **options)
        estimator.estimate([option], {key: sharder} if sharder else None)
        return option.shards[0].perf

    usual = perf()
    misses = 0.7 * 40 * 128 * 4 / topology.hbm_to_ddr_mem_bw
    assert usual.prefetch_compute == pytest.approx(misses * 1e3)
    ahead = perf(SharderData(fused_params={"prefetch_pipeline": True}))
    assert ahead.fwd_compute < usual.fwd_compute
    halves = SharderData(qcomm_dtype_sizes={CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name: (2.0, 4.0)})
    assert perf(halves).fwd_comms < usual.fwd_comms
    assert perf(halves).bwd_comms == usual.bwd_comms
    assert perf(is_inference=True).bwd_compute == 0.0
    twice = perf(constraints={"t0": replace(constraints["t0"], num_poolings=[2.0])})
    assert twice.fwd_compute == pytest.approx(2 * usual.fwd_compute)
    with pytest.raises(ValueError, match="num_poolings has 2 entries for 1"):
        perf(constraints={"t0": ParameterConstraints(num_poolings=[1.0, 1.0])})


def test_times_may_be_changed_once_all_are_known():
    class Even(HardwarePerfConfig):
        def post_process_perfs(self, perfs, sizes, kind, multiplier=1.0):
            assert len(perfs) == len(sizes)
            return [replace(perf, fwd_compute=multiplier) for perf in perfs]

    topology = Topology(2, "cuda", uneven_sharding_perf_multiplier=1.25)
    options = EmbeddingEnumerator(topology, 8).enumerate(tables((99, 32)), [PlannedTables()])
    EmbeddingPerfEstimatorFactory.create_with_config(Even(), topology=topology).estimate(options)
    assert {shard.perf.fwd_compute for o in options for shard in o.shards} == {1.25}
    with pytest.raises(ValueError, match="topology is None"):
        EmbeddingPerfEstimatorFactory.create_with_config(Even())


def test_a_sharder_as_plain_values():
    codecs = get_qcomm_codecs_registry(
        QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
    )
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"learning_rate": 0.5}, qcomm_codecs_registry=codecs
    )
    data = build_sharder_data_map({"bags": sharder})["bags"]
    assert data == build_sharder_data(sharder)
    assert data.storage_usage_type is StorageUsageType.BASE
    assert data.fused_params == {"learning_rate": 0.5}
    assert data.qcomm_dtype_sizes[CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name] == (2, 2)
    (option, *_) = EmbeddingEnumerator(Topology(2, "cuda"), 8).enumerate(
        tables((99, 32)), [PlannedTables()]
    )
    assert extract_comm_data_type_size(option, data) == (2, 2, 2, 2)
    assert extract_comm_data_type_size(option, SharderData()) == (4, 4, 4, 4)
    assert extract_comm_data_type_size(replace(option, is_pooled=False), data)[2:] == (4, 4)


@pytest.mark.parametrize(
    ("device", "kernel", "kind", "expected"),
    [
        ("cuda", "fused", StorageUsageType.BASE, {"hbm": 80}),
        ("cuda", "fused_uvm", StorageUsageType.BASE, {"ddr": 80}),
        ("cuda", "fused_uvm", StorageUsageType.DEFAULT, {"hbm": 80}),
        ("cuda", "quant_uvm", StorageUsageType.BASE_QUANT, {"ddr": 120}),
        ("cpu", "quant", StorageUsageType.BASE_QUANT, {"ddr": 120}),
    ],
)
def test_memory_by_the_kind_of_sharder(device, kernel, kind, expected):
    assert compute_storage_usage(torch.zeros(10, 2), device, kernel, kind) == expected


def test_miss_rates_are_those_of_a_cache_that_drops_the_oldest_row():
    height, draw = 50, random.Random(3)
    ids = [min(int(draw.expovariate(0.1)), height - 1) for _ in range(4000)]
    counts, recent = torch.zeros(height), []
    for each in ids:
        if each in recent:
            counts[recent.index(each)] += 1
            recent.remove(each)
        recent.insert(0, each)
    stats = EmbeddingOffloadStats(0.5, 30, counts, height)
    assert (stats.expected_lookups, stats.cacheability) == (30, 0.5)
    for size in (0, 1, 5, 20, 49, 50):
        cache, hits = [], 0
        for each in ids:
            if each in cache:
                hits += 1
                cache.remove(each)
            cache = [each, *cache][:size]
        again = int(counts.sum())  # an id's first lookup misses in every cache, and is not counted
        assert stats.expected_miss_rate(size / height) == pytest.approx(1 - hits / again, abs=1e-6)
    none = EmbeddingOffloadStats(0.5, 0, torch.zeros(4), height)
    assert none.expected_miss_rate(0.0) == 0.0
    for wrong in (torch.zeros(0), torch.zeros(2, 2)):
        with pytest.raises(ValueError, match="mrc_hist_counts"):
            EmbeddingOffloadStats(0.5, 0, wrong, height)


def test_known_ids_make_a_cached_table_faster_or_slower():
    topology = Topology(1, "cuda")

    def lookup(counts):
        stats = counts and EmbeddingOffloadStats(0.5, 9, torch.tensor(counts), height=1000)
        cache = CacheParams(load_factor=0.5, stats=stats)
        given = ParameterConstraints(compute_kernels=["fused_uvm_caching"], cache_params=cache)
        options = EmbeddingEnumerator(topology, 64, {"t0": given}).enumerate(
            tables((1000, 128)), [PlannedTables(["fused_uvm_caching"])]
        )
        return options[0].shards[0].perf.fwd_compute

    assert lookup([1.0, 0.0]) < lookup(None) < lookup([0.0, 1.0])


def test_every_strategy_has_an_evaluator_of_its_name():
    assert all(kind == each.sharding_type for kind, each in TRAINING_EVALUATORS.items())
    with pytest.raises(ValueError, match="by_rows"):
        get_embedding_perf_sharding_evaluator("by_rows")
