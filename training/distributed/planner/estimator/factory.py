"""Estimators of time for kinds of hardware, by name.

@EmbeddingPerfEstimatorFactory.register("h100")
class H100(HardwarePerfConfig):
    hbm_mem_bw = 2.6e12

estimator = EmbeddingPerfEstimatorFactory.create("h100", topology=topology)
enumerator = EmbeddingEnumerator(topology, batch_size, estimator=[estimator, EmbeddingStorageEstimator(topology)])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from tessera.errors import UserError
from tessera.training.distributed.planner.constants import DEFAULT_PERF_ESTIMATOR
from tessera.training.distributed.planner.constraints import ParameterConstraints
from tessera.training.distributed.planner.estimator.context import ShardPerfContext
from tessera.training.distributed.planner.estimator.evaluators import (
    get_embedding_perf_sharding_evaluator,
)
from tessera.training.distributed.planner.estimator.hardware_config import HardwarePerfConfig
from tessera.training.distributed.planner.hardware import Topology
from tessera.training.distributed.planner.sharder_data import SharderData, build_sharder_data
from tessera.training.distributed.planner.types import ShardEstimator, ShardingOption

Config = TypeVar("Config", bound=type[HardwarePerfConfig])


class EmbeddingPerfEstimatorV2(ShardEstimator):
    """Milliseconds of a step per shard (``perf``), from bytes, bandwidths and coefficients of a hardware.

    Args:
        topology: the ranks, and the bandwidths that ``config`` leaves open.
        constraints: by table, in the place of those that the options have.
        is_inference: there is no backward pass.
        config: the hardware; None: the topology's figures.
        use_batch_inputs_for_expected_cache_fetches: every id of a batch may be missing from a cache;
            otherwise every distinct one.
        use_linear_regression_prefetch_estimate: filling a cache takes what the hardware's
            `PrefetchCoefficients` say; otherwise bytes over the bandwidth to host memory.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        is_inference: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        config: HardwarePerfConfig | None = None,
        *,
        use_batch_inputs_for_expected_cache_fetches: bool = False,
        use_linear_regression_prefetch_estimate: bool = False,
    ) -> None:
        self._topology = topology
        self._constraints = constraints
        self._is_inference = is_inference
        self._config = HardwarePerfConfig() if config is None else config
        self._of_contexts = {
            "use_batch_inputs_for_expected_cache_fetches": use_batch_inputs_for_expected_cache_fetches,
            "use_linear_regression_prefetch_estimate": use_linear_regression_prefetch_estimate,
        }

    @property
    def config(self) -> HardwarePerfConfig:
        """Return the hardware that is estimated for."""
        return self._config

    @property
    def is_inference(self) -> bool:
        """Whether there is no backward pass."""
        return self._is_inference

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_map: dict[str, Any] | None = None
    ) -> None:
        """Set ``perf`` on every shard of every option.

        Args:
            sharding_options: the options.
            sharder_map: a sharder, or its `SharderData`, by the name of the type of module that it takes.

        Raises:
            ValueError: a strategy or a kernel that the hardware does not have, or a figure of the hardware
                that is not positive.
        """
        topology = self._config.on(self._topology)
        known: dict[str, SharderData] = {}
        for option in sharding_options:
            self._config.validate_sharding_type(option.sharding_type)
            key = option.module_type_key
            if key not in known:
                known[key] = _data_of((sharder_map or {}).get(key))
            sizes = [shard.size for shard in option.shards]
            contexts = ShardPerfContext.build_shard_perf_contexts(
                self._config,
                sizes,
                option,
                topology,
                self._constraints,
                known[key],
                is_inference=self._is_inference,
                **self._of_contexts,
            )
            evaluator = get_embedding_perf_sharding_evaluator(
                option.sharding_type, self._is_inference
            )
            perfs = self._config.post_process_perfs(
                [evaluator.compute_perf(ctx, self._config) for ctx in contexts],
                sizes,
                option.sharding_type,
                topology.uneven_sharding_perf_multiplier,
            )
            for shard, perf in zip(option.shards, perfs, strict=True):
                shard.perf = perf


def _data_of(sharder: Any) -> SharderData:
    if sharder is None:
        return SharderData()
    return sharder if isinstance(sharder, SharderData) else build_sharder_data(sharder)


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
    def list_registered(cls) -> list[str]:
        """The registered names, in lower case."""
        return list(cls._registry)

    @classmethod
    def is_registered(cls, name: str) -> bool:
        """Whether a name was registered; its case does not matter."""
        return name.lower() in cls._registry

    @classmethod
    def create(
        cls,
        hardware_name: str,
        is_inference: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        topology: Topology | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        **options: bool,
    ) -> EmbeddingPerfEstimatorV2:
        """The estimator of time for registered hardware.

        Args:
            hardware_name: as it was registered.
            is_inference: there is no backward pass.
            topology: the ranks.
            constraints: by table, in the place of those that the options have.
            **options: other arguments of `EmbeddingPerfEstimatorV2`, by name.

        Raises:
            ValueError: nothing was registered by that name, or ``topology`` is missing.
        """
        if not cls.is_registered(hardware_name):
            raise UserError(
                f"Unknown hardware: hardware_name is {hardware_name!r}; give one of "
                f"{', '.join(cls.list_registered())}, or register it"
            )
        config = cls._registry[hardware_name.lower()]()
        return cls.create_with_config(config, is_inference, topology, constraints, **options)

    @classmethod
    def create_with_config(
        cls,
        config: HardwarePerfConfig,
        is_inference: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        topology: Topology | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        **options: bool,
    ) -> EmbeddingPerfEstimatorV2:
        """The estimator of time for hardware that need not be registered.

        Args:
            config: the hardware.
            is_inference: there is no backward pass.
            topology: the ranks.
            constraints: by table, in the place of those that the options have.
            **options: other arguments of `EmbeddingPerfEstimatorV2`, by name.

        Raises:
            ValueError: ``topology`` is missing.
        """
        if topology is None:
            raise ValueError("topology is None; give the ranks that are planned for")
        return EmbeddingPerfEstimatorV2(topology, constraints, is_inference, config, **options)


@EmbeddingPerfEstimatorFactory.register(DEFAULT_PERF_ESTIMATOR)
class EmbeddingPerfEstimatorConfig(HardwarePerfConfig):
    """The topology's own figures."""
