"""Scores over gRPC are the package's own, bit for bit, whoever shares the batch."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
import torch

from tessera.serving.client import Draw, RequestDrawer, encode_request
from tessera.serving.package.loading import load_package
from tessera.serving.package.runner import HostBatch
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.serving.server.background import ServerThread
from tessera.serving.server.config import ModelLimits, ModelSource, ServerConfig
from tests.package_factory import package_file
from tests.patience import PATIENCE_S

SIZES = [*range(1, 34), 47, 64, 65, 100, 127, 128, 200, 255, 256, 300, 511, 512]


@pytest.fixture(scope="module", params=["dlrm", "dlrm_dcn"])
def package(request, tmp_path_factory):
    return package_file(tmp_path_factory.mktemp("package"), arch=request.param)


@pytest.fixture(scope="module")
def in_process(package):
    return load_package(package)


@pytest.fixture(scope="module")
def server(package):
    config = ServerConfig(
        models=(ModelSource(path=str(package)),),
        host="127.0.0.1",
        port=0,
        http_port=0,
        limits=ModelLimits(workers=2, max_batch_samples=600),
        drain_propagation_ms=0,
        log_level="error",
    )
    with ServerThread(config) as thread:
        yield thread


def run_in_process(loaded, message):
    """The package's own answer to a message without weighted features."""
    B, group = message.batch_size, message.id_list_features
    wide = group.values_int64
    values = np.frombuffer(wide, "<i8") if wide else np.frombuffer(group.values, "<i4")
    batch = HostBatch(
        float_features=tensor(message.float_features.values, "<f4").view(B, -1),
        id_list_features_lengths=tensor(group.lengths, "<i4"),
        id_list_features_values=torch.from_numpy(values.copy()),
        id_score_list_features_lengths=torch.empty(0, dtype=torch.int32),
        id_score_list_features_values=torch.empty(0, dtype=torch.int64),
        id_score_list_features_weights=torch.empty(0),
        batch_size=B,
    )
    return loaded.runner.forward(batch)["default"].numpy()


def tensor(content, dtype):
    return torch.from_numpy(np.frombuffer(content, dtype).copy())


def messages(loaded, sizes, *, max_bag=50, seed=0):
    draw = Draw(ids="uniform", bags="uniform", max_bag=max_bag)
    drawer = RequestDrawer(loaded.manifest.schema, draw, seed=seed)
    for size in sizes:
        yield pb.PredictionRequest.FromString(encode_request(drawer.samples(size)))


def served(channel, message):
    call = channel.unary_unary("/predictor.Predictor/Predict")
    response = pb.PredictionResponse.FromString(
        call(message.SerializeToString(), timeout=PATIENCE_S)
    )
    return np.array(response.predictions["default"].data, np.float32), response.timings


def same_bits(a, b):
    return a.astype("<f4").tobytes() == b.astype("<f4").tobytes()


def test_every_batch_size_with_bags_of_0_to_50_ids(server, in_process):
    with grpc.insecure_channel(server.address) as channel:
        for message in messages(in_process, SIZES):
            scores, _ = served(channel, message)
            assert same_bits(scores, run_in_process(in_process, message)), message.batch_size


def test_neighbours_in_a_batch_change_no_bit(server, in_process):
    """Many calls at once, so that the server merges them; each alone must give the same bits."""
    rng = np.random.default_rng(0)
    sent = list(messages(in_process, rng.integers(1, 9, 300).tolist(), max_bag=5, seed=1))
    with grpc.insecure_channel(server.address) as channel, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda message: served(channel, message), sent))
    assert max(timings.batch_requests for _, timings in answers) > 1  # else nothing was shown
    for message, (scores, _) in zip(sent, answers, strict=True):
        assert same_bits(scores, run_in_process(in_process, message))


def test_a_request_cut_into_parts_changes_no_bit(in_process, package):
    config = ServerConfig(
        models=(ModelSource(path=str(package)),),
        host="127.0.0.1",
        port=0,
        http_port=0,
        limits=ModelLimits(workers=2, max_batch_samples=37),
        drain_propagation_ms=0,
        log_level="error",
    )
    (message,) = messages(in_process, [512])
    with ServerThread(config) as thread, grpc.insecure_channel(thread.address) as channel:
        scores, _ = served(channel, message)
    assert same_bits(scores, run_in_process(in_process, message))


def test_rows_of_a_large_batch_equal_the_rows_alone(in_process):
    """The property behind the above, in-process: the batch size never reaches a score."""
    (message,) = messages(in_process, [512])
    whole = run_in_process(in_process, message)
    F = message.id_list_features.num_features
    lengths_FB = np.frombuffer(message.id_list_features.lengths, "<i4").reshape(F, 512)
    ids = np.frombuffer(
        message.id_list_features.values_int64 or message.id_list_features.values,
        "<i8" if message.id_list_features.values_int64 else "<i4",
    )
    starts_FB = np.concatenate(([0], np.cumsum(lengths_FB)))[:-1].reshape(F, 512)
    dense = np.frombuffer(message.float_features.values, "<f4").reshape(512, -1)
    for size in (1, 2, 3, 5, 31, 33, 100, 511):
        rows = range(7, 7 + size) if size < 500 else range(size)
        part = pb.PredictionRequest(batch_size=size)
        part.float_features.num_features = dense.shape[1]
        part.float_features.values = dense[list(rows)].tobytes()
        part.id_list_features.num_features = F
        part.id_list_features.lengths = lengths_FB[:, list(rows)].tobytes()
        part.id_list_features.values_int64 = (
            np.concatenate(
                [ids[starts_FB[f, b] :][: lengths_FB[f, b]] for f in range(F) for b in rows]
            )
            .astype("<i8")
            .tobytes()
        )
        assert same_bits(run_in_process(in_process, part), whole[list(rows)]), size
