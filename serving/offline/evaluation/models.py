"""Packages and runs as what answers batches of training's readers.

Shapes: ``B`` rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.errors import UserError
from tessera.serving.package.loading import LoadedPackage, cpu_instead, load_package
from tessera.serving.package.schema import FeatureSpec, InputSchema
from tessera.serving.package.time_limit import TimeLimit
from tessera.serving.packaging.evaluate import host_batch
from tessera.serving.packaging.ranking import RANK_ONLY, ServedRanking, served_tasks
from tessera.training.data.batch import Batch
from tessera.training.data.columns import ColumnConfig, FeatureColumns, Kind, LabelColumn
from tessera.training.data.config import DataConfig
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.training.trained import load_trained

Scores = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, kw_only=True)
class Feature:
    """What a model needs of a row: one dense value, or the ids of one feature.

    Attributes:
        name: the feature's name in the model.
        column: how a table's column gives it.
        strings: whether its ids are those of strings; None: the model does not say.
    """

    name: str
    column: ColumnConfig
    strings: bool | None = None

    @property
    def dense(self) -> bool:
        """Whether it is a dense value."""
        return self.column.kind == "dense"

    def definition(self) -> tuple[Any, ...]:
        """What must be the same where two features are read once."""
        own = self.column
        family = "sequence" if own.kind == "sequence" else "list"
        if own.kind in {"dense", "categorical"}:
            family = own.kind
        source = own.column or self.name
        return source, family, own.max_length, own.weights, own.kind == "weighted_list"


class Model:
    """A package or a run, on the CPU or on the GPUs that it was made for.

    Attributes:
        name: how results call it.
        path: what the user named.
        kind: ``package`` or ``run``.
        features: what it needs of a row, dense ones first.
        outputs: the names of its scores.
        labels: what the scores are of, as far as the model knows: of a run.
        data: where a run's data is; None for a package.
        about: what else the results say of it.
        probabilities: whether its scores for binary labels are probabilities, as far as it is known.
    """

    name: str
    path: Path
    kind: str
    features: tuple[Feature, ...]
    outputs: tuple[str, ...]
    labels: tuple[LabelColumn, ...] = ()
    data: DataConfig | None = None
    about: Mapping[str, Any]
    probabilities: bool = True

    def answers(self, dense: Tensor, sparse: KeyedJaggedTensor) -> dict[str, Tensor]:
        """Each output ``[B]`` float32, of the model's own features in its own order."""
        raise NotImplementedError


class RunModel(Model):
    """A run's best checkpoint, or one checkpoint: float32, with the heads that it is served with."""

    kind = "run"

    def __init__(self, path: Path, name: str) -> None:
        trained = load_trained(path)
        self.name, self.path = name, path
        self.labels = trained.columns.labels
        self.outputs = trained.columns.label_names
        self.data = trained.config.data
        self.features = features_of(trained.columns)
        self.about = {"step": trained.step, "checkpoint": trained.checkpoint_path.name}
        self.probabilities = trained.model.scores == "logits"
        tasks = served_tasks(trained.model, trained.columns)
        self._served = ServedRanking(trained.model, tasks).eval()
        self._weighted = any(one.kind == "weighted_list" for one in trained.columns.sparse)

    def answers(self, dense: Tensor, sparse: KeyedJaggedTensor) -> dict[str, Tensor]:
        """See `Model.answers`."""
        if not self._weighted and sparse.weights_or_none() is not None:
            sparse = sparse.with_fields(sparse.values(), None, sparse.lengths(), None)
        with torch.inference_mode():
            found = self._served(dense, sparse)
        return {self.outputs[0]: found} if isinstance(found, Tensor) else found


class PackageModel(Model):
    """A package, as servers run it."""

    kind = "package"

    def __init__(
        self, path: Path, name: str, *, allow_ops: Collection[str], time_limit: TimeLimit | None
    ) -> None:
        self._loaded: LoadedPackage = load_package(
            path, devices=cpu_instead(path), allow_ops=allow_ops, time_limit=time_limit
        )
        manifest = self._loaded.manifest
        self._schema: InputSchema = manifest.schema
        self.name, self.path = name, path
        self.features = (*_dense_of(self._schema), *map(_sparse_of, self._schema.features))
        self.outputs = tuple(one.name for one in self._schema.outputs if one.width == 1)
        self.about = {"sha256": self._loaded.sha256, "dtype": manifest.dtype}
        self.probabilities = manifest.source.get("scores") != RANK_ONLY

    def answers(self, dense: Tensor, sparse: KeyedJaggedTensor) -> dict[str, Tensor]:
        """See `Model.answers`."""
        found = self._loaded.runner.forward(host_batch((dense, sparse), self._schema))
        return {name: found[name].reshape(-1) for name in self.outputs}


def open_models(
    paths: Sequence[Path], *, allow_ops: Collection[str] = (), time_limit: TimeLimit | None = None
) -> list[Model]:
    """Load packages and runs.

    Raises:
        UserError: one is neither, is damaged, or cannot be loaded.
        OSError: one cannot be read.
    """
    models: list[Model] = []
    for path, name in zip(paths, _names(paths), strict=True):
        if not path.exists():
            raise UserError(f"{path}: no such file or folder; name a package or a run")
        if is_package(path):
            models.append(PackageModel(path, name, allow_ops=allow_ops, time_limit=time_limit))
        else:
            models.append(RunModel(path, name))
    return models


def is_package(path: Path) -> bool:
    """Whether ``path`` is a package; otherwise it may be a run or a checkpoint."""
    if not path.is_file():
        return False
    # Both are zip archives that torch wrote; only a package says what it is.
    from zipfile import BadZipFile, ZipFile  # noqa: PLC0415 - only where there is a file

    try:
        with ZipFile(path) as archive:
            return any(name.endswith("/extra/tessera/manifest.json") for name in archive.namelist())
    except (BadZipFile, NotImplementedError, ValueError) as error:
        raise UserError(
            f"{path}: is neither a package nor a checkpoint ({error}); name a MODEL.pt that"
            " package-model wrote, a run folder, or one of its checkpoints"
        ) from error


def features_of(columns: FeatureColumns) -> tuple[Feature, ...]:
    """What a model that was trained on these columns needs, in the order of its batches."""
    dense = [
        Feature(name=one.name, column=ColumnConfig(kind="dense", column=one.column, side=one.side))
        for one in columns.dense
    ]
    sparse = [
        Feature(
            name=one.name,
            column=ColumnConfig(
                kind=one.kind,
                column=one.column,
                side=one.side,
                max_length=one.max_length,
                weights=one.weights,
            ),
            strings=one.strings,
        )
        for one in columns.sparse
    ]
    return (*dense, *sparse)


def _dense_of(schema: InputSchema) -> list[Feature]:
    columns = schema.dense_columns or ("",) * len(schema.dense_features)
    return [
        Feature(name=name, column=ColumnConfig(kind="dense", column=column or None))
        for name, column in zip(schema.dense_features, columns, strict=True)
    ]


def _sparse_of(spec: FeatureSpec) -> Feature:
    kind: Kind = "categorical"
    if spec.group == "id_score_list":
        kind = "weighted_list"
    elif spec.many:
        kind = "sequence" if spec.keep == "last" and spec.max_length else "categorical_list"
    return Feature(
        name=spec.name,
        column=ColumnConfig(
            kind=kind,
            column=spec.column or None,
            max_length=(spec.max_length or None) if kind != "categorical" else None,
            weights=(spec.weights_column or None) if kind == "weighted_list" else None,
            strings=spec.strings,
        ),
        strings=spec.strings,
    )


def _names(paths: Sequence[Path]) -> list[str]:
    """A short name for each path, which no other has."""
    names = [path.name or str(path.resolve().name) for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return [
        name if names.count(name) == 1 else f"{name}#{number}"
        for number, name in enumerate(names, start=1)
    ]


class Input:
    """A model's own features out of batches that may hold more, in another order or under other names.

    Args:
        model: whose.
        names: by feature of the model, its name in the batches.
        columns: what the batches hold.

    Raises:
        UserError: the batches lack a feature, or have ids of another kind.
    """

    def __init__(self, model: Model, names: Mapping[str, str], columns: FeatureColumns) -> None:
        there = {one.name: one for one in columns.sparse}
        dense_places = {name: place for place, name in enumerate(columns.dense_names)}
        sparse_places = {name: place for place, name in enumerate(columns.sparse_names)}
        for feature in model.features:
            name = names[feature.name]
            if name not in (dense_places if feature.dense else sparse_places):
                raise UserError(
                    f"{model.path}: takes the feature {feature.name!r}, which this data does not have;"
                    " give data with the model's own columns"
                )
            if feature.strings is not None and there[name].strings != feature.strings:
                kinds = ("strings", "integers") if feature.strings else ("integers", "strings")
                raise UserError(
                    f"{model.path}: was trained on {kinds[0]} in column"
                    f" {feature.column.column or feature.name!r}, and this data has {kinds[1]};"
                    " give data of the same types"
                )
        self.model = model
        self._dense = [dense_places[names[one.name]] for one in model.features if one.dense]
        wanted = [one for one in model.features if not one.dense]
        self._keys = [one.name for one in wanted]
        self._sparse = [sparse_places[names[one.name]] for one in wanted]
        self._same_dense = self._dense == list(range(len(columns.dense)))
        self._same_sparse = tuple(self._keys) == columns.sparse_names

    def places(self) -> tuple[list[int], list[int]]:
        """The dense columns and the sparse keys of a batch that the model takes."""
        return self._dense, self._sparse

    def answers(self, batch: Batch) -> dict[str, Scores]:
        """Each output ``[B]`` of the model."""
        dense, sparse = batch.dense_features, batch.sparse_features
        if not self._same_dense:
            dense = dense[:, self._dense].contiguous()
        if not self._same_sparse:
            sparse = sparse.permute(self._sparse)
            sparse = KeyedJaggedTensor(
                self._keys,
                sparse.values(),
                sparse.weights_or_none(),
                lengths=sparse.lengths(),
                stride=batch.size,
                validate=False,
            )
        found = self.model.answers(dense, sparse)
        return {name: scores.numpy() for name, scores in found.items()}
