"""A loaded model whose bytes commits replace: staged beside serving, put in as a whole, and taken back.

A commit's new bytes change places with those that they replace (`exchange_all`), so what is left in the commit's memory
afterwards is what undoes it.  Rows of tables in this process's memory are not exchanged while passes wait for it,
which takes milliseconds: passes read them where they were staged until the tables have them (`RowOverlay`).

Where there are two instances of the model (`TwoInstances`), no pass waits for a commit at all.  The instance that passes
do not see gets the new weights and computes the golden answers, with the new rows laid over the tables for it alone; then
passes that begin see it and these rows, those that had begun end with what they saw, and the other instance is made
equal.  Else, and to go back, passes are stopped meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tessera.cpus import usable_cpus
from tessera.kernels.ops import load as load_operators
from tessera.serving.commits.file import CommitError, ReadCommit
from tessera.serving.package.commit import Patch
from tessera.serving.package.golden import GoldenMismatchError, compare_golden, read_golden
from tessera.serving.package.loading import SecondInstance
from tessera.serving.package.pace import Pace
from tessera.serving.package.runner import HostBatch, Runner
from tessera.serving.package.torchscript import last_line
from tessera.serving.server.batching.commit_lock import CommitLock, PassState
from tessera.serving.server.batching.workers import is_out_of_memory
from tessera.serving.server.follow.device_exchange import DeviceExchange, copied, rows_on_device
from tessera.serving.server.follow.exchange import (
    AnyExchange,
    Exchange,
    bring_near,
    exchange_all,
    on_devices,
    prepare,
    take_back_all,
)
from tessera.serving.server.follow.row_overlay import RowOverlay, rows_apart
from tessera.serving.server.follow.two_instances import TwoInstances

_RESTORING_THREADS = 8
"""More would wait for memory together."""


@dataclass(frozen=True, kw_only=True)
class StagedCommit:
    """A commit that is ready to be put in.

    Attributes:
        path: its file.
        read: what it says.
        exchanges: what is exchanged while no pass runs, in their order.
        golden: the inputs and outputs that the state after it must have; None: they are not compared.
        overlay: the other rows; None: there are none.
    """

    path: Path
    read: ReadCommit
    exchanges: Sequence[AnyExchange]
    golden: tuple[HostBatch, Mapping[str, Tensor]] | None
    overlay: RowOverlay | None = None


@dataclass(frozen=True, kw_only=True)
class UndoRecord:
    """What undoes a commit that was put in.

    Attributes:
        exchanges: of the commit, in their order, with what it has replaced.
    """

    exchanges: Sequence[AnyExchange]

    @classmethod
    def of(cls, staged: StagedCommit) -> UndoRecord:
        """What undoes a commit that was put in; it takes no more memory than the commit's file has bytes."""
        laid = () if staged.overlay is None else staged.overlay.exchanges
        return cls(exchanges=[exchange.compact() for exchange in (*staged.exchanges, *laid)])

    @property
    def bytes(self) -> int:
        """What it holds; rows' numbers that several exchanges have in common count once."""
        held = {one.data_ptr(): one.nbytes for each in self.exchanges for one in each.held}
        return sum(held.values())


class FollowedModel:
    """The memory of one model, whose replicas are patched together.

    Args:
        runners: its replicas.
        memory: of each replica, the memory of each record (`stored_bytes`).
        sizes: bytes of every record of the package.
        base: `unsigned_sha256` of the package's manifest.
        verify_golden: whether the golden answers of commits are compared.
        overlays: whether nothing reads the rows of tables but operators that know overlays.
        second: another instance of the only replica; None: there is none.

    Attributes:
        lock: what passes and commits hold; see `CommitLock`.
        base: see above.
    """

    def __init__(
        self,
        *,
        runners: Sequence[Runner],
        memory: Sequence[Mapping[str, Sequence[Tensor]]],
        sizes: Mapping[str, int],
        base: str,
        verify_golden: bool,
        overlays: bool = False,
        second: SecondInstance | None = None,
    ) -> None:
        load_operators()
        self.lock = CommitLock()
        self._runners = runners
        self._instances = None if second is None else TwoInstances(runners[0], memory[0], second)
        self._see(0)
        self.base = base
        self._memory = memory
        self._sizes = sizes
        self._verify_golden = verify_golden
        self._threads = min(usable_cpus(), _RESTORING_THREADS)
        self._overlays = overlays

    def stage(
        self, path: Path, read: ReadCommit, pace: Pace | None = None, *, beside_others: bool = False
    ) -> StagedCommit:
        """Everything that can be done beside serving; ``read``'s memory belongs to what is returned.

        Args:
            path: the commit's file, for messages.
            read: what is in it.
            pace: that of the thread, where others are answered meanwhile; None: it does not pause.
            beside_others: whether passes would wait while rows are exchanged.

        Raises:
            CommitError: its patches do not fit the package, or its golden answers cannot be read.
        """
        golden = None
        try:
            read.check_fits(self._sizes)
            if self._verify_golden:
                golden = read_golden(read.golden)
        except ValueError as error:
            raise CommitError(path, str(error), "schema") from error
        pace = pace or Pace(0.0)
        exchanges: list[AnyExchange] = []
        laid: list[Exchange] = []
        may_be_laid = rows_apart(read) if beside_others and self._overlays else set()
        rows_there: dict[tuple[str, torch.device], Tensor] = {}
        for patch in read.commit.patches:
            values = torch.from_numpy(read.new_bytes(patch))
            for number, place in enumerate(self._places(path, patch.record)):
                if place.device.type != "cpu":
                    exchanges.append(
                        _on_device(read, patch, place, values, rows_there=rows_there, pace=pace)
                    )
                    continue
                exchange = Exchange(
                    memory=place,
                    rows=_rows(read, patch),
                    # Each place exchanges memory of its own.
                    values=values if number == 0 else values.clone(),
                    offset=patch.offset,
                    stride=patch.stride,
                )
                is_laid = patch in may_be_laid and not self._has_each(place)
                (laid if is_laid else exchanges).append(exchange)
        if self._beside(golden, exchanges) is None:
            prepare(exchanges, pace)
        overlay = RowOverlay(laid, pace) if laid else None
        return StagedCommit(
            path=path, read=read, exchanges=exchanges, golden=golden, overlay=overlay
        )

    def _places(self, path: Path, record: str) -> list[Tensor]:
        """The memory of ``record`` in every replica."""
        found = [memory.get(record, ()) for memory in self._memory]
        if not all(found):
            raise CommitError(
                path,
                f"patches record {record!r}, which the model keeps in another form while it runs",
                "schema",
            )
        return [place for places in found for place in places]

    def put_in(self, staged: StagedCommit, *, pauses_end_s: float = 0.0) -> float:
        """Make the commit part of the state, or leave the state as it was; returns for how many seconds passes had to wait.

        Args:
            staged: by `stage`.
            pauses_end_s: seconds of ``time.monotonic``; until then rows are written with pauses.

        Raises:
            CommitError: the model does not give the commit's golden answers.
            MemoryError: there is no memory to compute them.
        """
        overlay = staged.overlay
        seconds = self._put_in_beside(staged)
        if seconds is None:
            seconds = self._put_in_alone(staged)
        if overlay is not None:
            overlay.write(pauses_end_s - time.monotonic())
            self.lock.wait_for_passes()  # those that began before may still read it
            overlay.close()
        return seconds

    def _put_in_beside(self, staged: StagedCommit) -> float | None:
        """See `put_in`; None: it has to be done while no pass runs, and the state is as it was.

        Rows are laid over tables here, and written by the caller.
        """
        instances, overlay = self._beside(staged.golden, staged.exchanges), staged.overlay
        if instances is None:
            return None
        spare, exchanges = instances.spare, instances.in_spare(staged.exchanges)
        exchange_all(exchanges)
        try:
            if overlay is not None:
                overlay.show(beside=True)
            self._compare(staged, [spare])
        except BaseException:
            if overlay is not None:
                overlay.take_back()
            exchange_all(exchanges[::-1])
            if overlay is not None and not overlay.fits:
                return None
            raise
        begin = time.perf_counter()
        self._see(staged.read.commit.number, overlay, spare=True)
        seconds = time.perf_counter() - begin
        self.lock.wait_for_passes()  # those that see the state before
        instances.equalize(staged.exchanges)
        return seconds

    def _beside(self, golden: object, exchanges: Sequence[AnyExchange]) -> TwoInstances | None:
        """The instances with which a commit with these is put in beside passes; None: passes are stopped for it.

        They are as well where its golden answers, which are needed for that, show that its rows cannot be laid.
        """
        instances = self._instances
        if instances is None or golden is None or not instances.have_each(exchanges):
            return None
        return instances

    def _has_each(self, memory: Tensor) -> bool:
        """Whether another instance has memory of its own in the place of ``memory``."""
        return self._instances is not None and self._instances.has_each(memory)

    def _put_in_alone(self, staged: StagedCommit) -> float:
        overlay = staged.overlay
        bring_near(staged.exchanges)
        with self.lock.exclusive():
            begin = time.perf_counter()
            exchange_all(staged.exchanges)
            try:
                if overlay is not None:
                    overlay.show()
                self._compare(staged, self._runners)
            except BaseException:
                if overlay is not None:
                    overlay.take_back()
                exchange_all(staged.exchanges[::-1])
                raise
            self._see(staged.read.commit.number, overlay)
            seconds = time.perf_counter() - begin
        if self._instances is not None:
            self._instances.equalize(staged.exchanges)
        return seconds

    def _see(self, commit: int, overlay: RowOverlay | None = None, *, spare: bool = False) -> None:
        """From now on passes see the state of ``commit``: where there are two instances the spare one, or the first."""
        runner = None
        if self._instances is not None:
            number = None if overlay is None else overlay.number
            runner = self._instances.see(number, spare=spare)
        self.lock.switch(PassState(commit, runner))

    def _compare(self, staged: StagedCommit, runners: Sequence[Runner]) -> None:
        if staged.golden is None:
            return
        batch, expected = staged.golden
        path = staged.path
        try:
            for runner in runners:
                compare_golden(runner, batch, expected, staged.read.commit.golden)
        except GoldenMismatchError as error:
            raise CommitError(
                path, f"does not give its golden answers: {error}", "golden"
            ) from error
        except (RuntimeError, ValueError) as error:
            if is_out_of_memory(error):
                raise MemoryError(last_line(error)) from error
            raise CommitError(path, f"cannot be called: {last_line(error)}", "golden") from error

    def take_back(self, undone: Sequence[UndoRecord], commit: int) -> None:
        """Undo commits, the newest first, together; the state is then that of ``commit``, and the records are of no use any more."""
        exchanges = [one for record in undone for one in reversed(record.exchanges)]
        with self.lock.exclusive():
            take_back_all(exchanges, self._threads)
            self._see(commit)
        if self._instances is not None:
            self._instances.equalize(exchanges)
        for exchange in on_devices(exchanges):
            exchange.compact()


def _rows(read: ReadCommit, patch: Patch) -> Tensor:
    """A patch's rows, in the commit's own memory where that has them."""
    stored = read.stored_rows(patch)
    if stored is not None:
        return torch.from_numpy(stored)
    numbers = read.rows(patch)
    if numbers is None:  # by NumPy, see `tessera.serving.package.golden`
        narrow = patch.count <= torch.iinfo(torch.int32).max
        numbers = np.arange(patch.count, dtype=np.int32 if narrow else np.int64)
    return torch.from_numpy(numbers)


def _on_device(
    read: ReadCommit,
    patch: Patch,
    memory: Tensor,
    values: Tensor,
    *,
    rows_there: dict[tuple[str, torch.device], Tensor],
    pace: Pace,
) -> DeviceExchange:
    """A patch of ``memory``; ``rows_there`` has the rows' numbers that are on a device, by the record that has them."""
    numbers = read.rows(patch)
    rows = None
    if numbers is not None:
        name = (patch.rows, memory.device)
        if name not in rows_there:
            rows_there[name] = rows_on_device(torch.from_numpy(numbers), memory.device, pace)
        rows = rows_there[name]
    return DeviceExchange.of(
        memory,
        rows,
        copied(values, memory.device, pace),
        last_row=read.last_row(patch),
        offset=patch.offset,
        stride=patch.stride,
    )
