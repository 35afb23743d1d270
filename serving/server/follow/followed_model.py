"""A loaded model whose bytes commits replace: staged beside serving, put in as a whole, and taken back.

A commit's new bytes change places with those that they replace (`torch.ops.tessera.exchange_rows`), so what is left
in the commit's memory afterwards is what undoes it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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

_LARGEST_INT32 = torch.iinfo(torch.int32).max


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Bytes that change places with those of one record.

    Attributes:
        memory: ``[bytes]`` uint8, the record's, on its device.
        rows: ``[count]`` int64 or int32, ascending, on the same device.
        values: ``[count, width]`` uint8, on the same device.
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
        if self.on_host:
            torch.ops.tessera.exchange_rows(
                self.memory, self.rows, self.values, self.offset, self.stride
            )
        else:
            rows = self.rows.long()
            exchange_by_index(self.memory, rows, self.values, self.offset, self.stride)

    @property
    def on_host(self) -> bool:
        """Whether the operators for the CPU do it."""
        return self.memory.device.type == "cpu"

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
    def bytes(self) -> int:
        """What the rows and their numbers take."""
        return self.values.nbytes + self.rows.nbytes


def exchange_by_index(
    memory: Tensor, rows: Tensor, values: Tensor, offset: int, stride: int
) -> None:
    """As the operator ``exchange_rows``, by torch's own: for devices that the operator does not know."""
    if not rows.numel():
        return
    last, width = int(rows[-1]), values.shape[1]
    table = memory.as_strided((last + 1, width), (stride, 1), offset)
    kept = table.index_select(0, rows)
    table.index_copy_(0, rows, values)
    values.copy_(kept)


def exchange_all(exchanges: Sequence[Exchange]) -> None:
    """Run all in their order, or none; those of the CPU in one call, which gives the interpreter's lock away once."""
    host = [one for one in exchanges if one.on_host]
    done: list[Exchange] = []
    if host:
        torch.ops.tessera.exchange_rows_of(*_arguments(host))
    try:
        for one in exchanges:
            if not one.on_host:
                one.run()
                done.append(one)
    except BaseException:
        for one in reversed(done):
            one.run()
        if host:
            torch.ops.tessera.exchange_rows_of(*_arguments(host[::-1]))
        raise


def prepare(exchanges: Sequence[Exchange], pace: Pace) -> None:
    """Do beside serving what would make the first exchange take longer: faults of pages that nobody wrote to lately.

    Args:
        exchanges: those of a commit.
        pace: that of the thread.
    """
    host = [one for one in exchanges if one.on_host]
    if host:
        torch.ops.tessera.touch_rows_aside(*_arguments(host), pace.share, pace.left_s)


def bring_near(exchanges: Sequence[Exchange]) -> None:
    """Have the rows that are exchanged next in the caches, beside those who read them."""
    host = [one for one in exchanges if one.on_host]
    if host:
        torch.ops.tessera.touch_rows_of(*_arguments(host))


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
    exchanges: Sequence[Exchange]
    golden: tuple[HostBatch, Mapping[str, Tensor]] | None


@dataclass(frozen=True, kw_only=True)
class UndoRecord:
    """What undoes a commit that was put in.

    Attributes:
        exchanges: of the commit, in their order, with what it has replaced.
    """

    exchanges: Sequence[Exchange]

    @classmethod
    def of(cls, staged: StagedCommit) -> UndoRecord:
        """What undoes a commit that was put in; it takes no more memory than the commit's file has bytes."""
        return cls(exchanges=[exchange.compact() for exchange in staged.exchanges])

    @property
    def bytes(self) -> int:
        """What it holds."""
        return sum(exchange.bytes for exchange in self.exchanges)


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
        exchanges: list[Exchange] = []
        for patch in read.commit.patches:
            values = torch.from_numpy(read.new_bytes(patch))
            for number, place in enumerate(self._places(path, patch.record)):
                # Each place exchanges memory of its own.
                own = values if number == 0 else values.clone()
                exchanges.append(
                    Exchange(
                        memory=place,
                        rows=_rows(read, patch, place.device),
                        values=own.to(place.device),
                        offset=patch.offset,
                        stride=patch.stride,
                    )
                )
        prepare(exchanges, pace or Pace(0.0))
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


def _rows(read: ReadCommit, patch: Patch, device: torch.device) -> Tensor:
    """A patch's rows on ``device``: on the CPU in the commit's own memory, where that has them."""
    stored = read.stored_rows(patch)
    if stored is not None and device.type == "cpu":
        return torch.from_numpy(stored)
    numbers = read.rows(patch)
    rows = torch.arange(patch.count) if numbers is None else torch.from_numpy(numbers)
    return rows.to(device)
