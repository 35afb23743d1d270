"""Runs over a folder in which files arrive: each row once, in order, over stops and restarts."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.errors import UserError
from tessera.training.config import ExperimentConfig
from tessera.training.data.opening import open_data
from tessera.training.data.table import view as view_module
from tessera.training.data.table.follow import Arrivals, FolderStream, Follow
from tessera.training.data.table.stream_loader import StreamLoader
from tessera.training.trainer.checkpoint import read_plain
from tessera.training.trainer.files import latest_checkpoint
from tessera.training.trainer.logs import read_metrics
from tessera.training.trainer.run import train
from tessera.training.trainer.run_folder import RunFolder
from tests.data import clicks
from tests.data.test_table import COLUMNS, expected_rows, plain_rows, write
from tests.training.ranks import run_on_ranks

QUICK = {"poll_s": 0.01, "settle_s": 0.0}
SIZES = (70, 33, 45, 1, 80)


def config(folder: Path, *, follow: dict[str, Any] | None = None, **changes: Any) -> Any:
    data = {
        "format": "table",
        "path": str(folder / "in"),
        "valid_path": str(folder / "valid.parquet"),
        "split": "files",
        "columns": COLUMNS,
        "cache_dir": str(folder / "cache"),
        "follow": {**QUICK, **(follow or {})},
        **changes.pop("data", {}),
    }
    small = {
        "batch_size": 16,
        "epochs": 1,
        "threads": 1,
        "log_every_steps": 1,
        "eval_every_steps": 5,
    }
    return ExperimentConfig.from_plain(
        {
            "data": data,
            "model": {"rows": 50, "embedding_dim": 4, "over_layers": [8], "dense_layers": [8]},
            "train": {**small, "checkpoint_every_steps": 3, **changes},
            "run": {"report": False, "tensorboard": False},
        },
        name="c.yaml",
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What it will hold is made already, in ``made``; ``in`` has its first file."""
    for name in ("in", "made"):
        (tmp_path / name).mkdir()
    write(tmp_path / "valid.parquet", clicks.rows(60, seed=99))
    for number, size in enumerate(SIZES):
        ending = "csv" if number == 2 else "parquet"
        path = write(tmp_path / "made" / f"{9 - number}.{ending}", clicks.rows(size, seed=number))
        os.utime(path, (1_000_000 + number,) * 2)
    arrive(tmp_path, 0)
    return tmp_path


def arrive(folder: Path, *numbers: int) -> None:
    """Let files come, under another name at first, as a careful writer does."""
    for number in numbers:
        made = next((folder / "made").glob(f"{9 - number}.*"))
        temporary = folder / "in" / f"{made.name}.tmp"
        shutil.copy2(made, temporary)
        temporary.rename(folder / "in" / made.name)


def end(folder: Path) -> None:
    (folder / "in" / "_DONE").touch()


def everything() -> list[Any]:
    """The rows of all files in the order of their arrival, without their numbers."""
    return [row[1:] for n, size in enumerate(SIZES) for row in expected_rows(clicks.rows(size, n))]


def begun(folder: Path, ledger: Path, *, stop: Callable[[], bool] = lambda: False) -> Any:
    stream = open_data(config(folder).data, progress=False).train
    assert isinstance(stream, FolderStream)
    stream.begin(stream.first_records(ledger), ledger, writes=True, should_stop=stop)
    stream.write_first()
    return stream


def loader(stream: FolderStream, part: tuple[int, int] = (0, 1)) -> StreamLoader:
    return StreamLoader(
        stream, batch_size=16, prefetch=2, threads=2, finish=None, numbered=True, part=part
    )


def test_each_row_comes_once_in_the_order_of_arrival(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_module, "WINDOW_ROWS", 50)
    stream = begun(folder, folder / "stream.jsonl")
    found = []
    comes = {1: (1, 2), 8: (3, 4)}
    for number, batch in enumerate(loader(stream).epoch(0)):
        found += plain_rows(batch)
        # Half of a file, and names that are not meant.
        (folder / "in" / "8.parquet.tmp").write_bytes(b"PAR1")
        (folder / "in" / "_half.parquet").write_bytes(b"PAR1")
        if number in comes:
            arrive(folder, *comes[number])
        if number == 12:
            end(folder)
    assert [row[1:] for row in found] == everything()
    assert [row[0] for row in found] == list(range(sum(SIZES)))
    lines = [json.loads(line) for line in (folder / "stream.jsonl").read_text().splitlines()]
    assert lines[-1] == {"end": "marker"}
    taken = [Path(file["path"]).name for line in lines[:-1] for file in line["files"]]
    assert taken == ["9.parquet", "8.parquet", "7.csv", "6.parquet", "5.parquet"]

    # Another process goes on with any batch, and of several ranks each has a part of it.  Files
    # whose rows are behind are not needed any more.
    for gone in ("9.parquet", "8.parquet"):
        (folder / "in" / gone).unlink()
    again = begun(folder, folder / "stream.jsonl")
    start = (SIZES[0] + SIZES[1]) // 16 + 1
    parts = [[plain_rows(b) for b in loader(again, (r, 3)).epoch(0, start)] for r in range(3)]
    together = [row for step in zip(*parts, strict=True) for part in step for row in part]
    assert together == found[16 * start :]


def test_what_is_half_written_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,")
    looks = Arrivals(tmp_path, Follow(settle_s=1000.0, idle_s=1e-9))
    assert [looks.look(set()) for _ in range(3)] == [([], None)] * 3  # changed a moment ago
    os.utime(path, (1_000_000, 1_000_000))
    assert looks.look(set()) == ([], None)  # another state than at the last look
    path.write_text("a,b\n1,2\n")
    os.utime(path, (1_000_000, 1_000_000))
    assert looks.look(set()) == ([], None)
    files, end = looks.look(set())
    assert ([file.path for file in files], end) == ([path], None)
    path.with_name("b.csv").write_text("a,b\n")
    assert looks.look({str(path)}) == ([], None)  # one is on its way: not idle
    path.with_name("_DONE").touch()
    files, end = looks.look({str(path)})
    assert ([file.path.name for file in files], end) == (["b.csv"], None)
    assert looks.look({str(path), str(tmp_path / "b.csv")}) == ([], "marker")


def outcome(out: Path) -> Any:
    rows = read_metrics(RunFolder(out).metrics)
    for row in rows:
        row.pop("samples_per_second")
    path = latest_checkpoint(RunFolder(out).checkpoints)
    assert path is not None
    state = torch.load(path, weights_only=True)["model"] if path.suffix == ".pt" else {}
    final = RunFolder(out).read_final()
    final.pop("evaluation_samples_per_second")
    return rows, {name: value.tolist() for name, value in state.items()}, final


def test_stops_and_restarts_change_no_bit(folder: Path) -> None:
    once = threading.Event()

    def all_come() -> bool:
        if not once.is_set():
            once.set()
            arrive(folder, 1, 2, 3, 4)
            end(folder)
        return False

    straight = folder / "straight"
    result = train(config(folder), straight, progress=False, should_stop=all_come)
    steps = -(-sum(SIZES) // 16)
    assert (result.status, result.step) == ("finished", steps)

    for path in (folder / "in").iterdir():
        path.unlink()
    arrive(folder, 0)
    out = folder / "stopped"
    began = time.monotonic()
    # Stopped while it waits for a second file: all whole batches of the first are trained on.
    first = train(
        config(folder), out, progress=False, should_stop=lambda: time.monotonic() > began + 2
    )
    assert (first.status, first.step) == ("interrupted", SIZES[0] // 16)
    arrive(folder, 1, 2)
    calls = iter(range(1000))
    second = train(
        config(folder), out, resume=True, progress=False, should_stop=lambda: next(calls) >= 2
    )
    assert second.status == "interrupted"
    assert second.step < steps
    arrive(folder, 3, 4)
    end(folder)
    assert train(config(folder), out, resume=True, progress=False).status == "finished"
    assert outcome(out) == outcome(straight)


def train_there(given: ExperimentConfig, out: Path) -> Any:
    result = train(given, out, progress=False)
    return result.status, result.step


def test_ranks_and_ends(folder: Path) -> None:
    arrive(folder, 1, 2)
    end(folder)
    steps = -(-sum(SIZES[:3]) // 16)
    alone, two = folder / "alone", folder / "two"
    assert train_there(config(folder), alone) == ("finished", steps)
    assert run_on_ranks(2, train_there, config(folder), two) == [("finished", steps)] * 2
    progress = read_plain(latest_checkpoint(RunFolder(two).checkpoints))["progress"]
    assert progress["samples"] == sum(SIZES[:3])
    limited = config(folder, follow={"max_steps": 4})
    assert train_there(limited, folder / "limited") == ("finished", 4)
    (folder / "in" / "_DONE").unlink()
    assert train_there(config(folder, follow={"idle_s": 0.2}), folder / "idle") == (
        "finished",
        steps,
    )
    plain = read_plain(latest_checkpoint(RunFolder(folder / "idle").checkpoints))
    assert plain["progress"]["samples"] == sum(SIZES[:3])


def refused(given: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        given()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_what_is_wrong_is_one_line(folder: Path) -> None:
    out = folder / "run"
    assert "read once" in refused(lambda: train(config(folder, epochs=2), out, progress=False))
    assert "set split: files" in refused(
        lambda: config(folder, data={"split": "random", "valid_path": []})
    )
    assert "one local folder" in refused(lambda: config(folder, data={"path": "s3://a/b"}))
    assert "max_steps=0" in refused(lambda: config(folder, follow={"max_steps": 0}))
    empty = {"path": str(folder / "made" / "none")}
    (folder / "made" / "none").mkdir()
    assert "holds no whole file yet" in refused(
        lambda: train(config(folder, data=empty), out, progress=False)
    )
    # A damaged file arrives: the run ends, and goes on when it is mended.
    whole = (folder / "made" / "8.parquet").read_bytes()
    (folder / "in" / "8.parquet").write_bytes(whole[:-20])
    end(folder)
    given = config(folder, follow={"settle_s": 0.0})
    assert "8.parquet: cannot be read" in refused(lambda: train(given, out, progress=False))
    shutil.rmtree(out, ignore_errors=True)
    (folder / "in" / "8.parquet").write_bytes(whole)
    calls = iter(range(1000))
    stopped = train(given, out, progress=False, should_stop=lambda: next(calls) >= 1)
    assert stopped.status == "interrupted"
    os.utime(folder / "in" / "8.parquet", (1, 1))
    assert "was changed after it was taken" in refused(
        lambda: train(given, out, resume=True, progress=False)
    )
    (folder / "in" / "8.parquet").unlink()
    assert "is gone" in refused(lambda: train(given, out, resume=True, progress=False))
    (out / "stream.jsonl").write_text("{\n")
    assert "is damaged" in refused(lambda: train(given, out, resume=True, progress=False))
