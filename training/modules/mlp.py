"""Fully connected layers with an activation behind each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from tessera.errors import refuse_unknown
from tessera.training.modules.batch_norm import BatchNorm

Activation = Literal["relu", "sigmoid", "none"] | Callable[[Tensor], Tensor] | nn.Module


def _identity(tensor: Tensor) -> Tensor:
    return tensor


_NAMED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "none": _identity,
}


def _activation(activation: Activation) -> Callable[[Tensor], Tensor] | nn.Module:
    if not isinstance(activation, str):
        return activation
    refuse_unknown("activation", activation, [*_NAMED, "a function"])
    return _NAMED[activation]


class Perceptron(nn.Module):
    """``activation(x W + b)``.

    Args:
        in_size: columns of the input.
        out_size: columns of the output.
        bias: whether to add ``b``.
        activation: a name, a function of a tensor, or a module.
        device: where the weights live.
        dtype: of the weights.

    Raises:
        ValueError: an unknown activation.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        in_size: int,
        out_size: int,
        bias: bool = True,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        activation: Activation = torch.relu,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._linear = nn.Linear(in_size, out_size, bias=bias, device=device, dtype=dtype)
        self._activation_fn = _activation(activation)

    @property
    def linear(self) -> nn.Linear:
        """The layer without its activation."""
        return self._linear

    @property
    def activation(self) -> Callable[[Tensor], Tensor] | nn.Module:
        """What follows the layer."""
        return self._activation_fn

    def forward(self, tensor: Tensor) -> Tensor:
        """``[B, in_size]`` to ``[B, out_size]``."""
        result: Tensor = self._activation_fn(self._linear(tensor))
        return result


class NormedPerceptron(nn.Module):
    """``activation(batch norm(x W))``.

    Args:
        in_size: columns of the input.
        out_size: columns of the output.
        activation: a name, a function of a tensor, or a module.
        device: where the weights live.
        dtype: of the weights.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        activation: Activation,
        device: torch.device | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self._linear = nn.Linear(in_size, out_size, bias=False, device=device, dtype=dtype)
        self._norm = BatchNorm(out_size).to(device=device, dtype=dtype)
        self._activation_fn = _activation(activation)

    def forward(self, tensor: Tensor) -> Tensor:
        """``[B, in_size]`` to ``[B, out_size]``."""
        result: Tensor = self._activation_fn(self._norm(self._linear(tensor)))
        return result


class MLP(nn.Module):
    """Perceptrons one after the other.

    Args:
        in_size: columns of the input.
        layer_sizes: columns after each layer, one or more.
        bias: whether layers add a bias.
        activation: the same for all layers.
        device: where the weights live.
        dtype: of the weights.
        dropout: share of each layer's outputs that training sets to zero; no effect in eval.
        batch_norm: whether each layer's output is normalised before its activation; the
            normalisation's shift then stands for the bias.

    Raises:
        ValueError: no layers, or an unknown activation.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        in_size: int,
        layer_sizes: list[int],
        bias: bool = True,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        activation: Activation = torch.relu,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        if not layer_sizes:
            raise ValueError("layer_sizes is empty; give the size of at least one layer")
        layers: list[nn.Module] = []
        for size_in, size_out in zip([in_size, *layer_sizes], layer_sizes, strict=False):
            layers.append(
                NormedPerceptron(size_in, size_out, activation, device, dtype)
                if batch_norm
                else Perceptron(size_in, size_out, bias, activation, device, dtype)
            )
            if dropout:
                layers.append(nn.Dropout(dropout))
        self._mlp = nn.Sequential(*layers)

    def forward(self, tensor: Tensor) -> Tensor:
        """``[B, in_size]`` to ``[B, layer_sizes[-1]]``."""
        result: Tensor = self._mlp(tensor)
        return result
