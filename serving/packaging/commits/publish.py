"""Publish a checkpoint as the next commit of a version of a repository."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from tessera.durable import PARTIAL_SUFFIX
from tessera.errors import UserError
from tessera.serving.commits.file import ReadCommit
from tessera.serving.commits.replay import Broken, fence_rest, next_number, replay
from tessera.serving.commits.state import VersionState
from tessera.serving.commits.writer import Facts, publishing_lock, write_next
from tessera.serving.package.commit import COMMIT_PACKAGE_RECORD
from tessera.serving.package.manifest import GOLDEN_RECORD, Manifest
from tessera.serving.package.records import Records
from tessera.serving.packaging.commits.difference import difference
from tessera.serving.packaging.commits.places import TablePiece, table_pieces
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import package_run
from tessera.serving.packaging.write.package import iso_time
from tessera.serving.repository.folder import PACKAGE_NAME, package_path, scan_model
from tessera.training.models.retrieval import TowerSide

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_MOST_BYTES = 1 << 30
_DRAFT = ".publish."  # packages that are compared, in the version's folder


def version_folder(repository: Path, model: str, version: int | None) -> Path:
    """The folder of a version of a model: the one given, or the highest that has a package.

    Raises:
        UserError: there is no such version.
    """
    folder = repository.expanduser() / model
    try:
        versions = scan_model(folder).versions
    except OSError as error:
        raise UserError(
            f"{folder} cannot be read ({error.strerror}); give --repository DIR and --model NAME of a "
            "model that package-model --repository wrote"
        ) from error
    if not versions:
        raise UserError(
            f"{folder} has no version; write its first one with: package-model --repository "
            f"{repository} --name {model}"
        )
    if version is not None and version not in versions:
        raise UserError(
            f"--version {version}: {folder} has the versions {', '.join(map(str, versions))}"
        )
    return package_path(folder, max(versions) if version is None else version).parent


def options_of(manifest: Manifest, version: int) -> PackageOptions:
    """The options of `package-model` that lead to a package like this one."""
    types = {glob.escape(table.name): table.dtype for table in manifest.tables}
    outputs = manifest.schema.outputs
    return PackageOptions(
        name=manifest.name,
        version=str(version),
        dtype=manifest.tables[0].dtype if manifest.tables else "int8",
        table_dtypes=types,
        dense_dtype=manifest.dense_dtype,
        backend=manifest.backend,
        device=manifest.device,
        plan=manifest.plan if manifest.plan.num_shards > 1 else None,
        output=outputs[0].name if len(outputs) == 1 else "default",
    )


@dataclass(frozen=True, kw_only=True)
class Published:
    """What became of a state that was to be published.

    Attributes:
        path: the commit's file; None: nothing had changed.
        number: of the state's last commit.
        rows: how many rows of tables it changed.
        bytes: of the file; 0 where there is none.
        broken: what was wrong with the log before; None: nothing.
    """

    path: Path | None
    number: int
    rows: int
    bytes: int
    broken: Broken | None


class Publisher:
    """Writes to the log of one version; holds its lock.

    Args:
        folder: ``DIR/MODEL/VERSION``.
        key: to sign commits with; None: they are not signed.

    Attributes:
        state: the version at the end of its log.
        pieces: of the version's tables.
        broken: what was wrong with the log, and was fenced off; None: nothing.

    A state is **described** when its last commit holds the manifest of its package, or when it is the version's
    package itself.  Whoever publishes a checkpoint leaves a described state, also where an earlier publisher was
    ended between a commit and its description: no row is different then, and the commit has no patches.

    Raises:
        PackageError: the version's package cannot be loaded.
        UserError: another process publishes, or the folder cannot be written to.
    """

    def __init__(self, folder: Path, key: Ed25519PrivateKey | None = None) -> None:
        self._lock = contextlib.ExitStack()
        self._key = key
        self.log = self._lock.enter_context(publishing_lock(folder))
        for leftover in self.log.glob(f".*{PARTIAL_SUFFIX}"):  # of a publisher that was killed
            leftover.unlink(missing_ok=True)
        for leftover in folder.glob(f"{_DRAFT}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            self.state = VersionState(folder / PACKAGE_NAME, folder.parent.name, int(folder.name))
            state = self.state
            self.pieces: list[TablePiece] = table_pieces(
                state.manifest, state.tensor_records, state.sizes
            )
            self._described = 0, state.records.manifest_bytes()
            self.broken = replay(self.state, self.log, on_commit=self._note)
            if self.broken is not None:
                fence_rest(self.state, self.log)
        except BaseException:
            self.close()
            raise

    def _note(self, read: ReadCommit) -> None:
        manifest = read.contents.get(COMMIT_PACKAGE_RECORD)
        if manifest is not None:
            self._described = read.commit.number, manifest.tobytes()

    def close(self) -> None:
        """Let go of the lock."""
        self._lock.close()

    def describes(self, checkpoint: Path) -> bool:
        """Whether the last described state is that of this checkpoint's file."""
        try:
            manifest = Manifest.from_bytes(self._described[1])
        except ValueError:
            return False
        made = manifest.source.get("checkpoint"), manifest.created
        return made == (checkpoint.name, iso_time(checkpoint.stat().st_mtime))

    def publish_checkpoint(
        self,
        run_or_checkpoint: Path,
        facts: Facts,
        *,
        evaluate_rows: int | None = None,
        skip_evaluation: bool = False,
        progress: bool = True,
    ) -> Published:
        """Package a checkpoint as the version was packaged, and publish what differs.

        Args:
            run_or_checkpoint: see `package_run`, as the last two.
            facts: what the commit says beside its patches.
            evaluate_rows: how many validation rows are measured; None: all.
            skip_evaluation: none is.
            progress: whether to show a progress bar on a terminal.

        Raises:
            UserError: it cannot be packaged, or see `publish_package`.
        """
        manifest, folder = self.state.manifest, self.log.parent
        with tempfile.TemporaryDirectory(prefix=_DRAFT, dir=folder) as place:
            path = Path(place) / PACKAGE_NAME
            made = package_run(
                run_or_checkpoint,
                path,
                options_of(manifest, int(folder.name)),
                evaluate_rows=evaluate_rows,
                skip_evaluation=skip_evaluation,
                tower=_tower(manifest),
                progress=progress,
            )
            step = made.source.get("step", "")
            facts = replace(facts, step=int(step) if step.isdecimal() else None)
            return self.publish_package(Records(path), facts)

    def publish_package(self, package: Records, facts: Facts) -> Published:
        """Write what leads from the state to a package as the next commit; see `publish_checkpoint`.

        Nothing is written where nothing has changed and the state is described already.

        Raises:
            UserError: no commit can lead there, or the file cannot be written.
        """
        changes = difference(self.state, self.pieces, package)
        number = self.state.log.number
        if not changes and number == self._described[0]:
            return Published(path=None, number=number, rows=0, bytes=0, broken=self.broken)
        manifest = package.manifest()
        golden = package.read(GOLDEN_RECORD, max_bytes=_MOST_BYTES)
        own = self._as_this_package(manifest).to_bytes()
        facts = replace(facts, golden=(golden, manifest.golden), package=own)
        path = write_next(
            self.state, self.log, changes, facts, self._key, number=next_number(self.log)
        )
        self._described = self.state.log.number, own
        tables = {piece.record for piece in self.pieces}
        rows = {
            id(c.rows): len(c.rows) for c in changes if c.rows is not None and c.record in tables
        }
        return Published(
            path=path,
            number=self.state.log.number,
            rows=sum(rows.values()),
            bytes=path.stat().st_size,
            broken=self.broken,
        )

    def _as_this_package(self, manifest: Manifest) -> Manifest:
        """The manifest with the records that a package made of this version's has."""
        base = self.state.manifest.records
        own = {
            name: manifest.records[name]
            if name in self.state.tensors or name == GOLDEN_RECORD
            else info
            for name, info in base.items()
        }
        return replace(manifest, records=own, signature=None)


def _tower(manifest: Manifest) -> TowerSide | None:
    """Which tower of a model for retrieval the package is; None: the whole model."""
    found = manifest.source.get("tower")
    return next((side for side in get_args(TowerSide) if side == found), None)


def json_of(published: Published) -> str:
    """For programs: one line."""
    return json.dumps(
        {
            "commit": published.number,
            "path": None if published.path is None else os.fspath(published.path),
            "rows": published.rows,
            "bytes": published.bytes,
        }
    )
