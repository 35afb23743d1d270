"""Going on from another run with other data: ``tessera train --continue RUN``.

A continued run takes over, from the latest checkpoint of a finished or stopped run, all that its steps
depend on: weights, their averages, the states of both optimizers, what transforms have learned, torch's random
numbers, and how many steps and epochs there were.  Learning rates, data, batch size and what is
evaluated may be others.  So runs that go on from each other take the steps of one loop over all of their
data: step ``n`` of a schedule is step ``n`` of that loop, a decay ends with the last step of the
present run, and another epoch over the same rows is the next epoch of them.

Which run it was stands in ``continues.json``, which is written before anything else.  As long as the
run has no checkpoint of its own, one that is resumed begins there again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.errors import UserError
from tessera.training.config import ExperimentConfig
from tessera.training.data.columns import FeatureColumns
from tessera.training.data.table.ledger import Ledger
from tessera.training.trainer.checkpoint import read_plain
from tessera.training.trainer.files import is_checkpoint, latest_checkpoint, run_of
from tessera.training.trainer.progress import Before, Progress
from tessera.training.trainer.run_folder import LOCK, RunFolder
from tessera.training.typed_config import differing_keys

KEPT = ("model", "train.average", "train.dense_optimizer", "train.embedding_optimizer")
"""Keys and sections that must be as they were: weights and states belong to them."""
FREE = ("train.dense_optimizer.learning_rate", "train.embedding_optimizer.learning_rate")
"""What of them may change nevertheless."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The checkpoint that a run goes on from.

    Attributes:
        run: the folder of its run.
        path: the checkpoint.
        plain: what it holds but for tensors; see `read_plain`.
    """

    run: Path
    path: Path
    plain: dict[str, Any]

    def check_config(self, config: ExperimentConfig) -> None:
        """Check that ``config`` has the model and the optimizers of the checkpoint.

        Raises:
            UserError: it has not.
        """
        differing = [
            key
            for key in differing_keys(self._config().to_plain(), config.to_plain())
            if _is_below(key, KEPT) and not _is_below(key, FREE)
        ]
        if differing:
            raise UserError(
                f"--continue: the config differs from that of {self.path} in {', '.join(differing)}, to"
                " which its weights and the optimizers' states belong; give the values of that run, or"
                " begin a new one without --continue"
            )

    def check_columns(self, columns: FeatureColumns) -> None:
        """Check that the data has the columns that the checkpoint was trained on.

        Raises:
            UserError: it has not.
        """
        known = FeatureColumns.from_json(self.plain["columns"], name=str(self.path))
        differing = differing_keys(_by_name(known), _by_name(columns))
        if differing:
            raise UserError(
                f"--continue: the columns of the data differ from those that {self.path} was trained on"
                f" in {', '.join(differing)}; give data with the same columns (data.columns), or begin a new"
                " run without --continue"
            )

    def stream_records(self, config: ExperimentConfig) -> list[dict[str, Any]]:
        """What the run had taken of the growing folder of ``config``; none where it followed another one."""
        own = self._config().data
        same = getattr(own, "follow", None) is not None and own.paths() == config.data.paths()
        records = Ledger(RunFolder(self.run).stream).records() if same else []
        return [record for record in records if "files" in record]

    def before(self, config: ExperimentConfig) -> Before:
        """What was done before a run of ``config`` that goes on from here."""
        done = Progress.from_plain(self.plain["progress"], self.path)
        return Before(
            steps=done.step,
            epochs=done.epochs,
            samples=done.samples,
            stream_rows=done.stream_rows if self.stream_records(config) else 0,
        )

    def record(self) -> dict[str, Any]:
        """What the records of the new run say of this one, as JSON."""
        progress = self.plain["progress"]
        return {
            "run": str(self.run),
            "checkpoint": str(self.path.relative_to(self.run)),
            "step": progress["step"],
            "samples": progress["samples"],
        }

    def _config(self) -> ExperimentConfig:
        return ExperimentConfig.from_plain(self.plain["config"], name=str(self.path))


def check_out(source: Path, out: Path) -> None:
    """Check that the new run in ``out`` is not the run ``source`` that it goes on from.

    Raises:
        UserError: it is.
    """
    if out.absolute().resolve() == run_of(source).absolute().resolve():
        raise UserError(
            f"--continue: --out is the run {source} itself; give another folder, or --resume to go on"
            " with its own data"
        )


def find_origin(source: Path, out: Path) -> Origin:
    """The latest checkpoint of the run ``source``, or the one that it names, for a new run in ``out``.

    Raises:
        UserError: there is none, or it is the run in ``out``.
        CheckpointError: it is damaged.
    """
    run = run_of(source).absolute()
    check_out(source, out)
    if not RunFolder(run).is_run:
        raise UserError(f"--continue: there is no run in {run_of(source)}; give a run folder")
    if is_checkpoint(source):
        path: Path | None = source.absolute() if source.exists() else None
    else:
        path = latest_checkpoint(RunFolder(run).checkpoints)
    if path is None:
        raise UserError(
            f"--continue: {source} does not exist; give the run folder, for its latest checkpoint"
            if is_checkpoint(source)
            else f"--continue: the run in {source} has no checkpoint yet; go on with it by --resume first"
        )
    return Origin(run=run, path=path, plain=read_plain(path))


def origin_of(folder: RunFolder) -> Path | None:
    """Where a run that is resumed begins: the origin's checkpoint, if it has one and none of its own.

    Raises:
        UserError: the origin is not there any more, or what says which it is is damaged.
    """
    record = None
    if latest_checkpoint(folder.checkpoints) is None:
        record = read_record(folder)
    if record is None:
        return None
    source = Path(str(record["run"])) / str(record["checkpoint"])
    try:
        find_origin(source, folder.root)
    except UserError as error:
        raise UserError(
            f"--resume: the run in {folder.root} stopped before its first checkpoint, and what it goes on"
            f" from cannot be used any more ({error}); begin a new run"
        ) from error
    return source


def read_record(folder: RunFolder) -> dict[str, Any] | None:
    """What `Origin.record` says of the run that the one in ``folder`` goes on from; None: of none.

    Raises:
        UserError: the file is damaged.
    """
    if not folder.continues.exists():
        return None
    try:
        found = json.loads(folder.continues.read_text())
        names = {"run": str, "checkpoint": str, "step": int, "samples": int}
        if not all(isinstance(found[name], kind) for name, kind in names.items()):
            raise ValueError("a value has another type")  # noqa: TRY301 - as what json finds
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder.continues} is damaged ({error}); begin a new run") from error
    return dict(found)


@contextlib.contextmanager
def undisturbed(run: Path) -> Iterator[None]:
    """Nobody trains into the folder ``run``, and so removes checkpoints of it, within the context.

    Raises:
        UserError: somebody does.
    """
    if not (run / LOCK).exists():
        yield
        return
    with (run / LOCK).open() as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"--continue: another process is training into {run}; wait for it or stop it"
            ) from error
        yield


def begin_continued(folder: RunFolder, origin: Origin) -> None:
    """Write what says that the run in ``folder`` goes on from ``origin``."""
    folder.write_text(folder.continues, json.dumps(origin.record(), indent=2) + "\n")


def _is_below(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in sections)


def _by_name(columns: FeatureColumns) -> dict[str, Any]:
    """The columns as a tree whose lists of columns have names, in order, for keys.

    The order counts: a batch's values have their places by it.
    """
    plain = columns.to_json()
    for kind in ("dense", "sparse", "labels"):
        plain[kind] = {one["name"]: one for one in plain[kind]} | {
            "order": [one["name"] for one in plain[kind]]
        }
    return plain
