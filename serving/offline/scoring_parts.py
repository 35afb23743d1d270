"""The folder of finished parts beside an output that is being written, which a later call goes on with.

    OUT.parts/
        plan.json       what is scored: package, files, flags; written first
        lock            held (flock) by the process that works on it
        NNNNNNNN.part   one finished unit, by its number

A part appears by a rename, whole and on the disk.  The folder is removed when the output is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tessera.durable import replacing
from tessera.errors import UserError
from tessera.serving.offline.scoring_work import Part, PartHead

PLAN = "plan.json"


class PartsFolder:
    """Finished parts of one output.

    Args:
        out: the output.
        plan: what is scored, by name, as JSON values; parts of another plan do not fit.
    """

    def __init__(self, out: Path, plan: dict[str, Any]) -> None:
        self._path = out.with_name(f"{out.name}.parts")
        self._plan: dict[str, Any] = json.loads(json.dumps(plan))

    @contextlib.contextmanager
    def opened(self, *, anew: bool) -> Iterator[None]:
        """Hold the folder, made if needed, with this plan in it; ``anew`` leaves no part of before.

        Raises:
            UserError: another process holds it, or it has parts of another plan.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        with (self._path / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"{self._path}: another process is writing this output; wait for its end"
                ) from error
            if anew:
                for path in self._path.iterdir():
                    if path.name != "lock":
                        path.unlink()
            self._agree()
            try:
                yield
            except BaseException:
                if not any(self._path.glob("*.part")):  # nothing to go on with
                    self.remove()
                raise

    def _agree(self) -> None:
        path = self._path / PLAN
        before = None
        if path.exists():
            with contextlib.suppress(ValueError, RecursionError):
                before = json.loads(path.read_text(encoding="utf-8"))
            before = before if isinstance(before, dict) else {}
            if before != self._plan:
                names = {*before, *self._plan}
                other = sorted(n for n in names if before.get(n) != self._plan.get(n))
                raise UserError(
                    f"{self._path}: holds parts of a call with another {' and '.join(other)}; repeat that"
                    " call to go on with it, or begin anew with --overwrite"
                )
            return
        with replacing(path) as file:
            file.write(json.dumps(self._plan, indent=1).encode())

    def _file(self, number: int) -> Path:
        return self._path / f"{number:08}.part"

    def head(self, number: int) -> PartHead | None:
        """What a finished part says of itself; None where it is not finished.

        Raises:
            UserError: the part is damaged.
        """
        path = self._file(number)
        if not path.exists():
            return None
        with path.open("rb") as file, _whole(path):
            return Part.read_head(file)

    def read(self, number: int) -> Part:
        """A finished part.

        Raises:
            UserError: it is damaged.
        """
        path = self._file(number)
        with path.open("rb") as file, _whole(path):
            return Part(Part.read_head(file), file.read())

    def write(self, number: int, part: Part) -> None:
        """Keep a finished part.

        Raises:
            OSError: it cannot be written.
        """
        with replacing(self._file(number)) as file:
            file.write(part.to_bytes())

    def remove(self) -> None:
        """Remove the folder and what is in it."""
        shutil.rmtree(self._path, ignore_errors=True)


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: is damaged; begin anew with --overwrite") from error
