"""Decorators that say on a class of hardware what is special about it.

@supported_sharding_types("table_wise", "row_wise")
@device_bw(2.1e12, device="cuda", compute_kernel="fused")
class Mine(HardwarePerfConfig):
    @fwd_coefficient(sharding_type="table_wise")
    def narrow(self) -> PerfCoefficient:
        return PerfCoefficient(lookup_size_multiplier=1.4)

    @forward_compute("row_wise")
    def measured(self, ctx: ShardPerfContext) -> float:
        return 0.02 + ctx.batch_inputs * 3e-7  # milliseconds

Those of a class set one figure; those of a method mark it as the way to compute one part of a shard's
time, for some strategies or for all.  Of two marked methods the one that names the strategy is taken,
then the first by name.  The names and their meanings are those of TorchRec's planner.  Bandwidths are
bytes per second, times milliseconds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from tessera.training.distributed.sharding.registry import strategy_of

Method = TypeVar("Method", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound=type[Any])
Types = str | Sequence[str]

_MARKS = "_tessera_estimates"


@dataclass(frozen=True)
class _Mark:
    """What a method computes (``part``), and for which strategies; None: for all."""

    part: str
    sharding_types: frozenset[str] | None


def _mark(part: str, sharding_type: Types | None) -> Callable[[Method], Method]:
    given = [sharding_type] if isinstance(sharding_type, str) else sharding_type
    types = None
    if given is not None:
        types = frozenset(strategy_of(kind.lower(), "sharding_type").name for kind in given)

    def marked(method: Method) -> Method:
        setattr(method, _MARKS, (*getattr(method, _MARKS, ()), _Mark(part, types)))
        return method

    return marked


_KNOWN: WeakKeyDictionary[type[Any], tuple[tuple[str, _Mark], ...]] = WeakKeyDictionary()


def _marked(config: type[Any]) -> tuple[tuple[str, _Mark], ...]:
    """The marked methods of a class, by name."""
    if config not in _KNOWN:
        _KNOWN[config] = tuple(
            (name, mark)
            for name in dir(config)
            for mark in getattr(inspect.getattr_static(config, name, None), _MARKS, ())
        )
    return _KNOWN[config]


def _method(config: Any, part: str, sharding_type: str | None) -> Callable[..., Any] | None:
    """The method of ``config`` that computes ``part``, bound; None: none does."""
    wanted = None if sharding_type is None else sharding_type.lower()
    for_all = None
    for name, mark in _marked(type(config)):
        if mark.part != part:
            continue
        if mark.sharding_types is None or wanted is None:
            for_all = for_all or name
        elif wanted in mark.sharding_types:
            return _bound(config, name)
    return None if for_all is None else _bound(config, for_all)


def _bound(config: Any, name: str) -> Callable[..., Any]:
    method: Callable[..., Any] = getattr(config, name)
    return method


def _of_method(
    part: str, method_or_sharding_type: Any, sharding_type: Types | None
) -> Callable[..., Any]:
    """A decorator that may be written with or without strategies."""
    if callable(method_or_sharding_type):
        method: Callable[..., Any] = _mark(part, None)(method_or_sharding_type)
        return method
    return _mark(part, method_or_sharding_type if sharding_type is None else sharding_type)


def forward_compute(
    method_or_sharding_type: Any = None, *, sharding_type: Types | None = None
) -> Callable[..., Any]:
    """Mark a method ``(ctx) -> milliseconds`` of the forward lookup.

    Args:
        method_or_sharding_type: the method, or the strategies that it is for.
        sharding_type: the strategies that it is for; None: all.

    Raises:
        ValueError: an unknown strategy.
    """
    return _of_method("forward_compute", method_or_sharding_type, sharding_type)


def backward_compute(
    method_or_sharding_type: Any = None, *, sharding_type: Types | None = None
) -> Callable[..., Any]:
    """Mark a method ``(ctx) -> milliseconds`` of the backward pass; see `forward_compute`."""
    return _of_method("backward_compute", method_or_sharding_type, sharding_type)


def prefetch_compute(method: Method) -> Method:
    """Mark a method ``(ctx) -> milliseconds`` of filling a cache ahead."""
    return _mark("prefetch_compute", None)(method)


def input_dist_comms(
    method_or_sharding_type: Any = None, *, sharding_type: Types | None = None
) -> Callable[..., Any]:
    """Mark a method ``(ctx) -> milliseconds`` of ids on their way; see `forward_compute`."""
    return _of_method("input_dist_comms", method_or_sharding_type, sharding_type)


def fwd_comms(
    method_or_sharding_type: Any = None, *, sharding_type: Types | None = None
) -> Callable[..., Any]:
    """Mark a method ``(ctx) -> milliseconds`` of vectors on their way; see `forward_compute`."""
    return _of_method("fwd_comms", method_or_sharding_type, sharding_type)


def bwd_comms(
    method_or_sharding_type: Any = None, *, sharding_type: Types | None = None
) -> Callable[..., Any]:
    """Mark a method ``(ctx) -> milliseconds`` of gradients on their way; see `forward_compute`."""
    return _of_method("bwd_comms", method_or_sharding_type, sharding_type)


def output_write_size(
    method_or_sharding_type: Any = None, *, sharding_type: Types | None = None
) -> Callable[..., Any]:
    """Mark a method ``(ctx, is_fwd) -> bytes`` that a lookup writes; see `forward_compute`."""
    return _of_method("output_write_size", method_or_sharding_type, sharding_type)


def fwd_coefficient(sharding_type: Types | None = None) -> Callable[[Method], Method]:
    """Mark a method ``() -> PerfCoefficient`` of the forward lookup.

    Args:
        sharding_type: the strategies that it is for; None: all.

    Raises:
        ValueError: an unknown strategy.
    """
    return _mark("fwd_coefficient", sharding_type)


def bwd_coefficient(sharding_type: Types | None = None) -> Callable[[Method], Method]:
    """Mark a method ``() -> PerfCoefficient`` of the backward pass; see `fwd_coefficient`."""
    return _mark("bwd_coefficient", sharding_type)


def prefetch_coefficient() -> Callable[[Method], Method]:
    """Mark a method ``() -> PrefetchCoefficients``."""
    return _mark("prefetch_coefficient", None)


def get_forward_compute(config: Any, sharding_type: str | None = None) -> Callable[..., Any] | None:
    """The method of ``config`` that `forward_compute` marked for a strategy; None: there is none."""
    return _method(config, "forward_compute", sharding_type)


def get_backward_compute(
    config: Any, sharding_type: str | None = None
) -> Callable[..., Any] | None:
    """The method of ``config`` that `backward_compute` marked for a strategy; None: there is none."""
    return _method(config, "backward_compute", sharding_type)


def get_prefetch_compute(config: Any) -> Callable[..., Any] | None:
    """The method of ``config`` that `prefetch_compute` marked; None: there is none."""
    return _method(config, "prefetch_compute", None)


def get_input_dist_comms(
    config: Any, sharding_type: str | None = None
) -> Callable[..., Any] | None:
    """The method of ``config`` that `input_dist_comms` marked for a strategy; None: there is none."""
    return _method(config, "input_dist_comms", sharding_type)


def get_fwd_comms(config: Any, sharding_type: str | None = None) -> Callable[..., Any] | None:
    """The method of ``config`` that `fwd_comms` marked for a strategy; None: there is none."""
    return _method(config, "fwd_comms", sharding_type)


def get_bwd_comms(config: Any, sharding_type: str | None = None) -> Callable[..., Any] | None:
    """The method of ``config`` that `bwd_comms` marked for a strategy; None: there is none."""
    return _method(config, "bwd_comms", sharding_type)


def get_output_write_size(
    config: Any, sharding_type: str | None = None
) -> Callable[..., Any] | None:
    """The method of ``config`` that `output_write_size` marked for a strategy; None: there is none."""
    return _method(config, "output_write_size", sharding_type)


def get_fwd_coefficient(config: Any, sharding_type: str) -> Any:
    """What the method that `fwd_coefficient` marked for a strategy returns; None: there is none."""
    method = _method(config, "fwd_coefficient", sharding_type)
    return None if method is None else method()


def get_bwd_coefficient(config: Any, sharding_type: str) -> Any:
    """What the method that `bwd_coefficient` marked for a strategy returns; None: there is none."""
    method = _method(config, "bwd_coefficient", sharding_type)
    return None if method is None else method()


def get_prefetch_coefficient(config: Any) -> Any:
    """What the method that `prefetch_coefficient` marked returns; None: there is none."""
    method = _method(config, "prefetch_coefficient", None)
    return None if method is None else method()


def _figure(name: str, value: Any) -> Callable[[Kind], Kind]:
    """A decorator that sets one figure of a class."""

    def set_it(config: Kind) -> Kind:
        setattr(config, name, value)
        return config

    return set_it


def hbm_mem_bw(value: float) -> Callable[[Kind], Kind]:
    """Bytes per second of device memory."""
    return _figure("hbm_mem_bw", value)


def ddr_mem_bw(value: float) -> Callable[[Kind], Kind]:
    """Bytes per second of host memory."""
    return _figure("ddr_mem_bw", value)


def ssd_mem_bw(value: float) -> Callable[[Kind], Kind]:
    """Bytes per second of solid-state disks."""
    return _figure("ssd_mem_bw", value)


def hbm_to_ddr_mem_bw(value: float) -> Callable[[Kind], Kind]:
    """Bytes per second between device memory and host memory."""
    return _figure("hbm_to_ddr_mem_bw", value)


def intra_host_bw(value: float) -> Callable[[Kind], Kind]:
    """Bytes per second between ranks of one host."""
    return _figure("intra_host_bw", value)


def inter_host_bw(value: float) -> Callable[[Kind], Kind]:
    """Bytes per second between hosts, per rank and direction."""
    return _figure("inter_host_bw", value)


def device_bw(
    bandwidth: float, *, device: str | None = None, compute_kernel: Types | None = None
) -> Callable[[Kind], Kind]:
    """Bytes per second that lookups read and write.

    Args:
        bandwidth: bytes per second.
        device: the device, ``cuda`` or ``cpu``, and
        compute_kernel: the kernels that it is for; None: every kernel of every device.

    Raises:
        ValueError: one of ``device`` and ``compute_kernel`` without the other.
    """
    if device is None and compute_kernel is None:
        return _figure("device_bw", bandwidth)
    if device is None or compute_kernel is None:
        raise ValueError(
            f"device is {device!r} and compute_kernel {compute_kernel!r}; give both or neither"
        )
    kernels = [compute_kernel] if isinstance(compute_kernel, str) else compute_kernel
    entries = {(device.lower(), kernel.lower()): bandwidth for kernel in kernels}

    def set_them(config: Kind) -> Kind:
        # A dictionary of the class's own: the base class's stays as it is.
        config.kernel_device_bandwidths = {
            **getattr(config, "kernel_device_bandwidths", {}),
            **entries,
        }
        return config

    return set_them


def use_min_dim_for_lookup(value: bool = True) -> Callable[[Kind], Kind]:  # noqa: FBT001, FBT002 - TorchRec's
    """Whether rows narrower than 32 columns are read as if they had 32."""
    return _figure("use_min_dim_for_lookup", value)


def use_block_usage_penalty(value: bool = True) -> Callable[[Kind], Kind]:  # noqa: FBT001, FBT002 - TorchRec's
    """Whether rows narrower than 128 columns take longer per byte."""
    return _figure("use_block_usage_penalty", value)


def use_bytes_for_input_read_size(value: bool = True) -> Callable[[Kind], Kind]:  # noqa: FBT001, FBT002 - TorchRec's
    """Whether ids count by their bytes; otherwise each counts 1."""
    return _figure("use_bytes_for_input_read_size", value)


def input_data_type_size(value: float) -> Callable[[Kind], Kind]:
    """Bytes of an id."""
    return _figure("input_data_type_size", value)


def supported_sharding_types(*sharding_types: str) -> Callable[[Kind], Kind]:
    """The only strategies that the hardware can be estimated for.

    Raises:
        ValueError: an unknown strategy.
    """
    types = frozenset(
        strategy_of(kind.lower(), "an entry of sharding_types").name for kind in sharding_types
    )
    return _figure("supported_types", types)
