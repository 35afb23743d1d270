"""TorchRec's module paths: which names each has, and where each name is defined here.

Code is in rooms.  The module files beside the rooms of ``training/distributed`` only import names,
so that ``from tessera.training.distributed.embeddingbag import EmbeddingBagCollectionSharder``
works as TorchRec's users, type checkers and editors expect.  ``tests/write_torchrec_paths.py``
generates them from `PATHS`, the one place to change; nothing in this project imports them except
tests, measurements, examples and documents.  The ``__init__.py`` of the packages in `LAZY` is
generated likewise; it imports a name when it is first asked for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

LAZY = {
    "": "Training of recommendation models: sparse types, embedding collections, models, trainer.",
    "distributed": "Model parallelism: tables spread over ranks and fused with their optimizer.",
    "distributed.checkpoint": "Checkpoints of models that are spread over ranks.",
    "distributed.planner": (
        "Deciding where every table goes: which way of sharding, on which ranks; see `planners`."
    ),
    "fx": "Tracing of models whose inputs and outputs are sparse types.",
    "optim": "Optimizers that know parameters by name, and those that work in the backward pass.",
}
"""The packages that import a name when it is first asked for -> what they are."""

# TorchRec's module (below "torchrec.") -> home -> names.  A home is below tessera.training, or
# torch's.
PATHS: dict[str, dict[str, str]] = {
    "": {
        "distributed.collections.pooled": "EmbeddingBagCollectionSharder",
        "distributed.comm.environment": "ShardingEnv",
        "distributed.model.model_parallel": "DistributedModelParallel",
        "distributed.plan.plan_types": "ShardingPlan",
        "models.config": "ModelConfig TableConfig",
        "models.dlrm": "DLRM DLRMTrain DLRM_DCN",
        "models.ranking": "RankingModel build_ranking_model",
        "modules.embedding_configs": "DataType EmbeddingBagConfig EmbeddingConfig PoolingType",
        "modules.embedding_modules": "EmbeddingBagCollection EmbeddingCollection",
        "modules.tables": "EmbeddingBagCollectionInterface EmbeddingCollectionInterface",
        "optim.row_updates": "EmbOptimType",
        "optim.combined_optimizer": "CombinedOptimizer",
        "optim.keyed": "KeyedOptimizerWrapper",
        "optim.keyed_optimizer": "KeyedOptimizer",
        "optim.optimizers": "in_backward_optimizer_filter",
        "sparse.jagged_tensor": "JaggedTensor KeyedJaggedTensor KeyedTensor",
    },
    "distributed": {
        "distributed.collections.feature_processed": (
            "FeatureProcessedEmbeddingBagCollectionSharder "
            "ShardedFeatureProcessedEmbeddingBagCollection"
        ),
        "distributed.collections.pooled": (
            "EmbeddingBagCollectionSharder ShardedEmbeddingBagCollection"
        ),
        "distributed.collections.single_bag": "EmbeddingBagSharder ShardedEmbeddingBag",
        "distributed.collections.unpooled": (
            "EmbeddingCollectionSharder ShardedEmbeddingCollection"
        ),
        "distributed.comm.awaitable": "Awaitable LazyAwaitable LazyNoWait NoWait",
        "distributed.comm.codecs": "CommType QCommsConfig get_qcomm_codecs_registry",
        "distributed.comm.environment": "ShardingEnv",
        "distributed.comm.nodes": "get_local_rank get_local_size",
        "distributed.comm.request": "get_gradient_division set_gradient_division",
        "distributed.model.data_parallel": "DataParallelWrapper DefaultDataParallelWrapper",
        "distributed.model.model_parallel": (
            "DistributedModelParallel get_module get_unwrapped_module"
        ),
        "distributed.plan.plan_types": (
            "EmbeddingModuleShardingPlan ParameterSharding ShardingPlan ShardingType"
        ),
        "distributed.plan.sharded_module": "ModuleSharder ShardedModule",
        "distributed.planner.generators": "construct_module_sharding_plan get_default_sharders",
        "distributed.planner.hardware": "Topology",
        "distributed.planner.planners": "EmbeddingShardingPlanner",
        "distributed.planner.types": "ParameterConstraints",
        "distributed.train_pipeline.pipelines": "TrainPipelineBase",
        "distributed.train_pipeline.prefetch": "PrefetchTrainPipelineSparseDist",
        "distributed.train_pipeline.sparse_dist": "TrainPipelineSparseDist",
    },
    "distributed.batched_embedding_kernel": {
        "distributed.tables.batched_kernels": (
            "BatchedDenseEmbedding BatchedDenseEmbeddingBag BatchedFusedEmbedding "
            "BatchedFusedEmbeddingBag"
        ),
    },
    "distributed.checkpoint": {
        "distributed.checkpoint.save_and_load": (
            "SavedCheckpoint async_save_checkpoint load_checkpoint read_checkpoint read_extra "
            "save_checkpoint"
        ),
    },
    "distributed.collective_utils": {
        "distributed.comm.leader": ("invoke_on_rank_and_broadcast_result is_leader run_on_leader"),
    },
    "distributed.comm": {
        "distributed.comm.nodes": (
            "get_group_rank get_local_rank get_local_size get_num_groups intra_and_cross_node_pg"
        ),
    },
    "distributed.comm_ops": {
        "distributed.comm.all_gather": (
            "AllGatherBaseInfo AllGatherBase_Req AllGatherBase_Wait all_gather_base_pooled"
        ),
        "distributed.comm.alltoall_pooled": (
            "All2AllPooledInfo All2All_Pooled_Req All2All_Pooled_Wait "
            "VariableBatchAll2AllPooledInfo Variable_Batch_All2All_Pooled_Req "
            "Variable_Batch_All2All_Pooled_Wait alltoall_pooled variable_batch_alltoall_pooled"
        ),
        "distributed.comm.alltoall_sequence": (
            "All2AllSequenceInfo All2All_Seq_Req All2All_Seq_Req_Wait alltoall_sequence"
        ),
        "distributed.comm.alltoallv": (
            "All2AllDenseInfo All2AllVInfo All2All_Dense_Req All2All_Dense_Wait All2Allv_Req "
            "All2Allv_Wait alltoall_dense alltoallv"
        ),
        "distributed.comm.reduce_scatter": (
            "ReduceScatterBaseInfo ReduceScatterBase_Req ReduceScatterBase_Wait ReduceScatterInfo "
            "ReduceScatterVInfo ReduceScatterV_Req ReduceScatterV_Wait ReduceScatter_Req "
            "ReduceScatter_Wait reduce_scatter_base_pooled reduce_scatter_pooled "
            "reduce_scatter_v_per_feature_pooled reduce_scatter_v_pooled"
        ),
        "distributed.comm.request": "Request get_gradient_division set_gradient_division",
    },
    "distributed.dist_data": {
        "distributed.travel.kjt_all_to_all": (
            "KJTAllToAll KJTAllToAllSplitsAwaitable KJTAllToAllTensorsAwaitable ReceivedSizes "
            "SplitsAllToAllAwaitable get_recat sizes_to_send"
        ),
        "distributed.travel.one_to_all": (
            "EmbeddingsAllToOne EmbeddingsAllToOneReduce KJTOneToAll SeqEmbeddingsAllToOne"
        ),
        "distributed.travel.pooled_vectors": (
            "PooledEmbeddingsAllGather PooledEmbeddingsAllToAll PooledEmbeddingsAwaitable "
            "PooledEmbeddingsReduceScatter VariableBatchPooledEmbeddingsAllToAll "
            "VariableBatchPooledEmbeddingsReduceScatter"
        ),
        "distributed.travel.sequence_vectors": (
            "SequenceEmbeddingsAllToAll SequenceEmbeddingsAwaitable"
        ),
    },
    "distributed.embedding": {
        "distributed.collections.unpooled": (
            "EmbeddingCollectionSharder ShardedEmbeddingCollection"
        ),
        "distributed.collections.unpooled_output": (
            "EmbeddingCollectionAwaitable EmbeddingCollectionContext"
        ),
        "distributed.sharding.creation": (
            "create_embedding_sharding create_sharding_infos_by_sharding"
        ),
        "distributed.travel.index_dedup": "get_ec_index_dedup set_ec_index_dedup",
    },
    "distributed.embedding_lookup": {
        "distributed.inference.lookup": (
            "InferGroupedEmbeddingsLookup InferGroupedLookupMixin "
            "InferGroupedPooledEmbeddingsLookup MetaInferGroupedEmbeddingsLookup "
            "MetaInferGroupedPooledEmbeddingsLookup fx_wrap_tensor_view2d"
        ),
        "distributed.tables.grouped_lookup": (
            "CommOpGradientScaling GroupedEmbeddingsLookup GroupedLookup "
            "GroupedPooledEmbeddingsLookup common_output_dtype embeddings_cat_empty_rank_handle"
        ),
    },
    "distributed.embedding_sharding": {
        "distributed.sharding.embedding_sharding": "EmbeddingSharding",
        "distributed.sharding.interfaces": (
            "BaseEmbeddingDist BaseSparseFeaturesDist EmbeddingShardingContext "
            "EmbeddingShardingInfo OutputColumns"
        ),
        "distributed.sharding.layout": "group_tables",
        "distributed.travel.bucketize": "bucketize_kjt_before_all2all",
        "distributed.travel.features_awaitable": (
            "FusedKJTListSplitsAwaitable KJTListAwaitable KJTListSplitsAwaitable "
            "KJTSplitsAllToAllMeta ListOfKJTListAwaitable ListOfKJTListSplitsAwaitable"
        ),
    },
    "distributed.embedding_types": {
        "distributed.collections.sharded_embedding_module": "ShardedEmbeddingModule",
        "distributed.collections.sharders": "BaseEmbeddingSharder BaseQuantEmbeddingSharder",
        "distributed.sharding.mixins": "FeatureShardingMixIn ModuleShardingMixIn",
        "distributed.tables.interfaces": (
            "BaseEmbeddingLookup BaseGroupedFeatureProcessor OptimType"
        ),
        "distributed.tables.table_shards": (
            "EmbeddingAttributes EmbeddingComputeKernel GroupedEmbeddingConfig ShardedConfig "
            "ShardedEmbeddingTable ShardedMetaConfig compute_kernel_to_embedding_location"
        ),
        "distributed.travel.kjt_list": "KJTList ListOfKJTList",
        "modules.embedding_configs": "DataType EmbeddingTableConfig",
    },
    "distributed.embeddingbag": {
        "distributed.collections.pooled": (
            "EmbeddingBagCollectionSharder ShardedEmbeddingBagCollection"
        ),
        "distributed.collections.pooled_output": (
            "EmbeddingBagCollectionAwaitable EmbeddingBagCollectionContext construct_output_kt"
        ),
        "distributed.collections.single_bag": (
            "EmbeddingAwaitable EmbeddingBagSharder ShardedEmbeddingBag"
        ),
        "distributed.sharding.creation": (
            "create_embedding_bag_sharding create_sharding_infos_by_sharding "
            "replace_placement_with_meta_device"
        ),
    },
    "distributed.fbgemm_qcomm_codec": {
        "distributed.comm.codecs": (
            "CommType DEFAULT_ROW_DIM Fp8Codec HalfCodec Int8Codec QCommsConfig get_qcomm_codecs "
            "get_qcomm_codecs_registry"
        ),
    },
    "distributed.fp_embeddingbag": {
        "distributed.collections.feature_processed": (
            "FeatureProcessedEmbeddingBagCollectionSharder "
            "ShardedFeatureProcessedEmbeddingBagCollection"
        ),
    },
    "distributed.grouped_position_weighted": {
        "distributed.collections.position_weights": "GroupedPositionWeightedModule",
    },
    "distributed.model_parallel": {
        "distributed.model.data_parallel": "DataParallelWrapper DefaultDataParallelWrapper",
        "distributed.model.model_parallel": (
            "DistributedModelParallel get_module get_unwrapped_module"
        ),
    },
    "distributed.planner": {
        "distributed.planner.enumerators": "EmbeddingEnumerator",
        "distributed.planner.hardware": "Topology",
        "distributed.planner.measure": "measure_bandwidths",
        "distributed.planner.picture": "save_picture",
        "distributed.planner.plan_io": "load_plan save_plan",
        "distributed.planner.planners": "EmbeddingShardingPlanner",
        "distributed.planner.types": (
            "ParameterConstraints PlannerError PlannerErrorType ShardingOption"
        ),
    },
    "distributed.quant_embedding": {
        "distributed.inference.sharded": (
            "QuantEmbeddingCollectionSharder ShardedQuantEmbeddingCollection"
        ),
    },
    "distributed.quant_embeddingbag": {
        "distributed.inference.collection": (
            "ShardedQuantEbcInputDist create_infer_embedding_bag_sharding"
        ),
        "distributed.inference.sharded": (
            "QuantEmbeddingBagCollectionSharder ShardedQuantEmbeddingBagCollection"
        ),
    },
    "distributed.shard": {
        "distributed.model.shard": "Plan _shard_modules init_parameters shard shard_modules",
    },
    "distributed.sharding_plan": {
        "distributed.planner.generators": (
            "apply_to_all balanced_table_wise_plan construct_module_sharding_plan "
            "get_default_sharders get_module_to_default_sharders "
            "get_sharding_constructor_from_type"
        ),
        "distributed.sharding.by_hand": "ParameterShardingGenerator placement",
        "distributed.sharding.strategies.column_wise": "column_wise",
        "distributed.sharding.strategies.data_parallel": "data_parallel",
        "distributed.sharding.strategies.grid_shard": "grid_shard",
        "distributed.sharding.strategies.row_wise": "row_wise",
        "distributed.sharding.strategies.table_column_wise": "table_column_wise",
        "distributed.sharding.strategies.table_row_wise": "table_row_wise",
        "distributed.sharding.strategies.table_wise": "table_wise",
    },
    "distributed.train_pipeline": {
        "distributed.train_pipeline.contexts": (
            "PrefetchTrainPipelineContext TrainPipelineContext"
        ),
        "distributed.train_pipeline.forwards": (
            "BaseForward KJTAllToAllForward PipelinedForward PrefetchPipelinedForward"
        ),
        "distributed.train_pipeline.pipelines": "TrainPipeline TrainPipelineBase",
        "distributed.train_pipeline.prefetch": "PrefetchTrainPipelineSparseDist",
        "distributed.train_pipeline.sparse_dist": "TrainPipelineSparseDist",
        "distributed.train_pipeline.tracing": "ArgInfo Tracer",
        "distributed.travel.features_awaitable": (
            "FusedKJTListSplitsAwaitable KJTSplitsAllToAllMeta"
        ),
        "distributed.travel.kjt_all_to_all": "SplitsAllToAllAwaitable",
    },
    "distributed.types": {
        "distributed.comm.awaitable": "Awaitable GenericMeta LazyAwaitable LazyNoWait NoWait",
        "distributed.comm.codec_types": (
            "CommOp NoOpQuantizedCommCodec QuantizedCommCodec QuantizedCommCodecs"
        ),
        "distributed.comm.environment": "ShardingEnv rank_device",
        "distributed.plan.plan_types": (
            "BoundsCheckMode CacheAlgorithm CacheParams ComputeKernel EmbeddingModuleShardingPlan "
            "ModuleShardingPlan ParameterSharding ParameterStorage ShardingPlan ShardingType"
        ),
        "distributed.plan.sharded_module": (
            "CompIn DistOut M ModuleNoCopyMixin ModuleSharder NullShardedModuleContext "
            "NullShardingContext Out ShardedModule ShrdCtx get_tensor_size_bytes"
        ),
        "modules.embedding_configs": "DataType",
        "streamable": "Multistreamable Pipelineable",
        "torch.distributed._shard.metadata": "ShardMetadata",
        "torch.distributed._shard.sharded_tensor.api": "ShardedTensor",
        "torch.distributed._shard.sharded_tensor.metadata": (
            "ShardedTensorMetadata TensorProperties"
        ),
        "torch.distributed._shard.sharded_tensor.shard": "Shard",
        "torch.distributed._shard.sharding_spec.api": "EnumerableShardingSpec ShardingSpec",
    },
    "fx": {
        "fx.tracer": "Tracer is_fx_tracing symbolic_trace",
    },
    "optim": {
        "optim.clipping": "GradientClipping GradientClippingOptimizer",
        "optim.row_updates": "EmbOptimType",
        "optim.fused": ("EmptyFusedOptimizer FusedOptimizer FusedOptimizerModule FusedParams"),
        "optim.combined_optimizer": "CombinedOptimizer",
        "optim.keyed": "KeyedOptimizerWrapper OptimizerWrapper",
        "optim.keyed_optimizer": "KeyedOptimizer",
        "optim.optimizers": (
            "Adagrad Adam LAMB LarsSGD Lion PartialRowWiseAdam PartialRowWiseLAMB SGD "
            "in_backward_optimizer_filter"
        ),
        "optim.rowwise_adagrad": "RowWiseAdagrad",
        "optim.warmup": "WarmupOptimizer WarmupPolicy WarmupStage",
    },
}


def module_of(path: str) -> str:
    """The full name of a path or home in `PATHS`."""
    return path if path.startswith("torch.") else f"tessera.training.{path}".rstrip(".")


def lazy_names(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__all__``, ``__getattr__`` and ``__dir__`` of a package in `LAZY`, by its full name."""
    homes = PATHS[package.removeprefix("tessera.training").lstrip(".")]
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def getattr_of_package(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(module_of(home_of[name])), name)
        setattr(sys.modules[package], name, value)
        return value

    def dir_of_package() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return sorted(home_of), getattr_of_package, dir_of_package
