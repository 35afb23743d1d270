"""Keeps the rows that lookups have found, step by step, until everybody has asked for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from tessera.training.distributed.model_tracker.types import (
    IndexedLookup,
    UniqueRows,
    UpdateMode,
)


def unique_rows(ids: Tensor, states: Tensor | None, mode: UpdateMode) -> UniqueRows:
    """Each row once, ascending.

    Args:
        ids: ``[n]`` rows in the order of their lookup.
        states: ``[n, ...]`` of each; None: nothing is kept.
        mode: which state stays of a row that is there several times.
    """
    if states is None:
        return UniqueRows(torch.unique(ids), None)
    rows, inverse = torch.unique(ids, return_inverse=True)
    places = torch.arange(len(ids), device=ids.device)
    reduce = "amin" if mode is UpdateMode.FIRST else "amax"
    kept = torch.zeros_like(rows).scatter_reduce(0, inverse, places, reduce, include_self=False)
    return UniqueRows(rows, states[kept])


class DeltaStore(ABC):
    """What a tracker needs of a store; tables are known by their paths in the model."""

    @abstractmethod
    def append(self, batch_idx: int, fqn: str, ids: Tensor, states: Tensor | None = None) -> None:
        """Keep rows ``[n]`` of the lookups of a step, and their states ``[n, ...]``."""

    @abstractmethod
    def delete(self, up_to_idx: int | None = None) -> None:
        """Forget the rows of all steps before ``up_to_idx``; None: all."""

    @abstractmethod
    def compact(self, start_idx: int, end_idx: int) -> None:
        """Put the rows of the steps from ``start_idx`` to before ``end_idx`` together, each once."""

    @abstractmethod
    def get_unique(self, from_idx: int = 0) -> dict[str, UniqueRows]:
        """By table the rows of the steps from ``from_idx`` on, each once."""


class DeltaStoreTrec(DeltaStore):
    """Keeps rows where they were looked up.

    Args:
        updateMode: which state stays of a row that is there several times.

    Memory: 8 bytes per looked-up id and its state, until they are put together or forgotten.
    """

    def __init__(
        self,
        updateMode: UpdateMode = UpdateMode.NONE,
    ) -> None:
        self._mode = updateMode
        self.per_fqn_lookups: dict[str, list[IndexedLookup]] = {}

    def append(self, batch_idx: int, fqn: str, ids: Tensor, states: Tensor | None = None) -> None:
        """Keep rows ``[n]`` of the lookups of a step, and their states ``[n, ...]``.

        Raises:
            ValueError: there are no states, and ``updateMode`` chooses among them.
        """
        if states is None and self._mode is not UpdateMode.NONE:
            raise ValueError(
                f"{fqn}: states are not given and updateMode is {self._mode.name}; give them unless it "
                "is NONE"
            )
        self.per_fqn_lookups.setdefault(fqn, []).append(IndexedLookup(batch_idx, ids, states))

    def delete(self, up_to_idx: int | None = None) -> None:
        """Forget the rows of all steps before ``up_to_idx``; None: all."""
        if up_to_idx is None:
            self.per_fqn_lookups = {}
            return
        for fqn, lookups in self.per_fqn_lookups.items():
            self.per_fqn_lookups[fqn] = [own for own in lookups if own.batch_idx >= up_to_idx]

    def compact(self, start_idx: int, end_idx: int) -> None:
        """Put the rows of the steps from ``start_idx`` to before ``end_idx`` together, each once.

        Raises:
            ValueError: there is no step between them, or states were given and ``updateMode`` is NONE.
        """
        if start_idx >= end_idx:
            raise ValueError(f"start_idx is {start_idx}; give a step before end_idx, {end_idx}")
        for lookups in self.per_fqn_lookups.values():
            first, last = _span(lookups, start_idx, end_idx)
            if last - first > 1:
                rows = self._unique(lookups[first:last])
                together = IndexedLookup(start_idx, rows.ids, rows.states, compact=True)
                lookups[first:last] = [together]

    def _unique(self, lookups: Sequence[IndexedLookup]) -> UniqueRows:
        ids = [own.ids for own in lookups]
        if self._mode is UpdateMode.NONE and any(own.states is not None for own in lookups):
            raise ValueError(
                "states are given and updateMode is NONE, which does not say which of a row's states "
                "stays; give FIRST or LAST, or no states"
            )
        states = [own.states for own in lookups if own.states is not None]
        return unique_rows(
            torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64),
            torch.cat(states) if states else None,
            self._mode,
        )

    def get_indexed_lookups(self, start_idx: int, end_idx: int) -> dict[str, list[IndexedLookup]]:
        """By table what is kept of the steps from ``start_idx`` to before ``end_idx``."""
        return {
            fqn: lookups[slice(*_span(lookups, start_idx, end_idx))]
            for fqn, lookups in self.per_fqn_lookups.items()
        }

    def get_unique(self, from_idx: int = 0) -> dict[str, UniqueRows]:
        """By table the rows of the steps from ``from_idx`` on, each once.

        Raises:
            ValueError: states were given and ``updateMode`` is NONE.
        """
        return {
            fqn: self._unique([own for own in lookups if own.batch_idx >= from_idx])
            for fqn, lookups in self.per_fqn_lookups.items()
        }


def _span(lookups: Sequence[IndexedLookup], start_idx: int, end_idx: int) -> tuple[int, int]:
    steps = [own.batch_idx for own in lookups]
    return bisect_left(steps, start_idx), bisect_left(steps, end_idx)
