"""The steps from a trained model to a package file, in their order."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch
from torch import Tensor

import tessera
from tessera.errors import UserError
from tessera.kernels.libraries import fbgemm_version, load_libraries
from tessera.serving.package.golden import write_golden
from tessera.serving.package.manifest import (
    FORMAT_VERSION,
    Evaluation,
    GoldenInfo,
    Manifest,
    RecordInfo,
    Versions,
)
from tessera.serving.package.runner import Runner, TorchScriptRunner
from tessera.serving.package.schema import InputSchema
from tessera.serving.package.signing import read_private_key, sign_manifest
from tessera.serving.package.torchscript import optimize
from tessera.serving.packaging.evaluate import evaluate
from tessera.serving.packaging.lookups.backends import lookup_backend
from tessera.serving.packaging.options import Origin, PackageOptions
from tessera.serving.packaging.servable import (
    ServableModel,
    input_schema,
    make_servable,
    progress_bar,
)
from tessera.serving.packaging.tables.spill import Spill, SpilledRoom
from tessera.serving.packaging.type_report import Measure, check_place, compare_types, write_report
from tessera.serving.packaging.write.archive import write_package
from tessera.serving.packaging.write.golden import golden_batch, golden_info
from tessera.training.data.batch import Batch
from tessera.training.models.ranking import RankingModel
from tessera.training.trained import TrainedModel, load_trained, validation_batches

__all__ = [
    "Origin",
    "PackageOptions",
    "ServableModel",
    "input_schema",
    "make_servable",
    "package_run",
    "write_model",
]

TORCH_MIN = "2.11"
TORCH_BELOW = "2.14"
EVALUATION_BATCH_SIZE = 4096


def package_run(
    run_or_checkpoint: str | Path,
    out: str | Path,
    options: PackageOptions,
    *,
    evaluate_rows: int | None = None,
    skip_evaluation: bool = False,
    report: Path | None = None,
    progress: bool = True,
) -> Manifest:
    """Package a run folder's best checkpoint, or one checkpoint file.

    Args:
        run_or_checkpoint: what ``tessera train`` wrote.
        out: the file to make or replace.
        options: see `PackageOptions`.
        evaluate_rows: measure on about this many validation rows; None: on all.
        skip_evaluation: do not measure; the data is then not needed.
        report: write here what every weight type would cost and save.
        progress: show progress bars where stderr is a terminal.

    Raises:
        UserError: no checkpoint, missing validation data, operators that are not installed, or
            something that cannot be packaged.
    """
    out = checked_out(out)
    if report is not None:
        check_place(report)
    load_libraries(lookup_backend(options.backend).operator_libraries)
    trained = load_trained(run_or_checkpoint, room=SpilledRoom(out.parent))
    origin = Origin(
        source={"checkpoint": trained.checkpoint_path.name, "step": str(trained.step)},
        dense_transform=trained.dense_transform,
        metrics=trained.metrics,
        # Not the time of packaging: the same checkpoint gives the same bytes.
        created=_iso(trained.checkpoint_path.stat().st_mtime),
    )
    batches = () if skip_evaluation else _validation(trained)
    if report is not None:
        measure = _no_measure if skip_evaluation else _measure(trained, evaluate_rows)
        made = compare_types(options, lambda o: make_servable(trained.model, o), measure)
        write_report(made, report)
    return write_model(
        trained.model,
        out,
        options,
        origin=origin,
        batches=batches,
        evaluate_rows=evaluate_rows,
        progress=progress,
    )


def write_model(
    model: RankingModel,
    out: str | Path,
    options: PackageOptions,
    *,
    origin: Origin | None = None,
    batches: Iterable[Batch] = (),
    evaluate_rows: int | None = None,
    progress: bool = False,
) -> Manifest:
    """Package a model that is in memory.

    Args:
        model: float32, with plain tables; left as it is.
        out: the file to make or replace.
        options: see `PackageOptions`.
        origin: see `Origin`.
        batches: the validation set; empty: nothing is measured.
        evaluate_rows: see `package_run`.
        progress: see `package_run`.

    Returns:
        The manifest that the file now holds.

    Raises:
        UserError: something that cannot be packaged, or a file that cannot be written.
    """
    out, origin = checked_out(out), origin or Origin()
    spill = Spill(out.parent)
    servable = make_servable(model, options, origin=origin, progress=progress, allocate=spill.zeros)
    runner: Runner = TorchScriptRunner(optimize(servable.scripted))
    with progress_bar("evaluate", None, progress=progress) as bar:
        evaluation = evaluate(
            model,
            runner,
            servable.schema,
            batches,
            max_rows=evaluate_rows,
            on_rows=bar.update,
        )
    return write_servable(
        servable,
        runner,
        out,
        options,
        origin=origin,
        evaluation=evaluation,
        spilled=spill.buffers,
    )


def write_servable(
    servable: ServableModel,
    runner: Runner,
    out: Path,
    options: PackageOptions,
    *,
    origin: Origin,
    evaluation: Evaluation | None,
    spilled: Sequence[Tensor] = (),
) -> Manifest:
    """Record golden answers and write the file.

    Args:
        servable: the served form.
        runner: runs it, as a loader would.
        out: the file to make or replace.
        options: see `PackageOptions`.
        origin: see `Origin`.
        evaluation: the metrics before and after quantization, if they were measured.
        spilled: the tables' buffers that are in files.

    Raises:
        UserError: the file cannot be written.
    """
    inputs = golden_batch(servable.schema)
    answers = runner.forward(inputs)

    def manifest(records: Mapping[str, RecordInfo]) -> Manifest:
        made = _manifest(
            options=options,
            origin=origin,
            servable=servable,
            evaluation=evaluation,
            golden=golden_info(
                inputs, answers, device=options.device, dense_dtype=options.dense_dtype
            ),
            records=records,
        )
        if options.sign_key is None:
            return made
        return sign_manifest(made, read_private_key(options.sign_key))

    golden = write_golden(inputs, answers)
    return write_package(out, servable.scripted, golden, manifest, spilled=spilled)


def _manifest(
    *,
    options: PackageOptions,
    origin: Origin,
    servable: ServableModel,
    evaluation: Evaluation | None,
    golden: GoldenInfo,
    records: Mapping[str, RecordInfo],
) -> Manifest:
    backend = lookup_backend(options.backend)
    return Manifest(
        format_version=FORMAT_VERSION,
        name=options.name,
        version=options.version,
        created=_created(origin),
        versions=Versions(
            tessera=tessera.__version__,
            torch=torch.__version__,
            fbgemm=fbgemm_version(),
            torch_min=TORCH_MIN,
            torch_below=TORCH_BELOW,
        ),
        backend=backend.name,
        operator_libraries=backend.operator_libraries,
        schema=servable.schema,
        dtype=servable.dtype,
        dense_dtype=options.dense_dtype,
        tables=tuple(table.info for table in servable.tables.tables),
        bytes_fp32=servable.bytes_fp32,
        bytes_packaged=servable.bytes_packaged,
        plan=servable.plan,
        device=options.device,
        source=dict(origin.source),
        training_metrics={split: dict(metrics) for split, metrics in origin.metrics.items()},
        evaluation=evaluation,
        golden=golden,
        records=dict(records),
    )


def _created(origin: Origin) -> str:
    """The manifest's time; SOURCE_DATE_EPOCH overrides it, for builds that must repeat."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if not epoch:
        return origin.created or _iso(time.time())
    try:
        return _iso(float(epoch))
    except (ValueError, OverflowError, OSError) as error:
        raise UserError(f"SOURCE_DATE_EPOCH is {epoch!r}; give seconds since 1970") from error


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def checked_out(out: str | Path) -> Path:
    """The file to write.

    Raises:
        UserError: it is a folder, or its folder does not exist.
    """
    out = Path(out).expanduser()
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; give a file name, such as {out / 'model.pt'}")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: the folder {out.parent} does not exist; make it first")
    return out


def _measure(trained: TrainedModel, rows: int | None) -> Measure:
    def measure(runner: Runner, schema: InputSchema) -> Evaluation | None:
        return evaluate(trained.model, runner, schema, _validation(trained), max_rows=rows)

    return measure


def _no_measure(runner: Runner, schema: InputSchema) -> Evaluation | None:
    del runner, schema
    return None


def _validation(trained: TrainedModel) -> Iterable[Batch]:
    try:
        return validation_batches(trained, EVALUATION_BATCH_SIZE)
    except (UserError, OSError) as error:
        raise UserError(
            f"the validation data cannot be read ({error}); restore it, or package without "
            "measuring: --no-evaluate"
        ) from error
