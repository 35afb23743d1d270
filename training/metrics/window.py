"""The sum of the newest batches of a stream, without subtraction.

A running sum that adds the newest batch and subtracts the oldest keeps what rounding left of every batch
that has gone: a window without positives then has 1e-13 of them, and a ratio over it is nonsense.  So the
window is held in two parts, as a queue is made of two stacks.  Of the older part the sums from each batch to
that part's end are kept, and the oldest one is taken off when a batch leaves; new batches belong to the
newer part, which becomes the older part when that is used up.  The newer part is summed when the window's
sum is asked for, all batches since the last time at once.  A batch costs two additions on average, however
many a window holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor


class WindowBuffer:
    """The batches of one state's window.

    Args:
        max_size: examples that the window holds. Batches leave whole, the oldest first, until the rest is
            not more than that; the newest one always stays.
        max_buffer_count: batches that the window holds at most.
    """

    def __init__(self, max_size: int, max_buffer_count: int) -> None:
        self._max_size = max_size
        self._max_buffer_count = max_buffer_count
        self._sizes: deque[int] = deque()  # examples of each batch, the oldest first
        self._used_size = 0
        self._older: list[Tensor] = []  # sums to the older part's end, of the oldest batch last
        self._newer: list[Tensor] = []  # states of batches
        self._newer_sum: Tensor | None = None  # of the first `_summed` of them
        self._summed = 0

    def aggregate_state(self, window_state: Tensor, curr_state: Tensor, size: int) -> None:
        """Add a batch of ``size`` examples, and write the window's sum into ``window_state``.

        ``curr_state`` is kept as it is and must not be changed afterwards.
        """
        self.add(curr_state, size)
        self.write_sum(window_state)

    def add(self, curr_state: Tensor, size: int) -> None:
        """Add a batch of ``size`` examples; ``curr_state`` must not be changed afterwards."""
        sizes = self._sizes
        if len(sizes) == self._max_buffer_count:
            self._remove_oldest()
        self._newer.append(curr_state)
        sizes.append(size)
        self._used_size += size
        while self._used_size > self._max_size and len(sizes) > 1:
            self._remove_oldest()

    def write_sum(self, window_state: Tensor) -> None:
        """Write the window's sum into ``window_state``; there has been a batch."""
        newer = self._sum_of_newer()
        if newer is None:
            window_state.copy_(self._older[-1])
        elif not self._older:
            window_state.copy_(newer)
        else:
            torch.add(self._older[-1], newer, out=window_state)

    def _sum_of_newer(self) -> Tensor | None:
        """The sum of the newer part, to which batches are added in order; None: it has no batch."""
        left = self._newer[self._summed :]
        if not left:
            return self._newer_sum
        if self._newer_sum is not None:
            left.insert(0, self._newer_sum)
        # A running sum rounds as additions one by one do, and its last row is their result.
        self._newer_sum = left[0] if len(left) == 1 else torch.stack(left).cumsum(0)[-1]
        self._summed = len(self._newer)
        return self._newer_sum

    @property
    def buffers(self) -> list[Tensor]:
        """The tensors that the window holds on to."""
        return [*self._older, *self._newer]

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Put ``fn`` of each tensor in its place."""
        self._older = [fn(state) for state in self._older]
        self._newer = [fn(state) for state in self._newer]
        self._newer_sum = None if self._newer_sum is None else fn(self._newer_sum)

    def _remove_oldest(self) -> None:
        self._used_size -= self._sizes.popleft()
        if not self._older:
            self._older = list(torch.stack(self._newer[::-1]).cumsum(0).unbind(0))
            self._newer, self._newer_sum, self._summed = [], None, 0
        self._older.pop()
