"""The files of tests that take longest, which `make test` begins with.

All tests of a file run in one process.  Those that take long come first, so that at the end there are short ones
for every process and none works alone.  Where a file stands changes nothing else; a file that is not named here
takes less than ten seconds, or many tests.
"""

from collections import Counter

SECONDS = {
    "tests/commits/test_live.py": 114,
    "tests/attack/test_lives.py": 54,
    "tests/packaging/test_commands.py": 53,
    "tests/commits/test_publish.py": 43,
    "tests/trainer/test_train_ranks.py": 43,
    "tests/offline/test_partitions_on_ray.py": 40,
    "tests/conformance/test_criteo_rows.py": 36,
    "tests/conformance/test_bounded_memory.py": 35,
    "tests/conformance/test_repository_under_load.py": 35,
    "tests/conformance/test_access_log.py": 36,
    "tests/cpp/test_cpp_server.py": 35,
    "tests/packaging/test_edge_values.py": 30,
    "tests/packaging/test_damage.py": 29,
    "tests/training/test_resharding.py": 29,
    "tests/rolling/test_rolling.py": 28,
    "tests/conformance/test_trouble.py": 23,
    "tests/repository/test_versions_under_load.py": 23,
    "tests/test_demo_online.py": 23,
    "tests/tuning/test_tune.py": 23,
    "tests/training/test_notebook.py": 22,
    "tests/packaging/test_records.py": 21,
    "tests/trainer/test_averages.py": 20,
    "tests/attack/test_logs.py": 17,
    "tests/trainer/test_resume.py": 13,
    "tests/conformance/test_shop.py": 12,
    "tests/conformance/test_trained.py": 12,
    "tests/trainer/test_checkpoint.py": 12,
    "tests/conformance/test_kserve_models.py": 11,
    "tests/tuning/test_tuning_docs.py": 11,
    "tests/packaging/test_ensemble.py": 10,
    "tests/training/test_pipeline_kinds.py": 20,
    "tests/training/test_pipeline_stages.py": 12,
    "tests/training/test_planner.py": 10,
}
"""By file, what its slowest tests took together on two cores (``PYTEST_ARGS=--durations=80``), in seconds."""


def slow_files_first(paths):
    """The order of the files that ``paths`` names once for each test: the slow ones, then those of the most tests."""
    tests = Counter(paths)
    return sorted(tests, key=lambda path: (-SECONDS.get(path, 0), -tests[path], path))
