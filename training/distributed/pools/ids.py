"""Ids of rows to the ranks or devices that hold them.

Legend: ``N`` ids, ``W`` ranks or devices.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tessera.training.distributed.comm.awaitable import Awaitable
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.pools.interfaces import ObjectPoolRwShardingContext
from tessera.training.distributed.travel.rows_all_to_all import TensorAllToAll

# Annotations are not postponed here: TorchScript compiles the functions by themselves.


@torch.fx.wrap
def sort_by_block(ids: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sort ids by the block that holds them; within a block they keep their order.

    Args:
        ids: ``[N]`` int32 or int64.
        bounds: ``[W + 1]`` int64, where each block begins, and the end.

    Returns:
        ``[N]`` the ids in their new order, each counted from the first row of its block; ``[N]`` int64, the
        place there of each id; ``[N]`` int64, the block of each id as it was given; ``[W]`` int64, ids of
        each block; ``[N]`` int64, the place as it was given of each id in the new order.
    """
    if bounds.size(0) == 2:
        places = torch.arange(ids.size(0), device=ids.device)
        counts = torch.full((1,), ids.size(0), dtype=torch.int64, device=ids.device)
        return ids - bounds[0].to(ids.dtype), places, torch.zeros_like(places), counts, places
    # An id beyond the rows goes to the last block, where it is beyond the rows, too.
    blocks = torch.searchsorted(bounds[1:-1], ids.long(), right=True)
    in_order, order = torch.sort(blocks, stable=True)
    places = torch.empty_like(order)
    places.scatter_(0, order, torch.arange(order.size(0), device=ids.device))
    local = ids.index_select(0, order) - bounds.index_select(0, in_order).to(ids.dtype)
    firsts = torch.searchsorted(in_order, torch.arange(bounds.size(0), device=ids.device))
    return local, places, blocks, firsts.diff(), order


@torch.fx.wrap
def split_by_block(parts: Tensor, counts: Tensor) -> list[Tensor]:
    """``parts`` ``[N, ...]`` cut into ``counts`` ``[W]``."""
    sizes: list[int] = counts.tolist()
    return list(parts.split_with_sizes(sizes))


class RwObjectPoolIDsDist(nn.Module):
    """Sends ids to the ranks that hold their rows.

    Args:
        pg: the ranks that take part; None: this one alone.
        is_update: whether rows go the way of the ids, and not back.
        bucketize_world_size: among how many ranks the rows are divided; None: all of ``pg``.
        num_replicas: how often each row is there; each copy gets the ids. ``pg`` has the ranks of one copy after
            those of another.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup | None,
        is_update: bool = True,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        bucketize_world_size: int | None = None,
        num_replicas: int = 1,
    ) -> None:
        super().__init__()
        self._dist = TensorAllToAll(pg)
        self._is_update = is_update
        self._ranks = bucketize_world_size or (1 if pg is None else pg.size())
        self._replicas = num_replicas
        self._bounds: Tensor | None = None
        self._bounds_of: Tensor | None = None

    def forward(
        self, ctx: ObjectPoolRwShardingContext, ids: Tensor
    ) -> Awaitable[Awaitable[Tensor]]:
        """Begin to send ``ids``.

        Args:
            ctx: has the ``block_size``; learns how many rows go to and come from each rank and in which order.
            ids: ``[N]`` int32 or int64.

        Returns:
            Wait twice for the ids of this rank's rows, counted from its first, in the order of the ranks that
            sent them.
        """
        sent, counts = self.by_rank(ctx, ids)
        begun = self._dist(sent, counts)
        ways = counts, begun.output_splits
        if not self._is_update:  # rows come from where the ids went
            ways = ways[1], ways[0]
        ctx.num_ids_each_rank_to_send, ctx.num_ids_each_rank_to_receive = ways
        return begun  # type: ignore[no-any-return] # torch's modules give Any

    def _bounds_on(self, device: torch.device, block_size: Tensor) -> Tensor:
        """Where each rank's block begins, and the end, ``[W + 1]`` int64; made when ``block_size`` is another tensor."""
        if (
            self._bounds is None
            or self._bounds_of is not block_size
            or self._bounds.device != device
        ):
            self._bounds = torch.arange(self._ranks + 1, device=device) * block_size.to(device)
            self._bounds_of = block_size
        return self._bounds

    def by_rank(self, ctx: ObjectPoolRwShardingContext, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The ids in the order of the ranks that hold their rows, and how many each rank gets, ``[W]``.

        Args:
            ctx: as of `forward`; learns in which order they are.
            ids: ``[N]`` int32 or int64.
        """
        assert ctx.block_size is not None, "a sharding makes contexts with the size of its blocks"
        bounds = self._bounds_on(ids.device, ctx.block_size)
        sent, places, _, counts, order = sort_by_block(ids, bounds)
        ctx.ids_before_input_dist, ctx.unbucketize_permute = ids, places
        ctx.bucketize_permute = order
        if self._replicas > 1:
            sent, counts = sent.repeat(self._replicas), counts.repeat(self._replicas)
        return sent, counts


class InferRwObjectPoolInputDist(nn.Module):
    """Gives each device of one process the ids of its rows.

    Args:
        env: ``world_size`` devices.
        device: of the ids; where it is the CPU all devices are, otherwise device ``r`` is the ``r``-th of
            its type.
        block_size: ``[1]``, rows of a block.
        block_bucketize_row_pos: one tensor ``[W + 1]``, where the blocks begin and the end, for blocks of
            different sizes; they take the place of ``block_size``.
    """

    def __init__(
        self,
        env: ShardingEnv,
        device: torch.device,
        block_size: Tensor,
        block_bucketize_row_pos: list[Tensor] | None = None,
    ) -> None:
        super().__init__()
        places = torch.arange(env.world_size + 1, device=device)
        given = block_bucketize_row_pos[0] if block_bucketize_row_pos else places * block_size
        self._bounds: Tensor
        self.register_buffer("_bounds", given.to(device, torch.int64), persistent=False)
        self._devices = shard_devices(device, env.world_size)

    def forward(self, ids: Tensor) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """Divide the ids ``[N]`` of a lookup.

        Returns:
            ``W`` tensors of ids, counted from the first row of each device; and of `sort_by_block` the place
            of each id, the device of each, and ids per device.
        """
        local, places, blocks, counts, _ = sort_by_block(ids, self._bounds)
        parts = split_by_block(local, counts)
        moved = [parts[rank].to(device) for rank, device in enumerate(self._devices)]
        return moved, places, blocks, counts

    def update(self, ids: Tensor, values: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Divide ids ``[N]`` and what is written to their rows ``[N, ...]``.

        Returns:
            ``W`` tensors of ids, as many of values, and ``[N]`` the place of each id among all of them.
        """
        local, places, _, counts, order = sort_by_block(ids, self._bounds)
        sorted_values = values.index_select(0, order)
        parts, rows = split_by_block(local, counts), split_by_block(sorted_values, counts)
        return (
            [parts[rank].to(device) for rank, device in enumerate(self._devices)],
            [rows[rank].to(device) for rank, device in enumerate(self._devices)],
            places,
        )


def shard_devices(device: torch.device, world_size: int) -> list[torch.device]:
    """The device of each shard: all the CPU, or the accelerators of the type of ``device``."""
    if device.type in {"cpu", "meta"}:
        return [device] * world_size
    return [torch.device(device.type, rank) for rank in range(world_size)]
