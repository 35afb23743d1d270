"""Metrics that are functions of sums over examples: most of them.

A class of `SumsComputation` says which sums there are, what a batch adds to each, and the values that come
from them; the same values are reported since the training began and of the window.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from tessera.training.metrics.metrics_namespace import MetricNameBase, MetricPrefix
from tessera.training.metrics.rec_metric import MetricComputationReport, RecMetricComputation
from tessera.training.metrics.states import RecMetricException

Sums = Mapping[str, Tensor]
"""float64 ``[T]`` by the name of the sum, or ``[T, ...]`` where a task has several numbers."""


def given(name: str, tensor: Tensor | None) -> Tensor:
    """The tensor.

    Raises:
        RecMetricException: it is None.
    """
    if tensor is None:
        raise RecMetricException(f"{name} is None; give a tensor")
    return tensor


def ratio(over: Tensor, under: Tensor, otherwise: float = 0.0) -> Tensor:
    """``over / under`` in float64, and ``otherwise`` where ``under`` is 0."""
    over, under = over.double(), under.double()
    none = under == 0
    return torch.where(none, otherwise, over / torch.where(none, 1.0, under))


def sums_together(numbers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sums ``[T]`` of numbers ``[T, B]`` by name; a GPU works them all out by one kernel."""
    if next(iter(numbers.values())).device.type == "cpu":
        return {name: values.sum(-1) for name, values in numbers.items()}
    together = torch.stack(list(numbers.values())).sum(-1)
    return dict(zip(numbers, together.unbind(0), strict=True))


class SumsComputation(RecMetricComputation):
    """The base class of metrics of sums.

    ``_sums`` names them; each is a state of that name and one of the window.  ``_described`` takes the place of
    ``_of_sums`` where a metric reports several values of one name.
    """

    _sums: tuple[str, ...]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in self._sums:
            self._add_state(
                name,
                torch.zeros(self._n_tasks, *self._width(name), dtype=torch.double),
                add_window_state=True,
                dist_reduce_fx="sum",
                persistent=True,
            )

    def _width(self, name: str, /) -> tuple[int, ...]:  # noqa: ARG002 - for classes that have widths
        """The shape of one task's sum; none: a single number."""
        return ()

    @abc.abstractmethod
    def _of_batch(
        self, predictions: Tensor, labels: Tensor, weights: Tensor, **kwargs: Any
    ) -> Sums:
        """What a batch ``[T, B]`` adds to each sum; empty: nothing."""

    @abc.abstractmethod
    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        """The values ``[T]`` by name."""

    def _described(self, sums: Sums) -> list[tuple[MetricNameBase, str | None, Tensor]]:
        """The values ``[T]`` with their names and what is added to their keys."""
        return [(name, None, value) for name, value in self._of_sums(sums)]

    def update(
        self, *, predictions: Tensor | None, labels: Tensor, weights: Tensor | None, **kwargs: Any
    ) -> None:
        """Count a batch: predictions, labels and weights ``[T, B]``."""
        predictions, weights = given("predictions", predictions), given("weights", weights)
        added = self._of_batch(predictions, labels, weights, **kwargs)
        if not added:
            return
        # Not by get_buffer, which looks for modules by parts of the name.
        own = [cast("Tensor", self._buffers[name]) for name in added]
        pairs = zip(added.items(), own, strict=True)
        states = {
            name: state if state.dtype == buffer.dtype else state.to(buffer.dtype)
            for (name, state), buffer in pairs
        }
        torch._foreach_add_(own, [*states.values()])  # one kernel of a GPU for all of them
        self._aggregate_window_states(states, labels.shape[-1])

    def _compute(self) -> list[MetricComputationReport]:
        lifetime = {name: self.get_buffer(name) for name in self._sums}
        window = {name: self.get_window_state(name) for name in self._sums}
        return [
            MetricComputationReport(name, prefix, value, description)
            for prefix, sums in ((MetricPrefix.LIFETIME, lifetime), (MetricPrefix.WINDOW, window))
            for name, description, value in self._described(sums)
        ]
