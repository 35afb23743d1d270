"""Two instances of one model with the same tables: passes see one, while the weights of the other are replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tessera.serving.package.loading import SecondInstance
from tessera.serving.package.runner import HostBatch, Runner
from tessera.serving.server.follow.exchange import AnyExchange, Exchange

_NO_OVERLAY = 0
"""Below the numbers of all overlays."""


class _LookingUpTo:
    """A model whose lookups see the overlays up to one, whatever others are shown; see `Runner`."""

    def __init__(self, runner: Runner, overlay: int) -> None:
        self._runner = runner
        self._overlay = overlay

    @property
    def shares_rows(self) -> bool:
        return self._runner.shares_rows

    def forward(self, batch: HostBatch) -> dict[str, Tensor]:
        # It holds for the calling thread until the thread's next pass.
        torch.ops.tessera.overlay_look_up_to(self._overlay)
        return self._runner.forward(batch)


class TwoInstances:
    """Between two commits both have the same weights.

    Args:
        first: an instance.
        memory: of each record, its memory (`Loading.patchable_memory`).
        second: the other one.
    """

    def __init__(
        self, first: Runner, memory: Mapping[str, Sequence[Tensor]], second: SecondInstance
    ) -> None:
        self._runners = (first, second.runner)
        self._pairs = {
            one.data_ptr(): (one, other)
            for record, places in memory.items()
            for one, other in zip(places, second.memory[record], strict=True)
            if one.data_ptr() != other.data_ptr()
        }
        self._seen = 0
        self._overlay = _NO_OVERLAY

    @property
    def spare(self) -> Runner:
        """The instance that passes do not see; its calls see the overlays that the calling thread does."""
        return self._runners[1 - self._seen]

    def have_each(self, exchanges: Sequence[AnyExchange]) -> bool:
        """Whether each instance has memory of its own for all ``exchanges``, which are with the first one's."""
        return all(isinstance(one, Exchange) and self.has_each(one.memory) for one in exchanges)

    def has_each(self, memory: Tensor) -> bool:
        """Whether ``memory`` of the first instance has its counterpart in the other, as that of tables has not."""
        return memory.data_ptr() in self._pairs

    def in_spare(self, exchanges: Sequence[AnyExchange]) -> list[AnyExchange]:
        """The same exchanges with the memory of the instance that passes do not see."""
        spare = 1 - self._seen
        return [
            replace(one, memory=self._pairs[one.memory.data_ptr()][spare])
            for one in exchanges
            if isinstance(one, Exchange)
        ]

    def see(self, overlay: int | None, *, spare: bool) -> Runner:
        """What passes are to see from now on.

        Args:
            overlay: the last one whose rows they read; None: as before.
            spare: the other instance, in place of the first.
        """
        self._seen = 1 - self._seen if spare else 0
        self._overlay = self._overlay if overlay is None else overlay
        return _LookingUpTo(self._runners[self._seen], self._overlay)

    def equalize(self, exchanges: Sequence[AnyExchange]) -> None:
        """Give the spare, which no pass sees any more, what ``exchanges`` with the other one have changed."""
        changed = {one.memory.data_ptr() for one in exchanges if isinstance(one, Exchange)}
        for memory in changed & self._pairs.keys():
            pair = self._pairs[memory]
            pair[1 - self._seen].copy_(pair[self._seen])
