"""Columns of keyed tensors in groups: where they are is found once, and they are put together by views or by one kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessera.training.fbgemm import load_sparse_operators

_OPERATOR_FROM = 9
"""So many runs of columns make FBGEMM's operator, one kernel, faster than views and ``torch.cat`` on a GPU."""


class Regrouping:
    """Puts columns of tensors of certain keys together.

    Args:
        keys: of each tensor.
        lengths: columns of each of its keys.
        dims: the dimension that each tensor's keys divide.
        groups: the keys of each group.
        runs: where the groups' columns are, see `tessera.training.sparse.keyed.runs_of_groups`.
    """

    def __init__(
        self,
        keys: list[list[str]],
        lengths: list[list[int]],
        dims: list[int],
        groups: list[list[str]],
        runs: list[list[list[int]]],
    ) -> None:
        self._keys, self._lengths, self._dims = keys, lengths, dims
        self._groups, self._runs = groups, runs
        self._by_kernel = sum(map(len, runs)) >= _OPERATOR_FROM and all(dim == 1 for dim in dims)
        self._arguments: dict[torch.device, Any] = {}

    def of(self, values: list[Tensor]) -> list[Tensor]:
        """The groups' columns side by side, of the tensors' values; a group that is one run is a view of it."""
        first = values[0]
        if not (self._by_kernel and first.is_cuda):
            return self._by_views(values)
        dtype = first.dtype
        for own in values:
            if own.dim() != 2 or own.dtype != dtype:
                return self._by_views(values)
        arguments = self._arguments.get(first.device)
        if arguments is None:
            # A graph that is being captured cannot wait for the operator's arguments.
            if torch.cuda.is_current_stream_capturing():
                return self._by_views(values)
            return self.by_operator(values)
        return self._operated(values, arguments)

    def by_operator(self, values: list[Tensor]) -> list[Tensor]:
        """`of` values of one dtype, ``[B, columns]`` each, by FBGEMM's operator, which copies every group."""
        device = values[0].device
        if device not in self._arguments:
            load_sparse_operators()
            arguments = torch.ops.fbgemm.kt_regroup_arguments(
                values[0], self._keys, self._lengths, self._groups
            )
            if device.type == "cuda":
                # They are copied there by the current stream, and used by any stream.
                torch.cuda.synchronize(device)
            self._arguments[device] = arguments
        return self._operated(values, self._arguments[device])

    @staticmethod
    def _operated(values: list[Tensor], arguments: Any) -> list[Tensor]:
        found: list[Tensor] = torch.ops.fbgemm.permute_multi_embedding.default(values, *arguments)
        return found

    def _by_views(self, values: list[Tensor]) -> list[Tensor]:
        regrouped = []
        for runs in self._runs:
            dim = self._dims[runs[0][0]]
            pieces = [values[source].narrow(dim, first, width) for source, first, width in runs]
            regrouped.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim))
        return regrouped
