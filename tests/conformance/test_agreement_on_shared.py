"""Features that a request gives once: looked up once, with the bits of the request that repeats them."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tessera.serving.protocol import predictor_pb2 as pb
from tests.conformance.conformance_harness import RunningServer, i32, i64, same_bits, scores_of
from tests.conformance.test_answers import run_in_process, spread


def shared_request(drawn, schema, names, rows, *, narrow=False):
    """Candidate ``b`` uses row ``rows[b]`` of the features ``names``, as they are drawn."""
    B, features = len(rows), [feature.name for feature in schema.group("id_list")]
    message = drawn.samples(B)
    group = message.id_list_features
    lengths = np.frombuffer(group.lengths, "<i4")
    ids = np.frombuffer(group.values_int64, "<i8")
    if narrow:
        # No id of 32 bits that a rule refuses; both widths are served.
        ids = ids % 19
    bags = np.split(ids, np.cumsum(lengths)[:-1])
    R = max(rows) + 1

    def fill(group, names, count):
        chosen = [bags[features.index(name) * B + row] for name in names for row in range(count)]
        group.num_features = len(names)
        group.lengths = i32([len(bag) for bag in chosen])
        numbers = np.concatenate([ids[:0], *chosen])
        group.ClearField("values_int64")
        group.ClearField("values")
        if narrow:
            group.values = i32(numbers)
        else:
            group.values_int64 = i64(numbers)

    fill(group, [name for name in features if name not in names], B)
    shared = message.shared_features
    shared.names.extend(names)
    shared.num_rows = R
    shared.row_index = i32(rows)
    fill(shared.features, names, R)
    return message


def widened(message):
    """The same with int64 ids, as `spread` reads them."""
    wide = pb.PredictionRequest()
    wide.CopyFrom(message)
    for group in (wide.id_list_features, wide.shared_features.features):
        if group.values:
            group.values_int64 = i64(np.frombuffer(group.values, "<i4"))
            group.values = b""
    return wide


def drawn_requests(drawn, schema, count, *, sets, seed=0):
    """Requests of 1 to 40 candidates and 1 to as many users; one in four shares nothing."""
    rng = np.random.default_rng(seed)
    messages = []
    for number in range(count):
        B = int(rng.integers(1, 41))
        if number % 4 == 3:
            messages.append(drawn.samples(B))
            continue
        rows = rng.integers(0, rng.integers(1, B + 1), B)
        names = rng.permutation(sets[number % len(sets)]).tolist()
        messages.append(shared_request(drawn, schema, names, rows.tolist(), narrow=number % 3 == 1))
    return messages


def expected(in_process, message):
    if message.HasField("shared_features"):
        message = spread(widened(message), in_process.manifest.schema)
    return run_in_process(in_process, message)


ALL = ["user", "item", "history", "genre", "region", "tag", "bucket"]


def test_mixed_batches_change_no_bit(kind, package, in_process, drawn):
    sets = [["user"], ["user"], ["bucket", "user", "tag"], ALL]
    messages = drawn_requests(drawn, in_process.manifest.schema, 120, sets=sets)
    flags = ["--model", package, "--workers", 1, "--max-delay-us", 3000]
    flags += ["--drain-propagation-ms", 0]
    with RunningServer(kind, *flags) as server, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(server.predict, messages))
    assert max(answer.timings.batch_requests for answer in answers) > 1
    for message, answer in zip(messages, answers, strict=True):
        assert same_bits(scores_of(answer), expected(in_process, message))


@pytest.mark.parametrize("limit", [("--max-batch-samples", 7), ("--max-batch-ids", 60)])
def test_a_request_cut_into_parts_changes_no_bit(kind, package, in_process, drawn, limit):
    messages = drawn_requests(
        drawn, in_process.manifest.schema, 16, sets=[["user", "genre"], ["history"]], seed=1
    )
    with RunningServer(
        kind, "--model", package, *limit, "--workers", 2, "--drain-propagation-ms", 0
    ) as server:
        for message in messages:
            answer = server.predict(message)
            assert same_bits(scores_of(answer), expected(in_process, message))
        assert server.value("tessera_batches_total") > len(messages)


def one_user(drawn, schema, user_ids, candidates):
    """Every feature but the user's regions is empty."""
    message = drawn.samples(candidates)
    features = [feature.name for feature in schema.group("id_list")]
    group = message.id_list_features
    group.num_features = len(features) - 1
    group.lengths = i32([0] * (len(features) - 1) * candidates)
    group.values_int64 = b""
    shared = message.shared_features
    shared.names.append("region")
    shared.num_rows = 1
    shared.features.num_features = 1
    shared.features.lengths = i32([len(user_ids)])
    shared.features.values_int64 = i64(user_ids)
    shared.row_index = i32([0] * candidates)
    return message


def test_ids_are_counted_as_they_are_looked_up(server, in_process, drawn):
    assert in_process.runner.shares_rows
    message = one_user(drawn, in_process.manifest.schema, [3, 1_000, 2**40], 50)
    names = ("tessera_ids_total", "tessera_out_of_range_ids_total", "tessera_batch_ids_sum")
    server.settle()
    before = {name: server.value(name, model="ranker") for name in names}
    server.predict(message)
    server.settle()
    grown = {name: server.value(name, model="ranker") - before[name] for name in names}
    assert grown == dict(zip(names, (3, 2, 3), strict=True))


def test_shared_ids_beyond_a_batch_are_not_looked_up_for_each_candidate(
    kind, package, in_process, drawn
):
    ids = np.random.default_rng(0).integers(0, 50, 150)
    message = one_user(drawn, in_process.manifest.schema, ids, 300)
    with RunningServer(
        kind, "--model", package, "--max-batch-ids", 100, "--drain-propagation-ms", 0
    ) as server:
        assert same_bits(scores_of(server.predict(message)), expected(in_process, message))
        server.settle()
        assert server.value("tessera_ids_total") == len(ids)
        assert server.value("tessera_batches_total") == 1


def test_many_ids_are_few_when_they_are_shared(server, in_process, drawn):
    # 1,000 candidates of a user with 90,000 ids: repeated, far beyond the limit of 100,000.
    ids = np.random.default_rng(0).integers(0, 50, 90_000)
    message = one_user(drawn, in_process.manifest.schema, ids, 1_000)
    assert server.outcome(message.SerializeToString()) == ("OK", "")
    message = one_user(drawn, in_process.manifest.schema, np.zeros(100_001), 2)
    assert server.outcome(message.SerializeToString()) == (
        "INVALID_ARGUMENT",
        "the request has 100001 ids, the limit is 100000",
    )


def test_a_rejected_id_is_named_by_its_row(server, in_process, drawn):
    message = shared_request(drawn, in_process.manifest.schema, ["genre"], [0, 1, 1])
    shared = message.shared_features.features
    shared.lengths, shared.values_int64 = i32([1, 2]), i64([3, 4, 19])
    code, text = server.outcome(message.SerializeToString())
    assert code == "INVALID_ARGUMENT"
    assert text.replace('"', "'") == (
        "shared_features.features: feature 'genre', row 1: id 19 is outside [0, 19)"
    )
