"""Cross networks: of DCN-v2 with full matrices, with ones of low rank and with a mixture of those, and of DCN.

Source: Wang et al., "DCN V2: Improved Deep & Cross Network" (2020), equation 1 and section 3.5.
Legend: ``B`` samples, ``N`` columns, ``R`` the rank, ``K`` experts.  But for `LowRankCrossNet`, state dicts
have TorchRec's names and shapes.
"""

# ruff: noqa: A002 - the argument that TorchRec users know
# Annotations are not postponed: a graph that torch.fx traces has them, and TorchScript reads them there.

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class LowRankCrossNet(nn.Module):
    """``x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l`` with ``V`` ``[R, N]``, ``W`` ``[N, R]``.

    Args:
        in_features: ``N``.
        num_layers: how many times the input is crossed with itself.
        low_rank: ``R``.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(self, in_features: int, num_layers: int, low_rank: int = 1) -> None:
        super().__init__()
        if min(in_features, num_layers, low_rank) < 1:
            raise ValueError(
                f"in_features {in_features}, num_layers {num_layers}, low_rank {low_rank}: "
                "all must be at least 1"
            )
        # Drawn in TorchRec's order, so that the same seed gives the same layers: every W, then every V.
        with torch.random.fork_rng(devices=()):
            wide = [nn.Linear(low_rank, in_features) for _ in range(num_layers)]
            narrow = [nn.Linear(in_features, low_rank, bias=False) for _ in range(num_layers)]
        for linear in [*wide, *narrow]:
            nn.init.xavier_normal_(linear.weight)
        for linear in wide:
            nn.init.zeros_(linear.bias)
        self._v, self._w = nn.ModuleList(narrow), nn.ModuleList(wide)

    def forward(self, tensor: Tensor) -> Tensor:
        """``[B, N]`` to ``[B, N]``."""
        x_0 = tensor
        x_l = tensor
        for v, w in zip(self._v, self._w, strict=True):
            x_l = x_0 * w(v(x_l)) + x_l
        return x_l


def _kernels(layers: int, *shape: int) -> nn.ParameterList:
    return nn.ParameterList(
        nn.Parameter(nn.init.xavier_normal_(torch.empty(shape))) for _ in range(layers)
    )


def _biases(layers: int, in_features: int) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.zeros(in_features, 1)) for _ in range(layers))


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; give at least 1")


class CrossNet(nn.Module):
    """``x_{l+1} = x_0 * (W_l x_l + b_l) + x_l`` with ``W`` ``[N, N]`` (equation 1).

    Args:
        in_features: ``N``.
        num_layers: how many times the input is crossed with itself.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(self, in_features: int, num_layers: int) -> None:
        super().__init__()
        _check_sizes(in_features=in_features, num_layers=num_layers)
        self.kernels = _kernels(num_layers, in_features, in_features)
        self.bias = _biases(num_layers, in_features)

    def forward(self, input: Tensor) -> Tensor:
        """``[B, N]`` to ``[B, N]``."""
        x_l = input
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            x_l = input * functional.linear(x_l, kernel, bias.squeeze(1)) + x_l
        return x_l


class VectorCrossNet(nn.Module):
    """``x_{l+1} = x_0 (w_l . x_l) + b_l + x_l`` with ``w`` ``[N, 1]``, the cross network of DCN.

    Source: Wang et al., "Deep & Cross Network for Ad Click Predictions" (2017), equation 3.

    Args:
        in_features: ``N``.
        num_layers: how many times the input is crossed with itself.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(self, in_features: int, num_layers: int) -> None:
        super().__init__()
        _check_sizes(in_features=in_features, num_layers=num_layers)
        self.kernels = _kernels(num_layers, in_features, 1)
        self.bias = _biases(num_layers, in_features)

    def forward(self, input: Tensor) -> Tensor:
        """``[B, N]`` to ``[B, N]``."""
        x_l = input
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            x_l = input * torch.matmul(x_l, kernel) + bias.squeeze(1) + x_l
        return x_l


class LowRankMixtureCrossNet(nn.Module):
    """A mixture of low-rank crosses with a layer of their own in the small space (section 3.5).

    Expert ``i`` of a layer gives ``x_0 * (U_i g(C_i g(V_i x_l)) + b)`` with ``V`` ``[R, N]``, ``C``
    ``[R, R]`` and ``U`` ``[N, R]``; a softmax over the experts' gates, linear in ``x_l`` and shared by
    the layers, weighs them.  ``x_l`` is added.

    Args:
        in_features: ``N``.
        num_layers: how many times the input is crossed with itself.
        num_experts: ``K``; of one expert there is no gate.
        low_rank: ``R``.
        activation: ``g``, number by number.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        num_experts: int = 1,
        low_rank: int = 1,
        activation: nn.Module | Callable[[Tensor], Tensor] = torch.relu,
    ) -> None:
        super().__init__()
        _check_sizes(
            in_features=in_features,
            num_layers=num_layers,
            num_experts=num_experts,
            low_rank=low_rank,
        )
        self.U_kernels = _kernels(num_layers, num_experts, in_features, low_rank)
        self.V_kernels = _kernels(num_layers, num_experts, low_rank, in_features)
        self.bias = _biases(num_layers, in_features)
        self.gates = None
        if num_experts > 1:
            self.gates = nn.ModuleList(
                nn.Linear(in_features, 1, bias=False) for _ in range(num_experts)
            )
        self.C_kernels = _kernels(num_layers, num_experts, low_rank, low_rank)
        self._activation = activation

    def forward(self, input: Tensor) -> Tensor:
        """``[B, N]`` to ``[B, N]``."""
        x_l = input
        layers = zip(self.U_kernels, self.V_kernels, self.C_kernels, self.bias, strict=True)
        for u_KNR, v_KRN, c_KRR, bias in layers:
            small_BKR = self._activation(torch.einsum("krn,bn->bkr", v_KRN, x_l))
            small_BKR = self._activation(torch.einsum("ksr,bkr->bks", c_KRR, small_BKR))
            wide_BKN = torch.einsum("knr,bkr->bkn", u_KNR, small_BKR)
            crossed_BKN = input.unsqueeze(1) * (wide_BKN + bias.squeeze(1))
            if self.gates is None:
                x_l = crossed_BKN.squeeze(1) + x_l
            else:
                scores_BK = torch.cat([gate(x_l) for gate in self.gates], dim=1)
                shares_BK = torch.softmax(scores_BK, dim=1)
                x_l = torch.einsum("bk,bkn->bn", shares_BK, crossed_BKN) + x_l
        return x_l
