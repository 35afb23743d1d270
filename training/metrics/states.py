"""Tensors that a metric keeps, and how those of several ranks become one.

A state is a tensor, or a list of tensors that together are one along their last dimension.  `MetricStates.sync`
puts the reduced state of all ranks in the place of the rank's own, `MetricStates.unsync` puts that back.  All
tensors of one dtype travel in one collective; lists, of which ranks may have different lengths, are padded.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from typing_extensions import Self

State = Tensor | list[Tensor]
Reduction = Callable[[Any], Any]

_REDUCTIONS: dict[str, Reduction] = {
    "sum": lambda ranks: ranks.sum(0, dtype=ranks.dtype),
    "mean": lambda ranks: ranks.mean(0),
    "max": lambda ranks: ranks.amax(0),
    "min": lambda ranks: ranks.amin(0),
    "cat": lambda ranks: (
        [torch.cat(ranks, dim=-1)] if isinstance(ranks, list) else ranks.flatten(0, 1)
    ),
}


class RecMetricException(Exception):  # noqa: N818 - the name TorchRec users know
    """A metric was used in a way that gives no value."""


class MetricStates(nn.Module):
    """The states of a metric.

    Tensors are buffers, so they follow the module to a device and, where they are persistent, into its
    state dict.  Their dtypes stay: ``module.half()`` does not change a sum of millions of examples.

    Args:
        process_group: the ranks that `sync` reduces over; None: all.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self._group = process_group
        self._defaults: dict[str, State] = {}
        self._reductions: dict[str, Reduction | None] = {}
        self._own: dict[str, State] = {}  # while synced, the rank's own states
        self._is_synced = False
        self._on_device: Tensor
        self.register_buffer("_on_device", torch.empty(0), persistent=False)

    @property
    def device(self) -> torch.device:
        """Where the states are."""
        return self._on_device.device

    def add_state(
        self,
        name: str,
        default: State,
        dist_reduce_fx: str | Reduction | None = None,
        persistent: bool = False,  # noqa: FBT001, FBT002 - the signature torchmetrics users know
    ) -> None:
        """Add the state ``name``, an attribute of the module from then on.

        Args:
            name: of the attribute.
            default: the first value: a tensor, or a list with one tensor without elements, which says the
                shape and dtype of a rank that has seen no examples.
            dist_reduce_fx: makes one state of those of all ranks: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``,
                ``"cat"``, or a function of a tensor ``[ranks, ...]`` or of a list with each rank's tensor.
                None: that tensor or list.
            persistent: whether a tensor is in the state dict.

        Raises:
            ValueError: an empty list, a persistent list, or a reduction that there is not.
        """
        if isinstance(default, list) and (persistent or not default):
            raise ValueError(
                f"state {name!r} is a list; give it one tensor such as torch.zeros(n_tasks, 0), and "
                "persistent=False"
            )
        if isinstance(dist_reduce_fx, str):
            if dist_reduce_fx not in _REDUCTIONS:
                raise ValueError(
                    f"dist_reduce_fx={dist_reduce_fx!r} of state {name!r}; give one of "
                    f"{', '.join(_REDUCTIONS)}, or a function"
                )
            dist_reduce_fx = _REDUCTIONS[dist_reduce_fx]
        self._defaults[name] = copy.deepcopy(default)
        self._reductions[name] = dist_reduce_fx
        if isinstance(default, Tensor):
            self.register_buffer(name, default.detach().clone(), persistent=persistent)
        else:
            setattr(self, name, list(default))

    def reset(self) -> None:
        """Give each state its first value."""
        self._own, self._is_synced = {}, False
        for name, default in self._defaults.items():
            if isinstance(default, Tensor):
                setattr(self, name, default.to(self.device, copy=True))
            else:
                setattr(self, name, [part.to(self.device) for part in default])

    def sync(self) -> None:
        """Put the states of all ranks in the place of this one's; every rank must call it.

        Without ``torch.distributed`` nothing happens.

        Raises:
            RecMetricException: they are there already.
        """
        if self._is_synced:
            raise RecMetricException("the states are those of all ranks already; call unsync first")
        if not (dist.is_available() and dist.is_initialized()):
            return
        own: dict[str, State] = {name: getattr(self, name) for name in self._defaults}
        for name, state in self._reduced(self._group).items():
            setattr(self, name, state)
        self._own, self._is_synced = own, True

    def states_of_ranks(self, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
        """The states of all ranks, or of those of ``group``; every rank must call it. Nothing changes."""
        if self._is_synced or not (dist.is_available() and dist.is_initialized()):
            return {name: copy.deepcopy(getattr(self, name)) for name in self._defaults}
        return self._reduced(group or self._group)

    def _reduced(self, group: dist.ProcessGroup | None) -> dict[str, Any]:
        own: dict[str, State] = {name: getattr(self, name) for name in self._defaults}
        tensors = {name: state for name, state in own.items() if isinstance(state, Tensor)}
        ranks: dict[str, Any] = gather_tensors(tensors, group)
        for name, state in own.items():
            if isinstance(state, list):
                ranks[name] = gather_rows(torch.cat(state, dim=-1), group)
        return {
            name: ranks[name] if reduce is None else reduce(ranks[name])
            for name, reduce in self._reductions.items()
        }

    def unsync(self) -> None:
        """Put the rank's own states back.

        Raises:
            RecMetricException: they are in place.
        """
        if not self._is_synced:
            raise RecMetricException("the states are the rank's own already; call sync first")
        for name, state in self._own.items():
            setattr(self, name, state)
        self._own, self._is_synced = {}, False

    @contextmanager
    def synced(self) -> Iterator[None]:
        """Inside of it the states are those of all ranks."""
        if self._is_synced:
            yield
            return
        self.sync()
        try:
            yield
        finally:
            if self._is_synced:
                self.unsync()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002 - torch's
        def moved(state: Tensor) -> Tensor:
            return fn(state).to(state.dtype)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        for name, default in self._defaults.items():
            if isinstance(default, list):
                setattr(self, name, [moved(part) for part in getattr(self, name)])
        self._own = {
            name: moved(state) if isinstance(state, Tensor) else [moved(part) for part in state]
            for name, state in self._own.items()
        }
        return self


def gather_tensors(
    tensors: dict[str, Tensor], group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """Each tensor ``[ranks, *shape]`` of all ranks; shapes are the same on all. One collective a dtype."""
    by_dtype: dict[torch.dtype, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        by_dtype[tensor.dtype].append(name)
    gathered: dict[str, Tensor] = {}
    for names in by_dtype.values():
        flat = torch.cat([tensors[name].reshape(-1) for name in names])
        ranks = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
        dist.all_gather(ranks, flat, group=group)
        parts = torch.split(torch.stack(ranks), [tensors[name].numel() for name in names], dim=1)
        for name, part in zip(names, parts, strict=True):
            gathered[name] = part.reshape(len(ranks), *tensors[name].shape)
    return gathered


def gather_rows(rows: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """The tensor of each rank; the last dimension may differ between ranks."""
    length = torch.tensor([rows.shape[-1]], device=rows.device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    counts = [int(each) for each in torch.cat(lengths).tolist()]
    padded = nn.functional.pad(rows, (0, max(counts) - rows.shape[-1])).contiguous()
    if not padded.numel():
        return [rows for _ in counts]
    ranks = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(ranks, padded, group=group)
    return [each[..., :count] for each, count in zip(ranks, counts, strict=True)]
