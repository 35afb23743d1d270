"""Raw rows of a table to a score: the package's bits on both servers, and what the eager model gives."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tessera.serving.client import PredictorClient
from tessera.serving.client.assemble import assemble
from tessera.serving.client.encode import encode_request
from tessera.serving.client.row_files import read_row_batches
from tessera.serving.offline.scoring import ScoreOptions, score_files
from tessera.serving.package.loading import load_package
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import package_run
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.training.config import load_config
from tessera.training.trained import load_trained
from tessera.training.trainer.run import train
from tests.conformance.conformance_harness import RunningServer, same_bits, scores_of
from tests.conformance.test_answers import run_in_process
from tests.patience import PATIENCE_S
from tests.transforms.harness import jagged
from tests.transforms.table_runs import write_run

DENSE = [[12.5, 33], [np.nan, 90], [-5, np.nan], [1e9, -1], [0, 0], [3e38, 40]]
IDS = {
    "country": [[5 * 1000003 - 5], [0], [], [2**63 - 1], [15 * 1000003 - 5], [-5]],
    "device": [[1], [2], [3], [], [-(2**63)], [1]],
    "item": [[7], [99], [100], [-1], [], [0]],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    out = folder / "run"
    assert train(load_config(write_run(folder)), out, progress=False).status == "finished"
    return out


@pytest.fixture(scope="module", params=["fp32", "int8"])
def package(run, request, tmp_path_factory):
    path = tmp_path_factory.mktemp("package") / "m.pt"
    package_run(run, path, PackageOptions(name="m", dtype=request.param), progress=False)
    return path


def request_of(dense, bags, loaded):
    arrays = assemble(np.array(dense, np.float32), bags, schema=loaded.manifest.schema)
    return pb.PredictionRequest.FromString(encode_request(arrays))


def test_the_package_scores_raw_rows_as_the_trained_model(run, package):
    loaded = load_package(package)
    model = load_trained(run).model
    with torch.inference_mode():
        given = torch.tensor(DENSE, dtype=torch.float32)
        expected = torch.sigmoid(model(given, jagged(list(IDS), IDS))).numpy()
    found = run_in_process(loaded, request_of(DENSE, IDS, loaded))
    # int8: each of the vectors' numbers is off by at most half a step of its row.
    bound = 1e-6 if loaded.manifest.tables[0].dtype == "fp32" else 0.01
    assert np.abs(np.array(found) - expected).max() < bound
    assert np.std(expected) > 0.001


def test_both_servers_give_the_packages_bits(package, kind):
    loaded = load_package(package)
    request = request_of(DENSE, IDS, loaded)
    expected = run_in_process(loaded, request)
    with RunningServer(kind, "--model", package, "--drain-propagation-ms", 0) as server:
        assert same_bits(scores_of(server.predict(request)), expected)
        for row in range(len(DENSE)):
            bags = {name: [own[row]] for name, own in IDS.items()}
            alone = request_of(DENSE[row : row + 1], bags, loaded)
            assert same_bits(scores_of(server.predict(alone)), expected[row : row + 1])
        # No id is outside of a vocabulary's table: each has a row, or row 0.
        assert server.value("tessera_out_of_range_ids_total", model="m") == 0


def test_offline_scores_of_the_file_have_the_servers_bits(run, package, kind, tmp_path):
    """Clipped, fitted and missing values, vocabularies, a cross and target statistics."""
    table = run.parent / "clicks.csv"
    out = tmp_path / "scores.parquet"
    score_files(package, [str(table)], out, ScoreOptions(keep=("clicked",)), progress=False)
    scores = pq.read_table(out).column("default").to_numpy()
    assert len(scores) == 500
    assert np.std(scores) > 0.001
    schema = load_package(package).manifest.schema
    with (
        RunningServer(kind, "--model", package, "--drain-propagation-ms", 0) as server,
        PredictorClient(server.address, schema=schema, timeout_s=PATIENCE_S) as client,
    ):
        found = []
        for batch in read_row_batches(table, batch_size=77, schema=schema):
            answer = client.predict_rows(batch.rows, ignore=["clicked"])
            found.append(answer.outputs["default"])
    assert same_bits(np.concatenate(found), scores)
