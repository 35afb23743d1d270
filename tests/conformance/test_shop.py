"""Models of sequences and of several labels: trained, packaged in int8, answered by both servers."""

import numpy as np
import pytest

from tessera.cli import main
from tessera.serving.package.loading import load_package
from tests.conformance.conformance_harness import RunningServer, same_bits
from tests.conformance.tasks_module import draw, expected
from tests.packaging.test_same_bits import check_same_bits
from tests.trainer.shop import LABELS as TASKS
from tests.trainer.shop import write_config

TERMS = ["first_order: true", "fm: true"]
MODELS = {
    "din": (
        ("clicked",),
        [
            *("attention: {history: item}", "sequence_length: 5"),
            *("batch_norm: true", "embedding_dropout: 0.1", *TERMS),
        ],
    ),
    "sasrec": (
        ("clicked",),
        ["sequence: history", "candidate: item", "sequence_length: 5", "fm: true"],
    ),
    "mmoe": (("clicked", "spent"), ["batch_norm: true", *TERMS]),
    "ple": (("clicked", "bought"), []),
    "deepfm": (("spent",), []),
    "dlrm": (("clicked", "spent"), [*TERMS, "concat: true", "batch_norm: true"]),
    "dlrm_dcn": (("clicked",), ["first_order: true", "concat: true"]),
}
CHANGES = {"dlrm_dcn": ["model.embedding_dim=auto"]}
FLAGS = {"dlrm": ["--shards", "2"]}
LABELS = {**{arch: labels for arch, (labels, _) in MODELS.items()}, "ensemble": ("clicked",)}


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The packages of runs of `MODELS`, by name."""
    folder = tmp_path_factory.mktemp("shop")
    made = {}
    for arch, (labels, lines) in MODELS.items():
        config = write_config(folder / f"{arch}.yaml", arch, labels=labels, model=lines)
        run, made[arch] = folder / arch, folder / f"{arch}.pt"
        train = ["train", "--config", str(config), "train.metric=log_loss", "train.epochs=1"]
        assert main([*train, *CHANGES.get(arch, []), "--out", str(run), "--quiet"]) == 0
        package = ["package-model", str(run), "--out", str(made[arch])]
        assert main([*package, *FLAGS.get(arch, [])]) == 0
    made["ensemble"] = folder / "ensemble.pt"
    runs = [str(folder / arch) for arch in ("din", "sasrec", "dlrm_dcn")]
    words = ["--weights", "2,1,1", "--shards", "2", "--out", str(made["ensemble"])]
    assert main(["package-model", *runs, *words]) == 0
    return made


@pytest.fixture(scope="module")
def server(kind, packages):
    flags = [word for path in packages.values() for word in ("--model", path)]
    with RunningServer(kind, *flags, "--drain-propagation-ms", 0) as running:
        yield running


@pytest.mark.parametrize("arch", LABELS)
def test_servers_answer_every_label_with_the_packages_bits(arch, server, packages):
    loaded = load_package(packages[arch])
    labels = LABELS[arch]
    names = list(labels) if len(labels) > 1 else ["default"]
    assert [output.name for output in loaded.manifest.schema.outputs] == names
    for size in (1, 3, 40):
        message = draw(loaded, size, seed=size)
        message.model_name = arch
        answer = server.predict(message).predictions
        wanted = expected(loaded, message)
        assert set(answer) == set(wanted) == set(names)
        for name, scores in wanted.items():
            assert same_bits(np.array(answer[name].data), scores)


@pytest.mark.parametrize("arch", LABELS)
def test_a_package_scores_as_the_model_does(arch, packages):
    manifest = load_package(packages[arch]).manifest
    assert manifest.evaluation.rows == 40
    assert manifest.evaluation.max_abs_score_error < 0.02
    assert (manifest.evaluation.fp32.auc is None) == ("clicked" not in LABELS[arch])
    assert {label: own.task for label, own in manifest.evaluation.labels.items()} == {
        ("default" if len(LABELS[arch]) == 1 else label): TASKS[label].task
        for label in LABELS[arch]
    }
    check_same_bits(packages[arch])
