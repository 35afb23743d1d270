"""Evaluation of a model for retrieval: each user's best items, out of all items of the training rows.

Shapes: ``Q`` queries, ``I`` items, ``B`` samples of this rank, ``D`` numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tessera.errors import UserError
from tessera.training.config import ExperimentConfig, RetrievalConfig
from tessera.training.data.batch import Batch
from tessera.training.data.catalogue import Catalogue, collect, required_item_id, single_ids
from tessera.training.data.columns import FeatureColumns
from tessera.training.data.dataset import View
from tessera.training.data.item_rows import items_alone
from tessera.training.models.config import RetrievalSettings
from tessera.training.trainer.ranks import Ranks
from tessera.training.trainer.retrieval_metrics import RetrievalEvaluation, best_items, gains

_QUERIES = 512  # whose scores are held at a time


@dataclass(frozen=True, kw_only=True)
class RetrievalData:
    """What a run knows of its items.

    Attributes:
        settings: of the model.
        config: how it is evaluated.
        columns: of the data.
        catalogue: the items of the training rows.
    """

    settings: RetrievalSettings
    config: RetrievalConfig
    columns: FeatureColumns
    catalogue: Catalogue

    @property
    def item_id(self) -> str:
        """The data's column of the item's id."""
        return required_item_id(self.columns)


def retrieval_data(
    config: ExperimentConfig, train: View, ranks: Ranks, *, progress: bool
) -> RetrievalData | None:
    """What is known of the items of the rows ``train``; None of a model that is not for retrieval.

    Rank 0 goes through them; all ranks call it.
    """
    settings = config.model.retrieval()
    if settings is None:
        return None
    columns = train.dataset.columns
    return RetrievalData(
        settings=settings,
        config=config.train.retrieval,
        columns=columns,
        catalogue=ranks.on_first(lambda: collect(columns, train, progress=progress)),
    )


def check_metric(config: ExperimentConfig, valid: View) -> None:
    """Check that ``train.metric`` is one that the model has.

    Raises:
        UserError: it is not.
    """
    metric, arch = config.train.metric, config.model.arch
    if config.model.retrieval() is None:
        if metric in {"recall", "ndcg"}:
            raise UserError(
                f"train.metric={metric!r}: arch {arch} has no vectors to retrieve items by; set"
                " train.metric=auc or log_loss, or model.arch=two_tower"
            )
    elif metric == "log_loss":
        raise UserError(
            f"train.metric='log_loss': arch {arch} gives scores and no probabilities; set"
            " train.metric=recall or ndcg, or auc where the labels have both classes"
        )
    elif metric == "auc" and len(np.unique(valid.labels())) < 2:
        raise UserError(
            "train.metric='auc': all validation rows have the same label, so that no AUC is defined; set"
            " train.metric=recall or ndcg"
        )


@dataclass(kw_only=True)
class Queries:
    """The queries of a split, collected batch by batch; every rank has those of all.

    Attributes:
        data: what is known of the items.
        ranks: who evaluates together.
    """

    data: RetrievalData
    ranks: Ranks
    _vectors: list[npt.NDArray[np.float32]] = field(default_factory=list)
    _relevant: list[dict[int, None]] = field(default_factory=list)
    _of_user: dict[int, int] = field(default_factory=dict)
    _users: list[int] = field(default_factory=list)

    def update(self, batch: Batch, vectors: Tensor) -> None:
        """Take a batch of raw values with its users' vectors ``[B, D]``; all ranks call it."""
        columns = self.data.columns
        items = single_ids(batch, self.data.item_id)
        users = np.zeros_like(items)
        if columns.user_id is not None:
            users = single_ids(batch, columns.user_id)
        positive = batch.labels.numpy() > 0
        facts = np.stack([users, items], axis=1)[positive]
        all_facts = self.ranks.joined(torch.from_numpy(facts)).numpy()
        all_vectors = self.ranks.joined(vectors.cpu()[torch.from_numpy(positive)]).numpy()
        fresh = []
        for row, (user, item) in enumerate(all_facts.tolist()):
            query = self._of_user.get(user) if columns.user_id is not None else None
            if query is None:
                query = self._of_user[user] = len(self._relevant)
                self._relevant.append({})
                self._users.append(user)
                fresh.append(row)
            self._relevant[query][item] = None
        self._vectors.append(all_vectors[fresh])

    def compute(self, items: npt.NDArray[np.float32]) -> RetrievalEvaluation:
        """The metrics for the items' vectors ``[I, D]``; all ranks call it, each scores its part."""
        k, catalogue, ranks = self.data.config.k, self.data.catalogue, self.ranks
        users = np.concatenate([np.empty((0, items.shape[1]), np.float32), *self._vectors])
        mine = np.arange(ranks.rank, len(users), ranks.world_size)
        sums = np.zeros(5)  # queries, recall, ndcg, relevant items, those that are not known
        for start in range(0, len(mine), _QUERIES):
            part = mine[start : start + _QUERIES]
            excluded = self._excluded(part)
            relevant, missing = [], []
            for place, query in enumerate(part.tolist()):
                ids = np.array(list(self._relevant[query]), np.int64)
                places = catalogue.places(ids)
                missing.append(int((places < 0).sum()))
                own = places[places >= 0]
                relevant.append(own if excluded is None else np.setdiff1d(own, excluded[place]))
            totals = np.array([len(own) for own in relevant], np.int64) + np.array(missing)
            asked = totals > 0
            if not asked.any():
                continue
            found = best_items(
                users[part][asked],
                items,
                k,
                None
                if excluded is None
                else [e for e, a in zip(excluded, asked, strict=True) if a],
            )
            some = [own for own, a in zip(relevant, asked, strict=True) if a]
            both = gains(found, some, np.array(missing)[asked], k)
            sums += [asked.sum(), *both.sum(axis=0), totals.sum(), sum(missing)]
        queries, recall, ndcg, wanted, unknown = ranks.sum(sums.tolist())
        return RetrievalEvaluation(
            k=k,
            queries=int(queries),
            recall=recall / queries if queries else float("nan"),
            ndcg=ndcg / queries if queries else float("nan"),
            unknown_items=unknown / wanted if wanted else float("nan"),
        )

    def _excluded(self, queries: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]] | None:
        """By query, the places of the items that its user has in the training rows."""
        catalogue = self.data.catalogue
        if not self.data.config.exclude_known or catalogue.known is None:
            return None
        users = np.array([self._users[query] for query in queries.tolist()], np.int64)
        starts, counts = catalogue.items_of(users)
        known = catalogue.known[1]
        return [
            np.unique(known[start : start + count])
            for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
        ]


def item_vectors(
    data: RetrievalData,
    ranks: Ranks,
    vectors_of: Callable[[Batch, int], Tensor],
    *,
    batch_size: int,
) -> npt.NDArray[np.float32]:
    """``[I, D]``: the vectors of all items, each rank computing its part of every batch.

    ``vectors_of`` gives those of a batch of raw values and the number of all ranks' rows.
    """
    parts = []
    for start in range(0, len(data.catalogue), batch_size):
        count = min(batch_size, len(data.catalogue) - start)
        first, last = (count * r // ranks.world_size for r in (ranks.rank, ranks.rank + 1))
        places = np.arange(start + first, start + last, dtype=np.int64)
        batch = items_alone(data.columns, data.catalogue, places)
        parts.append(ranks.joined(vectors_of(batch, count).cpu()).numpy())
    return np.concatenate(parts)
