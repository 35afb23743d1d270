"""The ranks that a plan is made for: their memory, and how fast they move bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from tessera.errors import refuse_unknown
from tessera.training.distributed.planner import constants
from tessera.training.distributed.planner.bandwidths import (
    BasicCommsBandwidths,
    CustomTopologyData,
    GeneralizedCommsBandwidth,
)

Number = TypeVar("Number", int, float)


@dataclass(slots=True, unsafe_hash=True)
class Storage:
    """Bytes of device memory (``hbm``), of host memory (``ddr``) and of solid-state disks (``ssd``).

    A reservation of a program's own may change those of a copied topology's devices in place; what is
    in a set or a key of a dictionary must stay as it is.

    No kernel here keeps rows on a disk; an estimator of a program's own may.
    """

    hbm: int = 0
    ddr: int = 0
    ssd: int = 0

    def __add__(self, other: Storage) -> Storage:
        return Storage(self.hbm + other.hbm, self.ddr + other.ddr, self.ssd + other.ssd)

    def __sub__(self, other: Storage) -> Storage:
        return Storage(self.hbm - other.hbm, self.ddr - other.ddr, self.ssd - other.ssd)

    def on(self, compute_device: str) -> int:
        """The bytes of the memory that belongs to ``cuda`` or ``cpu``."""
        return self.hbm if compute_device == "cuda" else self.ddr


@dataclass(frozen=True, slots=True)
class Perf:
    """Milliseconds of one step, by what they are spent on.

    Attributes:
        fwd_compute, bwd_compute: lookups, and their backward pass with the update.
        fwd_comms, bwd_comms: vectors and gradients on their way; ``fwd_comms`` also ids, where an
            estimator does not tell them apart.
        input_dist_comms: ids on their way, where it does.
        prefetch_compute: rows on their way to a cache.
    """

    fwd_compute: float = 0.0
    fwd_comms: float = 0.0
    bwd_compute: float = 0.0
    bwd_comms: float = 0.0
    input_dist_comms: float = 0.0
    prefetch_compute: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all parts: nothing is assumed to overlap."""
        return (
            self.fwd_compute
            + self.fwd_comms
            + self.bwd_compute
            + self.bwd_comms
            + self.input_dist_comms
            + self.prefetch_compute
        )

    @property
    def comms(self) -> float:
        """The part that waits for other ranks."""
        return self.fwd_comms + self.bwd_comms + self.input_dist_comms

    def __add__(self, other: Perf) -> Perf:
        return Perf(
            self.fwd_compute + other.fwd_compute,
            self.fwd_comms + other.fwd_comms,
            self.bwd_compute + other.bwd_compute,
            self.bwd_comms + other.bwd_comms,
            self.input_dist_comms + other.input_dist_comms,
            self.prefetch_compute + other.prefetch_compute,
        )


@dataclass(slots=True)
class DeviceHardware:
    """What one rank has left, and what it was given to do."""

    rank: int
    storage: Storage
    perf: Perf = field(default_factory=Perf)


class Topology:
    """The ranks and their hardware.

    Args:
        world_size: ranks in all.
        compute_device: ``cuda`` or ``cpu``.
        hbm_cap: bytes of device memory per rank; None: an H200's, 0 on a CPU.
        ddr_cap: bytes of host memory per rank.
        local_world_size: ranks per host; None: ``LOCAL_WORLD_SIZE``, else all on one host.  A host
            that has room for more ranks than there are holds all of them.
        hbm_mem_bw: bytes per second of device memory; also ``ddr_mem_bw`` of host memory,
            ``hbm_to_ddr_mem_bw`` between them, ``intra_host_bw`` between ranks of one host and
            ``inter_host_bw`` between hosts, per rank and direction.
        bwd_compute_multiplier: time of a backward pass of tables over that of its forward pass.
        weighted_feature_bwd_compute_multiplier: time of a backward pass of weighted ids over that of
            others.
        uneven_sharding_perf_multiplier: what `HardwarePerfConfig.post_process_perfs` is told.
        ssd_mem_bw: bytes per second of disks, for kernels of a program's own.
        ssd_cap: bytes of disk per rank, for shards whose estimator says that they take some.
        custom_topology_data: memory of each rank, in the place of ``hbm_cap``, ``ddr_cap``, ``ssd_cap``.
        generalized_comms_bandwidths: bandwidths of collectives, in the place of ``intra_host_bw`` and
            ``inter_host_bw``.

    Raises:
        ValueError: a size or a bandwidth that is not positive, an unknown device, or hosts that
            do not divide the world, or memory of another number of ranks.
    """

    def __init__(
        self,
        world_size: int,
        compute_device: str,
        hbm_cap: int | None = None,
        ddr_cap: int | None = None,
        local_world_size: int | None = None,
        *,
        hbm_mem_bw: float = constants.H200_HBM_MEM_BW,
        ddr_mem_bw: float = constants.DDR_MEM_BW,
        hbm_to_ddr_mem_bw: float = constants.PCIE_BW,
        intra_host_bw: float | None = None,
        inter_host_bw: float | None = None,
        bwd_compute_multiplier: float = constants.BWD_COMPUTE_MULTIPLIER,
        weighted_feature_bwd_compute_multiplier: float = (
            constants.WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER
        ),
        uneven_sharding_perf_multiplier: float = 1.0,
        ssd_mem_bw: float = constants.SSD_MEM_BW,
        ssd_cap: int = 0,
        custom_topology_data: CustomTopologyData | None = None,
        generalized_comms_bandwidths: GeneralizedCommsBandwidth | None = None,
    ) -> None:
        refuse_unknown("compute_device", compute_device, ("cpu", "cuda"))
        on_gpu = compute_device == "cuda"
        self.world_size = positive("world_size", world_size)
        self.compute_device = compute_device
        self.local_world_size = positive(
            "local_world_size",
            min(
                world_size,
                local_world_size or int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
            ),
        )
        if world_size % self.local_world_size:
            raise ValueError(
                f"world_size is {world_size} and local_world_size {self.local_world_size}; "
                "every host must have the same number of ranks"
            )
        if hbm_cap is None:
            hbm_cap = constants.H200_HBM_CAP if on_gpu else 0
        ddr_cap = constants.DDR_CAP if ddr_cap is None else ddr_cap
        caps = _per_rank(
            world_size,
            {"hbm_cap": hbm_cap, "ddr_cap": ddr_cap, "ssd_cap": ssd_cap},
            custom_topology_data,
        )
        self.devices = [DeviceHardware(rank, cap) for rank, cap in enumerate(caps)]
        self.hbm_mem_bw = positive("hbm_mem_bw", hbm_mem_bw)
        self.ddr_mem_bw = positive("ddr_mem_bw", ddr_mem_bw)
        self.hbm_to_ddr_mem_bw = positive("hbm_to_ddr_mem_bw", hbm_to_ddr_mem_bw)
        if generalized_comms_bandwidths is None:
            generalized_comms_bandwidths = BasicCommsBandwidths(
                inter_host_bw=inter_host_bw
                or (constants.INTER_HOST_BW if on_gpu else constants.CPU_INTER_HOST_BW),
                intra_host_bw=intra_host_bw
                or (constants.NVLINK_BW if on_gpu else constants.CPU_INTRA_HOST_BW),
            )
        self.comms_bandwidths = generalized_comms_bandwidths
        self.ssd_mem_bw = positive("ssd_mem_bw", ssd_mem_bw)
        self.bwd_compute_multiplier = positive("bwd_compute_multiplier", bwd_compute_multiplier)
        self.weighted_feature_bwd_compute_multiplier = positive(
            "weighted_feature_bwd_compute_multiplier", weighted_feature_bwd_compute_multiplier
        )
        self.uneven_sharding_perf_multiplier = positive(
            "uneven_sharding_perf_multiplier", uneven_sharding_perf_multiplier
        )

    @property
    def intra_host_bw(self) -> float:
        """Bytes per second between ranks of one host."""
        return self.comms_bandwidths.intra_host_bw

    @property
    def inter_host_bw(self) -> float:
        """Bytes per second between hosts, per rank and direction."""
        return self.comms_bandwidths.inter_host_bw

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return self.world_size // self.local_world_size

    def with_storage(self, storage: Sequence[Storage]) -> Topology:
        """The same hardware with other amounts of memory, one per rank."""
        other = object.__new__(Topology)
        other.__dict__.update(self.__dict__)
        other.devices = [
            DeviceHardware(rank, replace(amount)) for rank, amount in enumerate(storage)
        ]
        return other

    def with_bandwidths(self, **bandwidths: float) -> Topology:
        """The same hardware with other bandwidths, by their names here.

        One of ``intra_host_bw`` and ``inter_host_bw`` takes the place of bandwidths by collective.

        Raises:
            ValueError: a bandwidth that is not positive.
        """
        other = object.__new__(Topology)
        other.__dict__.update(self.__dict__)
        links = {"inter_host_bw": self.inter_host_bw, "intra_host_bw": self.intra_host_bw}
        for name, value in bandwidths.items():
            if name not in links:
                setattr(other, name, positive(name, value))
        if links.keys() & bandwidths.keys():
            links.update({name: bandwidths.get(name, usual) for name, usual in links.items()})
            other.comms_bandwidths = BasicCommsBandwidths(**links)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Topology:
        """The same hardware, whose devices may be changed."""
        del memo
        return self.with_storage([device.storage for device in self.devices])

    def __repr__(self) -> str:
        first = self.devices[0].storage
        return (
            f"Topology(world_size={self.world_size}, local_world_size={self.local_world_size}, "
            f"compute_device={self.compute_device!r}, "
            f"hbm={first.hbm / constants.GIB:.1f} GiB, ddr={first.ddr / constants.GIB:.1f} GiB)"
        )


def _per_rank(
    world_size: int, caps: dict[str, int], custom: CustomTopologyData | None
) -> list[Storage]:
    """The memory of each rank."""
    amounts = {}
    for name, cap in caps.items():
        amounts[name] = [cap] * world_size
        if custom is not None and custom.has_data(name):
            amounts[name] = custom.get_data(name)
            if len(amounts[name]) != world_size:
                raise ValueError(
                    f"{name} of custom_topology_data has {len(amounts[name])} entries; there are "
                    f"{world_size} ranks"
                )
    each = zip(amounts["hbm_cap"], amounts["ddr_cap"], amounts["ssd_cap"], strict=True)
    return [Storage(hbm, ddr, ssd) for hbm, ddr, ssd in each]


def positive(name: str, value: Number) -> Number:
    """``value``, if it is positive.

    Raises:
        ValueError: ``value`` is not above 0.
    """
    if not value > 0:
        raise ValueError(f"{name} is {value}; give a positive number")
    return value
