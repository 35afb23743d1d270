"""Averages of weights against their formulas, on one rank and two, and what is made of them."""

import itertools

import pytest
import torch

from tessera.errors import UserError
from tessera.training.average_config import AverageConfig
from tessera.training.config import load_config
from tessera.training.modules.mc_modules import LFU_EvictionPolicy, MCHManagedCollisionModule
from tessera.training.sparse.jagged_tensor import JaggedTensor
from tessera.training.trained import load_trained, validation_batches
from tessera.training.trainer.averages import WeightAverages
from tessera.training.trainer.checkpoint import load_checkpoint
from tessera.training.trainer.files import latest_checkpoint, list_checkpoints
from tessera.training.trainer.logs import read_metrics
from tessera.training.trainer.run import train
from tessera.training.trainer.run_folder import RunFolder
from tests.trainer.test_train_ranks import on_ranks, train_here
from tests.training.ranks import run_on_ranks

KINDS = {
    "ema": AverageConfig(kind="ema", decay=0.8, every=2, start=3),
    "swa": AverageConfig(kind="swa", every=3),
}
# For runs of which only the last checkpoint is looked at.
SELDOM = "train.checkpoint_every_steps=100"
TIMED = "evaluation_samples_per_second"


def config_of(tiny_yaml, average, *more):
    lines = ["train.epochs=1", "model.batch_norm=true", "train.checkpoint_every_steps=1"]
    lines += [
        "train.keep_checkpoints=100",
        "train.batch_size=27",
        "train.eval_every_steps=5",
        *more,
    ]
    if average is not None:
        given = {key: value for key, value in vars(average).items() if value is not None}
        lines += [f"train.average.{key}={value}" for key, value in given.items()]
    return load_config(tiny_yaml, lines)


def checkpoints_of(out):
    found = list_checkpoints(RunFolder(out).checkpoints)
    return {step: load_checkpoint(path) for step, path in found.items()}


def last_of(out):
    """The last checkpoint; of many ranks, reading one takes a while."""
    return load_checkpoint(latest_checkpoint(RunFolder(out).checkpoints))


def averaged(weights, average, step):
    """The formula, step by step and in float64, of one tensor by step; None before the first."""
    seen = [weights[s].double() for s in range(max(average.start, 1), step + 1)
            if s % average.every == 0]  # fmt: skip
    if not seen:
        return None
    if average.kind == "swa":
        return torch.stack(seen).mean(dim=0)
    kept = average.decay**average.every
    result = seen[0]
    for value in seen[1:]:
        result = kept * result + (1 - kept) * value
    return result


def check_formula(out, average):
    found = checkpoints_of(out)
    assert list(found) == list(range(1, len(found) + 1))
    names = [name for name in found[1].model if name.startswith("arch.")]
    assert any("running_mean" in name for name in names)
    begun = 0
    for step, checkpoint in found.items():
        for name in names:
            weights = {s: one.model[name] for s, one in found.items()}
            expected = averaged(weights, average, step)
            assert (expected is None) == (not checkpoint.average)
            if expected is not None:
                assert checkpoint.average.keys() == set(names)
                # Float32, after some ten additions to numbers of magnitude 1.
                torch.testing.assert_close(
                    checkpoint.average[name].double(), expected, rtol=1e-5, atol=1e-6
                )
                begun += 1
    last = found[max(found)]
    assert begun > 5 * len(names)
    assert not all(torch.equal(last.average[name], last.model[name]) for name in names)


def loss_of(trained):
    """The mean loss of a loaded model over the validation rows."""
    logits, labels = [], []
    for batch in validation_batches(trained, 1000):
        with torch.no_grad():
            logits.append(trained.model(batch.dense_features, batch.sparse_features))
        labels.append(batch.labels)
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    return float(loss(torch.cat(logits), torch.cat(labels)))


def check_evaluations(out):
    """Every evaluation that a run logged is that of the checkpoint behind it, as it is loaded."""
    paths = list_checkpoints(RunFolder(out).checkpoints)
    rows = [row for row in read_metrics(RunFolder(out).metrics) if row["split"] == "valid"]
    assert len(rows) >= 2
    for row in rows:
        trained = load_trained(paths[int(row["step"])])
        assert loss_of(trained) == pytest.approx(float(row["loss"]), rel=1e-5)
    final = RunFolder(out).read_final()
    best = load_trained(out)
    assert best.step == final["best_step"]
    assert loss_of(best) == pytest.approx(final["valid"]["log_loss"], rel=1e-5)


def same_tensors(one, other, parts=("model", "average")):
    for part in parts:
        ours, theirs = getattr(one, part), getattr(other, part)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_averages_by_the_formula_and_trains_as_without(tiny_yaml, tmp_path, kind):
    config = config_of(tiny_yaml, KINDS[kind])
    train(config, tmp_path / "run", progress=False)
    check_formula(tmp_path / "run", KINDS[kind])
    check_evaluations(tmp_path / "run")
    train(config_of(tiny_yaml, None, SELDOM), tmp_path / "plain", progress=False)
    ours, plain = last_of(tmp_path / "run"), last_of(tmp_path / "plain")
    assert ours.progress["step"] == plain.progress["step"]
    same_tensors(ours, plain, ["model"])
    assert plain.average == {}


def test_a_stopped_run_goes_on_with_its_averages(tiny_yaml, tmp_path):
    config = config_of(tiny_yaml, KINDS["ema"], SELDOM)
    train(config, tmp_path / "whole", progress=False)
    calls = itertools.count()
    stopped = train(config, tmp_path / "cut", progress=False, should_stop=lambda: next(calls) > 7)
    assert stopped.final is None
    again = train(config, tmp_path / "cut", resume=True, progress=False)
    assert {**again.final, TIMED: 0} == {**RunFolder(tmp_path / "whole").read_final(), TIMED: 0}
    same_tensors(last_of(tmp_path / "cut"), last_of(tmp_path / "whole"))
    other = config_of(tiny_yaml, KINDS["swa"], SELDOM)
    with pytest.raises(UserError, match=r"differs from that of the run in .*train\.average"):
        train(other, tmp_path / "cut", resume=True, progress=False)


@pytest.mark.parametrize(("kind", "sharding"), [("ema", "row_wise"), ("swa", "column_wise")])
def test_two_ranks_average_by_the_formula(tiny_yaml, tmp_path, kind, sharding):
    more = [f"train.sharding={sharding}", "model.embedding_dim=8"]
    config = config_of(tiny_yaml, KINDS[kind], *more)
    on_ranks(2, config, tmp_path / "run")
    check_formula(tmp_path / "run", KINDS[kind])
    check_evaluations(tmp_path / "run")
    cut, seldom = tmp_path / "cut", config_of(tiny_yaml, KINDS[kind], *more, SELDOM)
    assert on_ranks(2, seldom, cut, stop_after=6)[0] == "interrupted"
    on_ranks(2, seldom, cut, resume=True)
    same_tensors(last_of(cut), last_of(tmp_path / "run"))


@pytest.mark.parametrize("first", [1, 2])
def test_averages_go_from_one_rank_to_two_and_back(tiny_yaml, tmp_path, first):
    config = config_of(tiny_yaml, KINDS["swa"], "train.sharding=row_wise")
    out = tmp_path / "run"
    if first == 1:
        calls = itertools.count()
        train(config, out, progress=False, should_stop=lambda: next(calls) > 7)
        run_on_ranks(2, train_here, config, out, True, None)
    else:
        on_ranks(2, config, out, stop_after=6)
        train(config, out, resume=True, progress=False)
    kinds = {path.is_dir() for path in list_checkpoints(RunFolder(out).checkpoints).values()}
    assert kinds == {True, False}
    check_formula(out, KINDS["swa"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "swa", "decay": 0.9}, "decay=0.9: swa is a mean; leave decay out"),
        ({"decay": 1.0}, "decay=1.0: give a number between 0 and 1"),
        ({"every": 0}, "every=0: give at least 1"),
    ],
)
def test_averages_that_are_none_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        AverageConfig(**fields)


def test_ids_that_wait_in_a_map_of_managed_collisions_stay():
    model = torch.nn.ModuleDict(
        {
            "arch": torch.nn.Linear(2, 2),
            "ids": MCHManagedCollisionModule(
                zch_size=4,
                device=torch.device("cpu"),
                eviction_policy=LFU_EvictionPolicy(),
                eviction_interval=3,
            ),
        }
    )
    averages = WeightAverages(AverageConfig(kind="ema", decay=0.5, every=1), model)
    asked = {"f": JaggedTensor(torch.tensor([7, 8]), lengths=torch.tensor([2]))}
    for step in range(1, 4):
        model["ids"].profile(asked)
        averages.after_step(step)
        with averages.in_use():
            pass
    # With the third step the map has what all three of them have asked for.
    assert (model["ids"]._mch_counts.sort().values[-2:] == 3).all()
