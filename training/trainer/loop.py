"""The training loop: steps, evaluations and checkpoints in their order, and nothing else.

After each step: log, evaluate if due, write a checkpoint if due, then look whether to stop.  All
that decides what comes next is in `Progress`, so a run that is taken up from a checkpoint does
exactly what the uninterrupted one would have done.

A training pipeline takes the steps and reads batches ahead of them.  It is given the batches up to
the next evaluation, so that it is empty when the model is evaluated.  What it has read beyond a
checkpoint changes nothing: the steps behind a checkpoint are counted, not the batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tessera.errors import UserError
from tessera.training.config import TrainConfig
from tessera.training.data.batch import Batch, PackedBatch
from tessera.training.data.dataset import DataSplits, packing
from tessera.training.data.loader import BatchLoader
from tessera.training.data.table.follow import FolderStream
from tessera.training.data.table.stream_loader import StreamLoader
from tessera.training.trainer.assembly import Assembly
from tessera.training.trainer.display import Display
from tessera.training.trainer.evaluate import evaluate
from tessera.training.trainer.logs import MetricsLog
from tessera.training.trainer.metrics import Evaluation
from tessera.training.trainer.pipelines import give_model_back, make_pipeline
from tessera.training.trainer.progress import Progress
from tessera.training.trainer.publishing import Publishing
from tessera.training.trainer.retrieval_metrics import RetrievalEvaluation
from tessera.training.trainer.split_metrics import LabelEvaluation, SplitEvaluation
from tessera.training.trainer.step import PackedStep, PendingLosses, StepBatch

MOST_PENDING = 256
"""After so many steps a GPU's losses are looked at, whatever is logged."""
GPU_STEPS_BETWEEN_QUESTIONS = 10
"""So often it is asked whether to stop: ranks exchange their answers, in host memory."""
GPU_LOADER_THREADS = 4
"""Threads that gather batches for a GPU; one gathers some 3 million rows of Criteo's a second."""


class DivergedError(UserError):
    """The loss is no longer a finite number."""


@dataclass(kw_only=True)
class TrainingLoop:
    """One run's loop over its training rows.

    Attributes:
        config: how to train.
        assembly: the model and its optimizers.
        splits: the rows to train on and those to evaluate on; neither is empty.
        progress: where to begin; kept up to date.
        log: takes losses and evaluations; None on ranks that write none.
        display: shows them.
        save: writes a checkpoint of the present state.
        publishing: publishes the model while it is trained; None: nobody does.
        should_stop: asked after each step (on GPUs every few steps) and within evaluations; it
            answers all ranks alike.
    """

    config: TrainConfig
    assembly: Assembly
    splits: DataSplits
    progress: Progress
    log: MetricsLog | None
    display: Display
    save: Callable[[], None]
    should_stop: Callable[[], bool]
    publishing: Publishing | None = None

    def __post_init__(self) -> None:
        device = self.assembly.model.device
        threads = 1 if device.type == "cpu" else GPU_LOADER_THREADS
        # Target statistics leave out the fold of the row itself.
        numbered = self.assembly.preparation.preprocessor.statistics is not None
        self._sampler = self.assembly.item_sampler(seed=self.config.seed)
        train = self.splits.train
        if device.type != "cpu" and not numbered and self._sampler is None:
            train = packing(train)
        how: dict[str, Any] = {
            "batch_size": self.config.batch_size,
            "prefetch": 2 * threads,
            "threads": threads,
            "finish": None if device.type == "cpu" else Batch.pin_memory,
            "numbered": numbered,
            "part": (self.assembly.ranks.rank, self.assembly.ranks.world_size),
        }
        self._loader: BatchLoader | StreamLoader = (
            StreamLoader(train, first_row=self.progress.before.stream_rows, **how)
            if isinstance(train, FolderStream)
            else BatchLoader(train, shuffle=True, seed=self.config.seed, **how)
        )
        self._evaluated_step: int | None = None
        waits = isinstance(train, FolderStream)
        self._pipeline = make_pipeline(self.config.pipeline, self.assembly, waits=waits)
        self._losses = PendingLosses(self.assembly.ranks)
        self._last_loss = math.nan
        self._row_began = 0.0
        self._row_samples = 0

    @property
    def total_steps(self) -> int:
        """Steps of the whole run and of those before it, without early stop."""
        return self.progress.before.steps + self.config.epochs * self._loader.num_batches

    def run(self) -> bool:
        """Train until the end or until asked to stop; a checkpoint of the last step is written.

        Returns:
            True if training has ended, False if it was stopped before.

        Raises:
            DivergedError: the loss is not finite; no checkpoint is written any more.
            CheckpointError: a checkpoint cannot be written.
        """
        self.assembly.model.train()
        if self.progress.evaluation_due and not self._evaluate():
            return False  # the checkpoint that was resumed from is still right
        while not self.progress.done:
            if not self._run_to_evaluation():
                return False
        return True

    def _run_to_evaluation(self) -> bool:
        """Train up to the next evaluation, that one included; False if asked to stop."""
        progress, on_cpu = self.progress, self.assembly.model.device.type == "cpu"
        batches = self._batches()
        self._row_began, self._row_samples = time.perf_counter(), 0
        while not progress.evaluation_due:
            try:
                self._step(batches)
            except StopIteration:
                if not self._has_ended():
                    self._save()
                    return False
                if self._evaluated_step == progress.step:
                    progress.done, progress.evaluation_due = True, False
                    self._save()
                    return True
            if progress.evaluation_due:
                break
            saved = _falls_on(progress.step, self.config.checkpoint_every_steps)
            if saved:
                self._save()
            asks = on_cpu or progress.step % GPU_STEPS_BETWEEN_QUESTIONS == 0
            if asks and self.should_stop():
                if not saved:
                    self._save()
                return False
        if not self._evaluate():
            self._save()
            return False
        return progress.done or not self.should_stop()

    def _batches(self) -> Iterator[StepBatch | PackedStep]:
        """The batches up to the next evaluation, across epochs if need be.

        Dropping the iterator stops the loader's threads.
        """
        every, last = self.config.eval_every_steps, self._loader.num_batches
        epoch, batch, step = self.progress.epoch, self.progress.batch, self.progress.step
        while True:
            stop = last if every is None else min(last, batch + every - step % every)
            made, order = batch, self.progress.before.epochs + epoch
            for given in self._loader.epoch(order, batch, stop):
                samples = self._loader.batch_rows(made)
                yield self._prepared(given, order, made, samples)
                made += 1
            if made < stop:
                return  # a growing folder has ended, or nothing arrives and it is asked to stop
            step += stop - batch
            if self._is_evaluated(step, ended_epoch=epoch if stop == last else None):
                return
            epoch, batch = epoch + 1, 0

    def _prepared(
        self, given: Batch | PackedBatch, epoch: int, number: int, samples: int
    ) -> StepBatch | PackedStep:
        """What a pipeline takes of batch ``number`` of ``epoch``."""
        preparation = self.assembly.preparation
        if isinstance(given, PackedBatch):
            return PackedStep(given, samples, preparation)
        if self._sampler is not None:
            given = self._sampler.sampled(given, epoch, number, samples)
        return StepBatch(given, samples, preparation)

    def _has_ended(self) -> bool:
        """Whether a growing folder has ended, which is then evaluated; False: it is asked to stop."""
        if not (isinstance(self._loader, StreamLoader) and self._loader.ended):
            return False
        progress = self.progress
        self._look_at_losses()
        if progress.loss_steps:
            self._log_loss()
        progress.epoch, progress.batch, progress.evaluation_due = self.config.epochs, 0, True
        return True

    def _is_evaluated(self, step: int, *, ended_epoch: int | None) -> bool:
        """Whether an evaluation follows ``step``, which is the last one of ``ended_epoch`` or of none."""
        if _falls_on(step, self.config.eval_every_steps):
            return True
        done = None if ended_epoch is None else ended_epoch + 1
        return done == self.config.epochs or (
            done is not None and done % self.config.eval_every_epochs == 0
        )

    def _step(self, batches: Iterator[StepBatch | PackedStep]) -> None:
        """One step: train, count, log if due."""
        progress = self.progress
        factor = self.config.schedule.factor(step=progress.step, total_steps=self.total_steps)
        self.assembly.set_learning_rates(factor)
        loss, _ = self._pipeline.progress(batches)
        samples = self._loader.batch_rows(progress.batch)
        progress.count_step(samples=samples)
        if self.assembly.averages is not None:
            self.assembly.averages.after_step(progress.step)
        self._row_samples += samples
        self._losses.add(loss, samples=samples)
        if loss.device.type == "cpu" or len(self._losses) == MOST_PENDING:
            self._look_at_losses()
        self.display.step(step=progress.step, samples=samples, loss=self._last_loss)
        ended_epoch = None
        if progress.batch == self._loader.num_batches:
            ended_epoch = progress.epoch
            progress.epoch, progress.batch = progress.epoch + 1, 0
        progress.evaluation_due = self._is_evaluated(progress.step, ended_epoch=ended_epoch)
        if self.publishing is not None:
            self.publishing.after_step(progress.step, self.newest_example_s)
        if progress.evaluation_due or _falls_on(progress.step, self.config.log_every_steps):
            self._log_loss()

    def newest_example_s(self) -> float | None:
        """When the newest row that was trained on was written, seconds since 1970; None: not known."""
        train = self.splits.train
        rows = self.progress.stream_rows
        return train.newest_s(rows) if isinstance(train, FolderStream) else None

    def _look_at_losses(self) -> None:
        """Count the losses of the steps that were not looked at; waits for the device.

        Raises:
            DivergedError: one is not finite.
        """
        losses, before = self._losses.take(), self.progress.before
        for step, loss in enumerate(losses, start=self.progress.step - len(losses) + 1):
            if not math.isfinite(loss):
                epoch = (step - before.steps - 1) // self._loader.num_batches + before.epochs + 1
                raise DivergedError(
                    f"the loss of step {step} (epoch {epoch}) is"
                    f" {loss}; lower train.dense_optimizer.learning_rate"
                    f" (now {self.config.dense_optimizer.learning_rate}) or"
                    " train.embedding_optimizer.learning_rate"
                    f" (now {self.config.embedding_optimizer.learning_rate}), or add"
                    " train.schedule.warmup_steps"
                )
            self.progress.count_loss(loss)
            self._last_loss = loss

    def _log_loss(self) -> None:
        self._look_at_losses()
        now = time.perf_counter()
        dense, embedding = self.assembly.learning_rates()
        self._log(
            split="train",
            loss=self.progress.take_mean_loss(),
            dense_learning_rate=dense,
            embedding_learning_rate=embedding,
            samples_per_second=round(self._row_samples / max(now - self._row_began, 1e-9), 1),
        )
        self._row_began, self._row_samples = now, 0

    def _log(self, **columns: float | str) -> None:
        if self.log is not None:
            done = self.progress
            self.log.write(step=done.step, epoch=done.epochs, samples=done.samples, **columns)

    def _evaluate(self) -> bool:
        """Evaluate and save; False, with nothing changed, if asked to stop meanwhile."""
        give_model_back(self._pipeline)
        metrics = evaluate(
            self.assembly,
            self.splits.valid,
            batch_size=self.config.eval_batch_size,
            should_stop=self.should_stop,
        )
        if metrics is None:
            return False
        progress, evaluation = self.progress, metrics.compute()
        self._evaluated_step = progress.step
        better = progress.count_evaluation(evaluation, metric=self.config.metric)
        patience = self.config.patience
        out_of_patience = patience is not None and progress.evaluations_since_best >= patience
        progress.done = progress.epoch >= self.config.epochs or out_of_patience
        self._log_evaluation(evaluation)
        self.display.evaluation(step=progress.step, evaluation=evaluation, better=better)
        if out_of_patience:
            self.display.say(f"no better {self.config.metric} in {patience} evaluations: stopping")
        self._save()
        return True

    def _log_evaluation(self, evaluation: SplitEvaluation) -> None:
        if evaluation.only is not None:
            self._log(split="valid", **_columns(evaluation.only, evaluation.retrieval))
            return
        self._log(split="valid", loss=evaluation.loss, auc=evaluation.auc)
        for label, own in evaluation.by_label.items():
            self._log(split="valid", label=label, **_columns(own))

    def _save(self) -> None:
        self._look_at_losses()
        began = time.perf_counter()
        if self.log is not None:
            self.log.sync()
        self.save()
        self._row_began += time.perf_counter() - began  # no training, so it does not count


def _columns(
    evaluation: LabelEvaluation, retrieval: RetrievalEvaluation | None = None
) -> dict[str, float]:
    """The columns of the log that a label's metrics have, or those of a model for retrieval."""
    if retrieval is not None and isinstance(evaluation, Evaluation):
        return {"auc": evaluation.auc, "recall": retrieval.recall, "ndcg": retrieval.ndcg}
    columns = {"loss": evaluation.loss, "calibration": evaluation.calibration}
    if isinstance(evaluation, Evaluation):
        columns |= {
            "auc": evaluation.auc,
            "normalised_entropy": evaluation.normalised_entropy,
        }
    return columns


def _falls_on(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
