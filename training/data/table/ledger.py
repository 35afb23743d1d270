"""``stream.jsonl``: which files of a growing folder were taken, in their order."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tessera.errors import UserError


class Ledger:
    """The lines of a ``stream.jsonl``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def records(self, skip: int = 0) -> list[dict[str, Any]]:
        """The whole lines after the first ``skip``; one that is being written is not whole.

        Raises:
            UserError: the file is not a ledger.
        """
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")[:-1][skip:]
        try:
            found = [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{self.path}: is damaged ({error}); begin a new run, or put the file back"
            ) from error
        return found

    def begin(self, records: list[dict[str, Any]]) -> None:
        """Make the file hold these records, without pauses and without half a line."""
        kept = [record for record in records if "pause" not in record]
        temporary = self.path.with_name(f"{self.path.name}.tmp")
        temporary.write_text("".join(json.dumps(one) + "\n" for one in kept), encoding="utf-8")
        _flush(temporary)
        temporary.replace(self.path)

    def append(self, record: dict[str, Any]) -> None:
        """Add a line, which is on the disk when this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
