"""What kernels make of a jagged tensor before the lookup, and of padded vectors after it.

Legend: F features, B samples, S_f samples of feature f, W ranks that they come from, N ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from tessera.training.distributed.tables.table_shards import ShardedEmbeddingTable
from tessera.training.fbgemm import import_training_tables
from tessera.training.modules.embedding_configs import DataType
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

STORED_DTYPES = {DataType.FP32: torch.float32, DataType.FP16: torch.float16}
OUTPUT_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Bags:
    """Ids and bags, every feature with the same number of samples.

    Attributes:
        ids: ``[N]`` int64.
        offsets: ``[F * B + 1]`` int64; a batch that varies per feature is padded with empty bags.
        weights: ``[N]`` float32, or None.
        strides: per feature and rank its samples; None: the batch does not vary.
    """

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    strides: list[list[int]] | None

    def bounds(self, features: int) -> Tensor:
        """``[F + 1]`` bounds of the features' ids."""
        batch_size = (self.offsets.numel() - 1) // features
        return self.offsets[::batch_size] if batch_size else self.offsets.new_zeros(features + 1)


def bags_of(features: KeyedJaggedTensor, *, weighted: bool, weighted_mean: bool) -> Bags:
    """Return the bags of all features in the form that the kernels take.

    Weights are left out unless the lookup is ``weighted``; for a ``weighted_mean`` each is divided by
    the size of its bag.

    Raises:
        ValueError: ``weighted``, and there are no weights.
    """
    ids = features.values().long()
    weights = features.weights().float() if weighted else None
    strides = features.stride_per_key_per_rank() if features.variable_stride_per_key() else None
    offsets = features.offsets().long() if strides is None else _padded(features.lengths(), strides)
    if weighted_mean and weights is not None:
        sizes = offsets.diff()
        weights = weights / torch.repeat_interleave(sizes, sizes, output_size=ids.numel())
    return Bags(ids, offsets, weights, strides)


def _padded(lengths: Tensor, strides_FW: list[list[int]]) -> Tensor:
    """Offsets ``[F * B + 1]`` with empty bags after a feature's own; B is the most samples."""
    samples_F = [sum(strides) for strides in strides_FW]
    most = max(samples_F, default=0)
    places = [torch.arange(f * most, f * most + count) for f, count in enumerate(samples_F)]
    padded = torch.zeros(len(samples_F) * most, dtype=torch.int64, device=lengths.device)
    padded[torch.cat(places).to(lengths.device)] = lengths.long()
    return torch.cat([padded.new_zeros(1), padded.cumsum(0)])


def unpadded(vectors: Tensor, strides_FW: list[list[int]], dims_F: list[int]) -> Tensor:
    """Flat vectors by rank and feature, from ``[B, sum of D]`` whose first S_f rows count.

    Source: the layout in which TorchRec's variable-batch exchange takes them.
    """
    columns = [0, *accumulate(dims_F)]
    starts_F = [[0, *accumulate(strides)] for strides in strides_FW]
    ranks = len(strides_FW[0]) if strides_FW else 0
    pieces = [
        vectors[starts[rank] : starts[rank + 1], columns[f] : columns[f + 1]].reshape(-1)
        for rank in range(ranks)
        for f, starts in enumerate(starts_F)
    ]
    return torch.cat(pieces) if pieces else vectors.reshape(-1)


class BoundsCheck:
    """FBGEMM's check of ids, for lookups that are not FBGEMM's; see `FusedParams`."""

    def __init__(
        self, tables: Sequence[ShardedEmbeddingTable], mode: str | None, device: torch.device
    ) -> None:
        mode = mode or ("fatal" if device.type == "cpu" else "warning")
        self._mode = int(import_training_tables().BoundsCheckMode[mode.upper()].value)
        self._rows_F = torch.tensor(
            [table.local_rows for table in tables for _ in table.feature_names],
            dtype=torch.int64,
            device=device,
        )
        self._warnings = torch.zeros(1, dtype=torch.int64, device=device)
        self._changes_ids = mode in {"warning", "ignore"}
        self._off = mode == "none"

    def __call__(self, bags: Bags) -> Bags:
        """Return the bags with every id inside its table.

        Raises:
            RuntimeError: the mode is ``fatal`` and an id is not a row.
        """
        if self._off or bags.offsets.numel() == 1:
            return bags
        if self._changes_ids:
            # The operator writes into its arguments; the caller's stay as they are.
            bags = replace(bags, ids=bags.ids.clone(), offsets=bags.offsets.clone())
        torch.ops.fbgemm.bounds_check_indices(
            self._rows_F, bags.ids, bags.offsets, self._mode, self._warnings, bags.weights
        )
        # The operator lets -1 pass, FBGEMM's mark of a pruned row.
        if self._changes_ids:
            bags.ids.clamp_(min=0)
        elif bags.ids.device.type == "cpu" and bool((bags.ids < 0).any()):
            raise RuntimeError("an id is negative")
        return bags


def name_bad_id(tables: Sequence[ShardedEmbeddingTable], bags: Bags) -> None:
    """Check every id against its shard, slowly.

    Raises:
        IndexError: naming feature, id, table and rows.
    """
    features = [(name, table) for table in tables for name in table.feature_names]
    bounds = bags.bounds(len(features)).tolist()
    for (feature, table), start, stop in zip(features, bounds, bounds[1:], strict=False):
        ids = bags.ids[start:stop]
        if ids.numel() == 0:
            continue
        lowest, highest = (int(bound) for bound in torch.aminmax(ids))
        if lowest < 0 or highest >= table.local_rows:
            raise IndexError(
                f"feature {feature!r} has id {lowest if lowest < 0 else highest}, but table "
                f"{table.name!r} has rows 0 to {table.local_rows - 1} here; hash or clamp ids "
                "first (tessera.training.modules.hashing)"
            )
