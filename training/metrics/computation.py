"""The states of a metric and what is computed from them.

Shapes: ``T`` tasks of a computation, ``B`` examples of a batch.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist
from typing_extensions import Self

from tessera.training.metrics.metrics_namespace import MetricNameBase, MetricPrefix
from tessera.training.metrics.states import MetricStates, RecMetricException, State
from tessera.training.metrics.window import WindowBuffer

MAX_BUFFER_COUNT = 1000
"""Batches that a window holds at most, whatever its examples."""


@dataclass(frozen=True)
class MetricComputationReport:
    """A value that a computation reports.

    Attributes:
        name: what it is.
        metric_prefix: of which examples it is.
        value: ``[T]``, or ``[T, ...]`` where a task has several numbers.
        description: added to the key.
    """

    name: MetricNameBase
    metric_prefix: MetricPrefix
    value: Tensor
    description: str | None = None


class RecMetricComputation(MetricStates, abc.ABC):
    """The states of a metric and what is computed from them: the base class of a metric of one's own.

    Args:
        my_rank: this rank.
        batch_size: examples of a rank's batch.
        n_tasks: ``T``.
        window_size: examples in a rank's window; 0: there are no windows.
        compute_on_all_ranks: whether `compute` gives the values on every rank, or on the first alone.
        should_validate_update: whether a task of which no batch had weights reports 0.
        process_group: the ranks; None: all.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        my_rank: int,
        batch_size: int,
        n_tasks: int,
        window_size: int,
        compute_on_all_ranks: bool = False,  # noqa: FBT001, FBT002
        should_validate_update: bool = False,  # noqa: FBT001, FBT002
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        self._my_rank = my_rank
        self._batch_size = batch_size
        self._n_tasks = n_tasks
        self._window_size = window_size
        self._compute_on_all_ranks = compute_on_all_ranks
        self._should_validate_update = should_validate_update
        self._batch_window_buffers: dict[str, WindowBuffer] = {}
        self._unwritten: set[str] = set()  # windows' states that are written when they are read
        if should_validate_update:
            self._add_state(
                "has_valid_update",
                torch.zeros(n_tasks, dtype=torch.uint8),
                add_window_state=False,
                dist_reduce_fx="max",
                persistent=True,
            )

    @staticmethod
    def get_window_state_name(state_name: str) -> str:
        """The attribute with the window's part of a state."""
        return f"window_{state_name}"

    def get_window_state(self, state_name: str) -> Tensor:
        """The window's part of a state."""
        return cast("Tensor", getattr(self, self.get_window_state_name(state_name)))

    def _add_state(
        self,
        name: str,
        default: State,
        add_window_state: bool,  # noqa: FBT001 - the signature TorchRec users know
        **kwargs: Any,
    ) -> None:
        """`add_state`, and the same of the window where ``add_window_state`` says so."""
        self.add_state(name, default, **kwargs)
        if not add_window_state:
            return
        if self._window_size <= 0 or not isinstance(default, Tensor):
            raise RecMetricException(
                f"state {name!r} can have no window: it needs a tensor as default and a window_size "
                f"above 0, which is {self._window_size}"
            )
        window_name = self.get_window_state_name(name)
        self.add_state(window_name, default, **{**kwargs, "persistent": False})
        self._batch_window_buffers[window_name] = self._empty_window()

    def _empty_window(self) -> WindowBuffer:
        return WindowBuffer(max_size=self._window_size, max_buffer_count=MAX_BUFFER_COUNT)

    def _aggregate_window_state(self, state_name: str, state: Tensor, num_samples: int) -> None:
        """Add a batch's part of a state, of ``num_samples`` examples, to the window."""
        self._aggregate_window_states({state_name: state}, num_samples)

    def _aggregate_window_states(self, states: Mapping[str, Tensor], num_samples: int) -> None:
        """Add a batch's parts of several states, of ``num_samples`` examples, to their windows."""
        windows = {self.get_window_state_name(name): state for name, state in states.items()}
        buffers = self._batch_window_buffers
        for state_name, name in zip(states, windows, strict=True):
            if name not in buffers:
                raise RecMetricException(f"state {state_name!r} has no window; add it with one")
        for name, state in windows.items():
            buffers[name].add(state, num_samples)
        self._unwritten.update(windows)

    def __getattr__(self, name: str) -> Any:
        """A buffer or module; the state of a window, which `_aggregate_window_state` leaves as it was, is written first."""
        found = super().__getattr__(name)
        unwritten: set[str] = self.__dict__.get("_unwritten", set())
        if name in unwritten:
            unwritten.discard(name)
            with torch.no_grad():
                self._batch_window_buffers[name].write_sum(cast("Tensor", found))
        return found

    def _write_windows(self) -> None:
        for name in list(self._unwritten):
            getattr(self, name)

    @abc.abstractmethod
    def update(
        self, *, predictions: Tensor | None, labels: Tensor, weights: Tensor | None, **kwargs: Any
    ) -> None:
        """Count a batch: predictions ``[T, B]`` (``[T, B, C]`` of C classes), labels and weights ``[T, B]``."""

    @abc.abstractmethod
    def _compute(self) -> list[MetricComputationReport]:
        """The values of the states as they are."""

    def pre_compute(self) -> None:
        """Called before states are reduced over ranks, for a metric that prepares its own."""

    def compute(self) -> list[MetricComputationReport]:
        """The values of all ranks' examples; empty on ranks that were not asked to have them."""
        with self.synced():
            if self._my_rank == 0 or self._compute_on_all_ranks:
                return self._reported()
            return []

    def local_compute(self) -> list[MetricComputationReport]:
        """The values of this rank's examples."""
        return self._reported()

    def _reported(self) -> list[MetricComputationReport]:
        reports = self._compute()
        if not self._should_validate_update:
            return reports
        seen = self.get_buffer("has_valid_update") > 0

        def kept(value: Tensor) -> Tensor:
            wide = seen.to(value.device).reshape(-1, *[1] * (value.dim() - 1))
            return torch.where(wide, value, torch.zeros_like(value))

        return [replace(report, value=kept(report.value)) for report in reports]

    def load_states(self, states: dict[str, Any]) -> None:
        """Begin with the persistent ones of ``states`` on the first rank, and without examples on others.

        Raises:
            RecMetricException: one is missing.
        """
        self.reset()
        for name, state in self.named_buffers():
            if name in self._non_persistent_buffers_set:
                continue
            if name not in states:
                have = ", ".join(sorted(states))
                raise RecMetricException(
                    f"state {name!r} is missing (there are {have}); give those of the same metric"
                )
            if self._my_rank == 0:
                state.copy_(states[name])

    def reset(self) -> None:
        """Forget all examples."""
        self._unwritten.clear()
        super().reset()
        self._batch_window_buffers = {
            name: self._empty_window() for name in self._batch_window_buffers
        }

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002 - torch's
        self._write_windows()
        for window in self._batch_window_buffers.values():
            window.move(lambda state: fn(state).to(state.dtype))
        return super()._apply(fn, recurse)
