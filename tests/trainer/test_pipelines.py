"""Which pipeline takes a run's steps, and what the loop gives it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tessera.errors import UserError
from tessera.training.data import open_data
from tessera.training.data.criteo import PackedRows
from tessera.training.data.dataset import packing
from tessera.training.distributed.model.model_parallel import DistributedModelParallel
from tessera.training.distributed.train_pipeline.sparse_dist import TrainPipelineSparseDist
from tessera.training.trained import load_trained
from tessera.training.trainer.assembly import assemble
from tessera.training.trainer.fitting import fit_transforms
from tessera.training.trainer.logs import read_metrics
from tessera.training.trainer.pipelines import chosen_pipeline, give_model_back, make_pipeline
from tessera.training.trainer.ranks import Ranks
from tessera.training.trainer.run import train
from tessera.training.trainer.run_folder import RunFolder
from tests.trainer.tiny_runs import changed


@pytest.fixture
def assembly(tiny):
    return assembled(tiny)


def assembled(config):
    train_rows = open_data(config.data, progress=False).train
    transforms = train_rows.dataset.columns.transforms()
    return assemble(
        config,
        transforms=transforms,
        fitted=fit_transforms(transforms, train_rows, progress=False),
        labels=train_rows.dataset.columns.labels,
        ranks=Ranks(),
        device=torch.device("cpu"),
    )


class LooksAtValues(nn.Module):
    """What ``torch.fx`` cannot trace: a branch on a value, beside a sharded module."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return self.model(batch) if batch.labels.sum() > 1 else None


def test_auto_is_plain_on_a_cpu(assembly):
    assert chosen_pipeline("auto", assembly.model) == "plain"
    assert chosen_pipeline("sparse_dist", assembly.model) == "sparse_dist"


def test_auto_is_plain_with_one_gpu(assembly, monkeypatch):
    monkeypatch.setattr(assembly.model, "device", torch.device("cuda"))
    assert chosen_pipeline("auto", assembly.model) == "sparse_dist"
    assert chosen_pipeline("auto", assembly.model, alone=True) == "plain"
    assert chosen_pipeline("sparse_dist", assembly.model, alone=True) == "sparse_dist"


def test_a_model_in_bfloat16_can_be_traced(tiny):
    """`torch.autocast` takes no device of a batch that is not there yet."""
    model = assembled(changed(tiny, precision="bf16")).model
    assert chosen_pipeline("sparse_dist", model) == "sparse_dist"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_model_that_cannot_be_traced_gets_the_plain_pipeline(assembly, monkeypatch, kind):
    parallel = DistributedModelParallel(LooksAtValues(assembly.model.module), sharders=[])
    monkeypatch.setattr(parallel, "device", torch.device(kind))
    assert chosen_pipeline("auto", parallel) == "plain"
    with pytest.raises(UserError, match=r"train\.pipeline=prefetch: .*cannot be traced"):
        chosen_pipeline("prefetch", parallel)


def test_the_ids_of_the_tables_are_sent_ahead(assembly, tiny):
    pipeline = make_pipeline("sparse_dist", assembly)
    assert isinstance(pipeline, TrainPipelineSparseDist)
    view = open_data(tiny.data, progress=False).train
    batch = view.dataset.take(0, 8)
    given = [assembly.on_device(batch, samples=8) for _ in range(3)]
    source = iter(given)
    losses = [float(pipeline.progress(source)[0]) for _ in given]
    (tables,) = [
        part for name, part in assembly.model.named_modules() if name.endswith("bag_collection")
    ]
    assert "forward" in vars(tables)  # the pipeline's own
    give_model_back(pipeline)
    assert "forward" not in vars(tables)
    assert losses[0] > losses[-1]


def test_packed_batches_change_no_bit_of_a_run(tiny, tmp_path, monkeypatch):
    as_they_are, packed = tmp_path / "as_they_are", tmp_path / "packed"
    train(tiny, as_they_are, progress=False)
    made = []

    def opened(*arguments, **options):
        splits = open_data(*arguments, **options)
        return replace(splits, train=packing(splits.train))

    def to(own, *arguments, **options):
        made.append(own.size)
        return given_to(own, *arguments, **options)

    given_to = PackedRows.to
    monkeypatch.setattr("tessera.training.trainer.run.open_data", opened)
    monkeypatch.setattr(PackedRows, "to", to)
    train(tiny, packed, progress=False)
    assert sum(made) == 2 * 320
    found, expected = (
        [{**row, "samples_per_second": ""} for row in read_metrics(RunFolder(out).metrics)]
        for out in (packed, as_they_are)
    )
    assert found == expected
    ours, theirs = (load_trained(out).model.state_dict() for out in (packed, as_they_are))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_epochs_without_an_evaluation(tiny, tmp_path):
    """The steps are those of a run that evaluates after each epoch; the pipeline goes on."""
    tiny = changed(
        tiny, epochs=5, eval_every_steps=None, pipeline="sparse_dist", log_every_steps=20
    )
    often, rarely = tmp_path / "often", tmp_path / "rarely"
    train(tiny, often, progress=False)
    train(changed(tiny, eval_every_epochs=2), rarely, progress=False)
    rows = {out: read_metrics(RunFolder(out).metrics) for out in (often, rarely)}
    steps = {
        out: [int(row["step"]) for row in found if row["split"] == "valid"]
        for out, found in rows.items()
    }
    assert steps == {often: [20, 40, 60, 80, 100], rarely: [40, 80, 100]}
    losses = [[row["loss"] for row in rows[out] if row["split"] == "train"] for out in rows]
    assert losses[0] == losses[1]
