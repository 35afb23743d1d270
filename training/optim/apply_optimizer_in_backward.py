"""Optimizers that step in the backward pass, and what they mean for a table that gets fused."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tessera.training.optim.optimizers import (
    IN_BACKWARD_OPTIMIZERS,
    RowOptimizer,
    both_betas,
)
from tessera.training.optim.row_updates import EmbOptimType

_TORCHS: dict[type[Optimizer], EmbOptimType] = {
    torch.optim.SGD: EmbOptimType.EXACT_SGD,
    torch.optim.Adagrad: EmbOptimType.EXACT_ADAGRAD,
    torch.optim.Adam: EmbOptimType.ADAM,
    torch.optim.AdamW: EmbOptimType.ADAM,
}
# Marks on parameters, under the names that torch gives them.
_CLASSES = "_optimizer_classes"
_KWARGS = "_optimizer_kwargs"
# How a dense optimizer computes, which says nothing of what.
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
_TAKEN = {"eps", "betas", "momentum", "eta"}


def apply_optimizer_in_backward(
    optimizer_class: type[Optimizer],
    params: Iterable[nn.Parameter],
    optimizer_kwargs: dict[str, Any],
) -> None:
    """Let ``params`` be updated, each by an optimizer of its own, as soon as it has its gradient.

    Their gradients are dropped after it.  A table that is sharded later takes over the optimizer
    into its fused form (`fused_params_of`).

    Args:
        optimizer_class: of torch's or of `tessera.training.optim.optimizers`.
        params: leaf parameters.
        optimizer_kwargs: for the optimizer's constructor.
    """
    for parameter in params:
        optimizer = optimizer_class([parameter], **optimizer_kwargs)
        first = not hasattr(parameter, IN_BACKWARD_OPTIMIZERS)
        for mark, value in (
            (IN_BACKWARD_OPTIMIZERS, optimizer),
            (_CLASSES, optimizer_class),
            (_KWARGS, optimizer_kwargs),
        ):
            setattr(parameter, mark, [*getattr(parameter, mark, []), value])
        if first:
            parameter.register_post_accumulate_grad_hook(_step_and_drop)  # type: ignore[no-untyped-call] # torch leaves it untyped


def _step_and_drop(parameter: torch.Tensor) -> None:
    for optimizer in getattr(parameter, IN_BACKWARD_OPTIMIZERS):
        optimizer.step()
    parameter.grad = None


def optimizer_type_to_emb_opt_type(optimizer_class: type[Optimizer]) -> EmbOptimType:
    """The fused optimizer that does what ``optimizer_class`` does.

    Raises:
        ValueError: there is none.
    """
    if issubclass(optimizer_class, RowOptimizer):
        return optimizer_class.kind
    if optimizer_class in _TORCHS:
        return _TORCHS[optimizer_class]
    known = [kind.__name__ for kind in (*_TORCHS, *_all_row_optimizers(RowOptimizer))]
    raise ValueError(
        f"{optimizer_class.__name__} has no fused form; give one of {', '.join(sorted(set(known)))}"
    )


def _all_row_optimizers(base: type[RowOptimizer]) -> list[type[RowOptimizer]]:
    found = [base] if hasattr(base, "kind") else []
    for below in base.__subclasses__():
        found += _all_row_optimizers(below)
    return found


def fused_params_of(parameter: nn.Parameter) -> dict[str, Any] | None:
    """What `apply_optimizer_in_backward` said about a table, as ``fused_params``.

    Only rows of a batch are updated by a fused table, also where torch's optimizer would let
    momentum and weight decay of other rows go on.

    Returns:
        ``optimizer``, ``learning_rate`` and so on; None: nothing was said.

    Raises:
        ValueError: the optimizer or one of its arguments has no fused form.
    """
    classes = getattr(parameter, _CLASSES, None)
    if not classes:
        return None
    if len(classes) > 1:
        raise ValueError(
            "apply_optimizer_in_backward was called twice for one table; a fused table has one "
            "optimizer"
        )
    return convert_optimizer_type_and_kwargs(classes[0], getattr(parameter, _KWARGS)[0])


def convert_optimizer_type_and_kwargs(
    optimizer_class: type[Optimizer], optimizer_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """``fused_params`` that do what the optimizer with these arguments does.

    An ``eps`` that is not given is that of fused tables, 1e-8, as in TorchRec; torch's Adagrad and
    `RowWiseAdagrad` have 1e-10.

    Raises:
        ValueError: the optimizer or one of its arguments has no fused form.
    """
    fused: dict[str, Any] = {"optimizer": optimizer_type_to_emb_opt_type(optimizer_class)}
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(optimizer_class).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    unknown = sorted(set(optimizer_kwargs) - set(defaults))
    if unknown:
        raise ValueError(
            f"{optimizer_class.__name__} has no argument {unknown[0]!r}; it has {', '.join(defaults)}"
        )
    # FBGEMM's, which TorchRec leaves to it: 1e-10 of torch's Adagrad trains rows of tiny gradients otherwise.
    defaults.pop("eps", None)
    own = issubclass(optimizer_class, RowOptimizer)
    l2 = getattr(optimizer_class, "l2", optimizer_class is not torch.optim.AdamW)
    values = {**defaults, **optimizer_kwargs}
    if own:
        fused.update(_of_fused_tables(values))
    for name, value in values.items():
        if name == "weight_decay":
            if value:
                fused.update(weight_decay=value, weight_decay_mode="l2" if l2 else "decouple")
        elif name == "lr":
            fused["learning_rate"] = float(value)
        elif name in _TAKEN and (own or name != "momentum"):
            fused[name] = value
        elif value and name not in _IMPLEMENTATION:
            raise ValueError(
                f"{optimizer_class.__name__}({name}={value}) has no fused form; leave {name} out"
            )
    return fused


def _of_fused_tables(values: dict[str, Any]) -> dict[str, Any]:
    """Takes what only optimizers of ours have out of their arguments, and gives it as ``fused_params``."""
    if "beta1" in values:
        values["betas"] = both_betas(values["betas"], values.pop("beta1"), values.pop("beta2"))
    clips, bound = values.pop("gradient_clipping"), values.pop("max_gradient")
    return {"gradient_clipping": True, "max_gradient": bound} if clips else {}
