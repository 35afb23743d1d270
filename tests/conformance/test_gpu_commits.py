"""Servers that follow a log with their model on GPUs: one, copies on several, shards over several."""

import itertools

import numpy as np
import pytest
import torch

from tessera.serving.client import RepositoryClient
from tessera.serving.package.golden import TOLERANCE
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tests.conformance.conformance_harness import TIMEOUT_S, RunningServer, scores_of
from tests.conformance.followed_logs import FollowedVersion, History, wait_for_commit
from tests.conformance.live_models import asking
from tests.package_factory import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

DEVICE = "cuda"
COUNT = 4
CALLS = 4  # so that every copy answers


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(((0,), {}), id="one"),
        pytest.param(((0, 1), {}), id="copies"),
        pytest.param(((0,), {"shards": 2, "sharding": "row_wise"}), id="shards-on-one"),
        pytest.param(((0, 1), {"shards": 2, "sharding": "row_wise"}), id="shards"),
    ],
)
def test_commits_are_taken_and_taken_back(kind, place, draw_with, tmp_path):
    gpus, chosen = place
    if torch.cuda.device_count() <= max(gpus):
        pytest.skip(f"there are {torch.cuda.device_count()} GPUs")
    package = tmp_path / "model.pt"
    options = PackageOptions(name="m", version="3", backend="tessera", device=DEVICE, **chosen)
    write_model(make_model(), package, options)
    history = History(tmp_path / "history", package, COUNT)
    version = FollowedVersion(tmp_path / "models", history)
    message = draw_with(max_bag=20).samples(40)
    asked = asking(message, "m")
    states = [
        np.frombuffer(history.expected(number, message), np.float32) for number in range(COUNT + 1)
    ]
    for before, after in itertools.pairwise(states):
        assert np.abs(before - after).max() > 10 * TOLERANCE["cuda"]
    flags = ["--model-repository", version.repository, "--model-control", "explicit", "--follow"]
    flags += ["--follow-poll-ms", 20, "--drain-propagation-ms", 0]
    flags += ["--rollback-bytes", sum(map(len, history.commits.values()))]
    with RunningServer(kind, *flags, "--gpus", ",".join(map(str, gpus))) as server:

        def check(number):
            for _ in range(CALLS):
                scores = scores_of(wait_for_commit(server, asked, number))
                np.testing.assert_allclose(scores, states[number], atol=TOLERANCE["cuda"], rtol=0)

        check(0)
        for number in range(1, COUNT + 1):
            version.put(number, history.commits[number])
            check(number)
        loads = server.value("tessera_model_loads_total")
        with RepositoryClient(server.address, timeout_s=TIMEOUT_S) as repository:
            repository.rollback("m", to="3.1")
        check(1)
        assert server.value("tessera_model_loads_total") == loads  # it was held in memory
