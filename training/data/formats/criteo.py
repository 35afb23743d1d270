"""``format: criteo``: label, 13 integers, 26 hex categories, tab-separated, ``.gz`` too."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from tessera.errors import UserError
from tessera.training import field_checks as check
from tessera.training.data import criteo
from tessera.training.data.config import DataConfig, Paths, Split, data_format
from tessera.training.data.dataset import DataSplits
from tessera.training.data.opening import Source, open_sources

_ENDINGS = (".tsv", ".txt", ".tsv.gz", ".txt.gz")


@data_format
@dataclass(frozen=True, kw_only=True)
class CriteoConfig(DataConfig):
    """Files in the format of Criteo's click data.

    Attributes:
        path: a file, a list of files (read in that order), or a folder (every ``.tsv``, ``.txt``,
            ``.tsv.gz`` and ``.txt.gz`` in it, by name).
        valid_path: files for validation; empty: a share of ``path`` is held out.
        test_path: files for the test; empty: a share of ``path`` is held out.
        split: ``random``: the held-out rows are drawn with ``split_seed``.  ``time``: they are the
            last lines, first validation, then test.
        workers (processes): processes that parse files of more than 128 MiB; 0 or 1: none beside this one.
    """

    format: Literal["criteo"] = "criteo"
    path: Paths
    valid_path: Paths = ()
    test_path: Paths = ()
    split: Split = "random"
    workers: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_of(self, "split", Split)
        check.not_negative(self, "workers")

    def open(self, *, progress: bool) -> DataSplits:
        """See `DataConfig.open`."""
        return open_sources(self, self._source, split=self.split, progress=progress)

    def _source(self, field: str) -> Source:
        files = [file for path in self.paths(field) for file in _files(path, field)]
        return Source(
            files=files,
            options={"layout": criteo.LAYOUT},
            write=partial(criteo.write_criteo, files, self.workers),
            opened=lambda found: criteo.CriteoDataset(found.path, rows=found.details["rows"]),
        )


def _files(path: str, field: str) -> list[Path]:
    """The files that a path of the config stands for."""
    found = Path(path).expanduser()
    if not found.is_dir():
        if not found.is_file():
            raise UserError(f"{field}='{path}': no such file or folder; name one that is there")
        return [found]
    files = sorted(file for file in found.iterdir() if file.name.endswith(_ENDINGS))
    if not files:
        raise UserError(f"{field}='{path}': no file in it ends in {', '.join(_ENDINGS)}; name one")
    return files
