"""Packages of users' own modules: several outputs, ids with weights, and a model with a bug."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conformance_harness import RunningServer, f32, same_bits
from torch import nn

from tessera.serving import package_model
from tessera.serving.client import Draw, RequestDrawer, encode_request
from tessera.serving.loading import load_package
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.serving.runner import HostBatch
from tessera.training import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

POISON = 1e6
"""A dense value that the module below cannot take."""


def tables(*names):
    return [
        EmbeddingBagConfig(name=name, num_embeddings=50, embedding_dim=8, feature_names=[name])
        for name in names
    ]


class Tasks(nn.Module):
    """A score per sample and three logits, from plain bags, weighted bags and dense values.

    A dense value of `POISON` or more is used as an index that is not there.
    """

    def __init__(self):
        super().__init__()
        self.plain = EmbeddingBagCollection(tables=tables("user", "item"))
        self.weighted = EmbeddingBagCollection(tables=tables("history"), is_weighted=True)
        self.layer = nn.Linear(2 + 24, 4)
        self.register_buffer("choices", torch.tensor([1.0, 2.0]))

    def forward(self, dense, bags, weighted):
        row = (dense[:, 0] >= POISON).long() * 7
        scale = self.choices.index_select(0, row).unsqueeze(1)
        vectors = [dense, self.plain(bags).values(), self.weighted(weighted).values()]
        out = self.layer(torch.cat(vectors, dim=1)) * scale
        return {"score": out[:, 0], "logits": out[:, 1:]}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    torch.manual_seed(0)
    lengths = torch.tensor([1, 2, 0, 1])
    plain = KeyedJaggedTensor(["user", "item"], torch.tensor([1, 2, 3, 4]), lengths=lengths)
    weighted = KeyedJaggedTensor(
        ["history"], torch.tensor([5, 6]), torch.tensor([0.5, 2.0]), torch.tensor([1, 1])
    )
    path = tmp_path_factory.mktemp("tasks") / "tasks.pt"
    package_model(Tasks().eval(), None, (torch.randn(2, 2), plain, weighted), out=path)
    return path


@pytest.fixture(scope="module")
def loaded(tasks):
    return load_package(tasks)


@pytest.fixture(scope="module")
def tasks_server(kind, tasks):
    # A worker that waits a moment finds company.
    flags = ["--model", tasks, "--workers", 1, "--max-delay-us", 3000]
    with RunningServer(kind, *flags, "--drain-propagation-ms", 0) as running:
        yield running


def draw(loaded, count, seed=0):
    drawer = RequestDrawer(
        loaded.manifest.schema, Draw(ids="uniform", bags="uniform", max_bag=4), seed=seed
    )
    return pb.PredictionRequest.FromString(encode_request(drawer.samples(count)))


def expected(loaded, message):
    def group(part):
        return (
            torch.from_numpy(np.frombuffer(part.lengths, "<i4").copy()),
            torch.from_numpy(np.frombuffer(part.values_int64, "<i8").copy()),
        )

    plain, scored = group(message.id_list_features), group(message.id_score_list_features)
    weights = np.frombuffer(message.id_score_list_features.weights, "<f4").copy()
    dense = np.frombuffer(message.float_features.values, "<f4").copy()
    batch = HostBatch(
        float_features=torch.from_numpy(dense).view(message.batch_size, -1),
        id_list_features_lengths=plain[0],
        id_list_features_values=plain[1],
        id_score_list_features_lengths=scored[0],
        id_score_list_features_values=scored[1],
        id_score_list_features_weights=torch.from_numpy(weights),
        batch_size=message.batch_size,
    )
    return {name: scores.numpy() for name, scores in loaded.runner.forward(batch).items()}


def hold(answer, message, loaded):
    wanted = expected(loaded, message)
    assert answer.predictions.keys() == wanted.keys()
    for name, scores in wanted.items():
        assert same_bits(np.array(answer.predictions[name].data), scores.ravel()), name


def test_several_outputs_and_weighted_ids(tasks_server, loaded):
    for size in (1, 2, 7, 100):
        message = draw(loaded, size, seed=size)
        hold(tasks_server.predict(message), message, loaded)


def poisoned(loaded):
    message = draw(loaded, 2, seed=9)
    message.float_features.values = f32([0.5, 0.5, POISON, 0.5])
    return message


def test_a_bug_is_internal_with_an_id_that_is_in_the_log(tasks_server, loaded):
    code, text = tasks_server.outcome(poisoned(loaded).SerializeToString())
    assert code == "INTERNAL"
    words = text.split()
    assert words[:3] == ["internal", "error,", "id"]
    error_id = words[3]
    tasks_server.wait_for(
        lambda: any(entry.get("error_id") == error_id for entry in tasks_server.log)
    )
    assert tasks_server.value("tessera_requests_total", code="INTERNAL") >= 1
    message = draw(loaded, 3)
    hold(tasks_server.predict(message), message, loaded)  # it lives on


def test_a_bug_does_not_fail_its_neighbours(tasks_server, loaded):
    bad = poisoned(loaded).SerializeToString()
    good = [draw(loaded, 1 + seed % 3, seed=seed) for seed in range(60)]
    with ThreadPoolExecutor(16) as pool:
        failures = [pool.submit(tasks_server.outcome, bad) for _ in range(20)]
        answers = list(pool.map(tasks_server.predict, good))
    for message, answer in zip(good, answers, strict=True):
        hold(answer, message, loaded)
    assert {future.result()[0] for future in failures} == {"INTERNAL"}
    # Some shared a batch, which then was computed again request by request.
    events = [entry["event"] for entry in tasks_server.log]
    assert "batch_failed_retrying_each" in events
