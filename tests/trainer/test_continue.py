"""`tessera train --continue`: runs that go on from each other are one loop over all of their data.

The bound is equality of every bit: weights, states of both optimizers, averages and random numbers.
"""

import fcntl
import itertools
import json
import shutil
import threading

import pytest
import torch

from tessera.cli import main
from tessera.errors import UserError
from tessera.training.config import load_config
from tessera.training.data.loader import BatchLoader
from tessera.training.data.opening import open_data
from tessera.training.trainer.assembly import assemble
from tessera.training.trainer.checkpoint import load_checkpoint, read_plain
from tessera.training.trainer.files import latest_checkpoint
from tessera.training.trainer.fitting import fit_transforms
from tessera.training.trainer.logs import read_metrics
from tessera.training.trainer.ranks import Ranks
from tessera.training.trainer.run import train
from tessera.training.trainer.run_folder import LOCK, RunFolder
from tessera.training.trainer.run_start import label_means
from tessera.training.trainer.step import StepBatch
from tests.trainer.test_growing_folder import SIZES, arrive, end
from tests.trainer.test_growing_folder import config as following
from tests.trainer.test_growing_folder import folder as growing  # noqa: F401 - a fixture
from tests.trainer.test_resume import bits
from tests.training.ranks import run_on_ranks
from tests.transforms.table_runs import write_run, write_table

STATES = ("model", "average", "fused_optimizer", "dense_optimizer", "rng")


def state(run):
    """All that a run's latest checkpoint goes on with."""
    checkpoint = load_checkpoint(latest_checkpoint(RunFolder(run).checkpoints))
    return {name: bits(getattr(checkpoint, name)) for name in STATES}


def plain_loop(*configs):
    """The state after the steps of these configs one after the other, taken by hand, without the trainer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(configs[0].train.seed)
        assembly, step, epochs, total = None, 0, 0, 0
        for config in configs:
            how, data = config.train, open_data(config.data, progress=False).train
            if assembly is None:
                columns = data.dataset.columns
                assembly = assemble(
                    config,
                    labels=columns.labels,
                    transforms=columns.transforms(),
                    fitted=fit_transforms(columns.transforms(), data, progress=False),
                    ranks=Ranks(),
                    device=torch.device("cpu"),
                )
                assembly.begin_at(label_means(data.labels()))
            loader = BatchLoader(
                data, batch_size=how.batch_size, shuffle=True, seed=how.seed, numbered=True
            )
            total += how.epochs * loader.num_batches
            for epoch in range(epochs, epochs + how.epochs):
                for batch in loader.epoch(epoch):
                    factor = how.schedule.factor(step=step, total_steps=total)
                    for optimizer, peak in (
                        (assembly.dense_optimizer, how.dense_optimizer.learning_rate),
                        (assembly.model.fused_optimizer, how.embedding_optimizer.learning_rate),
                    ):
                        for group in optimizer.param_groups:
                            group["lr"] = peak * factor
                    given = StepBatch(batch, len(batch.labels), assembly.preparation)
                    loss, _ = assembly.model(given.to(torch.device("cpu")))
                    assembly.dense_optimizer.zero_grad()
                    loss.backward()
                    assembly.dense_optimizer.step()
                    step += 1
            epochs += how.epochs
        found = {name: bits(value) for name, value in assembly.state().items()}
        found["rng"] = bits(torch.get_rng_state())
    torch.set_num_threads(threads)
    return found


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A folder with the config ``run.yaml``, a finished run ``a`` of it, and ``other.csv`` with other rows."""
    folder = tmp_path_factory.mktemp("first")
    write_run(folder)
    write_table(folder / "other.csv", seed=1)
    text = (folder / "run.yaml").read_text()
    text = text.replace("over_layers: [8]", "over_layers: [8], dropout: 0.2")
    more = "schedule: {kind: cosine, warmup_steps: 4}, threads: 1"
    (folder / "run.yaml").write_text(text.replace("threads: 1", more))
    command = ["train", "--config", str(folder / "run.yaml"), "--out", str(folder / "a"), "--quiet"]
    assert main(command) == 0
    return folder


def go_on(folder, out, *arguments):
    return main(["train", "--continue", str(folder / "a"), "--out", str(out), "--quiet",
                 *map(str, arguments)])  # fmt: skip


def test_two_runs_are_one_plain_loop(first, tmp_path):
    out = tmp_path / "b"
    changes = [f"data.path={first / 'other.csv'}", "train.epochs=1", "train.batch_size=50"]
    changes += ["train.embedding_optimizer.learning_rate=0.01", "run.report=true"]
    assert go_on(first, out, *changes) == 0
    configs = [load_config(RunFolder(run).config) for run in (first / "a", out)]
    assert configs[1].train.batch_size == 50
    assert state(out) == plain_loop(*configs)
    # Vocabularies and all else that was fitted are those of the first run, which the tables belong to.
    before, after = (
        read_plain(latest_checkpoint(run / "checkpoints")) for run in (first / "a", out)
    )
    assert (after["fitted"], after["ranges"]) == (before["fitted"], before["ranges"])
    steps = before["progress"]["step"]
    rows = read_metrics(RunFolder(out).metrics)
    assert [int(row["step"]) > steps for row in rows] == [True] * len(rows)
    assert int(rows[-1]["epoch"]) == 3
    final = RunFolder(out).read_final()
    record = json.loads((out / "continues.json").read_text())
    assert final["continues"] == record
    assert record == {
        "run": str(first / "a"),
        "checkpoint": f"checkpoints/step-{steps:010d}.pt",
        "step": steps,
        "samples": before["progress"]["samples"],
    }
    report = RunFolder(out).report.read_text()
    assert f"The run goes on from <code>{first / 'a'}</code>" in report


def test_stops_of_a_continued_run_change_no_bit(first, tmp_path):
    config = load_config(first / "a" / "config.yaml", [f"data.path={first / 'other.csv'}"])
    straight, out, source = tmp_path / "straight", tmp_path / "b", tmp_path / "a"
    shutil.copytree(first / "a", source)
    train(config, straight, continues=source, progress=False)
    # Stopped before its first checkpoint, it begins with the origin's again.
    train(config, out, continues=source, progress=False, should_stop=lambda: True)
    (latest_checkpoint(out / "checkpoints")).unlink()
    calls = itertools.count()
    train(config, out, resume=True, progress=False, should_stop=lambda: next(calls) >= 4)
    shutil.rmtree(source)  # it has a checkpoint of its own now
    assert train(config, out, resume=True, progress=False).status == "finished"
    assert state(out) == state(straight)


def test_another_epoch_is_the_next_one(tiny_yaml, tmp_path):
    common = ["train.schedule.kind=constant", "train.average={kind: swa, every: 3}"]
    one, two = (load_config(tiny_yaml, [*common, f"train.epochs={n}"]) for n in (1, 2))
    train(two, tmp_path / "two", progress=False)
    train(one, tmp_path / "one", progress=False)
    train(one, tmp_path / "next", continues=tmp_path / "one", progress=False)
    assert state(tmp_path / "next") == state(tmp_path / "two")


def train_both(one, two, out):
    """On a rank: two epochs at once, and one after the other."""
    train(two, out / "two", progress=False)
    train(one, out / "one", progress=False)
    train(one, out / "next", continues=out / "one", progress=False)
    train(one, out / "spread", continues=out / "alone", progress=False)


def test_on_two_ranks_and_from_one(tiny_yaml, tmp_path):
    common = ["train.schedule.kind=constant", "train.sharding=row_wise", "model.dropout=0"]
    common += ["train.eval_every_steps=null", "train.checkpoint_every_steps=null"]
    one, two = (load_config(tiny_yaml, [*common, f"train.epochs={n}"]) for n in (1, 2))
    train(one, tmp_path / "alone", progress=False)
    run_on_ranks(2, train_both, one, two, tmp_path)
    found = {
        name: load_checkpoint(latest_checkpoint(tmp_path / name / "checkpoints"))
        for name in ("two", "next")
    }
    assert bits(found["two"].model) == bits(found["next"].model)
    # What one rank has begun, one and two ranks go on with alike, but for the order of float32 sums.
    train(one, tmp_path / "again", continues=tmp_path / "alone", progress=False)
    again, spread = (
        load_checkpoint(latest_checkpoint(tmp_path / name / "checkpoints")).model
        for name in ("again", "spread")
    )
    for name, value in again.items():
        torch.testing.assert_close(spread[name], value, rtol=0, atol=1e-3)
    # And from two ranks to one.
    train(one, tmp_path / "back", continues=tmp_path / "spread", progress=False)
    assert (
        read_plain(latest_checkpoint(tmp_path / "back" / "checkpoints"))["progress"]["step"] == 60
    )


def test_a_growing_folder_goes_on_where_it_was(growing):  # noqa: F811 - the fixture
    first = following(growing, follow={"max_steps": 4})
    assert train(first, growing / "first", progress=False).step == 4
    # Rows 64 to 69 of the first file, and the other files, were not trained on.
    steps, given, once = -(-sum(SIZES) // 16), following(growing), threading.Event()

    def all_come():
        if not once.is_set():
            once.set()
            arrive(growing, 1, 2, 3, 4)
            end(growing)
        return False

    train(given, growing / "straight", progress=False, should_stop=all_come)
    second = train(given, growing / "second", continues=growing / "first", progress=False)
    assert (second.status, second.step) == ("finished", steps)
    assert state(growing / "second") == state(growing / "straight")
    # All was trained on: nothing is left, until something comes.
    third = train(given, growing / "third", continues=growing / "second", progress=False)
    assert (third.status, third.step) == ("finished", steps)
    # Another folder is read from its beginning, and need not hold a file yet.
    (growing / "elsewhere").mkdir()
    shutil.copy(growing / "made" / "9.parquet", growing / "elsewhere")
    (growing / "elsewhere" / "_DONE").touch()
    other = following(growing, data={"path": str(growing / "elsewhere")})
    fourth = train(other, growing / "fourth", continues=growing / "third", progress=False)
    assert fourth.step == steps + -(-SIZES[0] // 16)
    (growing / "elsewhere" / "9.parquet").unlink()
    assert (
        train(other, growing / "fifth", continues=growing / "third", progress=False).step == steps
    )


def test_what_cannot_go_on_is_one_line(first, tmp_path, capsys):
    out, run = tmp_path / "b", tmp_path / "a"

    def refused(*arguments, source=first / "a", status=2):
        assert main(["train", "--continue", str(source), "--quiet", *map(str, arguments)]) == status
        message = capsys.readouterr().err.strip()
        assert "\n" not in message, message
        assert not RunFolder(out).is_run
        return message

    to = ["--out", out]
    assert "in model.rows, to which" in refused(*to, "model.rows=50")
    assert "in train.dense_optimizer.name" in refused(*to, "train.dense_optimizer.name=sgd")
    assert "in train.average" in refused(*to, "train.average={kind: swa}")
    assert "in dense.price.transform" in refused(*to, "data.columns.price.transform=[log1p]")
    assert "--out is the run" in refused("--out", first / "a")
    assert "there is no run in" in refused(*to, source=tmp_path)
    assert "--resume goes on with the one" in refused(*to, "--resume")
    shutil.copytree(first / "a", run)
    path = latest_checkpoint(run / "checkpoints")
    with (run / LOCK).open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert "another process is training into" in refused(*to, source=run)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert "is damaged" in refused(*to, source=run)
    path.write_bytes(content[: len(content) // 2])
    assert "is not a whole Tessera checkpoint" in refused(*to, source=path)
    shutil.rmtree(run / "checkpoints")
    assert "has no checkpoint yet" in refused(*to, source=run)
    assert "does not exist" in refused(*to, source=path)
    with pytest.raises(UserError, match="holds a finished run"):
        train(load_config(first / "run.yaml"), first / "a", continues=run, progress=False)
