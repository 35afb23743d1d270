"""Ids that managed collision modules of every kind map: the servers have the rows that the module has."""

import numpy as np
import pytest
import torch

from tessera.serving import package_model
from tessera.serving.protocol import predictor_pb2 as pb
from tests.conformance.conformance_harness import RunningServer
from tests.packaging.test_packaged_maps import drawn, trained


@pytest.fixture(scope="module")
def module():
    return trained()


@pytest.fixture(scope="module")
def mapped_server(kind, module, tmp_path_factory):
    path = tmp_path_factory.mktemp("maps") / "maps.pt"
    package_model(module, None, (drawn(0),), out=path, dtype="fp32")
    with RunningServer(kind, "--model", path, "--drain-propagation-ms", 0) as running:
        yield running


def message_of(ids):
    message = pb.PredictionRequest(batch_size=ids.stride())
    features = message.id_list_features
    features.num_features = len(ids.keys())
    features.lengths = ids.lengths().int().numpy().tobytes()
    features.values_int64 = ids.values().numpy().tobytes()
    return message


def test_the_servers_have_the_rows_that_the_module_has(mapped_server, module):
    for seed in range(3, 9):
        ids = drawn(seed)
        answer = mapped_server.predict(message_of(ids))
        with torch.no_grad():
            expected = module(ids).numpy()
        (found,) = answer.predictions.values()
        scores = np.array(found.data, np.float32).reshape(expected.shape)
        # The lookups add up in another order than the module's.
        np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-6)
