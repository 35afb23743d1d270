"""What a run looks at, and what it makes, before its first step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tessera.errors import UserError
from tessera.training.config import (
    FREE_ON_RESUME,
    ExperimentConfig,
    TrainConfig,
    load_config,
    resume_conflicts,
)
from tessera.training.data.dataset import DataSplits, GrowingView, View
from tessera.training.distributed.checkpoint.basics import restore_replaced
from tessera.training.trainer.assembly import Assembly
from tessera.training.trainer.checkpoint import read_plain, restore
from tessera.training.trainer.continuing import (
    Origin,
    begin_continued,
    check_out,
    find_origin,
    origin_of,
    undisturbed,
)
from tessera.training.trainer.files import latest_checkpoint, run_of
from tessera.training.trainer.precision import products_in
from tessera.training.trainer.progress import Before
from tessera.training.trainer.ranks import Ranks
from tessera.training.trainer.retrieval_evaluation import check_metric
from tessera.training.trainer.run_folder import RunFolder
from tessera.training.transforms.fitting import Fitted
from tessera.training.transforms.preprocessor import FittedSizes
from tessera.training.transforms.ranges import ranges_from_json

RATE_ROWS = 1 << 20
"""Rows that are enough to know the share of positive ones (to 0.05 points)."""


def look_at(
    folder: RunFolder, config: ExperimentConfig, continues: Path | None, *, resume: bool
) -> bool:
    """Check that the run may begin or go on; whether it is finished already."""
    if continues is not None:
        check_out(continues, folder.root)
    folder.require_fit(resume=resume)
    for tracker in config.run.settled_trackers().values():
        tracker.require()  # before the data is read
    if not resume:
        return False
    if conflicts := resume_conflicts(load_config(folder.config), config):
        raise UserError(
            f"--resume: the config differs from that of the run in {folder.root} in"
            f" {', '.join(conflicts)}; give the values of {folder.config} or begin a new run (only"
            f" {', '.join(FREE_ON_RESUME)} may change)"
        )
    return folder.is_finished


def open_origin(
    folder: RunFolder,
    continues: Path | None,
    config: ExperimentConfig,
    stack: contextlib.ExitStack,
    *,
    resume: bool,
) -> Origin | None:
    """The checkpoint of another run that this one begins with; nobody changes it until the stack ends."""
    source = origin_of(folder) if resume else continues
    if source is None:
        return None
    stack.enter_context(undisturbed(run_of(source)))
    origin = find_origin(source, folder.root)
    origin.check_config(config)
    return origin


def fitted_values(
    folder: RunFolder, fit: Callable[[], Fitted], origin: Origin | None, *, resume: bool
) -> Fitted:
    """What is seen in the training rows; of a run that goes on, without the transforms' state."""
    plain = None if origin is None else origin.plain
    if resume and (path := latest_checkpoint(folder.checkpoints)) is not None:
        plain = read_plain(path)
    if plain is not None:
        sizes = FittedSizes(**plain["fitted"])
        return Fitted(sizes=sizes, state={}, ranges=ranges_from_json(plain["ranges"]))
    return fit()


def take_up(
    growing: GrowingView,
    folder: RunFolder,
    config: ExperimentConfig,
    ranks: Ranks,
    origin: Origin | None,
    *,
    should_stop: Callable[[], bool],
) -> None:
    """Let every rank begin with what the ledger holds, or what is there when there is none yet.

    A run that goes on from one that followed the same folder begins with what that one had taken.
    """
    if config.train.epochs != 1:
        raise UserError(
            f"train.epochs={config.train.epochs}: a growing folder (data.follow) is read once; set it"
            " to 1"
        )

    def first_records() -> list[dict[str, Any]]:
        if origin is None:
            return growing.first_records(folder.stream)
        own = growing.first_records(folder.stream, required=False)
        if found := own or origin.stream_records(config):
            return found
        # A model for retrieval takes its items from the first files.
        return growing.first_records(folder.stream, required=config.model.retrieval() is not None)

    records = ranks.on_first(first_records)
    growing.begin(records, folder.stream, writes=ranks.first, should_stop=should_stop)


def begin(
    folder: RunFolder,
    config: ExperimentConfig,
    stack: contextlib.ExitStack,
    growing: GrowingView | None,
    origin: Origin | None,
    *,
    resume: bool,
) -> None:
    """Hold the folder until the stack ends, and make what belongs in it."""
    stack.enter_context(folder.locked())
    folder.require_fit(resume=resume)  # again, now that nobody else can begin here
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    restore_replaced(folder.checkpoints)
    if origin is not None:
        begin_continued(folder, origin)
    if growing is not None:
        growing.write_first()
    folder.write_text(folder.config, config.to_yaml())


def first_weights(
    assembly: Assembly,
    origin: Origin | None,
    folder: RunFolder,
    config: ExperimentConfig,
    train: View,
    *,
    resume: bool,
) -> Before:
    """Let a run that has no checkpoint begin with its origin's weights, or let fresh ones answer the labels' means.

    Returns:
        What was done before this run.
    """
    if origin is not None:
        restore(origin.path, assembly, seed=config.train.seed)
        return assembly.ranks.on_first(lambda: origin.before(config))
    if not (resume and assembly.ranks.on_first(lambda: latest_checkpoint(folder.checkpoints))):
        assembly.begin_at(label_means(train.labels(RATE_ROWS)))
    return Before()


@contextlib.contextmanager
def torch_state(config: TrainConfig) -> Iterator[None]:
    """Seed, threads and precision of ``config`` for the time of the context."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]), products_in(config.precision):
        torch.manual_seed(config.seed)
        try:
            if config.threads is not None:
                torch.set_num_threads(config.threads)
            yield
        finally:
            torch.set_num_threads(threads)


def check_splits(splits: DataSplits, config: ExperimentConfig) -> None:
    """Refuse held-out rows that the choice of the best checkpoint cannot look at."""
    if len(splits.valid) == 0:
        raise UserError(
            f"data.valid_fraction={config.data.valid_fraction}: there are no validation rows, which"
            " choose the best checkpoint; raise it or give data.valid_path"
        )
    check_metric(config, splits.valid)
    if config.train.metric == "auc":
        labels = splits.valid.labels().reshape(len(splits.valid), -1)
        columns = splits.train.dataset.columns.labels
        binary = [place for place, label in enumerate(columns) if label.task == "binary"]
        if not binary:
            raise UserError(
                "train.metric='auc': no label is binary, so that no AUC is defined; set"
                " train.metric=log_loss, which takes the loss of every task"
            )
        if all(len(np.unique(_known(labels[:, place]))) < 2 for place in binary):
            raise UserError(
                "train.metric='auc': all validation rows have the same label, so that no AUC is"
                " defined; set train.metric=log_loss, hold out other rows, or add negatives (data.negatives)"
            )


def _known(labels: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return labels[~np.isnan(labels)]


def label_means(labels: npt.NDArray[np.float32]) -> list[float]:
    """The mean of every label, ``labels`` being ``[n]`` or ``[n, L]``; 0 where none is known."""
    known = [_known(column) for column in labels.reshape(len(labels), -1).T]
    return [float(column.mean()) if len(column) else 0.0 for column in known]
