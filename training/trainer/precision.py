"""What a run's layers compute in: ``train.precision``.

* ``fp32``: everything as torch is set.
* ``tf32``: matrix products on a GPU round their float32 inputs to 10 bits of mantissa (torch's switch, for
  the time of the run).
* ``bf16``: layers run under torch's autocast: products take and give bfloat16, sums of a product are float32.
  The layers of the logits and batch norms stay float32: a rounded logit would move a probability of one in a
  thousand by half a percent, and moving averages add up small differences.  On a GPU pooled vectors
  are given in bfloat16, and so are the gradients that the tables are updated with.

Weights, the gradients that optimizers get, their states and checkpoints are float32 with each.

A GPU multiplies narrow numbers at full speed only where rows are multiples of 16 bytes long.  Linear layers
with other numbers of inputs (13 dense values; 479 columns of a DLRM's interaction) are therefore given columns of
zeros on both sides of the product, which costs a pass over the input and changes no result but
for the order of sums.

A layer with a ReLU is computed as one (`NarrowPerceptron`) on a GPU under bf16: ReLU and bias are part of the product, and
one pass over the gradient gives both what passes back through the ReLU and the bias's share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tessera.errors import UserError
from tessera.kernels import ops
from tessera.training.modules.batch_norm import BatchNorm
from tessera.training.modules.mlp import Perceptron

Precision = Literal["fp32", "tf32", "bf16"]

WHOLE_COLUMNS = 8
"""Columns that fill 16 bytes in bfloat16 (of TF32 numbers, which take 4 bytes each, 32)."""
_FIRST_CAPABILITY = 8
"""The first GPUs that multiply TF32 and bfloat16 numbers have this compute capability."""


def check_precision(precision: Precision, device: torch.device) -> None:
    """Refuse a precision that ``device`` has not.

    Raises:
        UserError: naming it.
    """
    if precision == "fp32":
        return
    given = f"train.precision={precision}"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major < _FIRST_CAPABILITY:
            raise UserError(
                f"{given}: it needs a GPU of compute capability {_FIRST_CAPABILITY}.0 or more, and"
                f" {torch.cuda.get_device_name(device)} has {major}.{minor}; set train.precision=fp32"
            )
    elif precision == "tf32":
        raise UserError(f"{given}: it is for GPUs; give fp32 or bf16, or train.device=cuda")
    elif not torch.amp.is_autocast_available(device.type):
        raise UserError(
            f"{given}: this torch has no autocast for {device.type}; set train.precision=fp32"
        )


@contextlib.contextmanager
def products_in(precision: Precision) -> Iterator[None]:
    """Have GPUs multiply float32 matrices as ``precision`` says for the time of the context."""
    if precision != "tf32":
        yield
        return
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, True
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def layers_in(
    precision: Precision, device: torch.device, *, caches: bool = True
) -> AbstractContextManager[None]:
    """The context of a forward pass; ``caches``: weights are rounded once in it, however often they are used."""
    if precision != "bf16":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=caches)


def vectors_in(precision: Precision, device: torch.device) -> dict[str, str]:
    """The settings of fused tables that say what pooled vectors are given as."""
    if precision == "bf16" and device.type == "cuda":
        return {"output_dtype": "bf16"}
    return {}


def prepare_layers(
    model: nn.Module, precision: Precision, device: torch.device, *, logit_layers: Iterable[str]
) -> None:
    """Let the layers of ``model`` compute in ``precision`` within `layers_in`.

    Names, weights and states stay as they are; of ``fp32``, everything does.

    Args:
        model: on ``device``.
        precision: what they are to compute in.
        device: a CPU or a GPU.
        logit_layers: the dotted names of the ``nn.Linear`` that make the logits.
    """
    if precision == "fp32":
        return
    wide = {model.get_submodule(name) for name in logit_layers} if precision == "bf16" else set()
    for layer in model.modules():
        if precision == "bf16" and device.type == "cuda" and isinstance(layer, Perceptron):
            if ops.trains_on_gpus() and takes_perceptron(layer):
                _replace_forward(layer, _as_one(layer))
        elif layer in wide or (precision == "bf16" and isinstance(layer, BatchNorm)):
            _replace_forward(layer, _in_float32(layer.forward, device.type))
        elif type(layer) is nn.Linear and device.type == "cuda":
            columns = layer.in_features % WHOLE_COLUMNS
            if columns:
                _replace_forward(layer, _with_zeros(layer, WHOLE_COLUMNS - columns))


def _replace_forward(layer: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    # On the instance: nn.Module.__call__ finds it before the class's.
    layer.forward = forward


def _in_float32(forward: Callable[[Tensor], Tensor], device: str) -> Callable[[Tensor], Tensor]:
    def wide(x: Tensor) -> Tensor:
        with torch.autocast(device, enabled=False):
            return forward(x.float())

    return wide


def _with_zeros(layer: nn.Linear, columns: int) -> Callable[[Tensor], Tensor]:
    """``layer`` with so many inputs more, all of them zero."""

    def padded(x: Tensor) -> Tensor:
        added = (0, columns)
        return functional.linear(
            functional.pad(x, added), functional.pad(layer.weight, added), layer.bias
        )

    return padded


class NarrowPerceptron(torch.autograd.Function):
    """``relu(x weight' + bias)`` in bfloat16, products and sums of gradients in float32.

    ``apply(x [B, K], weight [N, K], bias [N]) -> [B, N]`` with N a multiple of 8; weights and what they get as gradients
    are float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """See the class."""
        ctx.columns = weight.size(1)
        added = (0, -ctx.columns % WHOLE_COLUMNS)
        x, weight = x.to(torch.bfloat16), weight.to(torch.bfloat16)
        if added[1]:
            x, weight = functional.pad(x, added), functional.pad(weight, added)
        y = torch._addmm_activation(bias.to(torch.bfloat16), x, weight.t())  # noqa: SLF001 (torch's only product with a ReLU)
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """The gradients of what `forward` was given."""
        x, weight, y = ctx.saved_tensors
        passed, of_bias = torch.ops.tessera.relu_backward_bf16(grads[0].contiguous(), y)
        of_weight = passed.t() @ x
        of_x = (passed @ weight)[:, : ctx.columns] if ctx.needs_input_grad[0] else None
        return of_x, of_weight[:, : ctx.columns].float(), of_bias


def takes_perceptron(layer: Perceptron) -> bool:
    """Whether `NarrowPerceptron` computes ``layer``."""
    linear = layer.linear
    return (
        layer.activation is torch.relu
        and linear.bias is not None
        and linear.out_features % WHOLE_COLUMNS == 0
    )


def _as_one(layer: Perceptron) -> Callable[[Tensor], Tensor]:
    own = layer.forward

    def forward(x: Tensor) -> Tensor:
        if x.dim() != 2:
            return own(x)
        linear = layer.linear
        result: Tensor = NarrowPerceptron.apply(x, linear.weight, linear.bias)  # type: ignore[no-untyped-call] # torch leaves apply untyped
        return result

    return forward
