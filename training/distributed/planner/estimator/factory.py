"""Bandwidths by the names of hardware, and the estimators that use them.

@EmbeddingPerfEstimatorFactory.register("h100")
class H100(HardwarePerfConfig):
    hbm_mem_bw = 2.6e12

estimator = EmbeddingPerfEstimatorFactory.create("h100", topology=topology)
enumerator = EmbeddingEnumerator(topology, batch_size, estimator=[estimator, EmbeddingStorageEstimator(topology)])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeVar

from tessera.errors import refuse_unknown
from tessera.training.distributed.planner.hardware import Topology
from tessera.training.distributed.planner.shard_estimators import EmbeddingPerfEstimator

_FIELDS = ("hbm_mem_bw", "ddr_mem_bw", "hbm_to_ddr_mem_bw", "bwd_compute_multiplier")


class HardwarePerfConfig:
    """What estimates know of one kind of hardware; a subclass says what differs from the topology's.

    Attributes:
        name: of the hardware.
        hbm_mem_bw: bytes per second of device memory; also ``ddr_mem_bw`` of host memory and
            ``hbm_to_ddr_mem_bw`` between them; None: the topology's.
        bwd_compute_multiplier: time of a backward pass of tables over that of its forward pass; None: the
            topology's.
    """

    name: str = "default"
    hbm_mem_bw: float | None = None
    ddr_mem_bw: float | None = None
    hbm_to_ddr_mem_bw: float | None = None
    bwd_compute_multiplier: float | None = None

    def on(self, topology: Topology) -> Topology:
        """The topology with this hardware's figures.

        Raises:
            ValueError: a figure that is not positive.
        """
        given = {name: getattr(self, name) for name in _FIELDS}
        return topology.with_bandwidths(
            **{name: value for name, value in given.items() if value is not None}
        )


Config = TypeVar("Config", bound=type[HardwarePerfConfig])


class EmbeddingPerfEstimatorFactory:
    """Estimators of time by the names of hardware."""

    _registry: ClassVar[dict[str, type[HardwarePerfConfig]]] = {}

    @classmethod
    def register(cls, name: str) -> Callable[[Config], Config]:
        """Register a subclass of `HardwarePerfConfig` by ``name``, whose case does not matter."""

        def keep(config: Config) -> Config:
            cls._registry[name.lower()] = config
            return config

        return keep

    @classmethod
    def create(cls, hardware_name: str, topology: Topology) -> EmbeddingPerfEstimator:
        """The estimator of time for registered hardware.

        Args:
            hardware_name: as it was registered.
            topology: the ranks, and the bandwidths that the hardware's class leaves open.

        Raises:
            ValueError: nothing was registered by that name.
        """
        name = hardware_name.lower()
        refuse_unknown("hardware_name", name, list(cls._registry))
        return cls.create_with_config(cls._registry[name](), topology)

    @classmethod
    def create_with_config(
        cls, config: HardwarePerfConfig, topology: Topology
    ) -> EmbeddingPerfEstimator:
        """The estimator of time for hardware that need not be registered."""
        return EmbeddingPerfEstimator(config.on(topology))


DEFAULT_PERF_ESTIMATOR = "default_estimator"
"""The name of the hardware that has the topology's own figures."""


@EmbeddingPerfEstimatorFactory.register(DEFAULT_PERF_ESTIMATOR)
class EmbeddingPerfEstimatorConfig(HardwarePerfConfig):
    """The topology's own figures."""
