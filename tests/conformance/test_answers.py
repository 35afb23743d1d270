"""Scores: bit for bit those of the package run in-process, however requests are batched."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tessera.kernels.libraries import LibraryError, load_libraries
from tessera.serving.package.loading import load_package
from tessera.serving.package.runner import HostBatch
from tessera.serving.protocol import predictor_pb2 as pb
from tests.conformance.conformance_harness import RunningServer, f32, i32, i64, same_bits, scores_of
from tests.package_factory import make_package

SIZES = [1, 2, 3, 5, 8, 17, 64, 100, 255, 512]


def tensor(content, dtype):
    return torch.from_numpy(np.frombuffer(content, dtype).copy())


def run_in_process(loaded, message):
    """The package's own answer to a message without shared features."""
    B, group = message.batch_size, message.id_list_features
    values = (
        tensor(group.values_int64, "<i8") if group.values_int64 else tensor(group.values, "<i4")
    )
    batch = HostBatch(
        float_features=tensor(message.float_features.values, "<f4").view(B, -1),
        id_list_features_lengths=tensor(group.lengths, "<i4"),
        id_list_features_values=values,
        id_score_list_features_lengths=torch.empty(0, dtype=torch.int32),
        id_score_list_features_values=torch.empty(0, dtype=torch.int64),
        id_score_list_features_weights=torch.empty(0),
        batch_size=B,
    )
    return loaded.runner.forward(batch)["default"].numpy()


@pytest.mark.parametrize("max_bag", [1, 5, 50])
def test_batches_of_1_to_512_with_bags_of_0_to_50_ids(server, in_process, draw_with, max_bag):
    drawn = draw_with(max_bag=max_bag)
    for size in SIZES:
        message = drawn.samples(size)
        answer = server.predict(message)
        assert same_bits(scores_of(answer), run_in_process(in_process, message)), size


def test_empty_bags_everywhere(server, in_process, drawn):
    message = drawn.samples(4)
    group = message.id_list_features
    group.lengths = i32([0] * (group.num_features * 4))
    group.values = group.values_int64 = b""
    assert same_bits(scores_of(server.predict(message)), run_in_process(in_process, message))


def test_ids_of_both_widths(server, in_process, drawn):
    message = drawn.samples(3)
    small = np.frombuffer(message.id_list_features.values_int64, "<i8") % 10
    message.id_list_features.values_int64 = i64(small)
    wide = scores_of(server.predict(message))
    message.id_list_features.values_int64 = b""
    message.id_list_features.values = i32(small)
    assert same_bits(scores_of(server.predict(message)), wide)
    assert same_bits(wide, run_in_process(in_process, message))
    # TorchRec's client puts its tensors' bytes there, whatever their type is.
    message.id_list_features.values = i64(small)
    scored = message.id_score_list_features
    scored.values, scored.values_int64 = scored.values_int64, b""
    assert same_bits(scores_of(server.predict(message)), wide)
    message.id_list_features.values = i64(small) + bytes(1)
    assert server.outcome(message.SerializeToString())[0] == "INVALID_ARGUMENT"


@pytest.mark.parametrize("backend", ["tessera", "fbgemm"])
def test_packages_of_every_backend(kind, drawn, tmp_path, backend):
    if backend == "tessera":
        try:
            load_libraries(["tessera_ops"])
        except LibraryError:
            pytest.skip("its library is not built (make build)")
    path, _ = make_package(tmp_path, name="ranker", backend=backend)
    loaded = load_package(path)
    with RunningServer(kind, "--model", path, "--drain-propagation-ms", 0) as running:
        for size in (1, 8, 100):
            message = drawn.samples(size)
            answer = running.predict(message)
            assert same_bits(scores_of(answer), run_in_process(loaded, message)), size


def test_dense_layers_in_bfloat16(kind, drawn, tmp_path):
    try:
        load_libraries(["tessera_ops"])
    except LibraryError:
        pytest.skip("its library is not built (make build)")
    path, _ = make_package(tmp_path, name="ranker", backend="tessera", dense_dtype="bf16")
    loaded = load_package(path)
    # A worker that waits a moment merges what comes at once.
    flags = ["--model", path, "--workers", 1, "--max-delay-us", 3000]
    with RunningServer(kind, *flags, "--drain-propagation-ms", 0) as running:
        messages = [drawn.samples(size) for size in [*SIZES, *[1] * 40]]
        with ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(running.predict, messages))
        for message, answer in zip(messages, answers, strict=True):
            assert same_bits(scores_of(answer), run_in_process(loaded, message))


def test_neighbours_in_a_batch_change_no_bit(kind, package, in_process, drawn):
    sizes = np.random.default_rng(0).integers(1, 9, 200).tolist()
    messages = [drawn.samples(size) for size in sizes]
    # A worker that waits a moment finds other requests, whatever the machine's speed.
    flags = ["--model", package, "--workers", 1, "--max-delay-us", 3000]
    flags += ["--drain-propagation-ms", 0]
    with RunningServer(kind, *flags) as server, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(server.predict, messages))
    assert max(answer.timings.batch_requests for answer in answers) > 1
    for message, answer in zip(messages, answers, strict=True):
        assert same_bits(scores_of(answer), run_in_process(in_process, message))


@pytest.mark.parametrize("limit", [("--max-batch-samples", 37), ("--max-batch-ids", 500)])
def test_a_request_cut_into_parts_changes_no_bit(kind, package, in_process, drawn, limit):
    message = drawn.samples(512)
    with RunningServer(
        kind, "--model", package, *limit, "--workers", 2, "--drain-propagation-ms", 0
    ) as server:
        answer = server.predict(message)
        passes = server.value("tessera_batches_total")
        largest = limit[1] if limit[0] == "--max-batch-samples" else 512
        assert answer.timings.batch_samples <= largest
    assert passes > 1
    assert same_bits(scores_of(answer), run_in_process(in_process, message))


def spread(message, schema):
    """The same request with its shared features copied to every sample, in plain loops."""
    B, shared = message.batch_size, message.shared_features
    features = [feature.name for feature in schema.group("id_list")]
    bags = {}

    def read(group, names, rows, row_of):
        lengths = np.frombuffer(group.lengths, "<i4").reshape(len(names), rows)
        values = np.frombuffer(group.values_int64, "<i8")
        at = 0
        for name, row_lengths in zip(names, lengths.tolist(), strict=True):
            cut = []
            for length in row_lengths:
                cut.append(values[at : at + length].tolist())
                at += length
            bags[name] = [cut[row_of(sample)] for sample in range(B)]

    rows = np.frombuffer(shared.row_index, "<i4")
    read(shared.features, list(shared.names), shared.num_rows, lambda sample: rows[sample])
    own = [name for name in features if name not in shared.names]
    read(message.id_list_features, own, B, lambda sample: sample)
    flat = pb.PredictionRequest()
    flat.CopyFrom(message)
    flat.ClearField("shared_features")
    flat.id_list_features.num_features = len(features)
    flat.id_list_features.lengths = i32([len(bag) for name in features for bag in bags[name]])
    flat.id_list_features.values_int64 = i64(
        [number for name in features for bag in bags[name] for number in bag]
    )
    return flat


def test_shared_features_score_as_if_every_sample_had_them(server, in_process, drawn):
    for candidates in (1, 2, 50):
        message = drawn.ranking(candidates)
        flat = spread(message, in_process.manifest.schema)
        assert same_bits(scores_of(server.predict(message)), run_in_process(in_process, flat)), (
            candidates
        )


def test_missing_dense_values(server, in_process, drawn):
    message = drawn.samples(2)
    dense = np.frombuffer(message.float_features.values, "<f4").copy()
    dense[[0, 3]] = np.nan
    message.float_features.values = f32(dense)
    assert same_bits(scores_of(server.predict(message)), run_in_process(in_process, message))


def test_an_answer_says_who_gave_it_and_how_long_it_took(server, drawn):
    answer = server.predict(drawn.samples(3))
    assert (answer.model_name, answer.model_version) == ("ranker", "3")
    assert answer.timings.batch_requests >= 1
    assert answer.timings.batch_samples >= 3
    assert answer.timings.forward_us > 0
