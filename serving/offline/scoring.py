"""`score_files`: raw rows in files to a file of scores, with a verified package and without a server.

The input is cut into units (`raw_units`), each of which becomes a part by itself (`scoring_work`) on an
engine (`tessera.partitions`); parts are kept until all are there (`scoring_parts`) and then joined in the
input's order.  Memory is bounded by a few units, whatever the size of the files.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from tessera.durable import replacing
from tessera.engines import open_engine
from tessera.errors import UserError
from tessera.partitions import Engine, LocalEngine
from tessera.serving.offline.raw_text import units_of
from tessera.serving.offline.raw_units import (
    TEXT_FORMATS,
    Unit,
    kept_types,
)
from tessera.serving.offline.scoring_inputs import find_inputs, reading_of
from tessera.serving.offline.scoring_parts import PartsFolder
from tessera.serving.offline.scoring_work import Part, PartHead, ScoringWork, output_fields
from tessera.serving.package.loading import LoadedPackage, cpu_instead, load_package
from tessera.training.data.malformed import MAX_EXAMPLES
from tessera.training.data.remote import Location, RemoteFile
from tessera.training.data.table.files import FoundFile

LAYOUT = 1
"""Goes up with every change of what parts hold, so that older ones are not taken up."""

DEFAULT_BATCH_ROWS = 2048
_GROUP_ROWS = 1 << 17


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """How files are scored.

    Attributes:
        keep: columns of the input that are carried into the output, each as ``COLUMN`` or
            ``COLUMN=NAME``.
        batch_rows: rows that are scored at once; it does not change a score.
        processes: how many score at once; None: one per core.
        engine: ``local`` or ``ray``.
        ray_address: see `tessera.engines.open_engine`.
        separator: what stands between the items of lists in text; None: seen from the first rows.
        strict: refuse the first row without a score.
        overwrite: replace the output, and begin anew what an earlier call left unfinished.
        load: arguments of `tessera.serving.package.loading.load_package`.
    """

    keep: tuple[str, ...] = ()
    batch_rows: int = DEFAULT_BATCH_ROWS
    processes: int | None = None
    engine: str = "local"
    ray_address: str | None = None
    separator: str | None = None
    strict: bool = False
    overwrite: bool = False
    load: Mapping[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Scored:
    """What was scored.

    Attributes:
        rows: rows of the output.
        malformed: how many of them have no score.
        examples: the first of these, each as file, row and what is wrong.
        units: the parts that the input was cut into.
        taken_up: how many of these an earlier call had finished.
        separators: by column, what was found between the items of lists in text.
        texts: kept columns that hold anything but plain integers.
    """

    rows: int = 0
    malformed: int = 0
    examples: list[str] = field(default_factory=list)
    units: int = 0
    taken_up: int = 0
    separators: dict[str, str] = field(default_factory=dict)
    texts: set[str] = field(default_factory=set)


def score_files(
    package: Path,
    data: Sequence[str],
    out: Path,
    options: ScoreOptions | None = None,
    *,
    progress: bool = True,
) -> Scored:
    """Write the scores of all rows of ``data`` to ``out``, a Parquet file, in the rows' order.

    A row that the model cannot take has null scores.  The file appears when it is whole; a call that
    was ended is gone on with by the next one.  The bytes are the same whatever engine worked in
    however many processes.

    Args:
        package: a MODEL.pt.
        data: files, patterns and folders, as `data.path` takes them.
        out: the output: the kept columns, then one per output of the model, float32.
        options: see `ScoreOptions`.
        progress: whether to show a progress bar on a terminal.

    Raises:
        UserError: package, data or options do not fit, or a row has no score and ``strict``.
    """
    options = options or ScoreOptions()
    if out.suffix.lower() not in {".parquet", ".pq"}:
        raise UserError(
            f"--out {out}: scores are written as Parquet; give a name that ends in .parquet"
        )
    if out.exists() and not options.overwrite:
        raise UserError(f"--out {out}: is there already; name another file, or give --overwrite")
    if not out.absolute().parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}; make it first")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # before the package is loaded, so that torch has no threads to lose
    try:
        return _score(package, data, out, options, progress=progress)
    finally:
        torch.set_num_threads(threads)


def _score(
    package: Path, data: Sequence[str], out: Path, options: ScoreOptions, *, progress: bool
) -> Scored:
    load = {"devices": cpu_instead(package), **options.load}
    loaded = load_package(package, **load)
    files, criteo = find_inputs(data, loaded.manifest.schema)
    engine = _engine(loaded, options, on_host=load["devices"] is not None)
    if options.engine == "local" and any(isinstance(file.path, RemoteFile) for file in files):
        engine = LocalEngine(processes=1)  # a remote file system's threads would not be in a fork
    scored = Scored()
    reading = reading_of(
        loaded.manifest.schema,
        files,
        keep=options.keep,
        separator=options.separator,
        criteo=criteo,
    )
    scored.separators = {n: sign for n, sign in reading.separators.items() if sign != "|"}
    types = kept_types(files, reading)
    plan = {
        "layout": LAYOUT,
        "package": loaded.sha256,
        "data": [_describe(file) for file in files],
        "keep": list(options.keep),
        "separator": dict(reading.separators),
        "batch": options.batch_rows,
    }
    folder = PartsFolder(out, plan)
    work = ScoringWork(
        package=package.absolute(),
        reading=reading,
        batch_rows=options.batch_rows,
        load=load,
        loaded=loaded,
    )
    with folder.opened(anew=options.overwrite):
        _fill(folder, files, work, engine, scored, strict=options.strict, progress=progress)
        if all(file.format in TEXT_FORMATS for file in files):
            strings = {name for name, kind in types.items() if pa.types.is_string(kind)}
            types |= dict.fromkeys(strings - scored.texts, pa.int64())
        metadata = {
            "tessera.package": loaded.manifest.name,
            "tessera.package_sha256": plan["package"],
        }
        schema = pa.schema(
            [*types.items(), *output_fields(reading.schema.outputs)], metadata=metadata
        )
        _join(folder, scored.units, schema, out)
        folder.remove()
    return scored


def _engine(loaded: LoadedPackage, options: ScoreOptions, *, on_host: bool) -> Engine:
    if loaded.manifest.device != "cpu" and not on_host:
        if options.engine != "local" or (options.processes or 1) > 1:
            raise UserError(
                f"package {loaded.path} is for GPUs, whose memory processes do not share; leave --processes"
                " and --engine out"
            )
        return LocalEngine(processes=1)
    return open_engine(options.engine, processes=options.processes, ray_address=options.ray_address)


def _describe(file: FoundFile) -> list[Any]:
    stat = file.path.stat()
    return [str(file.path), stat.st_size, stat.st_mtime_ns]


def _fill(
    folder: PartsFolder,
    files: Sequence[FoundFile],
    work: ScoringWork,
    engine: Engine,
    scored: Scored,
    *,
    strict: bool,
    progress: bool,
) -> None:
    """Finish every part that is not there yet; ``scored`` is told of all of them, in their order."""
    total = max(1, sum(file.path.stat().st_size for file in files))
    before: dict[Location, int] = {}
    taken_up: dict[int, tuple[Unit, PartHead]] = {}
    numbers = itertools.count()

    def missing() -> Iterator[Unit]:
        for unit in units_of(files, work.reading):
            head = folder.head(unit.number)
            if head is None:
                yield unit
            else:
                taken_up[unit.number] = (_bare(unit), head)

    with contextlib.closing(_Bar(total, shown=progress)) as bar:

        def told(unit: Unit, head: PartHead, *, fresh: bool) -> None:
            assert unit.number == next(numbers)
            first = 0 if unit.first_row else before.get(unit.file.path, 0) + 1
            before[unit.file.path] = before.get(unit.file.path, 0) + head.rows
            lines = [f"{unit.file.path}:{first + row}: {reason}" for row, reason in head.examples]
            if lines and strict:
                raise UserError(
                    f"{lines[0]}; mend the row, or leave --strict out to give it no score"
                )
            scored.rows += head.rows
            scored.units += 1
            scored.taken_up += not fresh
            scored.malformed += head.malformed
            scored.texts.update(head.texts)
            scored.examples = (scored.examples + lines)[:MAX_EXAMPLES]
            bar.told(unit, head, scored, fresh=fresh)

        def earlier() -> None:
            while scored.units in taken_up:
                told(*taken_up.pop(scored.units), fresh=False)

        for unit, part in engine.map(work, missing()):
            folder.write(unit.number, part)
            earlier()
            told(unit, part.head, fresh=True)
        earlier()


def _bare(unit: Unit) -> Unit:
    """The unit without its text."""
    return Unit(
        number=unit.number,
        file=unit.file,
        first_row=unit.first_row,
        source_bytes=unit.source_bytes,
    )


class _Bar:
    """Rows, rows a second, and of how many, as far as the bytes that were read tell."""

    def __init__(self, total_bytes: int, *, shown: bool) -> None:
        self._total = total_bytes
        self._bytes = 0
        self._bar = tqdm(
            unit=" rows",
            unit_scale=True,
            desc="Scoring",
            disable=None if shown else True,  # None: only on a terminal
        )

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()

    def told(self, unit: Unit, head: PartHead, scored: Scored, *, fresh: bool) -> None:
        """A part is finished; one of an earlier call does not count for the speed."""
        self._bytes += unit.source_bytes
        if self._bytes:
            self._bar.total = max(scored.rows, scored.rows * self._total // self._bytes)
        if not (fresh or self._bar.disable):
            self._bar.initial += head.rows
        if scored.malformed:
            self._bar.set_postfix_str(f"{scored.malformed} malformed", refresh=False)
        self._bar.update(head.rows)


def _join(folder: PartsFolder, units: int, schema: Any, out: Path) -> None:
    """Write all parts, in their order, to ``out``."""

    def write(writer: Any, tables: list[Any]) -> None:
        if tables:
            writer.write_table(pa.concat_tables(tables), row_group_size=_GROUP_ROWS)

    with replacing(out) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        waiting: list[Any] = []
        for number in range(units):
            part: Part = folder.read(number)
            if not part.head.rows:
                continue
            try:
                table = pa.ipc.open_stream(part.rows).read_all()
            except pa.ArrowException as error:
                raise UserError(
                    f"part {number} of {out} is damaged; begin anew with --overwrite"
                ) from error
            waiting.append(table.cast(schema))
            if sum(one.num_rows for one in waiting) >= _GROUP_ROWS:
                write(writer, waiting)
                waiting = []
        write(writer, waiting)


def describe(scored: Scored) -> str:
    """What was scored, for people: a line, and one for each row that is told."""
    lines = [f"{scored.rows:,} rows"]
    if scored.taken_up:
        lines[0] += f", {scored.taken_up} of {scored.units} parts from an earlier call"
    if scored.malformed:
        shown = len(scored.examples)
        which = "" if shown == scored.malformed else f" (first {shown} shown)"
        lines[0] += f"; {scored.malformed:,} could not be scored and are null{which}:"
        lines += [f"  {line}" for line in scored.examples]
    lines += [
        f"note: column {name!r} holds lists, whose items are taken to be separated by {sign!r};"
        " --separator says otherwise"
        for name, sign in scored.separators.items()
    ]
    return "\n".join(lines)


def say(scored: Scored) -> None:
    """Print `describe` to stderr."""
    print(describe(scored), file=sys.stderr)
