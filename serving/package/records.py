"""The package file as a plain archive: its records, and the manifest that lists them."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from tessera.serving.package.archive import Archive, ArchiveError, ArchiveKind
from tessera.serving.package.layout import TOP_FOLDER
from tessera.serving.package.manifest import MANIFEST_RECORD, MAX_MANIFEST_BYTES, Manifest


class PackageError(ArchiveError):
    """A package is not served; the message names the file and why."""

    word = "package"


class Records(Archive):
    """The records of a package, by their name below its top folder; see `Archive`."""

    kind: ClassVar[ArchiveKind] = ArchiveKind(
        top_folder=TOP_FOLDER,
        last_record=MANIFEST_RECORD,
        max_last_bytes=MAX_MANIFEST_BYTES,
        last_word="the manifest",
        not_a_file="is not a file; give the MODEL.pt that package-model wrote",
        not_laid_out="is damaged, cut short or no package at all ({error}); if an older Tessera "
        "wrote it, package the model again",
        not_this_kind=f"has no {MANIFEST_RECORD}: it was not written by package-model",
        error=PackageError,
    )

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._parsed: Manifest | None = None

    def manifest_bytes(self) -> bytes:
        """The manifest's content.

        Raises:
            PackageError: it is missing or damaged.
        """
        return self.last_bytes()

    def manifest(self) -> Manifest:
        """The manifest.

        Raises:
            PackageError: it is missing, damaged, or of another format version.
        """
        content = self.manifest_bytes()
        if self._parsed is None:
            try:
                self._parsed = Manifest.from_bytes(content)
            except ValueError as error:
                raise PackageError(self.path, str(error)) from error
        return self._parsed
