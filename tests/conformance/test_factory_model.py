"""A module of a user's, named in a config: from `tessera train` to the answers of both servers."""

import numpy as np
import pytest
import torch

from tessera.cli import main
from tessera.serving.package.loading import load_package
from tessera.training import KeyedJaggedTensor
from tessera.training.trained import load_trained
from tests.conformance.conformance_harness import RunningServer, same_bits
from tests.conformance.tasks_module import draw, expected
from tests.trainer.tiny_runs import TINY, write_criteo

FACTORY = """
import torch
from torch import nn


class Towers(nn.Module):
    def __init__(self, inputs, width):
        super().__init__()
        self.vectors = inputs.collection()
        self.weights = inputs.collection(prefix="weights_", dim=1)
        columns = inputs.dense_columns + sum(feature.dim for feature in inputs.features)
        self.hidden = nn.Linear(columns, width)
        self.head = nn.Linear(width, 1)

    def forward(self, dense, sparse):
        both = torch.cat([dense, self.vectors(sparse).values()], dim=1)
        deep = self.head(torch.relu(self.hidden(both)))
        return deep + self.weights(sparse).values().sum(dim=1, keepdim=True)


def towers(inputs, width):
    return Towers(inputs, width)
"""

MODEL = (
    "{factory: 'conformance_towers:towers', arguments: {width: 8}, output_layers: [head], "
    "embedding_dim: 4, rows: 50}"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The model that was trained, and its package."""
    folder = tmp_path_factory.mktemp("factory")
    (folder / "conformance_towers.py").write_text(FACTORY)
    data = write_criteo(folder / "clicks.tsv", rows=300)
    head, _, rest = TINY.replace("PATH", str(data)).partition("model:\n")
    train = rest.partition("train:\n")[2]
    config = folder / "config.yaml"
    config.write_text(f"{head}model: {MODEL}\ntrain:\n{train}")
    run, package = folder / "run", folder / "model.pt"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # where the factory's module lies
        assert main(["train", "--config", str(config), "--out", str(run), "--quiet"]) == 0
        package_arguments = [str(run), "--dtype", "fp32", "--out", str(package)]
        assert main(["package-model", *package_arguments]) == 0
        yield load_trained(run).model, package


def scores_of_the_trained_model(model, message):
    """What the model that was trained gives for the samples of a request."""
    ids = message.id_list_features
    sparse = KeyedJaggedTensor(
        [feature.name for feature in model.features],
        torch.from_numpy(np.frombuffer(ids.values_int64, "<i8").copy()),
        lengths=torch.from_numpy(np.frombuffer(ids.lengths, "<i4").copy()),
    )
    dense = np.frombuffer(message.float_features.values, "<f4").copy()
    with torch.no_grad():
        logits = model(torch.from_numpy(dense).view(message.batch_size, -1), sparse)
    return torch.sigmoid(logits).numpy()


def test_a_trained_module_of_the_users_is_served(kind, trained):
    model, package = trained
    assert len(model.collections()) == 2
    loaded = load_package(package)
    with RunningServer(kind, "--model", package, "--drain-propagation-ms", 0) as server:
        for size in (1, 5, 33):
            message = draw(loaded, size, seed=size)
            answer = server.predict(message)
            (wanted,) = expected(loaded, message).values()
            (given,) = (np.array(scores.data) for scores in answer.predictions.values())
            assert same_bits(given, wanted.ravel())
            np.testing.assert_allclose(
                given, scores_of_the_trained_model(model, message), rtol=0, atol=1e-5
            )
