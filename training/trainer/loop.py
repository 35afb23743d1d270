"""The training loop: steps, evaluations and checkpoints in their order, and nothing else.

After each step: log, evaluate if due, write a checkpoint if due, then look whether to stop.  All
that decides what comes next is in `Progress`, so a run that is taken up from a checkpoint does
exactly what the uninterrupted one would have done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from tessera.errors import UserError
from tessera.training.config import TrainConfig
from tessera.training.data.batch import Batch
from tessera.training.data.dataset import DatasetView
from tessera.training.data.loader import BatchLoader
from tessera.training.trainer.assembly import Assembly
from tessera.training.trainer.display import Display
from tessera.training.trainer.evaluate import evaluate
from tessera.training.trainer.logs import MetricsLog, NoLog
from tessera.training.trainer.progress import Progress
from tessera.training.trainer.schedule import learning_rate_factor


class DivergedError(UserError):
    """The loss is no longer a finite number."""


@dataclass(kw_only=True)
class TrainingLoop:
    """One run's loop over ``train_rows``.

    Attributes:
        config: how to train.
        assembly: the model and its optimizers.
        train_rows: the rows to train on.
        valid_rows: the rows to evaluate on; not empty.
        progress: where to begin; kept up to date.
        log: takes losses and evaluations.
        display: shows them.
        save: writes a checkpoint of the present state.
        should_stop: asked after each step and within evaluations; it answers all ranks alike.
    """

    config: TrainConfig
    assembly: Assembly
    train_rows: DatasetView
    valid_rows: DatasetView
    progress: Progress
    log: MetricsLog | NoLog
    display: Display
    save: Callable[[], None]
    should_stop: Callable[[], bool]

    def __post_init__(self) -> None:
        self._loader = BatchLoader(
            self.train_rows,
            batch_size=self.config.batch_size,
            shuffle=True,
            seed=self.config.seed,
            part=(self.assembly.ranks.rank, self.assembly.ranks.world_size),
        )
        self._row_seconds = 0.0
        self._row_samples = 0

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, without early stop."""
        return self.config.epochs * self._loader.num_batches

    def run(self) -> bool:
        """Train until the end or until asked to stop; a checkpoint of the last step is written.

        Returns:
            True if training has ended, False if it was stopped before.

        Raises:
            DivergedError: the loss is not finite; that step changed nothing.
            CheckpointError: a checkpoint cannot be written.
        """
        self.assembly.model.train()
        if self.progress.evaluation_due and not self._evaluate():
            return False  # the checkpoint that was resumed from is still right
        while not self.progress.done:
            if not self._run_epoch():
                return False
        return True

    def _run_epoch(self) -> bool:
        """Train to the end of the epoch or of the run; False if asked to stop."""
        began = time.perf_counter()
        for batch in self._loader.epoch(self.progress.epoch, self.progress.batch):
            self._step(batch)
            self._row_seconds += time.perf_counter() - began
            if not self._after_step():
                return False
            if self.progress.done:
                return True
            began = time.perf_counter()
        return True

    def _step(self, batch: Batch) -> None:
        progress = self.progress
        factor = learning_rate_factor(
            self.config.schedule, step=progress.step, total_steps=self.total_steps
        )
        samples = self._loader.batch_rows(progress.batch)
        loss = self.assembly.step(batch, samples=samples, learning_rate_factor=factor)
        if not math.isfinite(loss):
            raise DivergedError(
                f"the loss of step {progress.step + 1} (epoch {progress.epoch + 1}) is {loss};"
                " lower train.dense_optimizer.learning_rate"
                f" (now {self.config.dense_optimizer.learning_rate}) or"
                " train.embedding_optimizer.learning_rate"
                f" (now {self.config.embedding_optimizer.learning_rate}), or add"
                " train.schedule.warmup_steps"
            )
        progress.count_step(samples=samples, loss=loss)
        self._row_samples += samples
        self.display.step(step=progress.step, samples=samples, loss=loss)

    def _after_step(self) -> bool:
        """Log, evaluate and save what is due after a step; False if asked to stop."""
        config, progress = self.config, self.progress
        end_of_epoch = progress.batch == self._loader.num_batches
        if end_of_epoch:
            progress.epoch, progress.batch = progress.epoch + 1, 0
        progress.evaluation_due = end_of_epoch or _falls_on(progress.step, config.eval_every_steps)
        if progress.evaluation_due or _falls_on(progress.step, config.log_every_steps):
            self._log_loss()
        saved = False
        if progress.evaluation_due:
            saved = self._evaluate()
        elif _falls_on(progress.step, config.checkpoint_every_steps):
            self._save()
            saved = True
        if progress.done or not self.should_stop():
            return True
        if not saved:
            self._save()
        return False

    def _log_loss(self) -> None:
        progress = self.progress
        dense, embedding = self.assembly.learning_rates()
        self.log.train(
            step=progress.step,
            epoch=progress.epochs,
            samples=progress.samples,
            loss=progress.take_mean_loss(),
            dense_learning_rate=dense,
            embedding_learning_rate=embedding,
            samples_per_second=self._row_samples / max(self._row_seconds, 1e-9),
        )
        self._row_seconds, self._row_samples = 0.0, 0

    def _evaluate(self) -> bool:
        """Evaluate and save; False, with nothing changed, if asked to stop meanwhile."""
        metrics = evaluate(
            self.assembly.model,
            self.valid_rows,
            batch_size=self.config.eval_batch_size,
            ranks=self.assembly.ranks,
            should_stop=self.should_stop,
        )
        if metrics is None:
            return False
        progress, evaluation = self.progress, metrics.compute()
        better = progress.count_evaluation(evaluation, metric=self.config.metric)
        patience = self.config.patience
        out_of_patience = patience is not None and progress.evaluations_since_best >= patience
        progress.done = progress.epoch >= self.config.epochs or out_of_patience
        self.log.valid(
            step=progress.step,
            epoch=progress.epochs,
            samples=progress.samples,
            evaluation=evaluation,
        )
        self.display.evaluation(step=progress.step, evaluation=evaluation, better=better)
        if out_of_patience:
            self.display.say(f"no better {self.config.metric} in {patience} evaluations: stopping")
        self._save()
        return True

    def _save(self) -> None:
        self.log.sync()
        self.save()


def _falls_on(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
