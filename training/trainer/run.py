"""`train`: a whole run, from a config to a finished run folder."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tessera.errors import UserError
from tessera.partitions import Engine
from tessera.training.config import ExperimentConfig
from tessera.training.data.dataset import DataSplits, GrowingView, View
from tessera.training.data.opening import open_data
from tessera.training.data.users import user_feature
from tessera.training.models.ranking import build_ranking_model
from tessera.training.trackers.tracker import TrackedRun
from tessera.training.trainer.assembly import Assembly, assemble
from tessera.training.trainer.checkpoint import (
    prune_checkpoints,
    read_plain,
    restore,
    restore_model,
    save_checkpoint,
)
from tessera.training.trainer.continuing import read_record
from tessera.training.trainer.display import Display, describe
from tessera.training.trainer.evaluate import evaluate
from tessera.training.trainer.facts import count_parameters, label_hash
from tessera.training.trainer.files import find_checkpoint, latest_checkpoint
from tessera.training.trainer.fitting import fit_transforms
from tessera.training.trainer.logs import MetricsLog, read_metrics
from tessera.training.trainer.loop import TrainingLoop
from tessera.training.trainer.precision import check_precision
from tessera.training.trainer.progress import Before, Progress
from tessera.training.trainer.publishing import PublishedModel, Publishing, PublishOptions
from tessera.training.trainer.ranks import Ranks, device_of, joined_ranks
from tessera.training.trainer.retrieval_evaluation import retrieval_data
from tessera.training.trainer.run_facts import facts_of
from tessera.training.trainer.run_folder import RunFolder
from tessera.training.trainer.run_start import (
    begin,
    check_splits,
    first_weights,
    fitted_values,
    look_at,
    open_origin,
    take_up,
    torch_state,
)
from tessera.training.trainer.split_metrics import SplitMetrics
from tessera.training.transforms.fitting import Fitted
from tessera.training.typed_config import leaves


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a call of `train` ended.

    Attributes:
        folder: the run folder.
        status: ``finished``, or ``interrupted`` if ``should_stop`` asked for it.
        step: finished training steps.
        best_checkpoint: the best checkpoint so far; None before the first evaluation.
        final: what ``final.json`` holds: ``best_step``, ``metric``, and the metrics of the
            best checkpoint under ``valid`` and ``test`` (None without test rows); None while
            the run is not finished.
    """

    folder: Path
    status: Literal["finished", "interrupted"]
    step: int
    best_checkpoint: Path | None
    final: dict[str, Any] | None


def train(
    config: ExperimentConfig,
    out: Path,
    *,
    resume: bool = False,
    continues: Path | None = None,
    progress: bool = True,
    should_stop: Callable[[], bool] = lambda: False,
    engine: Engine | None = None,
    publish: PublishOptions | None = None,
) -> RunResult:
    """Train into the folder ``out`` until the config's end, evaluate the best checkpoint, report.

    Under torchrun, or in a process group, every rank calls it: each works on its part of every
    batch, tables are spread over them (``train.sharding``), and rank 0 writes the files.  The run
    is that of one rank but for the order of sums and the first values.

    Torch's CPU generator is seeded and its number of threads set for the time of the call; both
    are put back after it.  No signal handler is installed.

    Args:
        config: what to do; relative data paths are taken from the working directory.
        out: the run folder; it must not exist, be empty, or (with ``resume``) hold a run.
        resume: go on with the run in ``out`` from its latest checkpoint, exactly as if it had
            not stopped.  A finished run is left alone and its result returned.
        continues: a run folder, or one of its checkpoints, that the new run in ``out`` goes on from;
            see `tessera.training.trainer.continuing`.  None: it begins with fresh weights.
        progress: whether to show progress on stderr.
        should_stop: asked between steps; once it is True it must stay so.  The step that runs
            is finished and a checkpoint written.  One rank's True is all ranks'.
        engine: where transforms are fitted; None: in processes over all cores.  What they learn does
            not depend on it.
        publish: where commits of the model are written while it is trained; None: nowhere.

    Raises:
        UserError: the folder, the data or the config do not fit, the run was resumed with
            another config, ``continues`` holds nothing that this run can go on from, the loss diverged, or a checkpoint cannot be written.
    """
    folder = RunFolder(out)
    config = config.resolved(Path.cwd())
    device = device_of(config.train.device)
    check_precision(config.train.precision, device)
    with joined_ranks(device) as ranks, contextlib.ExitStack() as stack:
        finished = ranks.on_first(lambda: look_at(folder, config, continues, resume=resume))
        if finished:
            final = folder.read_final()
            best = folder.root / str(final["best_checkpoint"])
            return RunResult(
                folder=out, status="finished", step=final["step"], best_checkpoint=best, final=final
            )
        reading = stack.enter_context(contextlib.ExitStack())
        origin = ranks.on_first(
            lambda: open_origin(folder, continues, config, reading, resume=resume)
        )
        stack.enter_context(torch_state(config.train))
        splits = ranks.first_then_others(
            lambda: open_data(config.data, progress=progress and ranks.first)
        )
        growing = splits.train if isinstance(splits.train, GrowingView) else None
        if growing is not None:
            take_up(growing, folder, config, ranks, origin, should_stop=should_stop)
        check_splits(splits, config)
        if origin is not None:
            origin.check_columns(splits.train.dataset.columns)
        transforms = splits.train.dataset.columns.transforms()
        fitted = ranks.on_first(
            lambda: fitted_values(
                folder,
                lambda: fit_transforms(
                    transforms, splits.train, progress=progress, engine=engine, data=config.data
                ),
                origin,
                resume=resume,
            )
        )
        assembly = assemble(
            config,
            labels=splits.train.dataset.columns.labels,
            transforms=transforms,
            fitted=fitted,
            ranks=ranks,
            device=device,
            retrieval=retrieval_data(config, splits.train, ranks, progress=progress),
        )
        before = first_weights(assembly, origin, folder, config, splits.train, resume=resume)
        reading.close()
        ranks.on_first(lambda: begin(folder, config, stack, growing, origin, resume=resume))
        return _Run(
            config=config,
            folder=folder,
            splits=splits,
            fitted=fitted,
            assembly=assembly,
            ranks=ranks,
            before=before,
            show_progress=progress and ranks.first,
            should_stop=lambda: ranks.any(should_stop()),
            publish=publish,
        ).run()


@dataclass(kw_only=True)
class _Run:
    """One call of `train` after everything was checked."""

    config: ExperimentConfig
    folder: RunFolder
    splits: DataSplits
    fitted: Fitted
    assembly: Assembly
    ranks: Ranks
    before: Before
    show_progress: bool
    should_stop: Callable[[], bool]
    publish: PublishOptions | None

    def run(self) -> RunResult:
        progress = self._restore()
        with contextlib.ExitStack() as stack:
            log = self._log(progress, stack) if self.ranks.first else None
            ended = self._train(progress, log)
            final = self._evaluate_best(progress) if ended else None
            if log is not None:
                log.finish(final)
        return RunResult(
            folder=self.folder.root,
            status="interrupted" if final is None else "finished",
            step=progress.step,
            best_checkpoint=self._best_path(progress),
            final=final,
        )

    def _log(self, progress: Progress, stack: contextlib.ExitStack) -> MetricsLog:
        """The metrics log with its trackers, open until ``stack`` ends."""
        log = MetricsLog(self.folder.metrics, from_step=progress.step)
        stack.enter_context(contextlib.closing(log))
        run = TrackedRun(
            folder=self.folder.root,
            name=self.config.run.name or self.folder.root.absolute().name,
            config=leaves(self.config.to_plain()),
            from_step=progress.step,
            state=None,
        )
        log.track(self.config.run.settled_trackers(), run, self.folder.trackers)
        return log

    def _train(self, progress: Progress, log: MetricsLog | None) -> bool:
        train = self.splits.train
        steps: int | None = -(-len(train) // self.config.train.batch_size)
        if isinstance(train, GrowingView):
            steps = None
        with contextlib.ExitStack() as stack:
            display = Display(
                total_steps=(
                    None
                    if steps is None
                    else progress.before.steps + steps * self.config.train.epochs
                ),
                first_step=progress.step,
                enabled=self.show_progress,
            )
            stack.enter_context(contextlib.closing(display))
            if progress.step:
                own = progress.step > progress.before.steps
                display.say(f"{'resumed' if own else 'continued'} after step {progress.step}")
            publishing = self._publishing(stack)
            loop = TrainingLoop(
                config=self.config.train,
                assembly=self.assembly,
                splits=self.splits,
                progress=progress,
                log=log,
                display=display,
                save=lambda: self._save(progress),
                should_stop=self.should_stop,
                publishing=publishing,
            )
            if publishing is not None:
                loop.save = lambda: self._save_and_publish(progress, publishing, loop)
                publishing.after_resume(self.folder.checkpoints, loop.newest_example_s())
            return loop.run()

    def _publishing(self, stack: contextlib.ExitStack) -> Publishing | None:
        """What publishes the model, until ``stack`` ends."""
        if self.publish is None:
            return None
        columns, config = self.splits.train.dataset.columns, self.config
        model = PublishedModel(
            make=lambda: build_ranking_model(
                config.model,
                columns.dense_names,
                columns.sparse_names,
                labels=columns.label_names,
                transforms=columns.transforms(),
                sizes=self.fitted.sizes,
                device="meta",
            ),
            columns=columns,
        )
        publishing = Publishing(self.publish, model, self.assembly)
        stack.enter_context(contextlib.closing(publishing))
        return publishing

    def _save_and_publish(
        self, progress: Progress, publishing: Publishing, loop: TrainingLoop
    ) -> None:
        self._save(progress)
        publishing.after_save(self.folder.checkpoints, progress.step, loop.newest_example_s())

    def _restore(self) -> Progress:
        """Load the latest checkpoint, if there is one; returns where to begin."""
        path = self.ranks.on_first(lambda: latest_checkpoint(self.folder.checkpoints))
        if path is None:
            return Progress.behind(self.before)
        plain = read_plain(path)
        # How many rows of a growing folder are there when a run begins changes nothing of it.
        first = 1 if isinstance(self.splits.train, GrowingView) else 0
        if plain["split_rows"][first:] != self._split_rows()[first:]:
            raise UserError(
                f"the data has changed: {path} was trained with {plain['split_rows']} rows (train,"
                f" valid, test), data.path now gives {self._split_rows()}; begin a new run"
            )
        restore(path, self.assembly, seed=self.config.train.seed)
        return Progress.from_plain(plain["progress"], path)

    def _save(self, progress: Progress) -> None:
        data = self.splits.train.dataset
        plain: dict[str, Any] = {
            "config": self.config.to_plain(),
            "columns": data.columns.to_json(),
            "fitted": self.fitted.sizes.to_json(),
            "ranges": [own.to_json() for own in self.fitted.ranges],
            "dense_names": list(data.columns.dense_names),
            "sparse_names": list(data.columns.sparse_names),
            "split_rows": self._split_rows(),
            "progress": progress.to_plain(),
        }
        folder = self.folder.checkpoints
        save_checkpoint(folder, progress.step, self.assembly, plain)
        if self.ranks.first:
            prune_checkpoints(
                folder, newest=self.config.train.keep_checkpoints, best=progress.best_step
            )

    def _malformed_later(self) -> int:
        """Rows that were left out of files that have arrived since the run began."""
        train = self.splits.train
        return train.malformed_rows if isinstance(train, GrowingView) else 0

    def _split_rows(self) -> list[int]:
        return [len(self.splits.train), len(self.splits.valid), len(self.splits.test)]

    def _best_path(self, progress: Progress) -> Path | None:
        if progress.best_step is None:
            return None
        return find_checkpoint(self.folder.checkpoints, progress.best_step)

    def _evaluate_best(self, progress: Progress) -> dict[str, Any] | None:
        """Evaluate the best checkpoint and write the final files; None if asked to stop."""
        best = self._best_path(progress)
        assert best is not None, "training ends with an evaluation"
        if progress.best_step != progress.step:
            restore_model(best, self.assembly)
        began = time.perf_counter()
        users = user_feature(self.splits.train.dataset.columns)
        metrics: dict[str, SplitMetrics] = {}
        for name in ("valid", "test"):
            view: View = getattr(self.splits, name)
            if len(view) == 0:
                continue
            pass_metrics = evaluate(
                self.assembly,
                view,
                batch_size=self.config.train.eval_batch_size,
                should_stop=self.should_stop,
                user_feature=users,
            )
            if pass_metrics is None:
                return None
            metrics[name] = pass_metrics
        seconds = time.perf_counter() - began
        evaluations = {name: found.compute() for name, found in metrics.items()}
        rows = sum(len(getattr(self.splits, name)) for name in evaluations)
        final = {
            "continues": self.ranks.on_first(lambda: read_record(self.folder)),
            "step": progress.step,
            "samples": progress.samples,
            "malformed_rows": self.splits.malformed.total + self._malformed_later(),
            "best_step": progress.best_step,
            "best_checkpoint": str(best.relative_to(self.folder.root)),
            "metric": self.config.train.metric,
            "parameters": count_parameters(self.assembly.model),
            "data": {
                name: label_hash(getattr(self.splits, name)) if name in evaluations else None
                for name in ("valid", "test")
            },
            "valid": evaluations["valid"].to_json(),
            "test": evaluations["test"].to_json() if "test" in evaluations else None,
            "errors_clustered_by": users,
            "evaluation_samples_per_second": round(rows / max(seconds, 1e-9), 1),
        }
        if self.ranks.first:
            self._write_final(final, metrics)
        if self.show_progress:
            for name, evaluation in evaluations.items():
                line = f"{name}, best step {progress.best_step}: {describe(evaluation)}"
                print(line, file=sys.stderr, flush=True)
        return final

    def _write_final(self, final: dict[str, Any], metrics: dict[str, SplitMetrics]) -> None:
        if self.config.run.report:
            # Its plots take a second to import that a run without them need not wait.
            from tessera.training.trainer.report import render_report  # noqa: PLC0415

            report = render_report(
                facts=facts_of(
                    self.folder,
                    self.config,
                    self.splits,
                    device=self.assembly.model.device,
                    ranks=self.ranks.world_size,
                ),
                folder=self.folder.root,
                config_yaml=self.config.to_yaml(),
                rows=read_metrics(self.folder.metrics),
                final=final,
                metrics=metrics,
            )
            self.folder.write_text(self.folder.report, report)
        self.folder.write_final(final)  # last: it marks the run as finished
