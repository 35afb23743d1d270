"""TorchRec's module paths: which names each has, and where each name is defined here.

Code is in the rooms of this folder.  The module files beside them only import names, so that
``from tessera.training.distributed.embeddingbag import EmbeddingBagCollectionSharder`` works as
TorchRec's users, type checkers and editors expect.  They are generated from `PATHS`, the one place
to change; nothing in this project imports them except tests, examples and documents.

``python -m tessera.training.distributed.torchrec_paths --write`` writes them; without ``--write``
it names the files that differ and ends with status 1.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
_PACKAGE = "tessera.training.distributed"

# TorchRec's module (below torchrec.distributed) -> home -> names.  A home that begins with neither
# "tessera." nor "torch." is below this package.
PATHS: dict[str, dict[str, str]] = {
    "batched_embedding_kernel": {
        "tables.batched_kernels": (
            "BatchedDenseEmbedding BatchedDenseEmbeddingBag BatchedFusedEmbedding "
            "BatchedFusedEmbeddingBag"
        ),
    },
    "collective_utils": {
        "comm.leader": "invoke_on_rank_and_broadcast_result is_leader run_on_leader",
    },
    "comm": {
        "comm.nodes": (
            "get_group_rank get_local_rank get_local_size get_num_groups intra_and_cross_node_pg"
        ),
    },
    "comm_ops": {
        "comm.all_gather": (
            "AllGatherBaseInfo AllGatherBase_Req AllGatherBase_Wait all_gather_base_pooled"
        ),
        "comm.alltoall_pooled": (
            "All2AllPooledInfo All2All_Pooled_Req All2All_Pooled_Wait "
            "VariableBatchAll2AllPooledInfo Variable_Batch_All2All_Pooled_Req "
            "Variable_Batch_All2All_Pooled_Wait alltoall_pooled variable_batch_alltoall_pooled"
        ),
        "comm.alltoall_sequence": (
            "All2AllSequenceInfo All2All_Seq_Req All2All_Seq_Req_Wait alltoall_sequence"
        ),
        "comm.alltoallv": (
            "All2AllDenseInfo All2AllVInfo All2All_Dense_Req All2All_Dense_Wait All2Allv_Req "
            "All2Allv_Wait alltoall_dense alltoallv"
        ),
        "comm.reduce_scatter": (
            "ReduceScatterBaseInfo ReduceScatterBase_Req ReduceScatterBase_Wait ReduceScatterInfo "
            "ReduceScatterVInfo ReduceScatterV_Req ReduceScatterV_Wait ReduceScatter_Req "
            "ReduceScatter_Wait reduce_scatter_base_pooled reduce_scatter_pooled "
            "reduce_scatter_v_per_feature_pooled reduce_scatter_v_pooled"
        ),
        "comm.request": "Request get_gradient_division set_gradient_division",
    },
    "dist_data": {
        "travel.kjt_all_to_all": (
            "KJTAllToAll KJTAllToAllSplitsAwaitable KJTAllToAllTensorsAwaitable ReceivedSizes "
            "SplitsAllToAllAwaitable get_recat sizes_to_send"
        ),
        "travel.one_to_all": (
            "EmbeddingsAllToOne EmbeddingsAllToOneReduce KJTOneToAll SeqEmbeddingsAllToOne"
        ),
        "travel.pooled_vectors": (
            "PooledEmbeddingsAllGather PooledEmbeddingsAllToAll PooledEmbeddingsAwaitable "
            "PooledEmbeddingsReduceScatter VariableBatchPooledEmbeddingsAllToAll "
            "VariableBatchPooledEmbeddingsReduceScatter"
        ),
        "travel.sequence_vectors": "SequenceEmbeddingsAllToAll SequenceEmbeddingsAwaitable",
    },
    "embedding": {
        "collections.unpooled": "EmbeddingCollectionSharder ShardedEmbeddingCollection",
        "collections.unpooled_output": ("EmbeddingCollectionAwaitable EmbeddingCollectionContext"),
        "sharding.unpooled_shardings": (
            "create_embedding_sharding create_sharding_infos_by_sharding"
        ),
        "travel.index_dedup": "get_ec_index_dedup set_ec_index_dedup",
    },
    "embedding_lookup": {
        "inference.lookup": (
            "InferGroupedEmbeddingsLookup InferGroupedLookupMixin "
            "InferGroupedPooledEmbeddingsLookup MetaInferGroupedEmbeddingsLookup "
            "MetaInferGroupedPooledEmbeddingsLookup fx_wrap_tensor_view2d"
        ),
        "tables.grouped_lookup": (
            "CommOpGradientScaling GroupedEmbeddingsLookup GroupedLookup "
            "GroupedPooledEmbeddingsLookup common_output_dtype embeddings_cat_empty_rank_handle"
        ),
    },
    "embedding_sharding": {
        "sharding.embedding_sharding": "EmbeddingSharding",
        "sharding.interfaces": (
            "BaseEmbeddingDist BaseSparseFeaturesDist EmbeddingShardingContext "
            "EmbeddingShardingInfo OutputColumns"
        ),
        "sharding.layout": "group_tables",
        "travel.bucketize": "bucketize_kjt_before_all2all",
        "travel.features_awaitable": (
            "FusedKJTListSplitsAwaitable KJTListAwaitable KJTListSplitsAwaitable "
            "KJTSplitsAllToAllMeta ListOfKJTListAwaitable ListOfKJTListSplitsAwaitable"
        ),
    },
    "embedding_types": {
        "collections.sharded_embedding_module": "ShardedEmbeddingModule",
        "collections.sharders": "BaseEmbeddingSharder BaseQuantEmbeddingSharder",
        "sharding.mixins": "FeatureShardingMixIn ModuleShardingMixIn",
        "tables.interfaces": "BaseEmbeddingLookup BaseGroupedFeatureProcessor OptimType",
        "tables.table_shards": (
            "EmbeddingAttributes EmbeddingComputeKernel GroupedEmbeddingConfig ShardedConfig "
            "ShardedEmbeddingTable ShardedMetaConfig compute_kernel_to_embedding_location"
        ),
        "travel.kjt_list": "KJTList ListOfKJTList",
        "tessera.training.modules.embedding_configs": "DataType EmbeddingTableConfig",
    },
    "embeddingbag": {
        "collections.pooled": "EmbeddingBagCollectionSharder ShardedEmbeddingBagCollection",
        "collections.pooled_output": (
            "EmbeddingBagCollectionAwaitable EmbeddingBagCollectionContext construct_output_kt"
        ),
        "collections.single_bag": "EmbeddingAwaitable EmbeddingBagSharder ShardedEmbeddingBag",
        "sharding.pooled_shardings": (
            "create_embedding_bag_sharding create_sharding_infos_by_sharding "
            "replace_placement_with_meta_device"
        ),
    },
    "fbgemm_qcomm_codec": {
        "comm.codecs": (
            "CommType DEFAULT_ROW_DIM Fp8Codec HalfCodec Int8Codec QCommsConfig get_qcomm_codecs "
            "get_qcomm_codecs_registry"
        ),
    },
    "fp_embeddingbag": {
        "collections.feature_processed": (
            "FeatureProcessedEmbeddingBagCollectionSharder "
            "ShardedFeatureProcessedEmbeddingBagCollection"
        ),
    },
    "grouped_position_weighted": {
        "collections.position_weights": "GroupedPositionWeightedModule",
    },
    "model_parallel": {
        "model.data_parallel": "DataParallelWrapper DefaultDataParallelWrapper",
        "model.model_parallel": "DistributedModelParallel get_module get_unwrapped_module",
    },
    "quant_embedding": {
        "inference.unpooled": "QuantEmbeddingCollectionSharder ShardedQuantEmbeddingCollection",
    },
    "quant_embeddingbag": {
        "inference.pooled": (
            "QuantEmbeddingBagCollectionSharder ShardedQuantEbcInputDist "
            "ShardedQuantEmbeddingBagCollection create_infer_embedding_bag_sharding"
        ),
    },
    "shard": {
        "model.shard": "Plan _shard_modules init_parameters shard shard_modules",
    },
    "sharding_plan": {
        "planner.generators": (
            "apply_to_all balanced_table_wise_plan construct_module_sharding_plan "
            "get_default_sharders get_module_to_default_sharders "
            "get_sharding_constructor_from_type"
        ),
        "sharding.by_hand": "ParameterShardingGenerator placement",
        "sharding.strategies.column_wise": "column_wise",
        "sharding.strategies.data_parallel": "data_parallel",
        "sharding.strategies.grid_shard": "grid_shard",
        "sharding.strategies.row_wise": "row_wise",
        "sharding.strategies.table_column_wise": "table_column_wise",
        "sharding.strategies.table_row_wise": "table_row_wise",
        "sharding.strategies.table_wise": "table_wise",
    },
    "train_pipeline": {
        "train_pipeline.contexts": "PrefetchTrainPipelineContext TrainPipelineContext",
        "train_pipeline.forwards": (
            "BaseForward KJTAllToAllForward PipelinedForward PrefetchPipelinedForward"
        ),
        "train_pipeline.pipelines": "TrainPipeline TrainPipelineBase",
        "train_pipeline.prefetch": "PrefetchTrainPipelineSparseDist",
        "train_pipeline.sparse_dist": "TrainPipelineSparseDist",
        "train_pipeline.tracing": "ArgInfo Tracer",
        "travel.features_awaitable": "FusedKJTListSplitsAwaitable KJTSplitsAllToAllMeta",
        "travel.kjt_all_to_all": "SplitsAllToAllAwaitable",
    },
    "types": {
        "comm.awaitable": "Awaitable GenericMeta LazyAwaitable LazyNoWait NoWait",
        "comm.codec_types": (
            "CommOp NoOpQuantizedCommCodec QuantizedCommCodec QuantizedCommCodecs"
        ),
        "comm.environment": "ShardingEnv rank_device",
        "plan.plan_types": (
            "BoundsCheckMode CacheAlgorithm CacheParams ComputeKernel EmbeddingModuleShardingPlan "
            "ModuleShardingPlan ParameterSharding ParameterStorage ShardingPlan ShardingType"
        ),
        "plan.sharded_module": (
            "CompIn DistOut M ModuleNoCopyMixin ModuleSharder NullShardedModuleContext "
            "NullShardingContext Out ShardedModule ShrdCtx get_tensor_size_bytes"
        ),
        "tessera.training.modules.embedding_configs": "DataType",
        "tessera.training.streamable": "Multistreamable Pipelineable",
        "torch.distributed._shard.metadata": "ShardMetadata",
        "torch.distributed._shard.sharded_tensor.api": "ShardedTensor",
        "torch.distributed._shard.sharded_tensor.metadata": (
            "ShardedTensorMetadata TensorProperties"
        ),
        "torch.distributed._shard.sharded_tensor.shard": "Shard",
        "torch.distributed._shard.sharding_spec.api": "EnumerableShardingSpec ShardingSpec",
    },
}


def home_module(home: str) -> str:
    """The full name of a home in `PATHS`."""
    return home if home.startswith(("tessera.", "torch.")) else f"{_PACKAGE}.{home}"


def file_of(path: str) -> Path:
    """The generated file of a module path: the room's own ``__init__.py`` where one has its name."""
    room = FOLDER / path
    return room / "__init__.py" if room.is_dir() else FOLDER / f"{path}.py"


def text_of(path: str) -> str:
    """The source of the generated file of ``path``."""
    lines = [
        f'"""The names of ``torchrec.distributed.{path}``.',
        "",
        "Generated by torchrec_paths.py from its table; change it there.",
        '"""',
        "",
        # In an ``__init__.py`` ruff knows why a name is imported as itself.
        *(
            ["# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself"]
            if file_of(path).name != "__init__.py"
            else []
        ),
        "# isort: skip_file",
        "# fmt: off",
    ]
    for home, names in PATHS[path].items():
        # A name and its "as" stay on one line.
        imported = " ".join(f"{name}~as~{name}," for name in names.split())
        wrapped = textwrap.wrap(
            imported,
            96,
            initial_indent="    ",
            subsequent_indent="    ",
            break_long_words=False,
        )
        lines += [
            f"from {home_module(home)} import (",
            *(line.replace("~", " ") for line in wrapped),
            ")",
        ]
    return "\n".join(lines) + "\n"


def stale() -> list[Path]:
    """The generated files that are missing or differ from the table."""
    return [
        file_of(path)
        for path in PATHS
        if not file_of(path).exists() or file_of(path).read_text() != text_of(path)
    ]


def main() -> int:
    """Write the files, or name those that are not as the table says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the files (default: compare)")
    wrong = stale()
    if parser.parse_args().write:
        for path in PATHS:
            file_of(path).write_text(text_of(path))
        return 0
    for file in wrong:
        sys.stderr.write(f"{file} is not what torchrec_paths.py says; run it with --write\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
