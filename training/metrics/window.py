"""The sum of the newest batches of a stream, without subtraction.

A running sum that adds the newest batch and subtracts the oldest keeps what rounding left of every batch
that has gone: a window without positives then has 1e-13 of them, and a ratio over it is nonsense.  So the
window is held in two parts, as a queue is made of two stacks.  Of the older part the sums from each batch to
that part's end are kept, and the oldest one is taken off when a batch leaves; new batches are added to the
sum of the newer part, which becomes the older part when that is used up.  A batch costs two additions on
average, however many a window holds.
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
        self._newer_sum: Tensor | None = None

    def aggregate_state(self, window_state: Tensor, curr_state: Tensor, size: int) -> None:
        """Add a batch of ``size`` examples, and write the window's sum into ``window_state``.

        ``curr_state`` is kept as it is and must not be changed afterwards.
        """
        self.add(curr_state, size)
        self.write_sum(window_state)

    def add(self, curr_state: Tensor, size: int) -> None:
        """Add a batch of ``size`` examples; ``curr_state`` must not be changed afterwards."""
        newer_sum = self.newer_sum_with_room()
        self.append(curr_state, curr_state if newer_sum is None else newer_sum + curr_state, size)

    @staticmethod
    def add_to_each(windows: list[WindowBuffer], states: list[Tensor], size: int) -> None:
        """`add` a state of one batch to each window, with one kernel of a GPU for all of them."""
        sums = [window.newer_sum_with_room() for window in windows]
        held = [own for own in sums if own is not None]
        if len(held) == len(states):
            new_sums = list(torch._foreach_add(held, states))  # noqa: SLF001 - torch has no public name
        else:
            new_sums = [
                state if own is None else own + state
                for own, state in zip(sums, states, strict=True)
            ]
        for window, state, new_sum in zip(windows, states, new_sums, strict=True):
            window.append(state, new_sum, size)

    def newer_sum_with_room(self) -> Tensor | None:
        """The sum of the newer part, after the oldest batch left if there was no place for one more."""
        if len(self._sizes) == self._max_buffer_count:
            self._remove_oldest()
        return self._newer_sum

    def append(self, curr_state: Tensor, newer_sum: Tensor, size: int) -> None:
        """Add a batch, for which there is room, with the sum of the newer part that it belongs to."""
        self._newer.append(curr_state)
        self._newer_sum = newer_sum
        self._sizes.append(size)
        self._used_size += size
        while self._used_size > self._max_size and len(self._sizes) > 1:
            self._remove_oldest()

    def write_sum(self, window_state: Tensor) -> None:
        """Write the window's sum into ``window_state``; there has been a batch."""
        if self._newer_sum is None:
            window_state.copy_(self._older[-1])
        elif not self._older:
            window_state.copy_(self._newer_sum)
        else:
            torch.add(self._older[-1], self._newer_sum, out=window_state)

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
            self._newer, self._newer_sum = [], None
        self._older.pop()
