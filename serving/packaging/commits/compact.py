"""Make a full package of a version and its commits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tessera.errors import UserError
from tessera.serving.commits.file import ReadCommit
from tessera.serving.commits.replay import Broken, log_folder, replay
from tessera.serving.commits.state import VersionState
from tessera.serving.package.commit import COMMIT_PACKAGE_RECORD
from tessera.serving.package.layout import ArchiveWriter
from tessera.serving.package.manifest import GOLDEN_RECORD, MANIFEST_RECORD, Manifest
from tessera.serving.package.replace import replacing
from tessera.serving.package.signed_record import RecordInfo
from tessera.serving.repository.folder import PACKAGE_NAME

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Described:
    """The last commit of a log that says what a package of its state is like.

    Attributes:
        number: the commit's.
        manifest: unsigned, of a package of the state.
        golden: the content of its golden answers.
        behind: how many commits follow it.
        broken: what ends the log too early; None: nothing.
    """

    number: int
    manifest: Manifest
    golden: bytes
    behind: int
    broken: Broken | None


class Compaction:
    """A version at the last commit that a full package can be made of.

    Args:
        folder: ``DIR/MODEL/VERSION``.
        last: the commit; None: the last one that describes a package.

    Raises:
        PackageError: the version's package cannot be loaded.
        UserError: there is no such commit.
    """

    def __init__(self, folder: Path, last: int | None = None) -> None:
        model, version, log = folder.parent.name, int(folder.name), log_folder(folder)
        self._state = VersionState(folder / PACKAGE_NAME, model, version)
        self.described = _described(self._state, log, last)
        if self.described.behind:
            self._state = VersionState(folder / PACKAGE_NAME, model, version)
            replay(self._state, log, last=self.described.number)
        assert self._state.log.number == self.described.number

    def write(self, out: Path, version: int, key: Ed25519PrivateKey | None = None) -> Manifest:
        """Write the package, as version ``version``; with a key it is signed.

        Returns:
            Its manifest.

        Raises:
            UserError: the file cannot be written, or the state is not the described one.
        """
        expected = self.described.manifest
        with replacing(out) as target, target.open("w+b") as stream:
            writer = ArchiveWriter(stream)
            infos = {}
            for entry in self._state.records.entries:
                if entry.name == MANIFEST_RECORD:
                    continue
                size, content = self._content(entry.name)
                written = writer.add(entry.name, content, size)
                infos[entry.name] = RecordInfo(
                    sha256=written.sha256,
                    bytes=written.bytes,
                    crc32=written.crc32,
                    chunks=written.chunks,
                )
            differing = [name for name in infos if infos[name] != expected.records.get(name)]
            if differing or infos.keys() != expected.records.keys():
                raise UserError(
                    f"commit {self.described.number} says that record {min(differing or ['?'])!r} is another; "
                    "publish the checkpoint again"
                )
            made = replace(expected, version=str(version))
            if key is not None:
                from tessera.serving.package.signing import sign_manifest  # noqa: PLC0415 - only who signs

                made = sign_manifest(made, key)
            last = made.to_bytes()
            writer.add(MANIFEST_RECORD, [last], len(last))
            writer.finish()
        return made

    def _content(self, name: str) -> tuple[int, Iterator[bytes | memoryview]]:
        if name == GOLDEN_RECORD:
            return len(self.described.golden), iter([self.described.golden])
        patched = self._state.tensors.get(name)
        if patched is None:
            entry = next(one for one in self._state.records.entries if one.name == name)
            return entry.bytes, self._state.records.pieces_again(entry)
        view = patched.data
        return len(view), (
            view[begin : begin + _PIECE_BYTES] for begin in range(0, len(view), _PIECE_BYTES)
        )


def _described(state: VersionState, log: Path, last: int | None) -> Described:
    found: list[ReadCommit] = []
    behind = 0

    def note(read: ReadCommit) -> None:
        nonlocal behind
        behind += 1
        if COMMIT_PACKAGE_RECORD in read.contents:
            found[:] = [read]
            behind = 0

    broken = replay(state, log, last=last, on_commit=note)
    name = f"{state.log.model} {state.log.version}"
    if last is not None and (not found or found[0].commit.number != last):
        at = f"; the last one that was is {found[0].commit.number}" if found else ""
        why = f" ({broken.words})" if broken is not None else ""
        raise UserError(
            f"commit {last} of {name} was not made of a checkpoint, or is not there{why}{at}"
        )
    if not found:
        why = f" ({broken.words})" if broken is not None else ""
        raise UserError(
            f"{name} has no commit that was made of a checkpoint{why}; publish one: tessera publish"
        )
    try:
        manifest = Manifest.from_bytes(found[0].contents[COMMIT_PACKAGE_RECORD].tobytes())
    except ValueError as error:
        raise UserError(
            f"commit {found[0].commit.number} of {name} describes no package: {error}"
        ) from error
    return Described(
        number=found[0].commit.number,
        manifest=manifest,
        golden=found[0].golden,
        behind=behind,
        broken=broken,
    )
