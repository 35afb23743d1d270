"""The clients and ``tessera predict`` against the real server with a real package."""

import json

import numpy as np
import pytest
import torch

from tessera.cli import run_command
from tessera.serving.client import (
    Draw,
    InvalidRequest,
    ModelNotFound,
    PredictorClient,
    RequestDrawer,
    Shared,
    read_schema,
)
from tessera.serving.package.loading import load_package
from tessera.serving.package.runner import HostBatch


@pytest.fixture(scope="module")
def schema(package):
    return read_schema(package)


@pytest.fixture
def client(server_address, schema):
    with PredictorClient(server_address, schema=schema, timeout_s=60) as connected:
        yield connected


def in_process(package, arrays):
    """The package's own answer to drawn arrays without shared features."""
    empty = torch.empty(0, dtype=torch.int32)
    batch = HostBatch(
        float_features=torch.from_numpy(arrays.dense),
        id_list_features_lengths=torch.from_numpy(arrays.id_list.lengths.reshape(-1)),
        id_list_features_values=torch.from_numpy(arrays.id_list.values),
        id_score_list_features_lengths=empty,
        id_score_list_features_values=empty.long(),
        id_score_list_features_weights=empty.float(),
        batch_size=arrays.batch_size,
    )
    return load_package(package).runner.forward(batch)["default"].numpy()


@pytest.mark.parametrize("samples", [1, 2, 7, 64])
def test_scores_are_the_packages_own(client, package, schema, samples):
    draw = Draw(bags="uniform", max_bag=50)
    arrays = RequestDrawer(schema, draw, seed=samples).samples(samples)
    prediction = client.predict_arrays(arrays)
    assert np.array_equal(prediction.outputs["default"], in_process(package, arrays))
    assert (prediction.model_name, prediction.model_version) == ("small", "3")
    assert prediction.timings.batch_samples >= samples
    assert prediction.timings.forward_us > 0


def by_name(schema, samples, bags):
    names = [feature.name for feature in schema.features]
    dense = np.linspace(-1, 1, samples * len(schema.dense_features), dtype=np.float32)
    return dense.reshape(samples, -1), {name: bags(name) for name in names}


def test_shared_features_score_as_if_repeated(client, schema):
    dense, repeated = by_name(schema, 5, lambda _: [[1, 2, 3]] * 5)
    whole = client.predict(dense, repeated).outputs["default"]
    user = {name: [[1, 2, 3]] for name in ("user", "history", "region")}
    own = {name: bags for name, bags in repeated.items() if name not in user}
    once = client.predict(dense, own, shared=Shared.one_user(user, 5)).outputs["default"]
    assert np.array_equal(whole, once)


def test_every_width_of_ids_scores_the_same(server_address, schema, client):
    dense, bags = by_name(schema, 4, lambda _: np.array([[1, 2], [3, 4], [5, 6], [7, 8]]))
    wide = client.predict(dense, bags).outputs["default"]
    narrow = {name: ids.astype(np.int32) for name, ids in bags.items()}
    assert np.array_equal(wide, client.predict(dense, narrow).outputs["default"])
    with PredictorClient(server_address, schema=schema, compact_ids=True) as compact:
        assert np.array_equal(wide, compact.predict(dense, bags).outputs["default"])


def test_the_server_names_an_id_out_of_range(client, schema):
    dense, bags = by_name(schema, 2, lambda _: [[1], [2]])
    bags["genre"] = [[1], [19]]
    with pytest.raises(InvalidRequest, match=r"genre.*19"):
        client.predict(dense, bags)


def test_unknown_models_and_versions(client, schema):
    dense, bags = by_name(schema, 1, lambda _: [[1]])
    assert client.predict(dense, bags, model="small", version="3").outputs["default"].size == 1
    for model, version in (("large", ""), ("small", "4")):
        with pytest.raises(ModelNotFound):
            client.predict(dense, bags, model=model, version=version)


def test_predict_prints_what_the_client_gets(server_address, package, client, tmp_path, capsys):
    path = tmp_path / "samples.jsonl"
    lines = [
        {"dense": {"dense_0": 0.5}, "sparse": {"user": [2**62, -5], "genre": [3]}},
        {"dense": [1, None, 2, 3], "sparse": {"tag": [1000]}},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--address", server_address, "--model-file", str(package)]
    assert run_command("predict", [*flags, "--input", str(path)]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    nan = np.nan
    bags = {feature.name: [[], []] for feature in read_schema(package).features}
    bags |= {"user": [[2**62, -5], []], "genre": [[3], []], "tag": [[], [1000]]}
    expected = client.predict([[0.5, nan, nan, nan], [1, nan, 2, 3]], bags).outputs["default"]
    assert [np.float32(answer["scores"]["default"]) for answer in answers] == expected.tolist()


def test_predict_draws_samples_that_the_server_takes(server_address, package, capsys):
    flags = ["--address", server_address, "--model-file", str(package)]
    assert run_command("predict", [*flags, "--random", "200", "--batch", "30"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 200


def test_a_file_that_is_no_package(server_address, tmp_path, capsys):
    bad = tmp_path / "bad.pt"
    bad.write_bytes(b"no package at all, but long enough to look for an end record")
    flags = ["--address", server_address, "--model-file", str(bad), "--random", "1"]
    assert run_command("predict", flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(bad) in line
