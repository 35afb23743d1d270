"""How fast ranks send to each other, and memory that differs from rank to rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, unique

from tessera.errors import refuse_unknown
from tessera.training.distributed.planner import constants


@unique
class CollectiveType(Enum):
    """What ranks do together when tables are looked up."""

    ALL_TO_ALL = "all_to_all"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"


class GeneralizedCommsBandwidth(ABC):
    """Bandwidths of collectives, where they depend on more than whether ranks share a host.

    A program's own class may, for instance, return what it measured for each collective and size.
    """

    @abstractmethod
    def get_bw(
        self, local_world_size: int, world_size: int, collective_type: CollectiveType
    ) -> float:
        """Bytes per second, per rank and direction.

        Args:
            local_world_size: ranks per host that take part.
            world_size: ranks that take part.
            collective_type: what they do.
        """

    @property
    @abstractmethod
    def intra_host_bw(self) -> float:
        """Bytes per second between ranks of one host, for reports."""

    @property
    @abstractmethod
    def inter_host_bw(self) -> float:
        """Bytes per second between hosts, for reports."""


@dataclass(frozen=True)
class BasicCommsBandwidths(GeneralizedCommsBandwidth):
    """One bandwidth within hosts and one between them, for every collective.

    Attributes:
        inter_host_bw: bytes per second between hosts, per rank and direction.
        intra_host_bw: bytes per second between ranks of one host.

    Raises:
        ValueError: a bandwidth that is not positive.
    """

    inter_host_bw: float = constants.INTER_HOST_BW
    intra_host_bw: float = constants.NVLINK_BW

    def __post_init__(self) -> None:
        for name in ("inter_host_bw", "intra_host_bw"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; give a positive number")

    def get_bw(
        self, local_world_size: int, world_size: int, collective_type: CollectiveType
    ) -> float:
        """The bandwidth between hosts if ranks of several take part."""
        del collective_type
        return self.intra_host_bw if world_size <= local_world_size else self.inter_host_bw


class CustomTopologyData:
    """Memory of each rank, where ranks differ.

    Args:
        data: bytes per rank of ``hbm_cap``, ``ddr_cap`` or ``ssd_cap``.
        world_size: ranks in all.

    Raises:
        ValueError: another key, another number of ranks, or negative bytes.
    """

    supported_fields: Sequence[str] = ("ddr_cap", "hbm_cap", "ssd_cap")

    def __init__(self, data: Mapping[str, Sequence[int]], world_size: int) -> None:
        for key, numbers in data.items():
            refuse_unknown("custom_topology_data", key, self.supported_fields)
            if len(numbers) != world_size:
                raise ValueError(
                    f"{key} has {len(numbers)} entries for {world_size} ranks; give one for each"
                )
            if min(numbers) < 0:
                raise ValueError(f"{key} has {min(numbers)}; give 0 or more bytes")
        self._data = {key: list(numbers) for key, numbers in data.items()}

    def get_data(self, key: str) -> list[int]:
        """Bytes per rank.

        Raises:
            ValueError: another key.
            KeyError: a key without data.
        """
        refuse_unknown("key", key, self.supported_fields)
        return self._data[key]

    def has_data(self, key: str) -> bool:
        """Whether there are bytes per rank of ``key``."""
        return key in self._data
