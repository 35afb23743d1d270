"""Which ids a managed collision module keeps: eviction policies.

A policy scores the ids that have rows and the new ids of the last batches, and the highest scores get
the rows.

Shapes: ``U`` different new ids, those that have a row before the others, each part sorted; ``H`` ids in the history, in the order in which they came; ``K`` ids that
can have a row of their own; ``M`` of the ``U`` ids have one already.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tessera.training.modules.mc_exchange import by_falling, exchanged
from tessera.training.modules.mc_thresholds import ThresholdFilter


class MCHEvictionPolicyMetadataInfo(NamedTuple):
    """What a policy remembers of ids.

    Attributes:
        metadata_name: the buffer's name without ``_mch_`` or ``_history_``.
        is_mch_metadata: whether a number is kept for each id that has a row.
        is_history_metadata: whether a number is kept for each id in the history.
    """

    metadata_name: str
    is_mch_metadata: bool
    is_history_metadata: bool


class MCHEvictionPolicy(ABC):
    """Decides which ids get a module's rows.

    Args:
        metadata_info: what it remembers of ids.
        threshold_filtering_func: which of the new ids are counted; None: all.
    """

    def __init__(
        self,
        metadata_info: list[MCHEvictionPolicyMetadataInfo],
        threshold_filtering_func: ThresholdFilter | None = None,
    ) -> None:
        self._metadata_info = metadata_info
        self._threshold_filtering_func = threshold_filtering_func

    @property
    @abstractmethod
    def metadata_info(self) -> list[MCHEvictionPolicyMetadataInfo]:
        """What the policy remembers of ids."""

    @abstractmethod
    def record_history_metadata(
        self, current_iter: int, incoming_ids: Tensor, history_metadata: dict[str, Tensor]
    ) -> None:
        """Write what is remembered of the ids of one batch.

        Args:
            current_iter: the number of the training step, from 1.
            incoming_ids: ``[N]`` int64.
            history_metadata: by name ``[N]`` int64, filled here.
        """

    @abstractmethod
    def coalesce_history_metadata(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        current_iter: int,
        history_metadata: dict[str, Tensor],
        unique_ids_counts: Tensor,
        unique_inverse_mapping: Tensor,
        additional_ids: Tensor | None = None,
        threshold_mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """One number for each different id, of those for each id.

        Args:
            current_iter: the number of the training step.
            history_metadata: by name, ``[H]``.
            unique_ids_counts: ``[V]`` how often each different id came.
            unique_inverse_mapping: ``[H]``, and those of ``additional_ids`` behind them: the place of
                each id among the different ones.
            additional_ids: ids beside the history, which count as of this step.
            threshold_mask: ``[V]`` bool, which ids are counted; None: all.

        Returns:
            By name ``[U]``, of the ids that are counted.
        """

    @abstractmethod
    def update_metadata_and_generate_eviction_scores(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        current_iter: int,
        mch_size: int,
        coalesced_history_argsort_mapping: Tensor,
        coalesced_history_sorted_unique_ids_counts: Tensor,
        coalesced_history_mch_matching_elements_mask: Tensor,
        coalesced_history_mch_matching_indices: Tensor,
        mch_metadata: dict[str, Tensor],
        coalesced_history_metadata: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Count the new ids, and choose which of them get the places of which known ones.

        Args:
            current_iter: the number of the training step.
            mch_size: ``K``.
            coalesced_history_argsort_mapping: ``[U]``, the order that sorts the ids.
            coalesced_history_sorted_unique_ids_counts: ``[U]`` int64, in the sorted order.
            coalesced_history_mch_matching_elements_mask: ``[U]`` bool, whether the id has a row.
            coalesced_history_mch_matching_indices: ``[M]`` the places of those.
            mch_metadata: by name ``[K]`` int64, changed in place: the numbers of ids that have
                a row, and those of new ids in the places that they get.
            coalesced_history_metadata: by name ``[U]``, in the order before sorting.

        Returns:
            ``[E]`` places to give up, and ``[E]`` which of the ``U`` sorted ids get them.
        """

    def scores_of(
        self, current_iter: int, ids: Tensor, mch_metadata: Mapping[str, Tensor]
    ) -> Tensor:
        """One number for each id of a map that is too small for all: the highest stay.

        Args:
            current_iter: the step.
            ids: ``[n]``, ascending.
            mch_metadata: what is remembered of each, ``[n]``.

        Returns:
            ``[n]``; all alike unless a policy says otherwise.
        """
        del current_iter, mch_metadata
        return torch.zeros_like(ids)

    def exchange_known_first(  # noqa: PLR0917 - as above
        self,
        current_iter: int,
        mch_size: int,
        counts: Tensor,
        known_places: Tensor,
        mch_metadata: dict[str, Tensor],
        fresh: dict[str, Tensor],
        *,
        of_one_batch: bool,
    ) -> tuple[Tensor, Tensor]:
        """`update_metadata_and_generate_eviction_scores` of ids of which those that have a row come first.

        Args:
            current_iter: the number of the training step.
            mch_size: ``K``.
            counts: ``[U]`` int64, how often each came.
            known_places: ``[M]`` the places of the first ones.
            mch_metadata: by name ``[K]`` int64, changed in place.
            fresh: by name ``[U]``.
            of_one_batch: whether all came in this step.

        Returns:
            ``[E]`` places to give up, and ``[E]`` which of the ``U - M`` new ids get them.
        """
        del of_one_batch
        known = torch.ones_like(counts, dtype=torch.bool)
        known[known_places.numel() :] = False
        places_E, chosen_E = self.update_metadata_and_generate_eviction_scores(
            current_iter,
            mch_size,
            torch.arange(counts.numel(), device=counts.device),
            counts,
            known,
            known_places,
            mch_metadata,
            fresh,
        )
        return places_E, chosen_E - known_places.numel()


class _Remembered(NamedTuple):
    """What is remembered of ids, by name.

    Attributes:
        step: the training step.
        held: of those that have a row, ``[K]``.
        new: of those that have none, and their counts.
        of_one_batch: whether these came in this step alone.
    """

    step: int
    held: Mapping[str, Tensor]
    new: Mapping[str, Tensor]
    of_one_batch: bool


_BothScores = tuple[Tensor, Tensor]
"""The scores of ids that have a row, and those of new ones."""


class _ScoringPolicy(MCHEvictionPolicy):
    """Remembers how often ids came, when they came last, or both; a subclass scores them by that.

    The ids with the highest scores get the rows; of equal ones those that have a row, by
    place, then new ones, the more frequent before the smaller ids.
    """

    _names: tuple[str, ...]

    def __init__(self, threshold_filtering_func: ThresholdFilter | None = None) -> None:
        info = [
            MCHEvictionPolicyMetadataInfo(
                name, is_mch_metadata=True, is_history_metadata=in_history
            )
            for name, in_history in (("counts", False), ("last_access_iter", True))
            if name in self._names
        ]
        super().__init__(info, threshold_filtering_func)

    @property
    def metadata_info(self) -> list[MCHEvictionPolicyMetadataInfo]:
        """What the policy remembers of ids."""
        return self._metadata_info

    def record_history_metadata(
        self, current_iter: int, incoming_ids: Tensor, history_metadata: dict[str, Tensor]
    ) -> None:
        """Write the step of the batch beside each of its ids, where the policy remembers that."""
        del incoming_ids
        if "last_access_iter" in history_metadata:
            history_metadata["last_access_iter"].fill_(current_iter)

    def coalesce_history_metadata(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        current_iter: int,
        history_metadata: dict[str, Tensor],
        unique_ids_counts: Tensor,
        unique_inverse_mapping: Tensor,
        additional_ids: Tensor | None = None,
        threshold_mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The last step in which each different id came, where the policy remembers that."""
        if "last_access_iter" not in history_metadata:
            return {}
        steps = history_metadata["last_access_iter"]
        if additional_ids is not None:
            steps = torch.cat([steps, torch.full_like(additional_ids, current_iter)])
        last = torch.zeros_like(unique_ids_counts, dtype=torch.int64)
        last.scatter_reduce_(0, unique_inverse_mapping, steps, "amax")
        return {"last_access_iter": last if threshold_mask is None else last[threshold_mask]}

    @abstractmethod
    def _scores(self, current_iter: int, metadata: Mapping[str, Tensor]) -> Tensor:
        """One number for each id, of what is remembered of it: the higher, the longer it stays."""

    def _scores_with_counts(self, ids: _Remembered) -> _BothScores | None:
        """Scores in whose order new ids that are equal otherwise stand by their counts.

        None where a policy has no such; new ids are sorted by their counts before they are scored then.
        """
        del ids
        return None

    def _both_scores(self, ids: _Remembered) -> _BothScores:
        return self._scores(ids.step, ids.held), self._scores(ids.step, ids.new)

    def scores_of(
        self, current_iter: int, ids: Tensor, mch_metadata: Mapping[str, Tensor]
    ) -> Tensor:
        """The scores by which ids are given rows."""
        del ids
        return self._scores(current_iter, mch_metadata)

    def update_metadata_and_generate_eviction_scores(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        current_iter: int,
        mch_size: int,
        coalesced_history_argsort_mapping: Tensor,
        coalesced_history_sorted_unique_ids_counts: Tensor,
        coalesced_history_mch_matching_elements_mask: Tensor,
        coalesced_history_mch_matching_indices: Tensor,
        mch_metadata: dict[str, Tensor],
        coalesced_history_metadata: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Count the new ids, and give the rows to the ids with the highest scores.

        Arguments and results are those of `MCHEvictionPolicy`.
        """
        del mch_size  # as long as the tensors
        known = coalesced_history_mch_matching_elements_mask
        places = coalesced_history_mch_matching_indices
        # How many are known is known, so that no device has to be asked.
        held = torch.nonzero_static(known, size=places.numel()).squeeze(1)
        candidates = torch.nonzero_static(~known, size=known.numel() - places.numel()).squeeze(1)
        counts = coalesced_history_sorted_unique_ids_counts
        fresh = {
            name: values.index_select(0, coalesced_history_argsort_mapping)
            for name, values in coalesced_history_metadata.items()
        }
        of_known, of_new = (
            {
                name: values.index_select(0, those)
                for name, values in {**fresh, "counts": counts}.items()
            }
            for those in (held, candidates)
        )
        places_E, chosen_E = self._exchange(current_iter, places, mch_metadata, of_known, of_new)
        return places_E, candidates.index_select(0, chosen_E)

    def exchange_known_first(  # noqa: PLR0917 - as of the base class
        self,
        current_iter: int,
        mch_size: int,
        counts: Tensor,
        known_places: Tensor,
        mch_metadata: dict[str, Tensor],
        fresh: dict[str, Tensor],
        *,
        of_one_batch: bool,
    ) -> tuple[Tensor, Tensor]:
        """As of the base class, with fewer operations."""
        own = type(self).update_metadata_and_generate_eviction_scores
        if own is not _ScoringPolicy.update_metadata_and_generate_eviction_scores:
            return super().exchange_known_first(
                current_iter,
                mch_size,
                counts,
                known_places,
                mch_metadata,
                fresh,
                of_one_batch=of_one_batch,
            )
        count, of_all = known_places.numel(), {**fresh, "counts": counts}
        of_known = {name: values[:count] for name, values in of_all.items()}
        of_new = {name: values[count:] for name, values in of_all.items()}
        return self._exchange(
            current_iter,
            known_places,
            mch_metadata,
            of_known,
            of_new,
            of_one_batch=of_one_batch,
        )

    def _exchange(
        self,
        current_iter: int,
        places: Tensor,
        mch_metadata: dict[str, Tensor],
        of_known: dict[str, Tensor],
        of_new: dict[str, Tensor],
        *,
        of_one_batch: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Count ids that have places, and say which of those are given up to which of the new ones."""
        if "counts" in self._names:
            mch_metadata["counts"].index_add_(0, places, of_known["counts"])
        if "last_access_iter" in self._names:
            mch_metadata["last_access_iter"].index_copy_(0, places, of_known["last_access_iter"])
        scores = self._scores_with_counts(
            _Remembered(current_iter, mch_metadata, of_new, of_one_batch)
        )
        if scores is not None:
            places_E, chosen_E = exchanged(*scores)
        else:
            order = by_falling(of_new["counts"])
            scores_N = self._scores(
                current_iter, {name: of_new[name].index_select(0, order) for name in self._names}
            )
            places_E, chosen_E = exchanged(self._scores(current_iter, mch_metadata), scores_N)
            chosen_E = order.index_select(0, chosen_E)
        for name in self._names:
            came = of_new[name].index_select(0, chosen_E)
            mch_metadata[name].index_copy_(0, places_E, came)
        return places_E, chosen_E


def fills_history(policy: MCHEvictionPolicy) -> bool:
    """Whether `record_history_metadata` writes all of what it is given, which then need not be zero."""
    return type(policy).record_history_metadata is _ScoringPolicy.record_history_metadata


_MORE_THAN_COUNTS = 1 << 32  # ids of a history; a step's number times this is an int64


class LFU_EvictionPolicy(_ScoringPolicy):  # noqa: N801 - the name TorchRec users know
    """Keeps the ids that came most often (least frequently used ones go).

    Args:
        threshold_filtering_func: which of the new ids are counted; None: all.
    """

    _names = ("counts",)

    def _scores(self, current_iter: int, metadata: Mapping[str, Tensor]) -> Tensor:
        del current_iter
        return metadata["counts"]

    def _scores_with_counts(self, ids: _Remembered) -> _BothScores:
        return self._both_scores(ids)


class LRU_EvictionPolicy(_ScoringPolicy):  # noqa: N801 - the name TorchRec users know
    """Keeps the ids that came last (least recently used ones go).

    Args:
        decay_exponent: of a score ``1 / (steps since the last + 1) ** decay_exponent``; the order in which
            ids go is the same for all positive values.
        threshold_filtering_func: which of the new ids are counted; None: all.

    Raises:
        ValueError: ``decay_exponent`` is not positive.
    """

    _names = ("last_access_iter",)

    def __init__(
        self,
        decay_exponent: float = 1.0,
        threshold_filtering_func: ThresholdFilter | None = None,
    ) -> None:
        check_decay(decay_exponent)
        super().__init__(threshold_filtering_func)

    def _scores(self, current_iter: int, metadata: Mapping[str, Tensor]) -> Tensor:
        del current_iter
        return metadata["last_access_iter"]

    def _scores_with_counts(self, ids: _Remembered) -> _BothScores:
        # The step, and below it the count, in one number; an id that has a row is above all new ones of its step.
        held, new = ids.held["last_access_iter"], ids.new["last_access_iter"]
        return (held + 1) * _MORE_THAN_COUNTS, torch.add(
            ids.new["counts"], new, alpha=_MORE_THAN_COUNTS
        )


class DistanceLFU_EvictionPolicy(_ScoringPolicy):  # noqa: N801 - the name TorchRec users know
    """Keeps the ids that came often and lately.

    The score of an id is ``count / (steps since the last + 1) ** decay_exponent``.

    Args:
        decay_exponent: how fast the score falls.
        threshold_filtering_func: which of the new ids are counted; None: all.

    Raises:
        ValueError: ``decay_exponent`` is not positive.
    """

    _names = ("counts", "last_access_iter")

    def __init__(
        self,
        decay_exponent: float = 1.0,
        threshold_filtering_func: ThresholdFilter | None = None,
    ) -> None:
        check_decay(decay_exponent)
        super().__init__(threshold_filtering_func)
        self._decay_exponent = decay_exponent

    def _scores(self, current_iter: int, metadata: Mapping[str, Tensor]) -> Tensor:
        distance = current_iter + 1 - metadata["last_access_iter"]
        if self._decay_exponent == 1:
            return metadata["counts"] / distance
        return metadata["counts"] / torch.pow(distance, self._decay_exponent)

    def _scores_with_counts(self, ids: _Remembered) -> _BothScores | None:
        # The distances of new ids of one batch are all 1.
        return self._both_scores(ids) if ids.of_one_batch else None


def check_decay(decay_exponent: float) -> None:
    """Refuse a decay under which ids that came long ago would stay.

    Raises:
        ValueError: it is not positive.
    """
    if not decay_exponent > 0:
        raise ValueError(f"decay_exponent is {decay_exponent}; give a positive number")
