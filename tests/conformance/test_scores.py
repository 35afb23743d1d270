"""How scores are spread: counted by output, alike on both servers."""

import itertools
import math
import re

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from tessera.serving import package_model
from tessera.serving.client import PredictorClient
from tessera.serving.package.loading import load_package
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.serving.server.metrics.score_counts import SCORE_BUCKETS
from tessera.training import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from tests import REPOSITORY
from tests.conformance.conformance_harness import RunningServer
from tests.kserve_messages import infer, infer_request

ZERO = -7.0


class Outputs(nn.Module):
    """A dense value as it is, the same divided by another one, and a vector; ids have no part in them.

    Where the other one is `ZERO` the quotient is infinite or NaN, which no value does that the packager tries.
    """

    def __init__(self):
        super().__init__()
        table = EmbeddingBagConfig(
            name="t", num_embeddings=4, embedding_dim=4, feature_names=["user"]
        )
        self.bags = EmbeddingBagCollection(tables=[table])

    def forward(self, dense, bags):
        nothing = self.bags(bags).values()[:, 0] * 0
        first, second = dense[:, 0] + nothing, dense[:, 1]
        return {"clicked": first, "ratio": first / (second - ZERO), "vector": dense.repeat(1, 2)}


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    path = tmp_path_factory.mktemp("package") / "m.pt"
    bags = KeyedJaggedTensor(["user"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    package_model(Outputs().eval(), None, (torch.randn(2, 2), bags), name="m", out=path)
    return load_package(path)


@pytest.fixture
def server(package, kind):
    flags = ("--model", package.path, "--drain-propagation-ms", 0, "--max-batch-samples", 64)
    with RunningServer(kind, *flags) as running:
        yield running


def message(dense):
    dense = np.asarray(dense, np.float32)
    lengths = np.zeros(len(dense), np.int32)
    return pb.PredictionRequest(
        batch_size=len(dense),
        float_features=pb.FloatFeatures(num_features=2, values=dense.astype("<f4").tobytes()),
        id_list_features=pb.SparseFeatures(num_features=1, lengths=lengths.tobytes()),
    )


def slowly(scores):
    """Cumulative counts, their number, and how many of the scores are not finite."""
    finite = [float(score) for score in scores if math.isfinite(score)]
    below = [sum(score <= bound for score in finite) for bound in SCORE_BUCKETS]
    return [*below, len(finite)], len(finite), len(scores) - len(finite)


def counted(server, output):
    families = server.families()
    own = {"model": "m", "output": output}
    buckets, count, total = {}, None, None
    for sample in families["tessera_score"].samples:
        if own.items() <= sample.labels.items():
            if sample.name.endswith("_bucket"):
                buckets[float(sample.labels["le"])] = sample.value
            elif sample.name.endswith("_count"):
                count = sample.value
            else:
                total = sample.value
    assert list(buckets) == [*SCORE_BUCKETS, math.inf]
    return (
        list(buckets.values()),
        count,
        server.value("tessera_score_not_finite_total", **own),
    ), total


def test_scores_are_counted_by_output(server, package):
    every = {
        sample.labels["output"]
        for family in ("tessera_score", "tessera_score_not_finite")
        for sample in server.families()[family].samples
    }
    assert every == {"clicked", "ratio"}  # and not the vector
    assert counted(server, "clicked")[0] == ([0] * (len(SCORE_BUCKETS) + 1), 0, 0)
    chance = np.random.default_rng(5)
    bounds = np.float32(SCORE_BUCKETS)
    sent, answers = [], {"clicked": [], "ratio": []}
    for count in (1, 7, 150):  # the last is cut into parts
        drawn = np.where(
            chance.random(count) < 0.3, chance.choice(bounds, count), chance.random(count)
        )
        sent.append(np.stack([drawn, ZERO + chance.choice([0, 0.5, 4], count)], axis=1))
        sent[-1][0] = 0, ZERO
    for dense in sent:
        given = server.predict(message(dense)).predictions
        for name, own in answers.items():
            own.extend(given[name].data)
    rest = infer(server, infer_request(message(sent[1])))
    for output, content in zip(rest.outputs, rest.raw_output_contents, strict=True):
        if output.name in answers:
            answers[output.name].extend(np.frombuffer(content, "<f4").tolist())
    expected = {name: slowly(own) for name, own in answers.items()}
    assert expected["clicked"][2] == 0
    assert expected["ratio"][2] > 3
    server.wait_for(lambda: all(counted(server, n)[0] == e for n, e in expected.items()))
    for name, own in answers.items():
        finite = [score for score in own if math.isfinite(score)]
        assert counted(server, name)[1] == pytest.approx(math.fsum(finite), rel=1e-9)
    # What is refused has no score.
    with pytest.raises(grpc.RpcError, match="is nan, expected a finite number"):
        server.predict(message([[math.nan, 1]]))
    server.predict(message([[0.5, 1]]))
    expected = slowly([*answers["clicked"], 0.5])
    server.wait_for(lambda: counted(server, "clicked")[0] == expected)


def test_the_index_of_the_page_on_drift(server, package, tmp_path, monkeypatch, capsys):
    """The Python of docs/observe.md, with this server's address and this package's output."""
    page = (REPOSITORY / "docs/observe.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n([^`]*tessera_score_bucket[^`]*)```", page)
    program = program.replace("127.0.0.1:8002", server.http_address).replace("default", "clicked")
    monkeypatch.chdir(tmp_path)
    scores = np.linspace(0, 1, 2000, dtype=np.float32)
    dense = np.stack([scores, np.ones_like(scores)], axis=1)
    with PredictorClient(server.address, schema=package.manifest.schema) as client:
        for part in np.split(dense, 2):
            client.predict(part, {"user": [[]] * len(part)})
    server.wait_for(lambda: counted(server, "clicked")[0][1] == len(scores))
    found = []
    for trained in (scores, scores**3):
        pq.write_table(pa.table({"clicked": [*trained, None]}), "scores.parquet")
        exec(program, {})
        found.append(float(capsys.readouterr().out.removeprefix("PSI")))
    assert found[0] == pytest.approx(0, abs=1e-9)
    assert found[1] == pytest.approx(psi_slowly(scores, scores**3), rel=1e-6)
    assert found[1] > 0.25


def psi_slowly(one, other):
    edges = [-math.inf, *SCORE_BUCKETS, math.inf]
    total = 0
    for low, high in itertools.pairwise(edges):
        p, q = (
            max(0.5, sum(low < float(s) <= high for s in scores)) / len(scores)
            for scores in (one, other)
        )
        total += (p - q) * math.log(p / q)
    return total
