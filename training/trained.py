"""`load_trained`: a trained model as plain, eager PyTorch, with its config and metrics.

What the packager, and everyone who wants to look at a model, begins from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.training.config import ExperimentConfig
from tessera.training.data.batch import Batch
from tessera.training.data.columns import FeatureColumns
from tessera.training.data.loader import BatchLoader
from tessera.training.data.opening import open_data
from tessera.training.distributed.checkpoint.basics import CheckpointError, Room
from tessera.training.models.ranking import RankingModel, build_ranking_model
from tessera.training.trainer.checkpoint import load_checkpoint, read_plain
from tessera.training.trainer.files import find_checkpoint, is_checkpoint, latest_checkpoint
from tessera.training.trainer.progress import Progress
from tessera.training.trainer.run_folder import RunFolder
from tessera.training.transforms.preprocessor import FittedSizes
from tessera.training.transforms.ranges import ColumnRange, ranges_from_json


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A trained model and where it came from.

    Attributes:
        config: the resolved config; its data paths are absolute.
        model: float32, on the CPU, in eval mode, with plain tables: `EmbeddingBagCollection` and
            `EmbeddingCollection`.  Its parameters are mapped from the checkpoint, privately: writing
            to them changes no file.  Where the run averaged its weights, they are the averages.
        columns: what the data's batches held.
        ranges: what the training rows held of each dense column; empty: not known.
        step: training steps behind these weights.
        metrics: by split, the metrics of these weights as far as they are known; see
            `tessera.training.trainer.metrics.Evaluation.to_json`.
        checkpoint_path: the file (of a run of several ranks: the folder) that the weights are from.
    """

    config: ExperimentConfig
    model: RankingModel
    columns: FeatureColumns
    ranges: tuple[ColumnRange, ...]
    step: int
    metrics: dict[str, dict[str, int | float | None]]
    checkpoint_path: Path


def load_trained(path: str | Path, *, room: Room | None = None) -> TrainedModel:
    """Load a run folder's best checkpoint, or one checkpoint.

    Args:
        path: the folder or the checkpoint.
        room: where the tensors of a checkpoint of several ranks are put; None: in memory.

    Raises:
        UserError: there is no checkpoint, it is damaged, or it does not fit this version.
        OSError: it cannot be read.
    """
    path = Path(path)
    file = best_checkpoint(path) if path.is_dir() and not is_checkpoint(path) else path
    checkpoint = load_checkpoint(file, room=room)
    config = ExperimentConfig.from_plain(checkpoint.config, name=str(file))
    progress = Progress.from_plain(checkpoint.progress, file)
    try:
        # Tables without memory of their own: they take over the mapped ones.
        columns = FeatureColumns.from_json(checkpoint.columns, name=str(file))
        ranges = ranges_from_json(checkpoint.ranges)
        model = build_ranking_model(
            config.model,
            columns.dense_names,
            columns.sparse_names,
            labels=columns.label_names,
            transforms=columns.transforms(),
            sizes=FittedSizes(**checkpoint.fitted),
            device="meta",
        )
        model.load_state_dict({**checkpoint.model, **checkpoint.average}, assign=True)
    except (ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{file} does not fit this version of Tessera: {error}") from error
    model.eval()
    return TrainedModel(
        config=config,
        model=model,
        columns=columns,
        ranges=ranges,
        step=progress.step,
        metrics=_metrics(file, progress),
        checkpoint_path=file,
    )


def best_checkpoint(run: Path) -> Path:
    """The best checkpoint of the run folder ``run``; before any evaluation, the latest one.

    Raises:
        CheckpointError: there is none.
    """
    folder = RunFolder(run)
    latest = latest_checkpoint(folder.checkpoints)
    if latest is None:
        hint = "train longer (tessera train --resume)" if folder.is_run else "give a run folder"
        raise CheckpointError(f"{run} holds no checkpoint; {hint} or give a step-*.pt file")
    best_step = Progress.from_plain(read_plain(latest)["progress"], latest).best_step
    return latest if best_step is None else find_checkpoint(folder.checkpoints, best_step)


def validation_batches(trained: TrainedModel, batch_size: int) -> Iterator[Batch]:
    """The validation rows that the model was chosen by, in order, at most ``batch_size`` each.

    Raises:
        UserError: the data is gone or no longer readable.
        OSError: the same.
    """
    view = open_data(trained.config.data, progress=False).valid
    return BatchLoader(view, batch_size=batch_size, shuffle=False, seed=0).epoch(0)


def _metrics(file: Path, progress: Progress) -> dict[str, dict[str, Any]]:
    """What is known of the weights in ``file``: the run's final metrics, or the last ones."""
    folder = RunFolder(file.parent.parent)
    if folder.is_finished:
        final = folder.read_final()
        if folder.root / str(final["best_checkpoint"]) == file:
            return {name: final[name] for name in ("valid", "test") if final[name] is not None}
    if progress.best_step == progress.step and progress.best_evaluation is not None:
        return {"valid": progress.best_evaluation}
    return {}
