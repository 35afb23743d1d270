"""The cross network of DCN-v2 with weight matrices of low rank.

Source: Wang et al., "DCN V2: Improved Deep & Cross Network" (2020), equation 1 and section 3.5.
"""

from __future__ import annotations

from torch import Tensor, nn


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
        self._v = nn.ModuleList(
            nn.Linear(in_features, low_rank, bias=False) for _ in range(num_layers)
        )
        self._w = nn.ModuleList(nn.Linear(low_rank, in_features) for _ in range(num_layers))
        for linear in [*self._v, *self._w]:
            assert isinstance(linear, nn.Linear)
            nn.init.xavier_normal_(linear.weight)
        for linear in self._w:
            assert isinstance(linear, nn.Linear)
            nn.init.zeros_(linear.bias)

    def forward(self, tensor: Tensor) -> Tensor:
        """``[B, N]`` to ``[B, N]``."""
        x_0 = tensor
        x_l = tensor
        for v, w in zip(self._v, self._w, strict=True):
            x_l = x_0 * w(v(x_l)) + x_l
        return x_l
