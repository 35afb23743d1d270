"""What sharding is made of: who takes part, sharded modules, and the sharders that make them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from enum import Enum, unique
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from tessera.training.distributed.comm.awaitable import Awaitable, LazyAwaitable
from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs, no_op_codecs_registry
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.plan.plan_types import (
    ComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterStorage,
    ShardingType,
)
from tessera.training.streamable import Multistreamable

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")
Out = TypeVar("Out")
CompIn = TypeVar("CompIn", bound=Multistreamable)
DistOut = TypeVar("DistOut")
ShrdCtx = TypeVar("ShrdCtx", bound=Multistreamable)


class NullShardingContext(Multistreamable):
    """The context of a sharding that keeps nothing between its steps."""


class NullShardedModuleContext(NullShardingContext):
    """The context of a module that keeps nothing between its steps."""


class ModuleNoCopyMixin:
    """A module whose deep copy is itself: its tables are too large to exist twice."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleNoCopyMixin:
        memo[id(self)] = self
        return self


class ShardedModule(ABC, nn.Module, ModuleNoCopyMixin, Generic[CompIn, DistOut, Out, ShrdCtx]):
    """A module spread over ranks: ids travel, rows are looked up, vectors travel back.

    ``forward`` is `input_dist`, `compute` and `output_dist` one after the other; a training
    pipeline calls them apart, to overlap the communication of one batch with the computation
    of another.

    Args:
        qcomm_codecs_registry: codecs by `CommOp` name; None: numbers travel as they are.
    """

    @abstractmethod
    def __init__(self, qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None) -> None:
        super().__init__()
        self._qcomm_codecs_registry = {**no_op_codecs_registry(), **(qcomm_codecs_registry or {})}

    @property
    def qcomm_codecs_registry(self) -> dict[str, QuantizedCommCodecs]:
        """Return the codecs by `CommOp` name."""
        return self._qcomm_codecs_registry

    @abstractmethod
    def create_context(self) -> ShrdCtx:
        """Return a new context, which holds what the steps of one batch share."""

    @abstractmethod
    def input_dist(self, ctx: ShrdCtx, *input: Any, **kwargs: Any) -> Awaitable[Awaitable[CompIn]]:  # noqa: A002 - the reference's name
        """Send the input to the ranks that need it: first its sizes, then its tensors."""

    @abstractmethod
    def compute(self, ctx: ShrdCtx, dist_input: CompIn) -> DistOut:
        """Look up the received ids."""

    @abstractmethod
    def output_dist(self, ctx: ShrdCtx, output: DistOut) -> LazyAwaitable[Out]:
        """Send the results to the ranks that asked."""

    def compute_and_output_dist(self, ctx: ShrdCtx, input: CompIn) -> LazyAwaitable[Out]:  # noqa: A002 - the reference's name
        """`compute`, then `output_dist`; a module of several shardings starts each early."""
        return self.output_dist(ctx, self.compute(ctx, input))

    def forward(self, *input: Any, **kwargs: Any) -> LazyAwaitable[Out]:  # noqa: A002 - torch's name
        """All steps; the result waits for its communication when it is first used."""
        ctx = self.create_context()
        dist_input = self.input_dist(ctx, *input, **kwargs).wait().wait()
        return self.compute_and_output_dist(ctx, dist_input)

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """The names of the parameters whose ranks hold different parts."""
        for name, _ in self.named_parameters(prefix=prefix):
            yield name

    @property
    @abstractmethod
    def unsharded_module_type(self) -> type[nn.Module]:
        """Return the type of module that this is the sharded form of."""


@unique
class StorageUsageType(Enum):
    """How the memory of a sharder's parameters is counted: by the kind of sharder."""

    BASE_QUANT = "BaseQuantEmbeddingSharder"
    BASE = "BaseEmbeddingSharder"
    DEFAULT = "ModuleSharder"


class ModuleSharder(ABC, Generic[M]):
    """Turns a module of one type into its sharded form.

    Args:
        qcomm_codecs_registry: codecs by `CommOp` name; None: numbers travel as they are.
    """

    def __init__(self, qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None) -> None:
        self._qcomm_codecs_registry = qcomm_codecs_registry

    @abstractmethod
    def shard(
        self,
        module: M,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> nn.Module:
        """The sharded form of ``module``: a `ShardedModule` where more than one rank takes part.

        Args:
            module: what is sharded; on the ``meta`` device its shards get new values.
            params: how each of its parameters is cut and placed.
            env: who takes part.
            device: where this rank computes.
        """

    @property
    @abstractmethod
    def module_type(self) -> type[M]:
        """Return the type of module that this sharder takes."""

    @property
    def qcomm_codecs_registry(self) -> dict[str, QuantizedCommCodecs] | None:
        """Return the codecs by `CommOp` name."""
        return self._qcomm_codecs_registry

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """The parameters that a plan places, by table name."""
        return dict(module.named_parameters())

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The names of the strategies that a plan may choose on devices of this type."""
        del compute_device_type
        return [ShardingType.DATA_PARALLEL.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return the names of the kernels that a plan may choose."""
        del sharding_type, compute_device_type
        return [ComputeKernel.DEFAULT.value]

    def storage_usage(
        self, tensor: Tensor, compute_device_type: str, compute_kernel: str
    ) -> dict[str, int]:
        """Bytes that ``tensor`` takes, by `ParameterStorage`."""
        return compute_storage_usage(
            tensor, compute_device_type, compute_kernel, StorageUsageType.DEFAULT
        )


_SCALE_BYTES = 4
"""The scale and the bias of a quantized row are two 16-bit numbers."""
_ON_HOST = frozenset({"fused_uvm", "fused_uvm_caching", "quant_uvm", "quant_uvm_caching"})


def compute_storage_usage(
    tensor: Tensor,
    compute_device_type: str,
    compute_kernel: str,
    storage_usage_type: StorageUsageType,
) -> dict[str, int]:
    """Bytes that a parameter takes, by the name of the memory that they lie in.

    Args:
        tensor: the parameter; of a quantized table ``[rows, columns]`` without its scales.
        compute_device_type: ``cpu``, or a device with memory of its own.
        compute_kernel: with ``*_uvm*`` the rows of tables lie in host memory.
        storage_usage_type: tables that are trained (BASE), quantized tables, whose rows have a scale and a
            bias besides (BASE_QUANT), or parameters of any module (DEFAULT), which know no kernels.
    """
    size = get_tensor_size_bytes(tensor)
    if storage_usage_type is StorageUsageType.BASE_QUANT:
        size += tensor.shape[0] * _SCALE_BYTES
    knows_kernels = storage_usage_type is not StorageUsageType.DEFAULT
    on_host = compute_device_type == "cpu" or (knows_kernels and compute_kernel in _ON_HOST)
    return {(ParameterStorage.DDR if on_host else ParameterStorage.HBM).value: size}


def get_tensor_size_bytes(tensor: Tensor) -> int:
    """Return the number of bytes of the elements of ``tensor``."""
    return tensor.element_size() * tensor.nelement()


def outermost(
    module: nn.Module, take: Callable[[nn.Module], T | None]
) -> Iterator[tuple[str, nn.Module, T]]:
    """The modules that are taken and are in no other such module.

    Args:
        module: the model; it may be taken itself, by the path "".
        take: gives something of a module that is taken, else None.

    Returns:
        Path, module, and what ``take`` gave.
    """
    taken = take(module)
    if taken is not None:
        yield "", module, taken
        return
    for name, child in module.named_children():
        for path, part, found in outermost(child, take):
            yield f"{name}.{path}" if path else name, part, found
