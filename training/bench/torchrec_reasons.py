"""What docs/torchrec.md says of TorchRec's names that are not under their own path."""

_KEY_VALUE = "tables on disks and in key-value stores are not here"
_COLLISIONS = "a map of ids is sharded beside its tables, and is not quantized with them"
_HASH_ZCH = (
    "every policy of `modules.hash_mc_evictions` has times to live, and a map has no adapter"
)
_PEC = "updates of rows that batches share are not held back"
_READ_ONLY = "managed collision modules leave no id out of its bag and keep nothing else of it"
_POOLS = "a pool reads and writes its rows itself, in the memory of its device"
_PRUNING = "one `GenericITEPModule` holds the addresses of ids, whatever the strategy"
_LOGS = "for the logs of TorchRec's own makers"
_COMPILE = "for `torch.compile` and `torch.export` of TorchRec's own modules"
_TBE = "tables are held by `distributed.tables.kernels`, which have an interface of their own"
_STRATEGIES = "one `EmbeddingSharding` serves all strategies, which are records of `distributed.sharding.registry`"
_ESTIMATES = "bytes come from what a strategy moves, in `distributed.planner.shard_estimators`"
_MARKS = "marks of methods are read by `get_forward_compute` and the functions beside it"
_INFERENCE = "an evaluator takes `is_inference`; `INFERENCE_EVALUATORS` has those"
_PLANNER = "a tool of TorchRec's own planner"
_METRIC_THREADS = "metrics are computed by the thread that trains"
_SERVING = "models are packaged and served by `tessera package-model` and `tessera serve`"
_INSIDE = "a helper that TorchRec's own modules call"

ELSEWHERE: dict[str, str] = {
    "optim.rowwise_adagrad.adagrad": "the class `RowWiseAdagrad` beside it",
    "sparse.jagged_tensor_validator.validate_keyed_jagged_tensor": "the constructor checks its fields",
}
"""Full name without ``torchrec.`` -> what serves."""

REASONS: list[tuple[str, str]] = [
    (r"experimental\.torch_tpu\..*", "for TPUs; what is here runs on CPUs and NVIDIA's GPUs"),
    (
        r"distributed\.maglev\..*",
        "layers are not divided into stages over ranks (pipeline parallelism)",
    ),
    (r"metrics\.gauc\..*", "helpers of TorchRec's own ranking of sessions"),
    (
        r"metrics\.(cpu_\w+|deferrable_\w+|metric_job_types|metric_state_snapshot|noop_\w+)\..*",
        _METRIC_THREADS,
    ),
    (r"metrics\..*", _INSIDE),
    (r".*(logging_handlers|logging_utils|emo_logger|percentile_logger|pruning_logger)\..*", _LOGS),
    (r".*(feature_score_utils|\.logger|hash_mc_metrics)\..*", _LOGS),
    (
        r".*(KeyValue|ZeroCollision|VirtualTable|virtual_table|EvictionPolicy|FeatureScoreMapping).*",
        _KEY_VALUE,
    ),
    (r"modules\.(hash_mc_\w+|mc_adapter)\..*", _HASH_ZCH),
    (r"modules\.mc_embedding_modules\..*", _READ_ONLY),
    (r".*(pec_|PEC).*", _PEC),
    (
        r".*(mc_|MCE|ManagedCollision|MCC|quant_embedding\.input_dist_permute).*",
        _COLLISIONS,
    ),
    (r".*(itep|ITEP).*", _PRUNING),
    (r"modules\.object_pool_lookups\..*", _POOLS),
    (r"distributed\.tensor_pool\.(index_select_view|update)", _INSIDE),
    (
        r"(pt2|tensor_types|schema)\..*|.*_(fake|setup_context|backward)|.*sync_collectives",
        _COMPILE,
    ),
    (
        r".*\.(all2all|all_gather|reduce_scatter)\w*|.*\.variable_batch_all2all_pooled_sync",
        _COMPILE,
    ),
    (
        r"distributed\.sharding\.dynamic_sharding\..*",
        "tables are moved by `distributed.collections.shard_moves`, in one all-to-all",
    ),
    (r"distributed\.sharding\..*", _STRATEGIES),
    (r"distributed\.planner\.estimator\.annotations\..*", _MARKS),
    (r"distributed\.planner\.estimator\.estimator\..*", _INFERENCE),
    (r"distributed\.planner\.shard_estimators\..*", _ESTIMATES),
    (
        r"distributed\.planner\.types\.(HardwareConfig|KernelConfig|TrainerConfig|Topology(ConfigBase|Factory))",
        "a `Topology` is made by its constructor",
    ),
    (r"distributed\.planner\..*", _PLANNER),
    (
        r"distributed\.train_pipeline\.backward_injection\.(OutputDistTensorFinder|will_hook_fire)",
        "a finder of one's own picks the tensor; a pipeline's exchange of vectors has none of its own",
    ),
    (
        r"distributed\.train_pipeline\.(experimental_pipelines\..*|\w+\.CPUEmbedding\w+)",
        "experiments of TorchRec's: tables and optimizer states that wait in host memory, copies by threads",
    ),
    (
        r"distributed\.train_pipeline\.train_pipelines\.TrainPipelineSparseDistCompAutograd",
        "compiled autograd is private to torch; `TrainPipelinePT2` compiles a model",
    ),
    (
        r"distributed\.train_pipeline\.train_pipelines\.ModelDetachedException",
        "nothing raises it: `progress` attaches a model that was detached",
    ),
    (
        r"distributed\.train_pipeline\.runtime_forwards\.PrefetchEmbedding\w+",
        "rows that are prefetched are looked up in the forward pass",
    ),
    (r"distributed\.train_pipeline\.(postproc|tracing|types|utils)\..*", _INSIDE),
    (
        r"distributed\.(batched_embedding_kernel|quant_embedding_kernel|embedding_kernel|composable\.\w+|fused_params)\..*",
        _TBE,
    ),
    (
        r"distributed\.model_tracker\..*",
        "the ids before a hash-based map, by its row, are in the map itself",
    ),
    (
        r"distributed\.(quant_state|infer_utils|quant_embedding|quant_embeddingbag|sharded_relay_utils|memory_stashing|global_settings|shards_wrapper|embedding_dim_bucketer)\..*",
        _INSIDE,
    ),
    (
        r"modules\.fused_embedding_modules\..*",
        "a fused collection's optimizer is a `CombinedOptimizer`",
    ),
    (
        r"distributed\.model_parallel\.HybridEvalDMP",
        "a model is evaluated where it is trained",
    ),
    (
        r"distributed\.comm\.get_topology_\w+",
        "strategies know nodes, not groups of nodes with links of their own",
    ),
    (
        r"distributed\.types\.(DMPCollectionContext|ShardingStrategy)",
        "every copy of a shard is held whole; a `DMPCollection` keeps its groups to itself",
    ),
    (
        r"distributed\.(collective_utils|comm_ops|dist_data|embedding|embeddingbag|embedding_lookup|embedding_sharding|embedding_types|fbgemm_qcomm_codec|fp_embeddingbag|sharding_plan|types|utils)\.(?!ShardingPlanner|init_parameters|optimizer_type_to_emb_opt_type).*",
        _INSIDE,
    ),
    (r"inference\..*|models\.(cuda_graph_\w+|experimental\.\w+)\..*", _SERVING),
    (
        r"fx\.utils\..*|modules\.(utils|lazy_extension|debug_embedding_modules)\..*|types\.\w*(Copy|Cache)Mix[Ii]n|utils\.experimental\..*",
        _INSIDE,
    ),
    (
        r"modules\.(embedding_configs\.(?!ShardingType)|embedding_modules|feature_processor_|fp_embedding_modules)\.?.*",
        _INSIDE,
    ),
    (
        r"models\.deepfm\..*|models\.dlrm\..*",
        "`models.dlrm` and `models.architectures` have their own parts",
    ),
    (r"modules\.(regroup|sorted_index_select)\..*", _INSIDE),
    (r"quant\..*", "a quantized collection has one form of state and of alignment"),
    (r"sparse\..*", _INSIDE),
]
"""Patterns of full names without ``torchrec.``, the first that fits, and why those names are not here."""
