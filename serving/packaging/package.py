"""The steps from a trained model to a package file, in their order."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import fx
from tqdm import tqdm

import tessera
from tessera.errors import UserError
from tessera.kernels.libraries import fbgemm_version, load_libraries
from tessera.serving.golden import write_golden
from tessera.serving.manifest import (
    FORMAT_VERSION,
    Evaluation,
    Manifest,
    RecordInfo,
    Versions,
)
from tessera.serving.packaging.archive import write_package
from tessera.serving.packaging.embedding import float_tables, with_stored_tables
from tessera.serving.packaging.evaluate import evaluate
from tessera.serving.packaging.golden import golden_batch, golden_info
from tessera.serving.packaging.lookup import default_backend, lookup_backend
from tessera.serving.packaging.predict import PredictModule
from tessera.serving.packaging.quantize import StoredTables, quantize_tables
from tessera.serving.packaging.script import script
from tessera.serving.packaging.shard import plan_one_device
from tessera.serving.packaging.trace import trace
from tessera.serving.packaging.weight_types import weight_type
from tessera.serving.runner import Runner, TorchScriptRunner
from tessera.serving.schema import FeatureSpec, InputSchema, OutputSpec
from tessera.serving.torchscript import optimize
from tessera.training.data.batch import Batch
from tessera.training.models.ranking import RankingModel
from tessera.training.trained import TrainedModel, load_trained, validation_batches

TORCH_MIN = "2.11"
TORCH_BELOW = "2.14"
EVALUATION_BATCH_SIZE = 4096

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class PackageOptions:
    """What the user chooses.

    Attributes:
        name: the model's name: letters, digits, ``.``, ``_`` and ``-``.
        version: its version, of the same letters.
        dtype: weight type of the tables.
        backend: whose lookup operator; `default_backend` where none is named.
        output: the output's name.

    Raises:
        UserError: naming the field, its value and what to give, or what to install.
    """

    name: str
    version: str = "1"
    dtype: str = "int8"
    backend: str = field(default_factory=default_backend)
    output: str = "default"

    def __post_init__(self) -> None:
        for what in ("name", "version", "output"):
            value = getattr(self, what)
            if not _NAME.fullmatch(value):
                raise UserError(
                    f"the model's {what} is {value!r}; give letters, digits, '.', '_' and '-', "
                    "beginning with a letter or digit"
                )
        weight_type(self.dtype)
        lookup_backend(self.backend)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What is known of the weights, for the manifest.

    Attributes:
        source: the checkpoint's file name and step.
        dense_transform: what training did to the raw dense values, in words.
        metrics: by split, the metrics that training stored.
    """

    source: Mapping[str, str] = field(default_factory=dict)
    dense_transform: str = ""
    metrics: Mapping[str, Mapping[str, int | float | None]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ServableModel:
    """A model in its served form, before it is a file.

    Attributes:
        schema: inputs and outputs.
        tables: the stored tables.
        eager: the served form as a plain module.
        graph: the same, traced and with packed dense layers, run by Python op by op; what the
            scripted one must equal bit for bit.
        scripted: the same as TorchScript.
    """

    schema: InputSchema
    tables: StoredTables
    eager: PredictModule
    graph: fx.GraphModule
    scripted: torch.jit.ScriptModule


def package_model(
    run_or_checkpoint: str | Path,
    out: str | Path,
    options: PackageOptions,
    *,
    evaluate_rows: int | None = None,
    skip_evaluation: bool = False,
    progress: bool = True,
) -> Manifest:
    """Package a run folder's best checkpoint, or one checkpoint file.

    Args:
        run_or_checkpoint: what ``tessera train`` wrote.
        out: the file to make or replace.
        options: see `PackageOptions`.
        evaluate_rows: measure on about this many validation rows; None: on all.
        skip_evaluation: do not measure; the data is then not needed.
        progress: show progress bars where stderr is a terminal.

    Raises:
        UserError: no checkpoint, missing validation data, operators that are not installed, or
            something that cannot be packaged.
    """
    out = _checked_out(out)
    load_libraries(lookup_backend(options.backend).operator_libraries)
    trained = load_trained(run_or_checkpoint)
    origin = Origin(
        source={"checkpoint": trained.checkpoint_path.name, "step": str(trained.step)},
        dense_transform=trained.dense_transform,
        metrics=trained.metrics,
    )
    batches = () if skip_evaluation else _validation(trained)
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
        evaluate_rows: see `package_model`.
        progress: see `package_model`.

    Returns:
        The manifest that the file now holds.

    Raises:
        UserError: something that cannot be packaged, or a file that cannot be written.
    """
    out, origin = _checked_out(out), origin or Origin()
    servable = make_servable(model, options, origin=origin, progress=progress)
    runner: Runner = TorchScriptRunner(optimize(servable.scripted))
    with _bar("evaluate", None, progress=progress) as bar:
        evaluation = evaluate(
            model,
            runner,
            servable.schema,
            batches,
            max_rows=evaluate_rows,
            on_rows=bar.update,
        )
    inputs = golden_batch(servable.schema)
    answers = runner.forward(inputs)

    def manifest(records: Mapping[str, RecordInfo]) -> Manifest:
        return _manifest(
            model=model,
            options=options,
            origin=origin,
            servable=servable,
            evaluation=evaluation,
            records=records,
        )

    return write_package(out, servable.scripted, write_golden(inputs, answers), manifest)


def make_servable(
    model: RankingModel,
    options: PackageOptions,
    *,
    origin: Origin | None = None,
    progress: bool = False,
) -> ServableModel:
    """Quantize, trace and script a model, without writing anything.

    Raises:
        UserError: something that cannot be packaged.
    """
    origin = origin or Origin()
    backend = lookup_backend(options.backend)
    load_libraries(backend.operator_libraries)
    floats = float_tables(model)
    with _bar("quantize", sum(len(table.weights) for table in floats), progress=progress) as bar:
        tables = quantize_tables(floats, weight_type(options.dtype), on_rows=bar.update)
    schema = input_schema(model, output=options.output, dense_transform=origin.dense_transform)
    features = (*schema.group("id_list"), *schema.group("id_score_list"))
    eager = PredictModule(with_stored_tables(model, tables, features, backend), schema).eval()
    graph = trace(eager)
    backend.pack(graph)
    return ServableModel(
        schema=schema, tables=tables, eager=eager, graph=graph, scripted=script(graph)
    )


def input_schema(model: RankingModel, *, output: str, dense_transform: str) -> InputSchema:
    """What the served form of ``model`` takes and gives."""
    return InputSchema(
        dense_features=model.dense_names,
        dense_missing="nan",
        dense_transform=dense_transform,
        features=tuple(FeatureSpec(**vars(feature)) for feature in model.features),
        outputs=(OutputSpec(name=output, width=1),),
    )


def _manifest(
    *,
    model: RankingModel,
    options: PackageOptions,
    origin: Origin,
    servable: ServableModel,
    evaluation: Evaluation | None,
    records: Mapping[str, RecordInfo],
) -> Manifest:
    backend = lookup_backend(options.backend)
    tables = tuple(table.info for table in servable.tables.tables)
    floats = {id(table.weights) for table in float_tables(model)}
    dense = sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in floats)
    return Manifest(
        format_version=FORMAT_VERSION,
        name=options.name,
        version=options.version,
        created=_now(),
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
        dtype=options.dtype,
        tables=tables,
        bytes_fp32=dense + sum(table.bytes_fp32 for table in tables),
        bytes_packaged=dense + sum(table.bytes for table in tables),
        plan=plan_one_device(servable.tables),
        device="cpu",
        source=dict(origin.source),
        training_metrics={split: dict(metrics) for split, metrics in origin.metrics.items()},
        evaluation=evaluation,
        golden=golden_info(golden_batch(servable.schema)),
        records=dict(records),
    )


def _now() -> str:
    """The time of packaging; SOURCE_DATE_EPOCH overrides it, for builds that must repeat."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    try:
        moment = datetime.fromtimestamp(float(epoch), timezone.utc) if epoch else None
    except (ValueError, OverflowError, OSError) as error:
        raise UserError(f"SOURCE_DATE_EPOCH is {epoch!r}; give seconds since 1970") from error
    return (moment or datetime.now(timezone.utc)).strftime("%Y-%m-%dT%H:%M:%SZ")


def _checked_out(out: str | Path) -> Path:
    out = Path(out).expanduser()
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; give a file name, such as {out / 'model.pt'}")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: the folder {out.parent} does not exist; make it first")
    return out


def _validation(trained: TrainedModel) -> Iterable[Batch]:
    try:
        return validation_batches(trained, EVALUATION_BATCH_SIZE)
    except (UserError, OSError) as error:
        raise UserError(
            f"the validation data cannot be read ({error}); restore it, or package without "
            "measuring: --no-evaluate"
        ) from error


def _bar(what: str, total: int | None, *, progress: bool) -> tqdm[Any]:
    # disable=None: only where stderr is a terminal.
    return tqdm(
        total=total,
        desc=what,
        unit=" rows",
        unit_scale=True,
        leave=False,
        disable=None if progress else True,
    )
