"""A growing folder: rows of files that arrive while a run trains, each once, in the order of arrival.

What arrived is written to a ledger in the run folder, ``stream.jsonl``, before it is trained on.  Each line
is one of

    {"files": [{"path", "bytes", "mtime_ns"}, ...], "rows": N, "all_rows": M}   the next files, as one segment
    {"end": "marker" | "idle"}                                                  there are no more
    {"pause": true}                                                             asked to stop while waiting

Rank 0 looks at the folder and writes; every rank reads.  Batch ``k`` holds rows ``k * B`` to
``(k + 1) * B - 1`` of the segments one after the other, so that a checkpoint's number of steps says which
rows were trained on, and a run that goes on begins with the first that was not.  A line is flushed to
the disk before its rows are used.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tessera.errors import UserError
from tessera.training import field_checks as check
from tessera.training.data.columns import FeatureColumns
from tessera.training.data.dataset import EpochOrder, GrowingView
from tessera.training.data.malformed import MalformedReport
from tessera.training.data.table.files import FoundFile, files_below
from tessera.training.data.table.ledger import Ledger
from tessera.training.data.table.settle import TableColumns
from tessera.training.data.table.view import TableDataset, TableView

_log = logging.getLogger("tessera.data")


@dataclass(frozen=True, kw_only=True)
class Follow:
    """How a growing folder is read.

    Attributes:
        marker: name of a file that, once it is in the folder, says that all others are there too.
        idle_s: seconds without a new file after which the data has ended; None: never.
        max_steps: training steps after which the run ends; None: no limit.
        settle_s: seconds since its last change after which a file is taken to be whole.
        poll_s: seconds between looks at the folder.
    """

    marker: str = "_DONE"
    idle_s: float | None = None
    max_steps: int | None = None
    settle_s: float = 5.0
    poll_s: float = 1.0

    def __post_init__(self) -> None:
        if not self.marker or "/" in self.marker:
            raise UserError(f"marker={self.marker!r}: give the name of a file, without a folder")
        if self.idle_s is not None and self.idle_s <= 0:
            raise UserError(f"idle_s={self.idle_s}: give more than 0 seconds, or leave it out")
        if self.max_steps is not None and self.max_steps < 1:
            raise UserError(f"max_steps={self.max_steps}: give at least 1, or leave it out")
        check.not_negative(self, "settle_s")
        if self.poll_s <= 0:
            raise UserError(f"poll_s={self.poll_s}: give more than 0 seconds")


class Opener(Protocol):
    """Opens files with the columns of a config; see `tessera.training.data.table.opening`."""

    @property
    def malformed(self) -> MalformedReport:
        """What was left out so far."""

    def open_whole(self, found: list[FoundFile]) -> TableDataset:
        """The rows of these files, none held out."""


@dataclass
class Segment:
    """Files that arrived together.

    Attributes:
        files: what the ledger says of them.
        first: the place of their first row among all that are trained on.
        rows: how many rows are trained on.
        first_number: the number of their first row, where those that are left out count as well.
        view: the rows, once they are opened.
    """

    files: list[dict[str, Any]]
    first: int
    rows: int
    first_number: int
    view: TableView | None = field(default=None, repr=False)


class Arrivals:
    """Looks at a folder for files that are whole and were not taken yet, the oldest first."""

    def __init__(self, folder: Path, follow: Follow) -> None:
        self._folder, self._follow = folder, follow
        self._last: dict[str, tuple[int, int]] = {}
        self._waits_since = time.monotonic()

    def look(self, taken: set[str]) -> tuple[list[FoundFile], str | None]:
        """The files to take now; or none, and why there will be no more, if that is so.

        A file is whole if it has not changed since the last look nor for ``settle_s``; once the marker
        is there, all are.
        """
        complete = (self._folder / self._follow.marker).exists()  # before the files are listed
        now, states, whole = time.time(), {}, []
        for file in files_below(self._folder):
            name = str(file.path)
            if name in taken:
                continue
            try:
                stat = file.path.stat()
            except FileNotFoundError:
                continue  # its writer has just renamed it
            states[name] = (stat.st_size, stat.st_mtime_ns)
            settled = now - stat.st_mtime_ns / 1e9 >= self._follow.settle_s
            if complete or (settled and self._last.get(name) == states[name]):
                whole.append(((stat.st_mtime_ns, name), file))
        self._last = states
        if states:
            self._waits_since = time.monotonic()
        if whole:
            return [file for _, file in sorted(whole, key=lambda one: one[0])], None
        if complete:
            return [], "marker"
        idle = self._follow.idle_s
        ended = idle is not None and not states and time.monotonic() - self._waits_since >= idle
        return [], "idle" if ended else None


class FolderStream(GrowingView):
    """The training rows of a growing folder; see the module.

    As a `View` it has the rows of the files that were there when the run began, which transforms are
    fitted to.

    Args:
        folder: where files arrive.
        follow: how it is read.
        opener: opens files.
        table_columns: what columns are used for, settled against the files for validation.
        columns: what batches hold.
    """

    def __init__(
        self,
        folder: Path,
        follow: Follow,
        opener: Opener,
        table_columns: TableColumns,
        columns: FeatureColumns,
    ) -> None:
        self.folder, self.follow = folder, follow
        self.table_columns, self.columns = table_columns, columns
        self._opener = opener
        self._arrivals = Arrivals(folder, follow)
        self._segments: list[Segment] = []
        self._arrived = self._numbers = 0
        self._made: tuple[list[dict[str, Any]], TableView | None] = ([], None)
        self._records: list[dict[str, Any]] = []
        self._ledger: Ledger | None = None
        self._writes = False
        self._should_stop: Callable[[], bool] = lambda: False
        self._lock = threading.Lock()
        self.end: str | None = None

    @property
    def dataset(self) -> FolderStream:
        """Itself: it has columns and a length."""
        return self

    @property
    def malformed_rows(self) -> int:
        """See `GrowingView.malformed_rows`."""
        return sum(record.get("malformed", 0) for record in self._records)

    def newest_s(self, rows: int) -> float | None:
        """When the newest of the files that the first ``rows`` rows are in was written, seconds since 1970.

        None before the first row.
        """
        newest, seen = None, 0
        for record in self._records:
            if seen >= rows:
                break
            seen += record["rows"]
            written = max(file["mtime_ns"] for file in record["files"]) / 1e9
            newest = written if newest is None else max(newest, written)
        return newest

    def __len__(self) -> int:
        return self._segments[0].rows if self._segments else 0

    def first_records(self, ledger: Path, *, required: bool = True) -> list[dict[str, Any]]:
        """See `GrowingView.first_records`."""
        if (found := Ledger(ledger).records()) or not required:
            return found
        files, _ = self._arrivals.look(set())
        until = time.monotonic() + self.follow.settle_s + 2 * self.follow.poll_s
        while not files and time.monotonic() < until:
            time.sleep(self.follow.poll_s)
            files, _ = self._arrivals.look(set())
        if not files:
            raise UserError(
                f"path='{self.folder}': holds no whole file yet; the first ones have to be there when"
                " a run begins, because transforms are fitted to them, and items for retrieval taken from them"
            )
        record = self._record(files)
        if not record["rows"]:
            raise UserError(f"path='{self.folder}': no row of its files can be read; mend them")
        return [record]

    def begin(
        self,
        records: list[dict[str, Any]],
        ledger: Path,
        *,
        writes: bool,
        should_stop: Callable[[], bool],
    ) -> None:
        """See `GrowingView.begin`."""
        self._ledger, self._writes, self._should_stop = Ledger(ledger), writes, should_stop
        self._records = [record for record in records if "pause" not in record]
        for record in self._records:
            self._take(record)

    def write_first(self) -> None:
        """See `GrowingView.write_first`."""
        assert self._ledger is not None
        self._ledger.begin(self._records)

    def labels(self, limit: int | None = None) -> npt.NDArray[np.float32]:
        """See `View.labels`, of the first files."""
        return self.view_of(self._segments[0]).labels(limit)

    def order(self, epoch: int, *, seed: int | None, threads: int) -> EpochOrder:
        """See `View.order`, of the first files."""
        return self.view_of(self._segments[0]).order(epoch, seed=seed, threads=threads)

    def segment_at(self, row: int) -> Segment:
        """The segment that has a row that has arrived."""
        return next(one for one in self._segments if one.first <= row < one.first + one.rows)

    def forget_before(self, segment: Segment) -> None:
        """Nothing is read any more of what lies before a segment."""
        with self._lock:
            for one in self._segments:
                if one.first < segment.first:
                    one.view = None

    def view_of(self, segment: Segment) -> TableView:
        """The rows of a segment, opened if need be.

        Raises:
            UserError: a file is not as it was when it was taken.
        """
        with self._lock:
            if segment.view is None:
                there = {str(file.path): file for file in files_below(self.folder)}
                found = []
                for known in segment.files:
                    file = there.get(known["path"])
                    state = None if file is None else file.path.stat()
                    if file is None or state is None:
                        raise UserError(
                            f"{known['path']}: is gone, but not all of its rows were trained on; put"
                            " it back"
                        )
                    if [state.st_size, state.st_mtime_ns] != [known["bytes"], known["mtime_ns"]]:
                        raise UserError(
                            f"{known['path']}: was changed after it was taken; put the first state"
                            " back, and new rows into a file with another name"
                        )
                    found.append(file)
                segment.view = TableView(self._opener.open_whole(found), 0)
            return segment.view

    def rows_until(self, row: int, closed: threading.Event) -> tuple[int, bool]:
        """Wait for ``row`` rows in all.

        Returns:
            how many have arrived, and whether these are all there will be.  Fewer than ``row``, and
            not all, if it was asked to stop, or ``closed``.

        Raises:
            UserError: a file that has arrived cannot be read.
        """
        while self._arrived < row and self.end is None:
            written, paused = self._read_ledger()
            if paused:
                break
            if written or (self._writes and self._look()):
                continue
            if closed.wait(self.follow.poll_s):
                break
        return self._arrived, self.end is not None

    def _read_ledger(self) -> tuple[bool, bool]:
        """Take what the ledger has more; whether that is anything, and whether it is to pause."""
        assert self._ledger is not None
        records = self._ledger.records(len(self._records))
        for record in records:
            if "pause" in record:
                return True, True
            self._records.append(record)
            self._take(record)
        return bool(records), False

    def _look(self) -> bool:
        """Write what has arrived to the ledger, or that nothing will; whether anything was written."""
        assert self._ledger is not None
        if self._should_stop():
            self._ledger.append({"pause": True})
            return True
        taken = {file["path"] for segment in self._segments for file in segment.files}
        files, end = self._arrivals.look(taken)
        if files:  # one by one, so that each is needed no longer than its own rows
            self._ledger.append(self._record(files[:1]))
        elif end is not None:
            self._ledger.append({"end": end})
        return bool(files) or end is not None

    def _record(self, files: list[FoundFile]) -> dict[str, Any]:
        """The ledger's line of these files, all of which can be read."""
        before = self._opener.malformed.total
        described = []
        for file in files:
            stat = file.path.stat()
            described.append(
                {"path": str(file.path), "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
            )
        view = TableView(self._opener.open_whole(files), 0)
        left_out = self._opener.malformed.total - before
        if left_out:
            _log.warning(
                "%d malformed rows left out of %s",
                left_out,
                ", ".join(str(file.path) for file in files),
            )
        self._made = (described, view)
        return {
            "files": described,
            "rows": len(view),
            "all_rows": len(view.dataset),
            "malformed": left_out,
        }

    def _take(self, record: dict[str, Any]) -> None:
        if "end" in record:
            self.end = record["end"]
            return
        segment = Segment(record["files"], self._arrived, record["rows"], self._numbers)
        if self._made[0] == record["files"]:
            segment.view = self._made[1]
        self._made = ([], None)
        self._segments.append(segment)
        self._arrived += record["rows"]
        self._numbers += record["all_rows"]
