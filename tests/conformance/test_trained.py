"""The architectures of `tessera train` through `package-model` to an answer."""

import numpy as np
import pytest
import torch

from tessera.cli import main
from tessera.serving.package.loading import load_package
from tessera.training.trained import load_trained, validation_batches
from tests.conformance.conformance_harness import RunningServer, same_bits
from tests.conformance.tasks_module import draw, expected
from tests.trainer.tiny_runs import TINY, write_criteo


@pytest.fixture(scope="module", params=["deepfm", "dlrm", "dlrm_dcn"])
def trained(request, tmp_path_factory):
    """The folder of a run, and the package that it became."""
    folder = tmp_path_factory.mktemp(request.param)
    data = write_criteo(folder / "clicks.tsv", rows=400)
    (folder / "tiny.yaml").write_text(TINY.replace("PATH", str(data)))
    run, path = folder / "run", folder / "m.pt"
    config = ["--config", str(folder / "tiny.yaml"), f"model.arch={request.param}"]
    assert main(["train", *config, "train.epochs=1", "--out", str(run), "--quiet"]) == 0
    assert main(["package-model", str(run), "--dtype", "fp32", "--out", str(path)]) == 0
    return run, path


def test_the_package_scores_as_the_trained_model(trained):
    run, path = trained
    manifest = load_package(path).manifest
    assert manifest.evaluation.max_abs_score_error < 2e-5
    found = load_trained(run)
    parameters = sum(p.numel() for p in found.model.parameters())
    assert manifest.bytes_fp32 == 4 * parameters
    assert len(manifest.tables) == sum(
        len(part.embedding_bag_configs()) for part in found.model.collections().values()
    )
    rows = sum(batch.size for batch in validation_batches(found, 100))
    assert manifest.evaluation.rows == rows


def test_both_servers_answer_with_the_packages_bits(trained, kind):
    loaded = load_package(trained[1])
    with RunningServer(kind, "--model", trained[1], "--drain-propagation-ms", 0) as server:
        for size in (1, 3, 40):
            message = draw(loaded, size, seed=size)
            answer = server.predict(message).predictions["default"].data
            wanted = expected(loaded, message)["default"]
            assert same_bits(np.array(answer), wanted)
            assert torch.isfinite(torch.tensor(answer)).all()
