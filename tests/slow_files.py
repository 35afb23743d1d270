"""The files of tests that take longest, which `make test` begins with.

All tests of a file run in one process.  Those that take long come first, so that at the end there are short ones
for every process and none works alone.  Where a file stands changes nothing else; a file that is not named here
takes less than ten seconds, or many tests.
"""

from collections import Counter

SECONDS = {
    "tests/training/test_sharded_ebc.py": 90,
    "tests/tuning/test_tune.py": 66,
    "tests/trainer/test_train_ranks.py": 62,
    "tests/trainer/test_averages.py": 59,
    "tests/offline/test_partitions_on_ray.py": 55,
    "tests/server/test_processes.py": 52,
    "tests/repository/test_versions_under_load.py": 52,
    "tests/packaging/test_records.py": 49,
    "tests/cpp/test_cpp_server.py": 48,
    "tests/training/test_planner.py": 46,
    "tests/conformance/test_repository_poll.py": 46,
    "tests/trainer/test_resume.py": 43,
    "tests/conformance/test_repository_calls.py": 43,
    "tests/commits/test_live.py": 43,
    "tests/conformance/test_bounded_memory.py": 42,
    "tests/capacity/test_sweep.py": 41,
    "tests/conformance/test_surface.py": 39,
    "tests/packaging/test_edge_values.py": 37,
    "tests/conformance/test_trouble.py": 37,
    "tests/training/test_resharding.py": 36,
    "tests/packaging/test_servable.py": 35,
    "tests/conformance/test_kserve.py": 35,
    "tests/packaging/test_damage.py": 34,
    "tests/test_demo_online.py": 33,
    "tests/conformance/test_feature_counts.py": 33,
    "tests/attack/test_lives.py": 32,
    "tests/trainer/test_checkpoint.py": 30,
    "tests/training/test_sharded_ec.py": 29,
    "tests/training/test_pipeline_kinds.py": 29,
    "tests/packaging/test_shards.py": 29,
    "tests/attack/test_floods.py": 29,
    "tests/conformance/test_repository_under_load.py": 26,
    "tests/training/test_notebook.py": 25,
    "tests/rolling/test_rolling.py": 25,
    "tests/conformance/test_follow_log.py": 25,
    "tests/conformance/test_shop.py": 24,
    "tests/offline/test_scoring.py": 21,
    "tests/conformance/test_access_log.py": 21,
    "tests/training/test_train_pipeline.py": 20,
    "tests/training/test_reshard_in_training.py": 19,
    "tests/peers/test_peers.py": 19,
    "tests/packaging/test_commands.py": 19,
    "tests/deploy/test_monitoring.py": 19,
    "tests/trainer/test_two_tower.py": 18,
    "tests/trackers/test_trackers.py": 17,
    "tests/packaging/test_user_models.py": 17,
    "tests/training/test_torchrec_programs.py": 16,
    "tests/training/test_pipeline_stages.py": 16,
    "tests/training/test_itep.py": 16,
    "tests/kernels/test_linear_bf16.py": 16,
    "tests/tuning/test_tuning_docs.py": 15,
    "tests/packaging/test_quantized_models.py": 15,
    "tests/offline/test_retrieval.py": 15,
    "tests/conformance/test_repository_choice.py": 15,
    "tests/conformance/test_kserve_models.py": 15,
    "tests/training/test_embedding_modules.py": 14,
    "tests/test_prose.py": 14,
    "tests/packaging/test_ensemble.py": 14,
    "tests/test_layers.py": 13,
    "tests/test_distribution.py": 13,
    "tests/packaging/test_package.py": 13,
    "tests/kernels/test_linear.py": 13,
    "tests/kernels/test_cpu.py": 13,
    "tests/conformance/test_answers.py": 13,
    "tests/commits/test_publish.py": 13,
    "tests/trainer/test_labels.py": 12,
    "tests/packaging/test_weight_types.py": 11,
    "tests/packaging/test_one_way.py": 11,
    "tests/conformance/test_criteo_rows.py": 11,
    "tests/capacity/test_simulate.py": 11,
    "tests/attack/test_logs.py": 11,
    "tests/training/test_sharded_mc.py": 10,
    "tests/trainer/test_train.py": 10,
    "tests/server/test_serve_command.py": 10,
    "tests/kernels/test_dense_steps.py": 10,
    "tests/conformance/test_agreement_on_shared.py": 10,
}
"""By file, what its tests took on two cores that three processes shared, in seconds, in the order of the files."""


def slow_files_first(paths):
    """The order of the files that ``paths`` names once for each test: the slow ones, then those of the most tests."""
    tests = Counter(paths)
    return sorted(tests, key=lambda path: (-SECONDS.get(path, 0), -tests[path], path))
