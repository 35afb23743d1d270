"""Memory that is reserved for what is not tables."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, unique
from typing import Any

from torch import nn

from tessera.training.distributed.plan.sharded_module import ModuleSharder
from tessera.training.distributed.planner import constants
from tessera.training.distributed.planner.enumerators import shardable_modules
from tessera.training.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    Storage,
    StorageReservation,
    Topology,
)


@unique
class StorageReservationType(str, Enum):
    """The names of the kinds of reservation, for programs' own configuration."""

    HEURISTIC = "heuristic"
    FIXED_PERCENTAGE = "fixed_percentage"
    FIXED_ABSOLUTE = "fixed_absolute"


def _less(topology: Topology, fraction: float, fixed_bytes: int) -> Topology:
    """The topology without ``fraction`` and ``fixed_bytes`` of the compute device's memory."""
    left = []
    for device in topology.devices:
        cap = device.storage.on(topology.compute_device)
        rest = int(cap * (1 - fraction)) - fixed_bytes
        if rest < 0:
            raise PlannerError(
                f"a rank has {cap / constants.GIB:.2f} GiB; the reservation takes "
                f"{fraction:.0%} of it and {fixed_bytes / constants.GIB:.2f} GiB for the dense "
                f"part and its inputs: {-rest / constants.GIB:.2f} GiB too much before the first "
                "table; reserve less, lower the batch size, or take ranks with more memory",
                PlannerErrorType.INSUFFICIENT_STORAGE,
            )
        on_gpu = topology.compute_device == "cuda"
        ddr, ssd = device.storage.ddr, device.storage.ssd
        left.append(Storage(rest, ddr, ssd) if on_gpu else Storage(0, rest, ssd))
    return topology.with_storage(left)


class FixedPercentageStorageReservation(StorageReservation):
    """A part of every rank's memory.

    Args:
        percentage: the part as a fraction, 0 to 1 (TorchRec's name for it); with 1 nothing is left,
            and only tables that take no memory of the compute device fit.

    Raises:
        ValueError: another fraction.
    """

    def __init__(self, percentage: float) -> None:
        if not 0 <= percentage <= 1:
            raise ValueError(f"percentage is {percentage}; give a fraction from 0 to 1")
        self._fraction = percentage
        self._last: Topology | None = None

    @property
    def last_reserved_topology(self) -> Topology | None:
        """What `reserve` returned last; None before it."""
        return self._last

    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]],
        constraints: Mapping[str, ParameterConstraints] | None = None,
    ) -> Topology:
        """The topology with what is left for tables.

        Raises:
            PlannerError: nothing is left.
        """
        fixed = self._fixed_bytes(batch_size, module, sharders, constraints or {})
        self._last = _less(topology, self._fraction, fixed)
        return self._last

    def _fixed_bytes(
        self,
        _batch_size: int,
        _module: nn.Module,
        _sharders: list[ModuleSharder[Any]],
        _constraints: Mapping[str, ParameterConstraints],
        /,
    ) -> int:
        return 0


class FixedAbsoluteStorageReservation(FixedPercentageStorageReservation):
    """The same bytes of every rank's memory, whatever the memory's size.

    Args:
        hbm_reserved_bytes: bytes of the compute device's memory, on each rank.

    Raises:
        ValueError: a negative number.
    """

    def __init__(self, hbm_reserved_bytes: int) -> None:
        if hbm_reserved_bytes < 0:
            raise ValueError(f"hbm_reserved_bytes is {hbm_reserved_bytes}; give 0 or more bytes")
        super().__init__(percentage=0.0)
        self._bytes = hbm_reserved_bytes

    @classmethod
    def from_gb(cls, hbm_reserved_gb: float) -> FixedAbsoluteStorageReservation:
        """The same, of gibibytes."""
        return cls(int(hbm_reserved_gb * constants.GIB))

    def _fixed_bytes(
        self,
        _batch_size: int,
        _module: nn.Module,
        _sharders: list[ModuleSharder[Any]],
        _constraints: Mapping[str, ParameterConstraints],
        /,
    ) -> int:
        return self._bytes


class HeuristicalStorageReservation(FixedPercentageStorageReservation):
    """A part of the memory, the dense parameters several times, and the ids of a batch.

    Args:
        percentage: fraction for activations, the allocator's losses and libraries.
        parameter_multiplier: copies of the dense parameters: themselves, gradients, two numbers
            of optimizer state, all-reduce buckets, and one spare.
        dense_tensor_estimate: bytes of the dense part instead of the multiplied parameters.
    """

    _batches = 3  # two are on the way while a third is worked on

    def __init__(
        self,
        percentage: float = 0.15,
        parameter_multiplier: float = 6.0,
        dense_tensor_estimate: int | None = None,
    ) -> None:
        super().__init__(percentage)
        self._multiplier = parameter_multiplier
        self._dense_bytes = dense_tensor_estimate

    def _fixed_bytes(
        self,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]],
        constraints: Mapping[str, ParameterConstraints],
        /,
    ) -> int:
        found = list(shardable_modules(module, sharders))
        tables = {
            id(weight)
            for _, part, sharder in found
            for weight in sharder.shardable_parameters(part).values()
        }
        dense = self._dense_bytes
        if dense is None:
            sizes = [
                p.numel() * p.element_size() for p in module.parameters() if id(p) not in tables
            ]
            dense = int(self._multiplier * sum(sizes))
        ids = 0.0
        for _, part, sharder in found:
            for name in sharder.shardable_parameters(part):
                wanted = constraints.get(name) or ParameterConstraints()
                per_sample = wanted.batch_size or batch_size
                ids += wanted.ids_per_step(per_sample) * (
                    constants.ID_BYTES + constants.WEIGHT_BYTES
                )
        return dense + int(self._batches * ids)


class InferenceStorageReservation(HeuristicalStorageReservation):
    """A part of the memory, the dense parameters once, and the ids of one batch.

    Every rank holds the dense part.

    Args:
        percentage: fraction for activations, the allocator's losses and libraries.
        dense_tensor_estimate: bytes of the dense part instead of its parameters'.
    """

    _batches = 1

    def __init__(self, percentage: float, dense_tensor_estimate: int | None = None) -> None:
        super().__init__(percentage, 1.0, dense_tensor_estimate)
