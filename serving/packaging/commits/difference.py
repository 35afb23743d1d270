"""What differs between a state and a package of the same model: the patches that lead from one to the other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tessera.errors import UserError
from tessera.serving.commits.file import Bytes
from tessera.serving.commits.patching import strided
from tessera.serving.commits.state import VersionState
from tessera.serving.commits.writer import Change
from tessera.serving.package.manifest import GOLDEN_RECORD, Manifest
from tessera.serving.package.records import Records
from tessera.serving.packaging.commits.places import Span, TablePiece

_CHUNK_BYTES = 8 << 20
_MOST_BYTES = 64 << 20

# torch numbers the classes that one process has scripted.
_MANGLED = re.compile(rb"[./]?___torch_mangle_[0-9]+")


def difference(state: VersionState, pieces: Sequence[TablePiece], package: Records) -> list[Change]:
    """The changes from the state to a package whose bytes have just been written.

    Args:
        state: of a version.
        pieces: of its tables.
        package: packaged in the same way.

    Raises:
        UserError: it is another model, which no commit can make of this version's.
    """
    check_same_graph(state, package)
    changes: list[Change] = []
    tables = {piece.record for piece in pieces}
    for entry in package.entries:
        old = state.tensors.get(entry.name)
        if old is None:
            continue
        if package.manifest().records[entry.name].sha256 == _listed_sha256(state, entry.name):
            continue
        # In pages of the file, of which little is held.
        new: Bytes = np.memmap(package.path, np.uint8, "r", entry.content_offset, (entry.bytes,))
        if entry.name not in tables:
            if not np.array_equal(old, new):
                changes.append(Change.whole(entry.name, np.array(new)))
            continue
        for piece in pieces:
            if piece.record == entry.name:
                changes += _piece_changes(piece, old, new)
    return changes


def _listed_sha256(state: VersionState, name: str) -> str:
    """What the record hashes to, where no commit has changed it; else nothing."""
    return state.manifest.records[name].sha256 if not state.log.number else ""


def _piece_changes(piece: TablePiece, old: Bytes, new: Bytes) -> list[Change]:
    changes = span_changes(piece.spans, differing_rows(piece.spans, old, new), new)
    if piece.book is not None:
        begin, end = piece.book
        if not np.array_equal(old[begin:end], new[begin:end]):
            changes.append(book_change(piece, new[begin:end]))
    return changes


def book_change(piece: TablePiece, book: Bytes) -> Change:
    """The new book of a piece whose rows share their scales."""
    assert piece.book is not None
    return Change(
        record=piece.record,
        table=piece.table,
        offset=piece.book[0],
        stride=len(book),
        rows=None,
        new=np.array(book).reshape(1, -1),
    )


def differing_rows(spans: Sequence[Span], old: Bytes, new: Bytes) -> NDArray[np.int64]:
    """The rows of a piece in which two records differ."""
    found = []
    step = max(1, _CHUNK_BYTES // max(span.stride for span in spans))
    for begin in range(0, spans[0].rows, step):
        count = min(step, spans[0].rows - begin)
        differs = np.zeros(count, bool)
        for span in spans:
            at = span.offset + begin * span.stride
            differs |= (
                strided(old, at, span.stride, span.width, count)
                != strided(new, at, span.stride, span.width, count)
            ).any(axis=1)
        found.append(np.flatnonzero(differs) + begin)
    return np.concatenate(found)


def span_changes(spans: Sequence[Span], rows: NDArray[np.int64], new: Bytes) -> list[Change]:
    """Changes of ``rows`` of a piece to what ``new`` holds; none where there are no rows."""
    if not len(rows):
        return []
    return [
        Change(
            record=span.record,
            table=span.table,
            offset=span.offset,
            stride=span.stride,
            rows=rows,
            new=strided(new, span.offset, span.stride, span.width, span.rows)[rows],
        )
        for span in spans
    ]


def check_same_graph(state: VersionState, package: Records) -> None:
    """Refuse a package that differs in more than the contents of tensors.

    Raises:
        UserError: says what differs.
    """
    base, manifest = state.manifest, package.manifest()
    for what, ours, theirs in _described(base, manifest):
        if ours != theirs:
            raise _another(state, what)
    changing = state.tensors.keys() | {GOLDEN_RECORD}
    found = _plain_records(package, changing)
    expected = _plain_records(state.records, changing)
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise _another(state, f"record {name!r}")
    for name in state.tensors:
        if name not in manifest.records or manifest.records[name].bytes != len(state.tensors[name]):
            raise _another(state, f"the size of {name!r}")


def _another(state: VersionState, what: str) -> UserError:
    return UserError(
        f"{what} is not that of version {state.log.version}, which a commit cannot change; package the model as "
        "a new version: package-model --repository"
    )


def _described(base: Manifest, manifest: Manifest) -> Iterable[tuple[str, object, object]]:
    for what in ("backend", "operator_libraries", "dense_dtype", "device", "plan"):
        yield f"the package's {what}", getattr(base, what), getattr(manifest, what)
    ours, theirs = (
        replace(one.schema, dense_ranges=(), other_columns=()) for one in (base, manifest)
    )
    yield "the schema", ours, theirs
    yield (
        "a table's type",
        [(t.name, t.rows, t.dim, t.dtype) for t in base.tables],
        [(t.name, t.rows, t.dim, t.dtype) for t in manifest.tables],
    )


def _plain_records(package: Records, changing: Iterable[str]) -> dict[str, bytes]:
    """The records that are not tensors, without the numbers that torch gives to classes."""
    return {
        _MANGLED.sub(b"", entry.name.encode()).decode(): _MANGLED.sub(
            b"", package.read(entry.name, max_bytes=_MOST_BYTES)
        )
        for entry in package.entries
        if entry.name not in changing and entry.name != package.kind.last_record
    }
