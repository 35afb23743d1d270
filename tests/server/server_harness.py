"""A model that is plain arithmetic, a loader for it, and requests to send."""

import dataclasses
import io
import subprocess
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import grpc
import numpy as np
import torch

from tessera.serving.package.hashes import FileHash
from tessera.serving.package.schema import FeatureSpec, InputSchema, OutputSpec
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.serving.server.background import ServerProcess, ServerThread
from tessera.serving.server.config import ModelLimits, ModelSource, ServerConfig
from tessera.serving.server.log import make_logger
from tessera.serving.server.model.loader import LoadedModel, ModelIdentity
from tests import forked_program
from tests.patience import PATIENCE_S


class ForkedServer(ServerProcess):
    """The same, of ``tessera serve``, forked where it can be (`forked_program`)."""

    @staticmethod
    def _begun(command):
        return forked_program.start(command[3:], stderr=subprocess.PIPE)


def feature(name, group="id_list", *, rows=100, hashing="none", out_of_range="reject"):
    return FeatureSpec(
        name=name,
        group=group,
        table=f"t_{name}",
        rows=rows,
        dim=4,
        pooling="sum",
        hashing=hashing,
        out_of_range=out_of_range,
    )


def string_feature(name, **options):
    return dataclasses.replace(feature(name, **options), strings=True)


OUTPUTS = (OutputSpec(name="default", width=1), OutputSpec(name="pair", width=2))


def make_schema(
    *,
    dense=2,
    missing="nan",
    features=None,
    outputs=OUTPUTS,
):
    if features is None:
        features = (
            feature("a"),
            feature("b", hashing="murmur3"),
            feature("c", rows=10, out_of_range="clamp"),
            feature("w", "id_score_list", rows=50),
        )
    return InputSchema(
        dense_features=tuple(f"d{i}" for i in range(dense)),
        dense_missing=missing,
        dense_columns=("",) * dense,
        features=tuple(features),
        outputs=tuple(outputs),
    )


class FakeRunner:
    """Adds up what it is given.  Ids named in ``fails_on`` make it raise."""

    shares_rows = False

    def __init__(self, schema):
        self.schema = schema
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Semaphore(0)
        self.fails_on = set()
        self.batch_sizes = []
        self.threads = set()

    def forward(self, batch):
        self.entered.release()
        self.open.wait(PATIENCE_S)
        self.threads.add((threading.current_thread().name, torch.get_num_threads()))
        self.batch_sizes.append(batch.batch_size)
        ids = batch.id_list_features_values.numpy()
        if self.fails_on & set(ids.tolist()):
            raise RuntimeError("a table is on fire")
        scores = expected_scores(
            batch.float_features.numpy(),
            (batch.id_list_features_lengths.numpy(), ids),
            (
                batch.id_score_list_features_lengths.numpy(),
                batch.id_score_list_features_values.numpy(),
                batch.id_score_list_features_weights.numpy(),
            ),
        )
        outputs = {
            "default": torch.from_numpy(scores),
            "pair": torch.from_numpy(np.stack([scores, -scores], axis=1)),
        }
        return {output.name: outputs[output.name] for output in self.schema.outputs}


def expected_scores(dense, id_list, id_score_list):
    """Plain loops: dense + (feature + 1) * id for every id, weighted where there is a weight."""
    B = len(dense)
    scores = np.nan_to_num(dense).sum(axis=1, dtype=np.float64)
    plain = (*id_list, np.ones(len(id_list[1])))
    for group_lengths, group_values, group_weights in (plain, id_score_list):
        at = 0
        for bag, count in enumerate(group_lengths.tolist()):
            f, b = divmod(bag, B)
            for k in range(at, at + count):
                scores[b] += (f + 1) * float(group_values[k] % 1009) * float(group_weights[k])
            at += count
    return scores.astype(np.float32)


class FakeLoader:
    """Models by path, made here."""

    def __init__(self, schema=None):
        self.schema = schema or make_schema()
        self.runners = {}
        self.open = threading.Event()
        self.open.set()

    def identify(self, source):
        return ModelIdentity(name=source.name or source.path, version=f"{source.path}-v1")

    def load(self, source):
        self.open.wait(PATIENCE_S)
        runner = self.runners.setdefault(source.path, FakeRunner(self.schema))
        file_hash = FileHash(lambda: "0" * 64)
        file_hash.wait()
        return LoadedModel(
            schema=self.schema,
            runner=runner,
            file_hash=file_hash,
            torch="2.13.0",
            dtype="int8",
            device="cpu",
            devices=("cpu",),
            table_bytes={"cpu": 12345},
            load_seconds=0.25,
        )


def config(*models, limits=None, **settings):
    settings.setdefault("drain_propagation_ms", 0)
    return ServerConfig(
        models=tuple(ModelSource(path=path) for path in models or ("m",)),
        host="127.0.0.1",
        port=0,
        http_port=0,
        limits=limits or ModelLimits(workers=1),
        **settings,
    )


class Running:
    """A server thread and a channel to it."""

    def __init__(self, thread, channel, loader, log):
        self.thread = thread
        self.channel = channel
        self.loader = loader
        self.log = log
        self.raw = channel.unary_unary("/predictor.Predictor/Predict")

    @property
    def runner(self):
        return self.loader.runners["m"]

    def predict(self, message, **options):
        options.setdefault("timeout", PATIENCE_S)
        return pb.PredictionResponse.FromString(self.raw(message.SerializeToString(), **options))

    def start(self, message, **options):
        return self.raw.future(message.SerializeToString(), **options)

    def refused(self, message, **options):
        """The error of a call that must fail."""
        try:
            self.predict(message, **options)
        except grpc.RpcError as error:
            return error
        raise AssertionError("the server answered")

    def http(self, path):
        url = f"http://127.0.0.1:{self.thread.http_port}{path}"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as reply:
            return reply.read().decode()

    def http_state(self):
        """The status code of /readyz."""
        try:
            self.http("/readyz")
        except urllib.error.HTTPError as error:
            return error.code
        return 200

    def metrics(self):
        return parse_metrics(self.http("/metrics"))


def parse_metrics(text):
    """Sample lines as {(name, frozenset of labels): value}."""
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(metrics, name, **labels):
    """The sum of the samples whose labels include ``labels``."""
    wanted = set(labels.items())
    found = [v for (n, have), v in metrics.items() if n == name and wanted <= have]
    assert found, (name, labels)
    return sum(found)


@contextmanager
def serving(configuration=None, loader=None):
    loader = loader or FakeLoader()
    log = io.StringIO()
    thread = ServerThread(
        configuration or config(), loader=loader, log=make_logger("info", "json", log)
    )
    with thread, grpc.insecure_channel(thread.address) as channel:
        yield Running(thread, channel, loader, log)


def i32(numbers):
    return np.asarray(numbers, "<i4").tobytes()


def i64(numbers):
    return np.asarray(numbers, "<i8").tobytes()


def f32(numbers):
    return np.asarray(numbers, "<f4").tobytes()


def request(B=1, *, bag=1, first_id=0, **fields):
    """A request that fits `make_schema`: every bag has ``bag`` ids from ``first_id`` on."""
    message = pb.PredictionRequest(batch_size=B, **fields)
    message.float_features.num_features = 2
    message.float_features.values = f32(np.arange(2 * B) / 4)
    ids = (first_id + np.arange(3 * B * bag)) % 10
    message.id_list_features.num_features = 3
    message.id_list_features.lengths = i32([bag] * (3 * B))
    message.id_list_features.values = i32(ids)
    message.id_score_list_features.num_features = 1
    message.id_score_list_features.lengths = i32([bag] * B)
    message.id_score_list_features.values = i32(ids[: B * bag])
    message.id_score_list_features.weights = f32(np.arange(B * bag) / 2)
    return message


def random_request(rng, B, *, max_bag=5, wide=False):
    """A valid request with bags of 0 to ``max_bag`` ids."""
    message = pb.PredictionRequest(batch_size=B)
    message.float_features.num_features = 2
    message.float_features.values = f32(rng.integers(-8, 8, (B, 2)) / 4)
    lengths = rng.integers(0, max_bag + 1, 3 * B)
    ids = rng.integers(0, 100, lengths.sum())
    message.id_list_features.num_features = 3
    message.id_list_features.lengths = i32(lengths)
    if wide:
        message.id_list_features.values_int64 = i64(ids)
    else:
        message.id_list_features.values = i32(ids)
    w_lengths = rng.integers(0, max_bag + 1, B)
    message.id_score_list_features.num_features = 1
    message.id_score_list_features.lengths = i32(w_lengths)
    message.id_score_list_features.values = i32(rng.integers(0, 50, w_lengths.sum()))
    message.id_score_list_features.weights = f32(rng.integers(0, 4, w_lengths.sum()) / 2)
    return message


def scores_of(message):
    """What the fake model answers to a message without shared features."""
    group = message.id_list_features
    ids = np.frombuffer(group.values_int64, "<i8") if group.values_int64 else None
    scored = message.id_score_list_features
    return expected_scores(
        np.frombuffer(message.float_features.values, "<f4").reshape(message.batch_size, -1),
        (
            np.frombuffer(group.lengths, "<i4"),
            np.frombuffer(group.values, "<i4") if ids is None else ids,
        ),
        (
            np.frombuffer(scored.lengths, "<i4"),
            np.frombuffer(scored.values, "<i4"),
            np.frombuffer(scored.weights, "<f4"),
        ),
    )
