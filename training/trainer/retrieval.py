"""What a step of a model for retrieval needs beside the rows: candidates, and a softmax over them.

The candidates of a step are the items of its rows, of all ranks, and items that are drawn uniformly
from all items of the training rows.  So a run of several ranks is that of one.

Shapes: ``B`` samples of this rank, ``E`` items drawn on this rank, ``M`` candidates of all ranks, ``D``
numbers of a vector.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from tessera.training.data.batch import Batch
from tessera.training.data.catalogue import Catalogue, single_ids
from tessera.training.data.item_rows import with_items
from tessera.training.models.config import RetrievalSettings
from tessera.training.trainer.ranks import Ranks

_DRAWS = 0x6E65_6761  # sets this generator apart from those of the epochs' orders


@dataclass(frozen=True, kw_only=True)
class ItemSampler:
    """Adds to a batch the items that a step draws, and what the softmax must know of all of them.

    A function of (seed, epoch, number of the batch), so that a run that is taken up draws the same.

    Attributes:
        catalogue: the items of the training rows.
        item_id: the data's column of the item's id.
        settings: of the model.
        seed: of the draws.
        part: (r, n): this rank draws the r-th of n parts.
    """

    catalogue: Catalogue
    item_id: str
    settings: RetrievalSettings
    seed: int
    part: tuple[int, int]

    def sampled(self, batch: Batch, epoch: int, number: int, samples: int) -> Batch:
        """The batch ``number`` of ``epoch``, of ``samples`` rows of all ranks, with its items."""
        drawn = self._drawn(epoch, number)
        places = self.catalogue.places(single_ids(batch, self.item_id))
        candidates = np.concatenate([places, drawn])
        batch = with_items(batch, self.catalogue, drawn) if len(drawn) else batch
        return dataclasses.replace(
            batch,
            item_ids=torch.from_numpy(candidates),
            item_log_shares=torch.from_numpy(self._log_shares(candidates, samples)),
        )

    def _drawn(self, epoch: int, number: int) -> Any:
        count, (part, parts) = self.settings.sampled_negatives, self.part
        random = np.random.default_rng((_DRAWS, self.seed, epoch, number))
        every = random.integers(len(self.catalogue), size=count, dtype=np.int64)
        return every[count * part // parts : count * (part + 1) // parts]

    def _log_shares(self, candidates: Any, samples: int) -> Any:
        """``log Q`` of Yang et al. (2020), section 3.2: rows and draws mixed by their numbers."""
        if not self.settings.popularity_correction:
            return np.zeros(len(candidates), np.float32)
        counts = self.catalogue.counts
        drawn = self.settings.sampled_negatives
        share = (samples * counts[candidates] / counts.sum() + drawn / len(counts)) / (
            samples + drawn
        )
        return np.log(share).astype(np.float32)


def softmax_losses(
    users: Tensor,
    candidates: Tensor,
    own: Tensor,
    ids: Tensor,
    log_shares: Tensor,
    *,
    temperature: float,
) -> Tensor:
    """``-log softmax`` of each sample's own item among the candidates.

    The logit of candidate ``j`` is ``users_i * candidates_j / temperature - log_shares_j`` (Yi et al.,
    2019, equation 3).  A candidate that is the sample's own item once more does not count.

    Args:
        users: ``[B, D]``.
        candidates: ``[M, D]``.
        own: ``[B]`` int64, where each sample's item stands among the candidates.
        ids: ``[M]`` int64, which items they are.
        log_shares: ``[M]``.
        temperature: see above.

    Returns:
        ``[B]``, of at least 0.
    """
    logits = users @ candidates.t() / temperature - log_shares
    again = ids == ids[own].unsqueeze(1)
    again[torch.arange(len(own), device=own.device), own] = False
    return functional.cross_entropy(logits.masked_fill(again, float("-inf")), own, reduction="none")


def batch_losses(
    users: Tensor, items: Tensor, batch: Batch, ranks: Ranks, *, temperature: float
) -> Tensor:
    """``[B]``: each sample's loss, times its weight; 0 of samples whose label is not above 0.

    ``users`` is ``[B, D]`` and ``items`` ``[B + E, D]`` of this rank.
    """
    ids, log_shares = batch.item_ids, batch.item_log_shares
    assert ids is not None, "see `ItemSampler`"
    assert log_shares is not None, "see `ItemSampler`"
    first = 0
    if not ranks.alone:
        counts = torch.zeros(ranks.world_size, dtype=torch.int64, device=ids.device)
        counts[ranks.rank] = len(ids)
        dist.all_reduce(counts)
        sizes: list[int] = counts.tolist()
        first = sum(sizes[: ranks.rank])
        items = _Gathered.apply(items, sizes, ranks.rank)  # type: ignore[no-untyped-call] # torch's
        ids = gathered(ids, sizes)
        log_shares = gathered(log_shares, sizes)
    own = first + torch.arange(len(users), device=users.device)
    losses = softmax_losses(users, items, own, ids, log_shares, temperature=temperature)
    labels = torch.nan_to_num(batch.labels, nan=0.0)
    counted = (labels > 0).float() if batch.weights is None else (labels > 0) * batch.weights
    return losses * counted


def gathered(rows: Tensor, sizes: list[int]) -> Tensor:
    """The rows of all ranks, rank by rank; ``sizes`` are how many each has."""
    padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
    padded[: len(rows)] = rows
    everyone = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyone, padded)
    return torch.cat([part[:size] for part, size in zip(everyone, sizes, strict=True)])


class _Gathered(torch.autograd.Function):
    """`gathered` with a gradient: what all ranks' losses say of this rank's rows, added."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], rank: int) -> Tensor:
        ctx.place = (sum(sizes[:rank]), sizes[rank])
        return gathered(rows, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        first, size = ctx.place
        total = gradient.contiguous()
        dist.all_reduce(total)
        return total[first : first + size], None, None
