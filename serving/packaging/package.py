"""The steps from a module to a package file, in their order; a trained run is a module like any other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from torch import nn

from tessera.errors import UserError
from tessera.kernels.libraries import load_libraries
from tessera.serving.package.evaluation import Evaluation
from tessera.serving.package.manifest import Manifest, ShardingPlan
from tessera.serving.package.runner import Runner, TorchScriptRunner
from tessera.serving.package.schema import InputSchema
from tessera.serving.package.torchscript import optimize
from tessera.serving.packaging.calibration import looked_at
from tessera.serving.packaging.dense_types import DENSE_TYPES
from tessera.serving.packaging.ensemble import (
    Ensemble,
    check_members,
    checked_weights,
    ensemble_origin,
    member_names,
)
from tessera.serving.packaging.evaluate import LabelledBatch, evaluate
from tessera.serving.packaging.inputs import ModelInputs, read_inputs
from tessera.serving.packaging.lookups.backends import default_backend, lookup_backend
from tessera.serving.packaging.options import Origin, PackageOptions
from tessera.serving.packaging.ranking import (
    RANK_ONLY,
    ServedRanking,
    labelled,
    ranking_source,
    served_tasks,
    tower_source,
)
from tessera.serving.packaging.servable import make_servable, progress_bar
from tessera.serving.packaging.source import SampleBatch, Source
from tessera.serving.packaging.tables.spill import Spill, SpilledRoom
from tessera.serving.packaging.type_report import check_place, compare_types, write_report
from tessera.serving.packaging.write.package import iso_time, write_servable
from tessera.training.data.batch import Batch
from tessera.training.data.columns import FeatureColumns, ServedTask
from tessera.training.models.ranking import RankingModel
from tessera.training.models.retrieval import TowerSide
from tessera.training.trained import TrainedModel, load_trained, validation_batches

EVALUATION_BATCH_SIZE = 4096


def package_model(
    module: nn.Module,
    schema: ModelInputs | None,
    sample_batch: SampleBatch,
    *,
    out: str | Path,
    name: str | None = None,
    version: str = "1",
    dtype: str = "int8",
    table_dtypes: Mapping[str, str] | None = None,
    max_table_error: float | None = None,
    dense_dtype: str = "fp32",
    backend: str | None = None,
    device: str = "cpu",
    shards: int = 1,
    sharding: str = "auto",
    table_sharding: Mapping[str, str] | None = None,
    plan: ShardingPlan | None = None,
    leaf_modules: Sequence[str] = (),
    allow_ops: Sequence[str] = (),
    sign_key: Path | None = None,
    report: str | Path | None = None,
    validation: Iterable[LabelledBatch] = (),
    progress: bool = False,
) -> Manifest:
    """Quantize, shard, trace, script and package any module with embedding collections.

    * ``module`` takes, in any order and each at most once, a float32 tensor ``[B, F]``, a
      `KeyedJaggedTensor` and a `KeyedJaggedTensor` with weights; it returns a tensor, a dictionary
      of tensors or a `KeyedTensor`, each tensor ``[B]`` or ``[B, k]``.  It is left as it is, and
      packaged in evaluation mode.
    * ``schema`` says what inputs and outputs are called and how ids are treated; None: the defaults
      of `ModelInputs`.
    * ``sample_batch`` holds the module's arguments for one or more samples.  Only their kinds, names
      and widths count.
    * ``out`` is the file to make or replace, whose name is the model's where ``name`` is None.
    * ``backend`` is ``tessera`` where that is built, else ``fbgemm``, if it is None.
    * ``validation`` holds batches of the module's arguments, each with the labels ``[B]`` of its
      first output, or ``[B, L]`` of its first ``L``, which are probabilities; the manifest then holds
      the metrics of the first before and after quantization.
    * ``report`` is where to write what every weight type would cost and save: HTML where the name
      ends in ``.html``, text otherwise.
    * ``progress`` shows a progress bar where stderr is a terminal.
    * The others are fields of `PackageOptions`.

    Returns:
        The manifest that the file now holds.

    Raises:
        UserError: something that cannot be packaged; says what, where and how to go on.
    """
    inputs = read_inputs(schema)
    options = PackageOptions(
        name=Path(out).stem if name is None else name,
        version=version,
        dtype=dtype,
        table_dtypes=table_dtypes or {},
        max_table_error=max_table_error,
        dense_dtype=dense_dtype,
        backend=default_backend() if backend is None else backend,
        device=device,
        shards=shards,
        sharding=sharding,
        table_sharding=table_sharding or {},
        plan=plan,
        output=inputs.output,
        leaf_modules=leaf_modules,
        allow_ops=allow_ops,
        sign_key=sign_key,
    )
    return package_source(
        (module, inputs, sample_batch),
        out,
        options,
        origin=module_origin(module),
        validation=validation,
        report=None if report is None else Path(report),
        progress=progress,
    )


def module_origin(module: nn.Module) -> Origin:
    """What a manifest says of where a module of the user's own is from."""
    kind = type(module)
    return Origin(source={"module": f"{kind.__module__}.{kind.__qualname__}"})


def package_run(
    run_or_checkpoint: str | Path,
    out: str | Path,
    options: PackageOptions,
    *,
    evaluate_rows: int | None = None,
    skip_evaluation: bool = False,
    report: Path | None = None,
    tower: TowerSide | None = None,
    progress: bool = True,
) -> Manifest:
    """Package a run folder's best checkpoint, or one checkpoint file.

    About ``evaluate_rows`` validation rows are measured (None: all of them), and with
    ``skip_evaluation`` none, whose data is then not needed.  With ``tower`` it is one tower of a model for
    retrieval that is packaged, and nothing is measured.  For the others, see `package_source`.

    Raises:
        UserError: no checkpoint, missing validation data, operators that are not installed, or
            something that cannot be packaged.
    """
    return package_runs(
        [run_or_checkpoint],
        out,
        options,
        evaluate_rows=evaluate_rows,
        skip_evaluation=skip_evaluation,
        report=report,
        tower=tower,
        progress=progress,
    )


def package_runs(
    runs_or_checkpoints: Sequence[str | Path],
    out: str | Path,
    options: PackageOptions,
    *,
    weights: Sequence[float] | None = None,
    evaluate_rows: int | None = None,
    skip_evaluation: bool = False,
    report: Path | None = None,
    tower: TowerSide | None = None,
    progress: bool = True,
) -> Manifest:
    """Package one run, or several as the `Ensemble` that gives the mean of their logits.

    ``weights`` says what each of several runs counts; None: all the same.  An ensemble is measured
    on the validation rows of its first member, which must be those of all; it has no ``tower``.  For the
    others, see `package_run`.

    Raises:
        UserError: as `package_run`, or runs that differ in their inputs or labels.
    """
    out = checked_out(out)
    if report is not None:
        check_place(report)
    if weights is not None or len(runs_or_checkpoints) > 1:
        weights = checked_weights(weights, len(runs_or_checkpoints))
    load_libraries(lookup_backend(options.backend).operator_libraries)
    room = SpilledRoom(out.parent)
    trained = [load_trained(path, room=room) for path in runs_or_checkpoints]
    first = trained[0]
    tasks = served_tasks(first.model, first.columns)
    # Not the time of packaging: the same checkpoints give the same bytes.
    created = iso_time(max(one.checkpoint_path.stat().st_mtime for one in trained))
    members: dict[str, nn.Module] = {}
    if weights is not None:
        check_members(trained, same_rows=not skip_evaluation)
        ensemble = Ensemble([one.model for one in trained], weights)
        source = ranking_source(ensemble, first.columns, first.ranges)
        origin = ensemble_origin(trained, weights, created)
        names = member_names(trained)
        members = {
            name: ServedRanking(one.model, tasks) for name, one in zip(names, trained, strict=True)
        }
    else:
        source = (
            ranking_source(first.model, first.columns, first.ranges)
            if tower is None
            else tower_source(first.model, tower, first.columns, first.ranges)
        )
        origin = Origin(source=_source(first, tower), metrics=first.metrics, created=created)
    return package_source(
        source,
        out,
        options,
        origin=origin,
        validation=() if skip_evaluation or tower is not None else _Validation(first),
        tasks=tasks,
        evaluate_rows=evaluate_rows,
        report=report,
        progress=progress,
        members=members,
    )


def _source(trained: TrainedModel, tower: TowerSide | None) -> dict[str, str]:
    source = {"checkpoint": trained.checkpoint_path.name, "step": str(trained.step)}
    if tower is None and trained.model.scores == "raw":
        source["scores"] = RANK_ONLY
    if tower is not None:
        source |= {"tower": tower, "id_column": id_column(trained.columns, tower)}
    return source


def id_column(columns: FeatureColumns, tower: TowerSide) -> str:
    """The column of the files that says whose a row is, or which item; empty where none is declared."""
    name = columns.item_id if tower == "item" else columns.user_id
    named = {column.name: column.column or column.name for column in columns.sparse}
    return "" if name is None else named[name]


class _Validation:
    """The validation set of a run, from its beginning each time."""

    def __init__(self, trained: TrainedModel) -> None:
        self._trained = trained
        iter(self)  # what cannot be read is to be known before any work

    def __iter__(self) -> Iterator[LabelledBatch]:
        try:
            return labelled(validation_batches(self._trained, EVALUATION_BATCH_SIZE))
        except (UserError, OSError) as error:
            raise UserError(
                f"the validation data cannot be read ({error}); restore it, or package without "
                "measuring: --no-evaluate"
            ) from error


def package_source(
    source: Source,
    out: str | Path,
    options: PackageOptions,
    *,
    origin: Origin | None = None,
    validation: Iterable[LabelledBatch] = (),
    tasks: Sequence[ServedTask] = ("binary",),
    evaluate_rows: int | None = None,
    report: Path | None = None,
    progress: bool = False,
    members: Mapping[str, nn.Module] | None = None,
) -> Manifest:
    """Package a module that is in memory; returns the manifest that the file now holds.

    ``tasks`` are those of the labels in ``validation``.  ``evaluate_rows`` is explained at
    `package_run`, ``members`` at `evaluate`, the others at `package_model`; with a report, the validation
    set is gone through once per type.

    Raises:
        UserError: something that cannot be packaged, or a file that cannot be written.
    """
    out, origin = checked_out(out), origin or Origin()

    first: list[LabelledBatch] = []
    if report is not None or DENSE_TYPES[options.dense_dtype].calibrated:
        first, validation = looked_at(validation)

    def measure(runner: Runner, schema: InputSchema) -> Evaluation | None:
        return evaluate(
            source[0],
            runner,
            schema,
            validation,
            tasks=tasks,
            max_rows=evaluate_rows,
            members=members,
        )

    if report is not None:
        check_place(report)
        made = compare_types(
            options, lambda o: make_servable(source, o, calibration=first), measure
        )
        write_report(made, report)
    spill = Spill(out.parent)
    servable = make_servable(
        source, options, progress=progress, allocate=spill.zeros, calibration=first
    )
    runner: Runner = TorchScriptRunner(optimize(servable.scripted))
    with progress_bar("evaluate", None, progress=progress) as bar:
        evaluation = evaluate(
            source[0],
            runner,
            servable.schema,
            validation,
            tasks=tasks,
            max_rows=evaluate_rows,
            on_rows=bar.update,
            members=members,
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


def write_model(
    model: RankingModel,
    out: str | Path,
    options: PackageOptions,
    *,
    origin: Origin | None = None,
    columns: FeatureColumns | None = None,
    batches: Iterable[Batch] = (),
) -> Manifest:
    """Package a ranking model that is in memory; see `ranking_source` and `package_source`.

    ``batches`` are the validation set; where there are none, nothing is measured.
    """
    source = ranking_source(model, columns)
    return package_source(source, out, options, origin=origin, validation=labelled(batches))


def checked_out(out: str | Path) -> Path:
    """The file to write; a `UserError` where it is a folder, or its folder does not exist."""
    out = Path(out).expanduser()
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; give a file name, such as {out / 'model.pt'}")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: the folder {out.parent} does not exist; make it first")
    return out
