"""A loaded model whose bytes commits replace: staged beside serving, put in as a whole, and taken back.

A commit's new bytes change places with those that they replace (`torch.ops.tessera.exchange_rows`, on GPUs
`DeviceExchange`), so what is left in the commit's memory afterwards is what undoes it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tessera.kernels.ops import load as load_operators
from tessera.serving.commits.file import CommitError, ReadCommit
from tessera.serving.package.commit import Patch
from tessera.serving.package.golden import GoldenMismatchError, compare_golden, read_golden
from tessera.serving.package.pace import Pace
from tessera.serving.package.runner import HostBatch, Runner
from tessera.serving.package.torchscript import last_line
from tessera.serving.server.batching.commit_lock import CommitLock
from tessera.serving.server.batching.workers import is_out_of_memory
from tessera.serving.server.follow.device_exchange import DeviceExchange, copied, rows_on_device

_LARGEST_INT32 = torch.iinfo(torch.int32).max


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Bytes that change places with those of one record in this process's memory.

    Attributes:
        memory: ``[bytes]`` uint8, the record's.
        rows: ``[count]`` int64 or int32, ascending.
        values: ``[count, width]`` uint8.
        offset: where row 0 begins.
        stride: bytes from one row to the next.
    """

    memory: Tensor
    rows: Tensor
    values: Tensor
    offset: int
    stride: int

    def run(self) -> None:
        """Exchange them; running it again undoes it."""
        torch.ops.tessera.exchange_rows(
            self.memory, self.rows, self.values, self.offset, self.stride
        )

    def compact(self) -> Exchange:
        """The same with rows' numbers of four bytes, as a commit's file has them, where they fit."""
        if (
            self.rows.dtype == torch.int32
            or not self.rows.numel()
            or int(self.rows[-1]) > _LARGEST_INT32
        ):
            return self
        return replace(self, rows=self.rows.int())

    @property
    def held(self) -> list[Tensor]:
        """What it holds beside the record; rows may be those of another exchange, too."""
        return [self.values, self.rows]


AnyExchange: TypeAlias = Exchange | DeviceExchange


def exchange_all(exchanges: Sequence[AnyExchange]) -> None:
    """Run all in their order, or none; those of the CPU in one call, which gives the interpreter's lock away once.

    A GPU may still be at it afterwards: what is computed there later waits for it.
    """
    host, device = _on_host(exchanges), _on_devices(exchanges)
    done: list[DeviceExchange] = []
    if host:
        torch.ops.tessera.exchange_rows_of(*_arguments(host))
    try:
        for one in device:
            one.run()
            done.append(one)
    except BaseException:
        for one in reversed(done):
            one.run()
        if host:
            torch.ops.tessera.exchange_rows_of(*_arguments(host[::-1]))
        raise


def prepare(exchanges: Sequence[AnyExchange], pace: Pace) -> None:
    """Do beside serving what would make the first exchange take longer.

    On the CPU that are faults of pages that nobody wrote to lately, on GPUs the reading of what is replaced.

    Args:
        exchanges: those of a commit.
        pace: that of the thread.
    """
    host = _on_host(exchanges)
    if host:
        torch.ops.tessera.touch_rows_aside(*_arguments(host), pace.share, pace.left_s)
    for one in _on_devices(exchanges):
        one.keep()
        pace.rest()


def bring_near(exchanges: Sequence[AnyExchange]) -> None:
    """Have the rows that are exchanged next in the caches, beside those who read them."""
    host = _on_host(exchanges)
    if host:
        torch.ops.tessera.touch_rows_of(*_arguments(host))


def _on_host(exchanges: Sequence[AnyExchange]) -> list[Exchange]:
    return [one for one in exchanges if isinstance(one, Exchange)]


def _on_devices(exchanges: Sequence[AnyExchange]) -> list[DeviceExchange]:
    return [one for one in exchanges if isinstance(one, DeviceExchange)]


def _arguments(exchanges: Sequence[Exchange]) -> tuple[list[Any], ...]:
    """The arguments of ``exchange_rows_of``, ``touch_rows_of`` and, its last ones apart, ``touch_rows_aside``."""
    return (
        [one.memory for one in exchanges],
        [one.rows for one in exchanges],
        [one.values for one in exchanges],
        [one.offset for one in exchanges],
        [one.stride for one in exchanges],
    )


@dataclass(frozen=True, kw_only=True)
class StagedCommit:
    """A commit that is ready to be put in.

    Attributes:
        path: its file.
        read: what it says.
        exchanges: in their order.
        golden: the inputs and outputs that the state after it must have; None: they are not compared.
    """

    path: Path
    read: ReadCommit
    exchanges: Sequence[AnyExchange]
    golden: tuple[HostBatch, Mapping[str, Tensor]] | None


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
        return cls(exchanges=[exchange.compact() for exchange in staged.exchanges])

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
    ) -> None:
        load_operators()
        self.lock = CommitLock()
        self.base = base
        self._runners = runners
        self._memory = memory
        self._sizes = sizes
        self._verify_golden = verify_golden

    def stage(self, path: Path, read: ReadCommit, pace: Pace | None = None) -> StagedCommit:
        """Everything that can be done beside serving; ``read``'s memory belongs to what is returned.

        Args:
            path: the commit's file, for messages.
            read: what is in it.
            pace: that of the thread, where others are answered meanwhile; None: it does not pause.

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
        rows_there: dict[tuple[str, torch.device], Tensor] = {}
        for patch in read.commit.patches:
            values = torch.from_numpy(read.new_bytes(patch))
            for number, place in enumerate(self._places(path, patch.record)):
                if place.device.type != "cpu":
                    exchanges.append(
                        _on_device(read, patch, place, values, rows_there=rows_there, pace=pace)
                    )
                    continue
                exchanges.append(
                    Exchange(
                        memory=place,
                        rows=_rows(read, patch),
                        # Each place exchanges memory of its own.
                        values=values if number == 0 else values.clone(),
                        offset=patch.offset,
                        stride=patch.stride,
                    )
                )
        prepare(exchanges, pace)
        return StagedCommit(path=path, read=read, exchanges=exchanges, golden=golden)

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

    def put_in(self, staged: StagedCommit) -> float:
        """Make the commit part of the state, or leave the state as it was; returns seconds under the lock.

        Raises:
            CommitError: the model does not give the commit's golden answers.
            MemoryError: there is no memory to compute them.
        """
        read = staged.read
        bring_near(staged.exchanges)
        with self.lock.exclusive():
            begin = time.perf_counter()
            exchange_all(staged.exchanges)
            try:
                self._compare(staged)
            except BaseException:
                exchange_all(staged.exchanges[::-1])
                raise
            self.lock.commit = read.commit.number
            return time.perf_counter() - begin

    def _compare(self, staged: StagedCommit) -> None:
        if staged.golden is None:
            return
        batch, expected = staged.golden
        path = staged.path
        try:
            for runner in self._runners:
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
        """Undo commits, the newest first, together; the state is then that of ``commit``."""
        with self.lock.exclusive():
            for record in undone:
                exchange_all(record.exchanges[::-1])
            self.lock.commit = commit
        for record in undone:
            for exchange in _on_devices(record.exchanges):
                exchange.compact()


def _rows(read: ReadCommit, patch: Patch) -> Tensor:
    """A patch's rows, in the commit's own memory where that has them."""
    stored = read.stored_rows(patch)
    if stored is not None:
        return torch.from_numpy(stored)
    numbers = read.rows(patch)
    return torch.arange(patch.count) if numbers is None else torch.from_numpy(numbers)


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
        last_row=patch.count - 1 if numbers is None else int(numbers[-1]),
        offset=patch.offset,
        stride=patch.stride,
    )
