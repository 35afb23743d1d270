"""Packages for GPUs behind the servers: one GPU, copies on several, shards over several."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tessera.serving.package.golden import FP8_TOLERANCE, TOLERANCE
from tessera.serving.package.loading import load_package
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tests.conformance.conformance_harness import RunningServer, scores_of
from tests.conformance.test_answers import SIZES, run_in_process
from tests.package_factory import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

SHARDED = {
    sharding: {"shards": 2, "sharding": sharding}
    for sharding in ("table_wise", "row_wise", "column_wise")
}


@pytest.fixture(scope="module")
def package_for(tmp_path_factory):
    """Writes the model of the suite's first package, for any device."""
    folder = tmp_path_factory.mktemp("gpus")
    written = {}

    def write(**chosen):
        name = "-".join(map(str, chosen.values()))
        if name not in written:
            written[name] = folder / f"{name}.pt"
            options = PackageOptions(name="ranker", version="3", backend="tessera", **chosen)
            write_model(make_model(), written[name], options)
        return written[name]

    return write


@pytest.fixture(scope="module")
def on_cpu(package_for):
    return load_package(package_for(device="cpu"))


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(((0,), {}), id="one"),
        pytest.param(((0, 1), {}), id="copies"),
        pytest.param(((0,), SHARDED["row_wise"]), id="shards-on-one"),
        *(pytest.param(((0, 1), chosen), id=name) for name, chosen in SHARDED.items()),
        pytest.param(((1, 0), SHARDED["table_wise"]), id="turned-round"),
    ],
)
def test_answers_are_those_of_the_cpu(kind, place, package_for, on_cpu, draw_with):
    gpus, chosen = place
    if torch.cuda.device_count() <= max(gpus):
        pytest.skip(f"there are {torch.cuda.device_count()} GPUs")
    path = package_for(device="cuda", **chosen)
    flags = ["--model", path, "--gpus", ",".join(map(str, gpus)), "--drain-propagation-ms", 0]
    drawn = draw_with(max_bag=20)
    messages = [drawn.samples(size) for size in [*SIZES, *[1] * 200]]
    expected = [run_in_process(on_cpu, message) for message in messages]
    with RunningServer(kind, *flags) as server:
        with ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(server.predict, messages))
        held = [
            server.value("tessera_device_memory_bytes", device=f"cuda:{device}") for device in gpus
        ]
        assert server.value("tessera_requests_total", code="OK") == len(messages)
        inflight = server.families()["tessera_inflight_batches"].samples
        per_copy = gpus[::2] if chosen else gpus
        assert [sample.labels["device"] for sample in inflight] == [f"cuda:{d}" for d in per_copy]
        server.signal()
        assert server.exit_status() == 0
    for answer, scores in zip(answers, expected, strict=True):
        np.testing.assert_allclose(scores_of(answer), scores, atol=TOLERANCE["cuda"], rtol=0)
    assert min(held) > 0


def test_a_gpu_that_is_not_there(kind, package_for):
    path = package_for(device="cuda")
    missing = torch.cuda.device_count()
    server = RunningServer(kind, "--model", path, "--gpus", missing)
    assert server.exit_status() == 2
    server.wait_for(lambda: any(f"GPU {missing}" in line for line in server.noise))


def test_dense_layers_in_fp8(kind, draw_with, tmp_path):
    path = tmp_path / "fp8.pt"
    options = PackageOptions(
        name="ranker", version="3", backend="tessera", device="cuda", dense_dtype="fp8"
    )
    write_model(make_model(dense_layers=(32,), over_layers=(64, 32)), path, options)
    loaded = load_package(path)
    drawn = draw_with(max_bag=20)
    messages = [drawn.samples(size) for size in SIZES]
    with RunningServer(kind, "--model", path, "--drain-propagation-ms", 0) as server:
        for message in messages:
            scores = run_in_process(loaded, message)
            found = scores_of(server.predict(message))
            np.testing.assert_allclose(found, scores, atol=FP8_TOLERANCE, rtol=0)
