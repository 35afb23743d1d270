"""Settings of the optimizers that update a table inside the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from tessera.errors import refuse_unknown, unknown_name
from tessera.training.optim.keyed import KeyedOptimizer
from tessera.training.optim.row_updates import RULES, EmbOptimType, HyperParameters

__all__ = [
    "EmbOptimType",
    "EmptyFusedOptimizer",
    "FusedOptimizer",
    "FusedOptimizerModule",
    "FusedParams",
]

_DECAY_MODES = ("decouple", "l2")
# FBGEMM's WeightDecayMode by value; the modes that it has besides these are not here.
_FBGEMM_DECAY_MODES = {1: "l2", 2: "decouple"}
# Settings, what they may be, and the same in words.
_BOUNDS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "learning_rate eps weight_decay max_gradient cache_reserved_memory",
        lambda x: x >= 0,
        "0 or more",
    ),
    ("eta", lambda x: 0 <= x < float("inf"), "a finite number, 0 or more"),
    ("beta1 beta2 momentum", lambda x: 0 <= x < 1, "0 or more, below 1"),
    ("cache_load_factor", lambda x: 0 < x <= 1, "above 0, to 1"),
)
_CHOICES = {
    "output_dtype": ("fp32", "fp16", "bf16"),
    "bounds_check_mode": ("fatal", "warning", "ignore", "none"),
    "cache_algorithm": ("lru", "lfu"),
    "cache_precision": ("fp32", "fp16"),
}


@dataclass(frozen=True, kw_only=True)
class FusedParams:
    """How fused tables are updated and stored.

    "Exact" means that a row's gradients of one batch are added up before its one update; the
    other optimizers do the same.  Only rows that a batch touches are updated.

    None stands for the optimizer's or FBGEMM's usual value.  A setting that the optimizer or the
    device has no use for is refused, but for ``eps`` and ``stochastic_rounding``.

    Attributes:
        optimizer: ``EXACT_SGD``: ``w -= lr * g``.  ``EXACT_ADAGRAD``: ``s += g * g``,
            ``w -= lr * g / (sqrt(s) + eps)`` per number.  ``EXACT_ROWWISE_ADAGRAD``: the same
            with one ``s`` per row, which grows by the mean of ``g * g`` over the row.  The
            others: see `tessera.training.optim.row_updates`.
        learning_rate: ``lr``.
        eps: added to denominators.
        weight_decay: rows that a batch touches shrink by ``lr * weight_decay`` of themselves
            (decoupled, lazy), or as ``weight_decay_mode`` says.
        weight_decay_mode: ``decouple`` (None: the same), or ``l2``: ``weight_decay * w`` is
            added to the gradient.  FBGEMM's enum is taken too.
        beta1: of Adam, LAMB (0.9) and Lion (0.9).
        beta2: of Adam, LAMB (0.999) and Lion (0.99).
        momentum: of LARS-SGD (0.9).
        eta: of LARS-SGD (0.001), the trust coefficient.
        gradient_clipping: cut every number of the output's gradient to
            ``[-max_gradient, max_gradient]`` before it goes to the rows.
        max_gradient: the bound of ``gradient_clipping`` (1.0); giving it turns clipping on.
        stochastic_rounding: FP16 rows on a GPU are rounded up or down at random (True);
            FP32 rows are not rounded.
        output_dtype: ``fp32``, ``fp16`` or ``bf16``: what pooled vectors are given as.
        bounds_check_mode: what becomes of an id that is not a row: ``fatal``, ``warning``,
            ``ignore`` (both look up row 0), ``none`` (no check).  None: ``fatal`` on a CPU,
            ``warning`` on a GPU, as a fatal check there ends every later use of the GPU.
        enforce_hbm: a GPU's cache may not spill to host memory.
        cache_load_factor: share of the rows that the GPU caches (``fused_uvm_caching``).
        cache_algorithm: ``lru`` or ``lfu``.
        cache_reserved_memory: bytes of GPU memory that the cache leaves free.
        cache_precision: ``fp32`` or ``fp16``, of cached rows; None: the table's.
        prefetch_pipeline: the cache is filled ahead by a train pipeline.

    Raises:
        ValueError: a value that makes no sense.
    """

    optimizer: EmbOptimType = EmbOptimType.EXACT_ROWWISE_ADAGRAD
    learning_rate: float = 0.01
    eps: float = 1e-8
    weight_decay: float = 0.0
    weight_decay_mode: str | None = None
    beta1: float | None = None
    beta2: float | None = None
    momentum: float | None = None
    eta: float | None = None
    gradient_clipping: bool | None = None
    max_gradient: float | None = None
    stochastic_rounding: bool | None = None
    output_dtype: str = "fp32"
    bounds_check_mode: str | None = None
    enforce_hbm: bool | None = None
    cache_load_factor: float | None = None
    cache_algorithm: str | None = None
    cache_reserved_memory: float | None = None
    cache_precision: str | None = None
    prefetch_pipeline: bool | None = None

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2", "momentum", "eta"):
            if getattr(self, name) is not None and name not in RULES[self.optimizer].settings:
                raise ValueError(
                    f"fused_params: {name} is {getattr(self, name)}, but {self.optimizer.value} has "
                    "none; leave it out"
                )
        for names, allows, wanted in _BOUNDS:
            for name in names.split():
                value = getattr(self, name)
                if value is not None and not allows(value):
                    raise ValueError(f"fused_params: {name} is {value}; give {wanted}")
        if self.gradient_clipping is False and self.max_gradient is not None:
            raise ValueError(
                "fused_params: max_gradient is given but gradient_clipping is False; leave one out"
            )
        for name, known in {"weight_decay_mode": _DECAY_MODES, **_CHOICES}.items():
            value = getattr(self, name)
            if value is not None:
                refuse_unknown(f"fused_params: {name}", value, known)
        if self.weight_decay_mode is not None and not self.weight_decay:
            raise ValueError(
                f"fused_params: weight_decay_mode is {self.weight_decay_mode!r}, but there is no "
                "weight_decay; give one or leave the mode out"
            )

    @property
    def hyper_parameters(self) -> HyperParameters:
        """The numbers of an update, with the optimizer's own defaults filled in."""
        given = {name: getattr(self, name) for name in ("beta1", "beta2", "momentum", "eta")}
        usual = {"beta2": 0.99} if self.optimizer is EmbOptimType.LION else {}
        return HyperParameters(
            lr=self.learning_rate,
            eps=self.eps,
            weight_decay=self.weight_decay,
            l2=self.weight_decay_mode == "l2",
            **{**usual, **{name: value for name, value in given.items() if value is not None}},
        )

    @property
    def clip_to(self) -> float | None:
        """The bound on the numbers of the output's gradient; None: there is none."""
        if self.max_gradient is not None:
            return self.max_gradient
        return 1.0 if self.gradient_clipping else None

    @property
    def cache_settings(self) -> list[str]:
        """Names of the settings of a GPU's cache of rows that were given."""
        names = [field.name for field in fields(self)]
        of_cache = [name for name in names if name.startswith("cache_")] + ["prefetch_pipeline"]
        return [name for name in of_cache if getattr(self, name) is not None]

    @classmethod
    def from_dict(cls, fused_params: Mapping[str, Any]) -> FusedParams:
        """Read a dict as TorchRec's sharders take it.

        ``optimizer`` may be an `EmbOptimType` of ours or of FBGEMM's, or its value; ``betas`` is
        taken for ``beta1`` and ``beta2``; enums of FBGEMM and of ours for the strings here.

        Raises:
            ValueError: an unknown key, or an optimizer that fused tables do not know.
        """
        values = dict(fused_params)
        if "betas" in values:
            values["beta1"], values["beta2"] = values.pop("betas")
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"fused_params has key {unknown[0]!r}; it knows {', '.join(known)}")
        if "optimizer" in values:
            wanted = _plain(values["optimizer"])
            names = {kind.value: kind for kind in EmbOptimType}
            refuse_unknown("fused_params: optimizer", wanted, names)
            values["optimizer"] = names[wanted]
        for name in _CHOICES:
            given = values.get(name)
            if isinstance(given, Enum):
                values[name] = given.name.lower().removeprefix("v2_")
            elif isinstance(given, str):
                values[name] = given.lower()
        mode = _plain(values.get("weight_decay_mode"))
        if isinstance(mode, int):
            if mode not in _FBGEMM_DECAY_MODES and (mode != 0 or values.get("weight_decay")):
                given = values["weight_decay_mode"]
                raise unknown_name("fused_params: weight_decay_mode", given, _DECAY_MODES)
            mode = _FBGEMM_DECAY_MODES.get(mode)
        values["weight_decay_mode"] = mode
        return cls(**values)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


class FusedOptimizer(KeyedOptimizer):
    """An optimizer whose work is done by the backward pass.

    ``step`` and ``zero_grad`` have nothing left to do.  A change of ``lr``, ``eps`` or
    ``weight_decay`` in ``param_groups`` holds from the next forward pass on.
    """

    def step(self, closure: Any = None) -> Any:
        """Only evaluate the closure, if any: the tables were updated in the backward pass."""
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Nothing to clear: fused tables have no gradients."""

    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        """Nothing to make: the state is there from the beginning."""

    def _add_named_group(self, _group: dict[str, Any], /) -> None:
        raise ValueError("fused tables take no new parameters; shard another module instead")


class EmptyFusedOptimizer(FusedOptimizer):
    """The optimizer of no tables: of a rank that holds none."""

    def __init__(self) -> None:
        super().__init__({}, {}, [{"params": [], "lr": 0.0}])


class FusedOptimizerModule:
    """A module with tables that its backward pass updates."""

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer that works in the backward pass."""
        raise AttributeError(f"{type(self).__name__} does not say what its fused_optimizer is")
