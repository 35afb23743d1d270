"""MLPerf's LoadGen over the engine: what is drawn, and small runs in both scenarios."""

import json
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from load_tests import mlperf
from tessera.errors import UserError
from tessera.serving.client import read_schema
from tessera.serving.engine import engine_library
from tests import REPOSITORY
from tests.package_factory import package_file
from tests.patience import PATIENCE_S


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return package_file(tmp_path_factory.mktemp("mlperf"))


def test_queries_have_mlperf_s_sizes():
    sizes = mlperf.Pairs().draw(50_000, np.random.default_rng(0))
    assert sizes.min() >= 100
    assert sizes.max() <= 700
    # The standard deviation is 126, so that of the mean is 0.6.
    assert sizes.mean() == pytest.approx(270, abs=3)
    assert mlperf.Pairs(5, 5, 5).draw(3, np.random.default_rng(0)).tolist() == [5, 5, 5]
    with pytest.raises(UserError, match="pairs 9, 270, 8"):
        mlperf.Pairs(9, 8).draw(1, np.random.default_rng(0))


def test_queries_fit_the_package(package):
    schema = read_schema(package)
    generator = np.random.default_rng(0)
    features = len(schema.group("id_list"))
    (query,) = mlperf.draw_queries(schema, np.array([4]), range(features), generator)
    assert query.batch_size == 4
    assert query.struct.id_list.length_count == features * 4
    assert query.struct.id_list.value_count == 4 * sum(range(features))
    assert query.struct.id_list.value_bytes == 4
    with pytest.raises(UserError, match="--ids-per-bag has 2 numbers; give one, or one for each"):
        mlperf.draw_queries(schema, np.array([4]), [1, 2], generator)


@pytest.mark.parametrize("scenario", ["server", "offline"])
def test_a_small_run(package, tmp_path, scenario):
    if find_spec("mlperf_loadgen") is None:
        pytest.skip("LoadGen is not installed (pip install 'tessera-rec[mlperf]')")
    try:
        engine_library()
    except UserError as missing:
        pytest.skip(str(missing))
    command = [sys.executable, "-m", "load_tests.mlperf", package, "--scenario", scenario]
    flags = (
        "--target-qps 200 --duration-s 0.5 --warm-up-s 0.1 --queries 32 --inside 16 --least-pairs 2"
    )
    flags += " --most-pairs 20 --mean-pairs 6"
    done = subprocess.run(
        [*map(str, command), *flags.split(), "--out", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["scenario"] == scenario
    assert found["verdict"] in {"VALID", "INVALID"}
    assert found["failed"] == 0
    assert found["queries"] >= 20
    assert 2 <= found["mean_pairs"] <= 20
    assert found["pairs_per_s"] > found["samples_per_s"] > 0
    assert found["p99_ms"] > 0
    assert (tmp_path / "mlperf_log_detail.txt").exists()
