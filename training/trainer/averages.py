"""Averages of the weights over the steps of a run, which are evaluated and packaged in their place.

Sources: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992), for the
exponential average as in common use; Izmailov et al., "Averaging Weights Leads to Wider Optima and
Better Generalization" (2018), for the plain mean (SWA).

Every rank averages what it holds: the shards of its tables and its copy of the dense part.  An update
reads all weights and their averages and writes the averages, the rows that no batch touched included,
so its cost is that of the tables' size and not of a batch; ``every`` says how often it is paid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from tessera.training.average_config import AverageConfig
from tessera.training.distributed.tables.caches import tell_caches
from tessera.training.distributed.tables.shard_state import sharded_tensor

_AVERAGED = "arch."
"""What the names of a model's weights begin with; the rest of its state is not trained."""

_CHUNK = 1 << 22
"""Elements that are exchanged at once, through memory of that size."""


class WeightAverages:
    """The averages of a model's weights and of the moving averages in its batch norms.

    Args:
        config: how to average.
        model: its state dict holds the live weights, tables as this rank has them.
    """

    def __init__(self, config: AverageConfig, model: nn.Module) -> None:
        self._config = config
        self._model = model
        self._averages: dict[str, Tensor] = {}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The averages by the names of the weights, spread over the ranks as these; at first none."""
        return self._averages

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Let the weights behind ``step`` (from 1) count, if it is their turn; every rank calls it."""
        number = self._config.updates(step)
        if number == self._config.updates(step - 1):
            return
        tell_caches(self._model, "flush")
        weights = self._weights()
        if not self._averages:
            self._averages = {name: _copied(value) for name, value in weights.items()}
            return
        share = self._config.share(number)
        for name, average in self._averages.items():
            for own, value in zip(_parts(average), _parts(weights[name]), strict=True):
                own.lerp_(value, share)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """The model has the averages for its weights, once there are some; then its own again."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def begin(self, names: Mapping[str, object] | None) -> None:
        """Make room for averages that are then filled; for none, where ``names`` are none."""
        tell_caches(self._model, "flush")
        weights = self._weights() if names else {}
        self._averages = {name: _copied(value) for name, value in weights.items()}

    @torch.no_grad()
    def _exchange(self) -> None:
        if not self._averages:
            return
        tell_caches(self._model, "flush")
        weights = self._weights()
        for name, average in self._averages.items():
            for own, value in zip(_parts(average), _parts(weights[name]), strict=True):
                _exchange(own, value)
        tell_caches(self._model, "purge")

    def _weights(self) -> dict[str, Tensor]:
        return {
            name: value
            for name, value in self._model.state_dict().items()
            if name.startswith(_AVERAGED) and value.dtype.is_floating_point
        }


def _parts(value: Tensor) -> list[Tensor]:
    """What of a tensor lies on this rank."""
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value]


def _copied(value: Tensor) -> Tensor:
    if isinstance(value, ShardedTensor):
        shards = [(one.metadata, one.tensor.detach().clone()) for one in value.local_shards()]
        group = value._process_group  # noqa: SLF001 - it has no other name
        return sharded_tensor(shards, value.metadata(), group)
    return value.detach().clone()


def _exchange(left: Tensor, right: Tensor) -> None:
    """Each gets the other's values, some rows at a time."""
    if left.dim() == 0:
        left, right = left.view(1), right.view(1)
    rows = max(1, _CHUNK // max(1, left[:1].numel()))
    room = torch.empty_like(left[:rows])
    for begin in range(0, len(left), rows):
        one, other = left[begin : begin + rows], right[begin : begin + rows]
        kept = room[: len(one)].copy_(one)
        one.copy_(other)
        other.copy_(kept)
