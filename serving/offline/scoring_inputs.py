"""Which files are scored, and how they are read: what the flags and the first rows say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tessera.errors import UserError
from tessera.serving.offline.raw_columns import near_column
from tessera.serving.offline.raw_criteo import looks_like_criteo
from tessera.serving.offline.raw_text import found_separators
from tessera.serving.offline.raw_units import TEXT_FORMATS, Kept, Reading
from tessera.serving.package.schema import InputSchema
from tessera.training.data.criteo_format import COLUMN_NAMES
from tessera.training.data.table.files import FoundFile, find_files
from tessera.training.data.urls import is_url

_CRITEO_ENDINGS = (".txt", ".txt.gz")


def find_inputs(data: Sequence[str], schema: InputSchema) -> tuple[list[FoundFile], bool]:
    """The files, and whether they have Criteo's own columns without a header.

    Raises:
        UserError: there is no such file, or the files do not have the same columns.
    """
    found: list[FoundFile] = []
    for name in data:
        if is_url(name):
            found += find_files((name,), "--data")
            continue
        path = Path(name).expanduser()
        texts = sorted(p for p in path.iterdir() if _is_text(p)) if path.is_dir() else [path]
        criteo = [FoundFile(p.absolute(), "tsv", {}) for p in texts if p.is_file() and _is_text(p)]
        if criteo and all(looks_like_criteo(file, schema) for file in criteo):
            found += criteo
        else:
            found += find_files((str(path.absolute()),), "--data")
    first = set(found[0].partitions)
    for file in found:
        if set(file.partitions) != first:
            raise UserError(
                f"--data {file.path}: its folders name other columns than those of {found[0].path}; score"
                " them apart"
            )
    kinds = {looks_like_criteo(file, schema) for file in found if file.format in TEXT_FORMATS}
    if kinds == {True, False}:
        raise UserError("--data: some files have a header and some have none; score them apart")
    return found, kinds == {True}


def _is_text(path: Path) -> bool:
    return path.name.lower().endswith(_CRITEO_ENDINGS)


def reading_of(
    schema: InputSchema,
    files: Sequence[FoundFile],
    *,
    keep: Sequence[str],
    separator: str | None,
    criteo: bool,
) -> Reading:
    """How the files are read.

    Args:
        schema: the model's inputs.
        files: what is read.
        keep: see `tessera.serving.offline.scoring.ScoreOptions`.
        separator: of lists in text; None: seen from the first file's first rows.
        criteo: what `find_inputs` found.

    Raises:
        UserError: a column cannot be kept, or the first file cannot be read.
    """
    kept = tuple(_kept(own) for own in keep)
    names = [own.name for own in kept]
    for name in names:
        if names.count(name) > 1 or name in {output.name for output in schema.outputs}:
            raise UserError(
                f"--keep {name}: the output has another column of this name; give it one of its own,"
                f" as --keep {name}=NAME"
            )
    for own in kept if criteo else ():
        if own.column not in COLUMN_NAMES:
            raise UserError(
                f"--keep {own.column}: Criteo's files have no such column;"
                f" {near_column(own.column, list(COLUMN_NAMES))}"
            )
    separators: dict[str, str] = {}
    first = next((file for file in files if file.format in {"csv", "tsv"}), None)
    lists = [
        name
        for feature in schema.features
        if feature.many
        for name in (feature.column or feature.name, feature.weights_column)
        if name
    ]
    if separator is not None:
        separators = dict.fromkeys(lists, separator)
    elif first is not None and not criteo:
        separators = found_separators(first, schema)
        said = {one.column or one.name: one.separator for one in schema.features if one.separator}
        separators |= {name: sign for name, sign in said.items() if name in separators}
    features = tuple(
        replace(one, separator=separators.get(one.column or one.name, one.separator))
        for one in schema.features
    )
    known = replace(schema, features=features)
    return Reading(schema=known, kept=kept, separators=separators, criteo=criteo)


def _kept(given: str) -> Kept:
    column, sign, name = given.partition("=")
    if not column or (sign and not name):
        raise UserError(f"--keep {given!r}: give COLUMN, or COLUMN=NAME")
    return Kept(column=column, name=name or column)
