"""``arch: two_tower``: pairs, users and items on both servers, with the packages' bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tessera.errors import UserError
from tessera.serving.client.assemble import assemble
from tessera.serving.client.encode import encode_request
from tessera.serving.client.rows import rows_to_parts
from tessera.serving.package.loading import load_package
from tessera.serving.package.runner import HostBatch
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import package_run
from tessera.serving.packaging.ranking import tower_source
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.training.config import load_config
from tessera.training.data.loader import BatchLoader
from tessera.training.data.opening import open_data
from tessera.training.trained import load_trained
from tessera.training.trainer.run import train
from tests.conformance.conformance_harness import RunningServer
from tests.trainer import likes
from tests.transforms.table_runs import write_run

ROWS = 40
USER = {"age", "hour", "user", "history"}
ITEM = {"year", "price", "movie", "words"}
DIM = 8


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return load_config(likes.write_config(tmp_path_factory.mktemp("likes")))


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    train(config, out, progress=False)
    return out


@pytest.fixture(scope="module", params=[None, "user", "item"], ids=str)
def tower(request):
    return request.param


@pytest.fixture(scope="module")
def package(run, tower, tmp_path_factory):
    path = tmp_path_factory.mktemp("package") / "m.pt"
    package_run(run, path, PackageOptions(name="m", dtype="int8"), tower=tower, progress=False)
    return path


def request_of(loaded, start, stop):
    """Rows of the table; what the model does not take is left out by hand."""
    every = {"user", "time", "age", "hour", "history", "movie", "year", "price", "words"}
    schema = loaded.manifest.schema
    table = likes.rows().slice(start, stop - start)
    ignored = every | {"word_weights"}
    arrays = assemble(*rows_to_parts(table, schema, ignore=ignored), schema=schema)
    return pb.PredictionRequest.FromString(encode_request(arrays))


def array(content, dtype):
    return torch.from_numpy(np.frombuffer(content, dtype).copy())


def run_in_process(loaded, message):
    """The package's own answer, features with weights among its inputs."""
    plain, scored = message.id_list_features, message.id_score_list_features
    dense = array(message.float_features.values, "<f4").view(message.batch_size, -1)
    ids = [
        array(group.values_int64, "<i8") if group.values_int64 else array(group.values, "<i4")
        for group in (plain, scored)
    ]
    batch = HostBatch.of(
        dense,
        (array(plain.lengths, "<i4"), ids[0]),
        (array(scored.lengths, "<i4"), ids[1], array(scored.weights, "<f4")),
    )
    return loaded.runner.forward(batch)["default"].numpy()


def numbers_of(response, rows):
    return np.array(response.predictions["default"].data, np.float32).reshape(rows, -1)


def test_a_package_gives_what_the_model_gives(config, run, tower, package):
    loaded = load_package(package)
    schema = loaded.manifest.schema
    given = {*schema.dense_features, *(feature.name for feature in schema.features)}
    assert given == {None: USER | ITEM, "user": USER, "item": ITEM}[tower]
    assert loaded.manifest.source.get("tower") == tower
    assert schema.outputs[0].width == (1 if tower is None else DIM)
    found = np.array(run_in_process(loaded, request_of(loaded, 0, ROWS))).reshape(ROWS, -1)
    model = load_trained(run).model
    batch = next(
        BatchLoader(
            open_data(config.data, progress=False).train, batch_size=ROWS, shuffle=False, seed=0
        ).epoch(0)
    )
    with torch.inference_mode():
        if tower is None:
            expected = model(batch.dense_features, batch.sparse_features).unsqueeze(1)
        else:
            module, inputs, _ = tower_source(model, tower)
            keys, names = batch.sparse_features.keys(), likes_dense(config)
            own = [f.name for f in schema.features]
            columns = [names.index(name) for name in inputs.dense_features]
            sparse = batch.sparse_features.permute([keys.index(name) for name in own])
            expected = module(batch.dense_features[:, columns], sparse)
    # int8: half a step of the rows, times the tower's weights; a pair is divided by the temperature.
    assert np.abs(found - expected.numpy()).max() < 0.05
    assert expected.std() > 0.1
    if tower is not None:
        assert np.linalg.norm(found, axis=1) == pytest.approx(np.ones(ROWS), abs=1e-5)


def likes_dense(config):
    return list(open_data(config.data, progress=False).train.dataset.columns.dense_names)


def test_both_servers_give_the_packages_bits(package, kind):
    loaded = load_package(package)
    with RunningServer(kind, "--model", package, "--drain-propagation-ms", 0) as server:
        for start, stop in ((0, ROWS), (3, 4)):
            request = request_of(loaded, start, stop)
            expected = np.array(run_in_process(loaded, request), np.float32)
            found = numbers_of(server.predict(request), stop - start)
            assert found.tobytes() == expected.reshape(stop - start, -1).tobytes()


def test_another_architecture_has_no_towers(tmp_path):
    out = tmp_path / "run"
    train(load_config(write_run(tmp_path)), out, progress=False)
    with pytest.raises(UserError, match="which has no towers; train one with"):
        package_run(out, tmp_path / "m.pt", PackageOptions(name="m"), tower="user", progress=False)
