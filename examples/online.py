"""What it is worth to serve what was learned a moment ago: a shop whose truth drifts, a trainer that publishes, a server that follows.

Run by ``make demo-online``.  In simulated time a file of rows arrives every ten minutes.  Its rows are first scored by three
models, over the network and by one server, and only then put into the folder that ``tessera train`` follows:

* ``frozen``: the model of the history, as it was packaged at first;
* ``hourly``: a new version at each full hour, packaged of the trainer's checkpoint;
* ``followed``: the first version and the log of commits that the trainer publishes, one after each file.

The next file is drawn when the server answers with what was learned from this one, so that ``followed`` is ten simulated
minutes behind.  The AUC of each model on each hour's rows is printed, and drawn into a page.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from demo import ROOT, TESSERA_SERVER, say, serving, shown
from drifting_shop import STEPS_PER_HOUR, DriftingShop, Floats

from tessera.cli import main as tessera
from tessera.plots import BLUE, GREEN, GREY, ORANGE, svg_of
from tessera.report_page import render_page
from tessera.serving.client import PredictorClient, read_schema
from tessera.serving.commits.chain import commit_name, parse_commit_name
from tessera.serving.commits.file import read_commit
from tessera.training.metrics.binary import auc
from tessera.training.trainer.checkpoint import read_plain
from tessera.training.trainer.files import find_checkpoint, latest_checkpoint

if TYPE_CHECKING:
    from typing_extensions import Self

MODELS = ("frozen", "hourly", "followed")
BEST = "best possible"
COLOURS = {BEST: GREY, "frozen": ORANGE, "hourly": BLUE, "followed": GREEN}
BATCH = 128
VALID_ROWS = 2_000
WAIT_S = 300.0
CONFIG = ROOT / "examples" / "online.yaml"


@dataclass
class Hour:
    """What was seen in a simulated hour.

    Attributes:
        auc: by model, and for the chances that clicks were drawn with.
        commits: the commit that each file was scored with by ``followed``.
        version: the version that scored it as ``hourly``.
    """

    auc: dict[str, float] = field(default_factory=dict)
    commits: list[int] = field(default_factory=list)
    version: str = ""


def here(command: list[str], log: Path) -> None:
    """Run a command of ours in this process, which saves the time to import torch; its output goes to ``log``."""
    print("$ " + " ".join(command), flush=True)
    arguments = command[1:] if command[0] == "tessera" else command
    with log.open("a") as stream, contextlib.redirect_stdout(stream):
        status = tessera(arguments)
    if status:
        sys.exit(f"demo: '{' '.join(command)}' ended with exit status {status}; see {log}")


class Trainer:
    """``tessera train`` on a folder in which files arrive, publishing after each; a context.

    Args:
        folder: of the demo.
        steps: that a file has.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self.run, self.arrivals = folder / "runs" / "online", folder / "arrivals"
        self.log = folder / "train.log"
        self._commits = folder / "models" / "followed" / "1" / "log"
        self._seen = 0
        history = latest_checkpoint(folder / "runs" / "history" / "checkpoints")
        assert history is not None
        self.step, self._steps = int(read_plain(history)["progress"]["step"]), steps
        self.arrivals.mkdir()
        self._command = ["tessera", "train", "--continue", str(folder / "runs" / "history")]
        self._command += ["--out", str(self.run), "--quiet", f"data.path={self.arrivals}"]
        self._command += ["data.follow={settle_s: 0, poll_s: 0.02}"]
        self._command += [f"train.checkpoint_every_steps={STEPS_PER_HOUR * steps}"]
        self._command += ["--publish", str(self._commits.parent.parent)]
        self._command += ["--publish-every", f"{steps}steps"]

    def __enter__(self) -> Self:
        with self.log.open("w") as stream:
            self._process = subprocess.Popen(shown(self._command), stderr=stream, stdout=stream)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def give(self, table: pa.Table, number: int) -> int:
        """Let a file arrive, and wait until it was trained on; returns the commit that says so."""
        path = self.arrivals / f"{number:05d}.parquet"
        temporary = path.with_suffix(".tmp")
        pq.write_table(table, temporary)
        temporary.rename(path)
        self.step += self._steps
        for _ in patiently("the trainer's commit", self):
            found = self._commits.iterdir() if self._commits.is_dir() else ()
            newest = max((parse_commit_name(path.name) or 0 for path in found), default=0)
            for commit in range(self._seen + 1, newest + 1):
                self._seen = commit
                if read_commit(self._commits / commit_name(commit)).commit.step == self.step:
                    return commit
        raise AssertionError

    def checkpoint(self) -> Path:
        """The checkpoint of the rows that were given; waits for it."""
        path = find_checkpoint(self.run / "checkpoints", self.step)
        for _ in patiently("the trainer's checkpoint", self):
            if path.exists():
                return path
        raise AssertionError

    def finish(self) -> None:
        """Say that no more files come, and wait for the end of the run."""
        (self.arrivals / "_DONE").touch()
        self._process.wait()
        self.check(ended=True)

    def check(self, *, ended: bool = False) -> None:
        """End the demo if the trainer has failed."""
        status = self._process.poll()
        if status or (status == 0 and not ended):
            sys.exit(f"demo: the trainer ended with exit status {status}:\n{self.log.read_text()}")


def patiently(what: str, trainer: Trainer) -> Iterator[None]:
    """Let the caller look again and again; ends the demo when that takes too long."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        yield
        trainer.check()
        time.sleep(0.01)
    sys.exit(f"demo: {what} did not come in {WAIT_S:.0f} s; see {trainer.log}")


def simulate(
    shop: DriftingShop, trainer: Trainer, client: PredictorClient, folder: Path, options: Any
) -> tuple[list[Hour], list[float]]:
    """Let the hours pass; returns what was seen in each, and how long each file took into the answers, in seconds."""
    hours, taken = [], []
    print(f"\n{'hour':>4}{'best possible':>16}" + "".join(f"{name:>11}" for name in MODELS))
    for number in range(options.hours):
        hour, labels = Hour(), []
        scores: dict[str, list[Floats]] = {name: [] for name in (BEST, *MODELS)}
        for piece in range(STEPS_PER_HOUR):
            table, chances = shop.rows(options.rows)
            features = table.drop_columns(["click"])
            for name in MODELS:
                answer = client.predict_rows(features, model=name)
                scores[name].append(np.asarray(answer.outputs["default"], np.float64))
                if name == "followed":
                    hour.commits.append(answer.model_commit)
                elif name == "hourly":
                    hour.version = answer.model_version
            scores[BEST].append(chances)
            labels.append(table["click"].to_numpy())
            began = time.monotonic()
            commit = trainer.give(table, number * STEPS_PER_HOUR + piece)
            for _ in patiently("an answer with the last commit", trainer):
                answer = client.predict_rows(features.slice(0, 1), model="followed")
                if answer.model_commit >= commit:
                    break
            taken.append(time.monotonic() - began)
            shop.drift()
        known = np.concatenate(labels)
        hour.auc = {name: auc(np.concatenate(own), known) for name, own in scores.items()}
        hours.append(hour)
        print(f"{number + 1:>4}{hour.auc[BEST]:>16.4f}" + "".join(f"{hour.auc[n]:>11.4f}" for n in MODELS), flush=True)  # fmt: skip
        if number + 1 < options.hours:
            package_hour(trainer, client, features.slice(0, 1), folder)
    return hours, taken


def package_hour(trainer: Trainer, client: PredictorClient, row: pa.Table, folder: Path) -> None:
    """Make a new version of ``hourly`` of what was learned, and wait until it answers."""
    command = ["package-model", str(trainer.checkpoint()), "--repository", str(folder / "models")]
    with (folder / "package.log").open("a") as stream, contextlib.redirect_stdout(stream):
        if tessera([*command, "--name", "hourly", "--no-evaluate"]):
            sys.exit(f"demo: package-model failed; see {folder / 'package.log'}")
    newest = max(int(path.name) for path in (folder / "models" / "hourly").iterdir())
    for _ in patiently("an answer of the new version", trainer):
        if client.predict_rows(row, model="hourly").model_version == str(newest):
            return


def write_results(folder: Path, hours: list[Hour], taken: list[float], rows: int) -> dict[str, Any]:
    """Write ``results.json`` and the page; returns the means."""
    names = [BEST, *MODELS]
    mean = {name: statistics.mean(hour.auc[name] for hour in hours) for name in names}
    results = {
        "mean": mean,
        "hours": [vars(hour) for hour in hours],
        "seconds_to_answers": {"median": statistics.median(taken), "most": max(taken)},
    }
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")

    def draw(axes: Any) -> None:
        for name in names:
            values = [hour.auc[name] for hour in hours]
            line = ":" if name == BEST else "-"
            axes.plot(range(1, len(hours) + 1), values, line, color=COLOURS[name], marker="o", ms=3, label=name)  # fmt: skip

    page = render_page(
        ROOT / "examples" / "online.html",
        rows=rows * STEPS_PER_HOUR * len(hours),
        minutes=60 // STEPS_PER_HOUR,
        hours=hours,
        names=names,
        mean=mean,
        median_s=statistics.median(taken),
        most_s=max(taken),
        svg=svg_of("simulated hour", "AUC on fresh rows", draw),
    )
    (folder / "online.html").write_text(page)
    return mean


def parse() -> Any:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--dir", type=Path, default=Path(".demo-online"), help="work folder, made anew (default: %(default)s)"
    )  # fmt: skip
    parser.add_argument(
        "--hours", type=int, default=12, help="simulated hours (default: %(default)s)"
    )
    parser.add_argument("--history", type=int, default=10, help="simulated hours before these that the first model is trained on (default: %(default)s)")  # fmt: skip
    parser.add_argument("--rows", type=int, default=1024, help=f"rows of ten minutes, a multiple of {BATCH} (default: %(default)s)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, help="of the shop (default: %(default)s)")
    options = parser.parse_args()
    for name in ("hours", "history"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: give at least 1")
    if options.rows < BATCH or options.rows % BATCH:
        parser.error(f"--rows {options.rows}: give a multiple of {BATCH}")
    return options


def main() -> None:
    """Run the steps in order and say what happened."""
    options = parse()
    began, folder = time.monotonic(), options.dir.absolute()
    os.chdir(ROOT)
    # So small a model gains nothing from more threads, and on a busy machine they wait for each other.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    shutil.rmtree(folder, ignore_errors=True)
    models, history = folder / "models", folder / "runs" / "history"
    models.mkdir(parents=True)

    say(f"1. {options.history} hours of history, and a model of them")
    shop, tables = DriftingShop(options.seed), []
    for _ in range(options.history * STEPS_PER_HOUR):
        tables.append(shop.rows(options.rows)[0])
        shop.drift()
    pq.write_table(pa.concat_tables(tables), folder / "history.parquet")
    pq.write_table(shop.rows(VALID_ROWS)[0], folder / "valid.parquet")
    command = [
        "tessera",
        "train",
        "--config",
        str(CONFIG),
        f"data.path={folder / 'history.parquet'}",
    ]
    command += [f"data.valid_path={folder / 'valid.parquet'}", f"data.cache_dir={folder / 'cache'}"]
    here([*command, f"train.batch_size={BATCH}", "--out", str(history), "--quiet"], folder / "train.log")  # fmt: skip
    command = ["package-model", str(history), "--repository", str(models), "--name", "followed"]
    here([*command, "--no-evaluate"], folder / "package.log")
    for name in ("frozen", "hourly"):
        shutil.copytree(models / "followed", models / name)

    say("2. A server that follows, and a trainer that goes on and publishes")
    program = [str(TESSERA_SERVER)] if TESSERA_SERVER.exists() else ["tessera", "serve"]
    flags = ["--model-repository", str(models), "--model-control", "poll", "--poll-s", "0.2"]
    flags += ["--follow", "--follow-poll-ms", "20"]
    steps = options.rows // BATCH
    with (
        serving([*program, *flags], folder / "serve.log") as ready,
        Trainer(folder, steps) as trainer,
    ):
        schema = read_schema(models / "followed" / "1" / "model.pt")
        with PredictorClient(f"127.0.0.1:{ready['port']}", schema=schema) as client:
            say(
                f"3. {options.hours} hours of traffic: the AUC of each hour's rows, scored before they are trained on"
            )
            hours, taken = simulate(shop, trainer, client, folder, options)
        trainer.finish()

    mean = write_results(folder, hours, taken, options.rows)
    print(f"{'mean':>4}{mean[BEST]:>16.4f}" + "".join(f"{mean[name]:>11.4f}" for name in MODELS))
    say(f"Done in {time.monotonic() - began:.0f} s")
    print(
        f"from a file's arrival to the first answer that knows it: median {statistics.median(taken):.2f} s, at most {max(taken):.2f} s\n"
        f"plot     {folder / 'online.html'}\n"
        f"log      {models / 'followed' / '1' / 'log'} ({hours[-1].commits[-1]} commits when the last rows were scored)\n"
        "         docs/freshness.md says how it works"
    )


if __name__ == "__main__":
    main()
