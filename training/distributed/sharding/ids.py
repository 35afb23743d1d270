"""How ids are sent to the ranks that hold their rows: the components that strategies choose from.

Legend: ``W`` ranks, ``F`` features that are sent, ``T`` teams, ``P`` ranks of a team.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.training.distributed.comm.alltoall_sequence import segment_order
from tessera.training.distributed.comm.awaitable import Awaitable, NoWait
from tessera.training.distributed.sharding.interfaces import BaseSparseFeaturesDist
from tessera.training.distributed.sharding.layout import Team, Way
from tessera.training.distributed.travel.bucketize import (
    blocks_of,
    bucketize_kjt_before_all2all,
)
from tessera.training.distributed.travel.kjt_all_to_all import KJTAllToAll
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

IdsDist = BaseSparseFeaturesDist[KeyedJaggedTensor] | KJTAllToAll


class LocalSparseFeaturesDist(BaseSparseFeaturesDist[KeyedJaggedTensor]):
    """Ids stay: every row that they need is here."""

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """The features as they are."""
        return NoWait(NoWait(sparse_features))


class RwSparseFeaturesDist(BaseSparseFeaturesDist[KeyedJaggedTensor]):
    """Ids to the ranks that hold their rows, within the teams that look up their features.

    Received bags are ordered by the sender's place in its team and then by its team, as the
    reduction over teams needs them; with ``is_sequence`` they are in the senders' order.

    Args:
        pg: all ranks.
        teams: the ranks of each team in the order of their rows; all teams are equally large.
        features_per_team: ``[T]`` features; they come in the teams' order.
        row_bounds: ``[F]``, where the rows of each rank of the team begin, and the end.
        device: of the ids.
        is_sequence: keep where each id went, in ``unbucketize_permute_tensor``.
        need_pos: send each id's place in its bag as its weight.
        keep_original_indices: send ids as they are; otherwise as rows of the receiver's block.
        keys: gives ``[N]`` numbers of the features, which are sorted into ``row_bounds`` in the ids' place while
            the ids are sent as they are, with ``is_sequence``; None: the ids.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        teams: list[Team],
        features_per_team: list[int],
        row_bounds: list[list[int]],
        device: torch.device | None = None,
        *,
        is_sequence: bool = False,
        need_pos: bool = False,
        keep_original_indices: bool = False,
        keys: Callable[[KeyedJaggedTensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._keys = keys
        self._keeps = keep_original_indices
        self._count = len(row_bounds[0]) - 1 if row_bounds else 1
        self._block_sizes, self._bounds = blocks_of(row_bounds, device)
        self._is_sequence, self._need_pos = is_sequence, need_pos
        seats = {
            rank: (team, place)
            for team, ranks in enumerate(teams)
            for place, rank in enumerate(ranks)
        }
        firsts = [sum(features_per_team[:team]) for team in range(len(teams))]
        # Features are sorted into (block, feature); they are sent as (rank, feature of its team).
        order = [
            place * len(row_bounds) + firsts[team] + feature
            for team, place in (seats[rank] for rank in range(pg.size()))
            for feature in range(features_per_team[team])
        ]
        self._order = None if order == list(range(len(order))) else order
        self._order_tensor = torch.tensor(order, dtype=torch.int32, device=device)
        self._dist = KJTAllToAll(
            pg=pg,
            splits=[features_per_team[seats[rank][0]] for rank in range(pg.size())],
            stagger=1 if is_sequence else len(teams),
        )
        self.unbucketize_permute_tensor: Tensor | None = None

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Begin to send ``F`` features."""
        keys = self._keys
        sent, places = bucketize_kjt_before_all2all(
            sparse_features if keys is None else sparse_features.with_values(keys(sparse_features)),
            self._count,
            self._block_sizes,
            output_permute=self._is_sequence,
            bucketize_pos=self._need_pos and sparse_features.weights_or_none() is None,
            block_bucketize_row_pos=self._bounds,
            keep_original_indices=self._keeps,
        )
        if keys is not None and places is not None:
            ids = torch.empty_like(sparse_features.values())
            ids[places] = sparse_features.values()
            sent = sent.with_values(ids)
        if self._order is not None:
            if places is not None:
                places = self._moved(places, sent.length_per_key())
            sent = sent.permute(self._order, self._order_tensor)
        self.unbucketize_permute_tensor = places
        return self._dist(sent)  # type: ignore[no-any-return] # nn.Module's call is untyped

    def _moved(self, places: Tensor, length_per_key: list[int]) -> Tensor:
        """Where ids that were sorted to ``places`` are after the features were put in order."""
        sizes = torch.tensor(length_per_key, device=places.device)
        order = segment_order(sizes, self._order_tensor, places.numel())
        moved_to = torch.empty_like(order)
        moved_to[order] = torch.arange(order.numel(), device=order.device)
        return moved_to[places]


def ids_stay(_: Way) -> IdsDist:
    """Every rank has every row."""
    return LocalSparseFeaturesDist()


def ids_to_tables(way: Way) -> IdsDist:
    """To the rank that holds their feature's table, or to each rank with columns of it."""
    return KJTAllToAll(way.pg, way.layout.features_per_team())


def ids_to_rows(way: Way) -> IdsDist:
    """To the rank of their team that holds their row."""
    return RwSparseFeaturesDist(
        way.pg,
        way.layout.teams,
        way.layout.features_per_team(),
        way.layout.row_bounds,
        way.device,
        is_sequence=way.is_sequence,
        need_pos=any(
            table.has_feature_processor for own in way.layout.tables_per_rank for table in own
        ),
    )
