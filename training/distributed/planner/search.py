"""What searches for combinations of ways have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from dataclasses import dataclass

from tessera.training.distributed.planner.types import (
    Enumerator,
    Proposer,
    ShardingOption,
    Topology,
)


def options_by_table(search_space: list[ShardingOption]) -> dict[str, list[ShardingOption]]:
    """The options of every table, by its full name, fastest first."""
    tables: dict[str, list[ShardingOption]] = {}
    for option in search_space:
        tables.setdefault(option.fqn, []).append(option)
    return {fqn: sorted(options, key=time_of) for fqn, options in tables.items()}


def time_of(option: ShardingOption) -> float:
    """A table's share of every rank's step, were it spread evenly, or of its busiest rank's.

    Both matter: the sum is what all ranks must do, the largest shard cannot be balanced away.
    """
    return option.total_perf + max(shard.time.total for shard in option.shards)


def size_of(option: ShardingOption) -> int:
    """The device memory of a way, or its host memory if it takes none."""
    storage = option.total_storage
    return storage.hbm or storage.ddr


@dataclass(frozen=True)
class _Outcome:
    """How a proposal did."""

    rating: float | None  # of its plan; None: it does not fit
    room: int | None  # bytes that the ranks have for tables; None: the caller does not say


Proposals = Generator[list[ShardingOption], _Outcome, None]


class Search(Proposer):
    """Proposes what a generator yields, which is sent how each of its proposals did."""

    _proposals: Proposals
    _current: list[ShardingOption] | None = None
    _enumerator: Enumerator | None = None

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Begin a search among these options."""
        self._enumerator = enumerator
        self._proposals = self._search(options_by_table(search_space))
        self._current = next(self._proposals, None)

    @abstractmethod
    def _search(self, tables: dict[str, list[ShardingOption]]) -> Proposals:
        """What is proposed, of the options by table."""

    def propose(self) -> list[ShardingOption] | None:
        """One option per table; None: nothing more to try."""
        return self._current

    def feedback(
        self,
        partitionable: bool,  # noqa: FBT001 - the signature TorchRec users know
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Go on to the next proposal."""
        del plan
        devices = storage_constraint.devices if storage_constraint else []
        room = sum(d.storage.hbm or d.storage.ddr for d in devices) if devices else None
        try:
            outcome = _Outcome(perf_rating if partitionable else None, room)
            self._current = self._proposals.send(outcome)
        except StopIteration:
            self._current = None
