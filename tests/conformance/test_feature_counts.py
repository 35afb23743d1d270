"""Values that are missing, outside of what the training rows held, and where they lie: by feature, alike on both servers."""

import grpc
import numpy as np
import pytest
import torch

from tessera.serving.client import PredictorClient, Shared
from tessera.serving.client.rows import rows_to_parts
from tessera.serving.package.loading import load_package
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import package_run, package_runs
from tessera.serving.server.metrics.range_counts import RANGE_BUCKETS
from tessera.training.config import ExperimentConfig, load_config
from tessera.training.trained import load_trained
from tessera.training.trainer.run import train
from tests.conformance.conformance_harness import RunningServer
from tests.conformance.test_raw_rows import IDS, request_of
from tests.kserve_messages import infer, infer_request
from tests.string_requests import infer_with_strings
from tests.transforms.harness import jagged
from tests.transforms.table_runs import write_run

OUTSIDE, MISSING = "tessera_feature_outside_range_total", "tessera_feature_missing_total"
# In the range, at its ends, just outside of it, far outside, and missing.
PRICES = [100.0, "least", "most", "below", "above", 3e38, -3e38, np.nan]
AGES = [10, 90, 9.5, 91, np.nan, 40, np.nan, -1e-30]
KNOWN = 5 * 1000003 - 5


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("counts")
    assert train(load_config(write_run(folder)), folder / "run", progress=False).final
    return folder / "run"


@pytest.fixture(scope="module")
def package(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("package") / "m.pt"
    package_run(run, path, PackageOptions(name="m"), progress=False)
    return load_package(path)


@pytest.fixture
def server(package, kind):
    flags = ("--model", package.path, "--drain-propagation-ms", 0, "--max-batch-samples", 64)
    with RunningServer(kind, *flags) as running:
        yield running


def dense_rows(schema):
    price = schema.dense_ranges[0]
    ends = {
        "least": np.float32(price.least),
        "most": np.float32(price.most),
        "below": np.nextafter(np.float32(price.least), np.float32(-1)),
        "above": np.nextafter(np.float32(price.most), np.float32(1e9)),
    }
    return [[ends.get(p, p), a] for p, a in zip(PRICES, AGES, strict=True)]


def bags_of(count, seed=0):
    chance = np.random.default_rng(seed)
    pools = {
        "country": [5 * 1000003 - 5, -5, 0, 2**63 - 1, 16 * 1000003 - 5],
        "device": [1, 2, -(2**63)],
        "item": [*range(-3, 110), 2**40],
    }
    return {
        name: [list(map(int, chance.choice(pool, chance.integers(3)))) for _ in range(count)]
        for name, pool in pools.items()
    }


def slowly(run, schema, dense, bags):
    """What both servers must count of these rows."""
    outside, missing = {}, {}
    for name, own, values in zip(
        schema.dense_features, schema.dense_ranges, zip(*dense, strict=True), strict=True
    ):
        missing[name] = sum(bool(np.isnan(v)) for v in values)
        outside[name] = sum(bool(v < own.least or v > own.most) for v in values)
    vocabulary = load_trained(run).model.preprocessor.vocabulary
    ids = jagged(list(bags), bags)
    rows = torch.split(vocabulary(ids), [sum(map(len, own)) for own in bags.values()])
    for name, own in zip(bags, rows, strict=True):
        if name != "device":  # which is hashed
            outside[name] = int((own == 0).sum())
    return outside, missing


def counted(server):
    families = server.families()
    return tuple(
        {
            sample.labels["feature"]: sample.value
            for sample in families[name.removesuffix("_total")].samples
            if sample.name == name and sample.labels["model"] == "m"
        }
        for name in (OUTSIDE, MISSING)
    )


def check(server, expected):
    server.wait_for(lambda: counted(server)[1] == expected[1] and counted(server)[0] == expected[0])


def test_values_outside_and_missing_are_counted_by_feature(server, run, package):
    schema = package.manifest.schema
    zeros = counted(server)
    assert "unlike the training rows" not in server.http("/")[1]
    assert set(zeros[0]) == {"price", "age", "country", "item"}
    assert set(zeros[1]) == {"price", "age"}
    assert not any({**zeros[0], **zeros[1]}.values())
    dense, bags = dense_rows(schema), bags_of(len(PRICES))
    expected = slowly(run, schema, dense, bags)
    assert all(expected[0].values())
    server.predict(request_of(dense, bags, package))
    check(server, expected)
    many = 150  # more than a batch, so that the request is cut
    more = np.tile(dense, (many, 1))[:many].tolist()
    more_bags = bags_of(many, seed=1)
    server.predict(request_of(more, more_bags, package))
    twice = slowly(run, schema, more, more_bags)
    both = tuple({k: a[k] + b[k] for k in a} for a, b in zip(expected, twice, strict=True))
    check(server, both)
    outside, missing = both
    page = server.http("/")[1]
    for name, count in outside.items():
        cells = ("m", package.manifest.version, name, count, missing.get(name, 0))
        assert "".join(f"<td>{cell}</td>" for cell in cells) in page


def positions(server):
    """By feature the cumulative counts by bound, the sum of the positions and their number."""
    found = {}
    for sample in server.families()["tessera_feature_range_position"].samples:
        own = found.setdefault(sample.labels["feature"], {})
        bound = sample.labels.get("le")
        own[sample.name.rpartition("_")[2] if bound is None else float(bound)] = sample.value
    return found


def positions_slowly(schema, dense):
    found = {}
    for name, own, values in zip(
        schema.dense_features, schema.dense_ranges, zip(*dense, strict=True), strict=True
    ):
        given = [float(np.float32(value)) for value in values if not np.isnan(value)]
        width = own.most - own.least
        bounds = [float(np.float32(own.least + share * width)) for share in RANGE_BUCKETS]
        below = [sum(value <= bound for value in given) for bound in bounds]
        total = sum(min(max((value - own.least) / width, 0), 1) for value in given)
        found[name] = (below, len(given), total)
    return found


def test_where_values_lie_in_the_training_rows_range_is_counted(server, package):
    schema = package.manifest.schema
    assert all(own["count"] == own["sum"] == 0 for own in positions(server).values())
    chance = np.random.default_rng(4)
    calls = [dense_rows(schema)]
    for samples in (1, 3, 150):  # the last one is more than a batch, so that it is cut
        ends = [(own.least, own.most) for own in schema.dense_ranges]
        drawn = [chance.uniform(low - 5, high + 5, samples) for low, high in ends]
        calls.append(np.stack(drawn, axis=1).astype(np.float32).tolist())
    for dense in calls:
        server.predict(request_of(dense, bags_of(len(dense)), package))
    expected = positions_slowly(schema, [row for dense in calls for row in dense])
    rows = sum(map(len, calls))
    server.wait_for(lambda: positions(server)["price"]["count"] == rows - 1)
    found = positions(server)
    assert set(found) == {"price", "age"}
    for name, (below, given, total) in expected.items():
        own = found[name]
        assert [own[bound] for bound in RANGE_BUCKETS] == below
        assert own[np.inf] == own["count"] == given
        assert own["sum"] == pytest.approx(total, rel=1e-6)
        # What is counted as outside lies at or beyond the ends.
        outside = counted(server)[0][name]
        assert own["count"] - own[1] <= outside <= own[0] + own["count"] - own[1]


def test_values_come_in_any_form(server, run, package):
    schema = package.manifest.schema
    dense, bags = dense_rows(schema), IDS
    dense = dense[: len(IDS["item"])]
    expected = slowly(run, schema, dense, bags)
    ids = request_of(dense, bags, package)
    strings = type(ids).FromString(ids.SerializeToString())
    group = strings.id_list_features
    numbers = np.frombuffer(group.values_int64 or b"", "<i8").tolist()
    group.values = group.values_int64 = b""
    group.values_bytes.extend(str(number).encode() for number in numbers)
    server.predict(strings)
    infer(server, infer_request(ids))
    infer(server, infer_with_strings(ids, strings))
    check(server, tuple({name: 3 * n for name, n in own.items()} for own in expected))


def test_features_that_samples_share_count_once(server, run, package):
    schema = package.manifest.schema
    shared = Shared.one_user({"country": [[KNOWN, 3, 4]]}, 5)
    items = [[7], [-1], [], [1000], [8]]
    with PredictorClient(server.address, schema=schema) as client:
        own = {"item": items, "device": [[]] * 5}
        client.predict(np.full((5, 2), 50.0, np.float32), own, shared=shared)
    looked_up = 1 if counted_once(server) else 5
    expected = {"price": 0, "age": 0, "country": 2 * looked_up, "item": 2}
    server.wait_for(lambda: counted(server)[0] == expected)


def counted_once(server):
    """Whether the model looks shared features up once, as the ids' own counter has it."""
    server.settle()
    return server.value("tessera_ids_total", model="m") == 3 + 4


def test_an_ensemble_counts_by_its_first_members_vocabularies(run, kind, tmp_path):
    """The other member's are larger in one table and smaller in the other, and its columns stand otherwise."""
    config = load_config(write_run(tmp_path))
    plain = config.to_plain()
    columns = plain["data"]["columns"]
    columns["country"]["transform"] = [{"vocabulary": {"min_count": 35}}]
    columns["item"]["transform"] = [{"vocabulary": {"min_count": 3}}]
    data = plain["data"] | {"columns": {n: columns[n] for n in reversed(columns)}}
    other = ExperimentConfig.from_plain({**plain, "data": data}, name="other")
    assert train(other, tmp_path / "other", progress=False).final
    path = tmp_path / "both.pt"
    runs = [run, tmp_path / "other"]
    package_runs(runs, path, PackageOptions(name="m"), skip_evaluation=True, progress=False)
    loaded = load_package(path)
    schema = loaded.manifest.schema
    dense, bags = dense_rows(schema), bags_of(len(PRICES))
    with RunningServer(kind, "--model", path, "--drain-propagation-ms", 0) as server:
        server.predict(request_of(dense, bags, loaded))
        check(server, slowly(run, schema, dense, bags))


def test_what_is_refused_is_not_counted(server, package):
    for bad in (np.inf, -np.inf):
        with pytest.raises(grpc.RpcError, match="expected only NaN"):
            server.predict(request_of([[bad, 1000]], {n: [[]] for n in IDS}, package))
    server.predict(request_of([[50, 1000]], {n: [[]] for n in IDS}, package))
    check(server, ({"price": 0, "age": 1, "country": 0, "item": 0}, {"price": 0, "age": 0}))


def test_rows_of_raw_values_are_counted_as_they_are(server, package):
    schema = package.manifest.schema
    rows = [{"price": 1e6, "country": KNOWN, "clicked": 1}, {"age": 11, "item": 5000}]
    dense, _ = rows_to_parts(rows, schema)
    assert np.isnan(dense).sum() == 2
    with PredictorClient(server.address, schema=schema) as client:
        client.predict_rows(rows)
    check(server, ({"price": 1, "age": 0, "country": 0, "item": 1}, {"price": 1, "age": 1}))
