"""The engine on a Ray cluster of two local nodes, one of them killed midway: the bytes of one process."""

import contextlib
import importlib.util

import pyarrow.parquet as pq
import pytest
import torch

from tessera.engines import open_engine
from tessera.errors import UserError
from tessera.partitions import MAX_TRIES, LocalEngine
from tessera.serving.offline import raw_units, scoring
from tessera.serving.offline.scoring import ScoreOptions, score_files
from tessera.training.config import load_config
from tessera.training.data.opening import open_data
from tessera.training.trainer.fitting import fit_transforms
from tests.offline.raw_rows import rows, write
from tests.package_factory import package_file, string_columns
from tests.test_partitions import squares
from tests.transforms.table_runs import write_run

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)


def started(start, further_tries=2):
    """What ``start()`` returns; Ray gives a node 30 seconds, which a busy machine may take longer for."""
    try:
        return start()
    except Exception as error:  # Ray has no type for it
        if further_tries == 0 or "timed out during startup" not in str(error):
            raise
    return started(start, further_tries - 1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A head without cores, and two nodes of one core each."""
    import ray
    from ray.cluster_utils import Cluster

    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_AUTH_MODE", "disabled")
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    small = {"object_store_memory": 80 << 20}
    head = {"num_cpus": 0, "include_dashboard": False, **small}
    made = started(lambda: Cluster(initialize_head=True, head_node_args=head))
    try:
        made.nodes = [started(lambda: made.add_node(num_cpus=1, **small)) for _ in range(2)]
        yield made
    finally:
        with contextlib.suppress(Exception):
            ray.shutdown()
        made.shutdown()
        patch.undo()


def test_a_node_that_is_killed_loses_nothing(cluster, tmp_path, monkeypatch):
    """First the engine alone, and fitting; then scores, with a node that is killed midway."""
    engine = open_engine("ray", ray_address=cluster.address)
    deeds = {3: ("die", MAX_TRIES - 1)}
    assert squares(engine, tmp_path, range(8), deeds) == [(n, [n * n]) for n in range(8)]
    with pytest.raises(UserError, match=r"^mend it$"):
        squares(engine, tmp_path, range(8, 12), {9: ("user", 9)})

    config = load_config(write_run(tmp_path))
    train = open_data(config.data, progress=False).train
    transforms = train.dataset.columns.transforms()
    alone, spread = (
        fit_transforms(transforms, train, progress=False, engine=each, data=config.data)
        for each in (LocalEngine(processes=1), engine)
    )
    assert alone.sizes == spread.sizes
    assert all(torch.equal(value, spread.state[name]) for name, value in alone.state.items())

    package = package_file(tmp_path, columns=string_columns())
    path = write(tmp_path / "a.parquet", rows(1500))
    for name, size in (("UNIT_ROWS", 64), ("UNIT_BYTES", 1)):
        monkeypatch.setattr(raw_units, name, size)
    options = {"keep": ("id",)}
    here = tmp_path / "here.parquet"
    score_files(package, [str(path)], here, ScoreOptions(**options), progress=False)
    writes = scoring.PartsFolder.write

    def write_and_kill(self, number, part):
        writes(self, number, part)
        if number == 4:
            cluster.remove_node(cluster.nodes[0], allow_graceful=False)

    monkeypatch.setattr(scoring.PartsFolder, "write", write_and_kill)
    there = tmp_path / "there.parquet"
    given = ScoreOptions(**options, engine="ray", ray_address=cluster.address)
    scored = score_files(package, [str(path)], there, given, progress=False)
    assert scored.units > 20
    assert there.read_bytes() == here.read_bytes()
    assert pq.read_metadata(there).num_rows == 1500


def test_an_address_where_nobody_is_is_told_at_once(tmp_path):
    with pytest.raises(
        UserError, match=r"ray_address='127\.0\.0\.1:1': no Ray cluster can be used there"
    ):
        squares(open_engine("ray", ray_address="127.0.0.1:1"), tmp_path, range(3))
    assert squares(LocalEngine(processes=1), tmp_path, [2]) == [(2, [4])]
