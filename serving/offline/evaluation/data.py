"""What models are evaluated on: rows with features, labels, and the columns that slices and errors look at."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.errors import UserError
from tessera.serving.offline.evaluation.models import Feature, Input, Model
from tessera.training.config import find_config, load_config
from tessera.training.data.columns import ColumnConfig, FeatureColumns, Task
from tessera.training.data.config import DataConfig
from tessera.training.data.criteo_format import COLUMN_NAMES
from tessera.training.data.dataset import DataSplits, View
from tessera.training.data.formats.criteo import CriteoConfig
from tessera.training.data.formats.movielens import MovieLensConfig
from tessera.training.data.formats.table import TableConfig
from tessera.training.data.movielens import CHOSEN_NAMES, DENSE_NAMES, SPARSE_NAMES
from tessera.training.data.users import user_feature

SPLITS = ("train", "valid", "test", "all")
FORMATS = ("table", "criteo", "movielens")
_OF_MOVIELENS = (*SPARSE_NAMES, *CHOSEN_NAMES)
_TEXT_OF_CRITEO = (".tsv", ".txt", ".tsv.gz", ".txt.gz")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the command asks for.

    Attributes:
        data: paths; empty: the run's own.
        format: of the data; None: the run's, or what a package's features look like.
        split: which rows; None: ``all`` of ``data``, and otherwise ``test``.
        config: says how the data is read, in the place of a run's own config.
        labels: by output of the model the label's column, None where that has the output's name.
        task: what every label is; None: what the run says, or what the labels look like.
        columns: further columns that are read, by their names in the files or the features' names.
        cache_dir: where prepared files go; None: the config's place, or beside the data.
    """

    data: tuple[str, ...] = ()
    format: str | None = None
    split: str | None = None
    config: str | None = None
    labels: Mapping[str, str | None]
    task: Task | None = None
    columns: tuple[str, ...] = ()
    cache_dir: str | None = None


@dataclass(frozen=True, kw_only=True)
class Label:
    """One label of the data and what predicts it.

    Attributes:
        name: its name in results.
        place: its column in a batch's labels.
        task: what it is; None: as its values look.
        outputs: by model, the name of the output.
    """

    name: str
    place: int
    task: Task | None
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Opened:
    """Rows to evaluate on.

    Attributes:
        view: the rows.
        columns: what its batches hold.
        inputs: one for each model.
        labels: what is evaluated.
        config: how the data was read.
        split: which rows these are.
        malformed: rows that were left out because they could not be read.
        user: the column that says whose row it is, if one is known to.
    """

    view: View
    columns: FeatureColumns
    inputs: tuple[Input, ...]
    labels: tuple[Label, ...]
    config: DataConfig
    split: str
    malformed: int
    user: str | None


def open_rows(models: Sequence[Model], wanted: Wanted, *, progress: bool = True) -> Opened:
    """Find and open the data.

    Raises:
        UserError: it is not there, does not fit the models, or has no rows.
    """
    config = _config(models, wanted)
    split = wanted.split or ("all" if wanted.data else "test")
    if wanted.data:
        config = _with_paths(config, wanted.data)
    if wanted.cache_dir is not None:
        config = dataclasses.replace(config, cache_dir=wanted.cache_dir)
    names: list[dict[str, str]] = [{one.name: one.name for one in m.features} for m in models]
    if isinstance(config, TableConfig):
        columns, names = _joined(config, models, wanted)
        splits = config.opened(columns, progress=progress)
    else:
        if isinstance(config, MovieLensConfig) and "user" not in config.features:
            # Whose row it is, which models need not look at.
            config = dataclasses.replace(config, features=(*config.features, "user"))
        splits = config.open(progress=progress)
    described = splits.train.dataset.columns
    view = _view(splits, split, named=config)
    return Opened(
        view=view,
        columns=described,
        inputs=tuple(
            Input(model, own, described) for model, own in zip(models, names, strict=True)
        ),
        labels=_labels(models, wanted, described),
        config=config,
        split=split,
        malformed=splits.malformed.total,
        user=_user(config, described),
    )


def _config(models: Sequence[Model], wanted: Wanted) -> DataConfig:
    """How the data is read: by --config, the first run, or the first package."""
    if wanted.config is not None:
        path = Path(wanted.config)
        folder = path / "config.yaml"
        found = load_config(folder if folder.is_file() else find_config(wanted.config), [])
        return found.resolved(Path.cwd()).data
    runs = [model.data for model in models if model.data is not None]
    if runs and wanted.format in {None, runs[0].format}:
        return runs[0]
    if not wanted.data:
        raise UserError(
            f"{models[0].path}: a package does not say where data is; give --data PATH, or --config"
            " with the run's config"
        )
    kind = wanted.format or _looks_like(models[0], wanted.data[0])
    if kind == "criteo":
        return CriteoConfig(path=wanted.data)
    if kind == "movielens":
        lists = [one.column.max_length for one in models[0].features if one.column.max_length]
        names = {one.name for one in models[0].features}
        return MovieLensConfig(
            path=wanted.data,
            max_history=lists[0] if lists else 50,
            features=tuple(name for name in _OF_MOVIELENS if name in names),
        )
    return _table_of(models[0], wanted)


def _looks_like(model: Model, path: str) -> str:
    """The format that a package's features and the data's name say."""
    names = {feature.name for feature in model.features}
    if names <= set(COLUMN_NAMES) and (path.endswith(_TEXT_OF_CRITEO) or Path(path).is_dir()):
        return "criteo"
    if names <= {*DENSE_NAMES, *_OF_MOVIELENS} and Path(path).is_dir():
        return "movielens"
    return "table"


def _table_of(model: Model, wanted: Wanted) -> TableConfig:
    """A table with the columns that a package names, and its labels."""
    columns = {feature.name: feature.column for feature in model.features}
    for output, column in _label_columns(model, wanted).items():
        name = output if output not in columns and "." not in output else f"label {column}"
        # Whether it is 0 and 1 alone is seen when it has been read.
        columns[name] = ColumnConfig(kind="label", column=column, task="regression")
    return TableConfig(path=wanted.data, columns=columns, valid_fraction=0.0, test_fraction=0.0)


def _label_columns(model: Model, wanted: Wanted) -> dict[str, str]:
    """By label, its column in the data, of a package, which does not know the labels' names."""
    if not wanted.labels:
        if model.outputs == ("default",):
            raise UserError(
                f"{model.path}: does not say what its score is of; give the label's column with"
                " --label COLUMN"
            )
        return {name: name for name in model.outputs}
    found: dict[str, str] = {}
    for output, column in wanted.labels.items():
        if output in model.outputs:
            found[output] = column or output
        elif column is None and len(model.outputs) == 1:
            found[output] = output
        else:
            raise UserError(
                f"--label {output}: {model.path} has no such output; it has"
                f" {', '.join(model.outputs)}; give --label OUTPUT=COLUMN"
            )
    return found


def _with_paths(config: DataConfig, data: tuple[str, ...]) -> DataConfig:
    """The config with other rows, of which none is held out."""
    paths = config.path_fields()
    if "path" not in paths:
        raise UserError(
            f"--data {data[0]}: the run reads data of the format {config.format}, which has no path;"
            " leave --data out, or give --format and a package"
        )
    changed: dict[str, Any] = {"valid_fraction": 0.0, "test_fraction": 0.0}
    changed |= dict.fromkeys(paths, ())
    changed["path"] = data
    if isinstance(config, TableConfig):
        changed |= {"split": "random", "split_column": None}
    return dataclasses.replace(config, **changed)


def _joined(
    config: TableConfig, models: Sequence[Model], wanted: Wanted
) -> tuple[dict[str, ColumnConfig], list[dict[str, str]]]:
    """The columns to read: the config's, what models need beside them, and those that are looked at.

    Also, for each model, under which name the batches have each of its features.
    """
    chosen = dict(config.columns)
    if wanted.labels:
        _only(chosen, models, wanted.labels)
    if wanted.task is not None:
        # Numbers stay numbers, and are seen to be 0 and 1 later.
        chosen = {
            name: dataclasses.replace(own, task=wanted.task)
            if own.kind == "label" and own.task != "regression"
            else own
            for name, own in chosen.items()
        }
    known = {
        Feature(name=name, column=own).definition(): name
        for name, own in chosen.items()
        if own.kind in {"dense", "categorical", "categorical_list", "sequence", "weighted_list"}
    }
    names: list[dict[str, str]] = []
    for model in models:
        of_model: dict[str, str] = {}
        for feature in model.features:
            definition = feature.definition()
            if definition not in known:
                free = feature.name
                while free in chosen:
                    free += "'"
                source = feature.column.column or feature.name
                chosen[free] = dataclasses.replace(feature.column, column=source)
                known[definition] = free
            of_model[feature.name] = known[definition]
        names.append(of_model)
    read = {own.column or name for name, own in chosen.items() if own.kind != "ignore"}
    further: dict[str, ColumnConfig] = {}
    for name in wanted.columns:
        source = source_of(chosen, name)
        if source not in read:
            # As text where a file has no types, so that no cell of it is a malformed one.
            further[f"see {source}"] = ColumnConfig(kind="group", column=source, strings=True)
    return {**further, **chosen}, names


def _only(
    columns: dict[str, ColumnConfig], models: Sequence[Model], labels: Mapping[str, str | None]
) -> None:
    """Leave the labels that were asked for, under the columns that were given for them."""
    there = {name for name, own in columns.items() if own.kind == "label"}
    single = next(iter(there)) if len(there) == 1 else None
    kept: dict[str, ColumnConfig] = {}
    for output, column in labels.items():
        name = output
        if name not in there and single is not None and any(output in m.outputs for m in models):
            name = single
        if name not in there:
            raise UserError(
                f"--label {output}: is not a label of the run or config, which has"
                f" {', '.join(sorted(there))}; give --label LABEL=COLUMN to read it from another column"
            )
        kept[name] = dataclasses.replace(columns[name], column=column or columns[name].column)
    for name in there:
        del columns[name]
    columns |= kept


def source_of(columns: Mapping[str, ColumnConfig], name: str) -> str:
    """The column in the files that a user calls ``name``: by its own name, or a feature's."""
    if name in columns and columns[name].kind != "ignore":
        return columns[name].column or name
    return name


def _view(splits: DataSplits, split: str, *, named: DataConfig) -> View:
    parts = {"train": splits.train, "valid": splits.valid, "test": splits.test}
    if split == "all":
        filled = [part for part in parts.values() if len(part)]
        if len(filled) > 1:
            raise UserError(
                "--split all: the config holds rows out; give --data PATH for all rows of a path, or"
                " train, valid or test"
            )
        parts["all"] = filled[0] if filled else splits.train
    if not len(parts[split]):
        there = [name for name, part in parts.items() if len(part)]
        path = ", ".join(named.paths()) or named.format
        remedy = f"it has rows for {' and '.join(there)}" if there else "no row of it can be read"
        raise UserError(f"{path}: has no rows for the split {split}; {remedy}")
    return parts[split]


def _labels(models: Sequence[Model], wanted: Wanted, columns: FeatureColumns) -> tuple[Label, ...]:
    """The labels of the data that every model has an output for."""
    told = {label.name: label.task for model in models for label in model.labels}
    found = []
    for place, label in enumerate(columns.labels):
        outputs = []
        for model in models:
            if label.name in model.outputs:
                outputs.append(label.name)
            elif len(model.outputs) == 1 and len(columns.labels) == 1:
                outputs.append(model.outputs[0])
        if len(outputs) < len(models):
            continue
        name = label.name.removeprefix("label ")
        task = wanted.task or told.get(label.name)
        found.append(Label(name=name, place=place, task=task, outputs=tuple(outputs)))
    if not found:
        outputs = sorted({name for model in models for name in model.outputs})
        raise UserError(
            f"the data's labels are {', '.join(columns.label_names)}, the models' outputs"
            f" {', '.join(outputs)}; name the label of each output with --label OUTPUT=COLUMN"
        )
    if len(found) == 1 and found[0].name == "default" and wanted.labels:
        column = next(iter(wanted.labels.values())) or "default"
        found = [dataclasses.replace(found[0], name=column)]
    return tuple(found)


def _user(config: DataConfig, columns: FeatureColumns) -> str | None:
    """The column of kind group, or one that is called as users are."""
    if isinstance(config, TableConfig):
        group = [own.column or name for name, own in config.columns.items() if own.kind == "group"]
        if group:
            return group[0]
    return user_feature(columns)
