"""What an evaluator is told of one shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tessera.training.distributed.planner import constants
from tessera.training.distributed.planner.bandwidths import (
    BasicCommsBandwidths,
    GeneralizedCommsBandwidth,
)
from tessera.training.distributed.planner.constraints import ParameterConstraints
from tessera.training.distributed.planner.estimator.hardware_config import HardwarePerfConfig
from tessera.training.distributed.planner.hardware import Topology
from tessera.training.distributed.planner.sharder_data import (
    SharderData,
    extract_comm_data_type_size,
    get_num_poolings,
    is_prefetch_pipelined,
)
from tessera.training.distributed.planner.types import ShardingOption
from tessera.training.distributed.tables.table_shards import EmbeddingComputeKernel
from tessera.training.modules.embedding_configs import data_type_to_dtype


@dataclass
class ShardPerfContext:
    """One shard, its table's batches, and the ranks; the fields are those of TorchRec's planner.

    Attributes:
        sharding_type, compute_kernel: of the table.
        hash_size, emb_dim: rows and columns of the shard.
        batch_sizes, num_poolings, input_lengths: per feature: samples of a rank, bags of a sample and ids
            of a bag.
        world_size, local_world_size, intra_group_size: ranks in all, of a host, and of the group that
            shares the rows of a ``table_row_wise`` table.
        input_data_type_size, table_data_type_size, output_data_type_size: bytes of an id, a weight, and a
            number of a vector.
        fwd_a2a_comm_data_type_size, bwd_a2a_comm_data_type_size, fwd_sr_comm_data_type_size,
            bwd_sr_comm_data_type_size: bytes of a number on its way, in all-to-alls and reduce-scatters.
        device_bw, hbm_to_ddr_mem_bw: bytes per second that lookups read and write, and between device
            and host memory.
        comms_bandwidths: of collectives.
        is_inference: there is no backward pass.
        is_weighted, is_pooled: of the table's ids and bags.
        bwd_compute_multiplier, weighted_feature_bwd_compute_multiplier: the topology's.
        use_linear_regression_prefetch_estimate: filling a cache takes what `PrefetchCoefficients` say.
        use_batch_inputs_for_expected_cache_fetches: every id of a batch may be missing from a cache;
            otherwise every distinct one.
        caching_ratio: cached share of the rows, 0 to 1; None: there is no cache.
        table_name: of the table, and ``hash_size_for_clamping`` its rows.
        cache_stats_expected_lookups: distinct ids of a step, and ``expected_miss_rate`` the share of them
            that a cache does not hold; None: not known.
    """

    sharding_type: str = ""
    compute_kernel: str = ""
    hash_size: int = 0
    emb_dim: int = 0
    batch_sizes: list[int] = field(default_factory=list)
    num_poolings: list[float] = field(default_factory=list)
    input_lengths: list[float] = field(default_factory=list)
    world_size: int = 1
    local_world_size: int = 1
    intra_group_size: int = 1
    input_data_type_size: float = constants.ID_BYTES
    table_data_type_size: float = 4.0
    output_data_type_size: float = 4.0
    fwd_a2a_comm_data_type_size: float = 4.0
    bwd_a2a_comm_data_type_size: float = 4.0
    fwd_sr_comm_data_type_size: float = 4.0
    bwd_sr_comm_data_type_size: float = 4.0
    device_bw: float = constants.HBM_MEM_BW
    hbm_to_ddr_mem_bw: float = constants.HBM_TO_DDR_MEM_BW
    comms_bandwidths: GeneralizedCommsBandwidth = field(default_factory=BasicCommsBandwidths)
    is_inference: bool = False
    is_weighted: bool = False
    is_pooled: bool = True
    bwd_compute_multiplier: float = constants.BWD_COMPUTE_MULTIPLIER
    weighted_feature_bwd_compute_multiplier: float = (
        constants.WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER
    )
    use_linear_regression_prefetch_estimate: bool = False
    use_batch_inputs_for_expected_cache_fetches: bool = False
    caching_ratio: float | None = None
    table_name: str = ""
    hash_size_for_clamping: int = 0
    cache_stats_expected_lookups: float | None = None
    expected_miss_rate: float | None = None

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return max(1, self.world_size // self.local_world_size)

    @property
    def num_twrw_groups(self) -> int:
        """Number of groups that can each hold the rows of a ``table_row_wise`` table."""
        return max(1, self.world_size // self.intra_group_size)

    @property
    def batch_inputs(self) -> float:
        """Ids of a rank's batch."""
        each = zip(self.input_lengths, self.num_poolings, self.batch_sizes, strict=True)
        return sum(length * bags * samples for length, bags, samples in each)

    @property
    def batch_outputs(self) -> float:
        """Vectors for a rank's batch: of bags that are not empty, or of ids."""
        if not self.is_pooled:
            return self.batch_inputs
        each = zip(self.input_lengths, self.num_poolings, self.batch_sizes, strict=True)
        return sum(min(1.0, length) * bags * samples for length, bags, samples in each)

    @property
    def is_uvm_caching(self) -> bool:
        """Whether rows lie in host memory behind a cache."""
        return self.compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value

    @classmethod
    def build_shard_perf_contexts(  # noqa: PLR0917 - the signature TorchRec users know
        cls,
        config: HardwarePerfConfig,
        shard_sizes: list[list[int]],
        sharding_option: ShardingOption,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None,
        sharder_data: SharderData,
        *,
        is_inference: bool = False,
        use_batch_inputs_for_expected_cache_fetches: bool = False,
        use_linear_regression_prefetch_estimate: bool = False,
    ) -> list[ShardPerfContext]:
        """Return the contexts of an option's shards.

        Args:
            config: the hardware.
            shard_sizes: rows and columns of each shard.
            sharding_option: the way that the table is cut.
            topology: the ranks.
            constraints: by table, in the place of those that the option has.
            sharder_data: of the sharder of the table's module.
            is_inference: passed on.
            use_batch_inputs_for_expected_cache_fetches: passed on.
            use_linear_regression_prefetch_estimate: passed on.

        Raises:
            ValueError: lists of constraints of another number of features, or a kernel that the device
                does not have.
        """
        option = sharding_option
        features = len(option.input_lengths)
        given = (constraints or {}).get(option.name) or option.constraints or ParameterConstraints()
        batch_size = given.batch_size or option.batch_size
        given.bags_per_sample(batch_size, features)  # checks the lists' lengths
        cache = given.cache_params
        ratio = cache.load_factor if cache else None
        if ratio is None:
            ratio = sharder_data.fused_params.get("cache_load_factor")
        caches = option.compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value
        if caches and ratio is None:
            ratio = constants.UVM_CACHING_RATIO
        stats = cache.stats if cache and caches else None
        expected_lookups, miss_rate = None, None
        if stats is not None and ratio is not None:
            expected_lookups, miss_rate = stats.expected_lookups, stats.expected_miss_rate(ratio)
        output = option.tensor.element_size()
        if given.output_dtype is not None:
            output = data_type_to_dtype(given.output_dtype).itemsize
        forth, back, summed, summed_back = extract_comm_data_type_size(option, sharder_data)
        device_bw = config.get_device_bw(
            topology.compute_device,
            option.compute_kernel,
            topology.hbm_mem_bw,
            topology.ddr_mem_bw,
            topology.ssd_mem_bw,
            topology.hbm_to_ddr_mem_bw,
            ratio,
            is_prefetch_pipelined(option, sharder_data),
        )
        return [
            cls(
                sharding_type=option.sharding_type,
                compute_kernel=option.compute_kernel,
                hash_size=rows,
                emb_dim=columns,
                batch_sizes=given.batch_sizes or [batch_size] * features,
                num_poolings=get_num_poolings(constraints, option),
                input_lengths=option.input_lengths,
                world_size=topology.world_size,
                local_world_size=topology.local_world_size,
                intra_group_size=topology.local_world_size,
                input_data_type_size=config.input_data_type_size or constants.ID_BYTES,
                table_data_type_size=option.tensor.element_size(),
                output_data_type_size=output,
                fwd_a2a_comm_data_type_size=forth,
                bwd_a2a_comm_data_type_size=back,
                fwd_sr_comm_data_type_size=summed,
                bwd_sr_comm_data_type_size=summed_back,
                device_bw=device_bw,
                hbm_to_ddr_mem_bw=topology.hbm_to_ddr_mem_bw,
                comms_bandwidths=topology.comms_bandwidths,
                is_inference=is_inference,
                is_weighted=bool(option.is_weighted or given.is_weighted),
                is_pooled=option.is_pooled,
                bwd_compute_multiplier=topology.bwd_compute_multiplier,
                weighted_feature_bwd_compute_multiplier=(
                    topology.weighted_feature_bwd_compute_multiplier
                ),
                use_linear_regression_prefetch_estimate=use_linear_regression_prefetch_estimate,
                use_batch_inputs_for_expected_cache_fetches=(
                    use_batch_inputs_for_expected_cache_fetches
                ),
                caching_ratio=ratio,
                table_name=option.name,
                hash_size_for_clamping=option.tensor.shape[0],
                cache_stats_expected_lookups=expected_lookups,
                expected_miss_rate=miss_rate,
            )
            for rows, columns in shard_sizes
        ]
