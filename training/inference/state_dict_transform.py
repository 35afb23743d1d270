"""State dicts of sharded models, moved to another device and gathered on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.shard import Shard


def state_dict_gather(src: Mapping[str, Tensor | ShardedTensor], dst: Mapping[str, Tensor]) -> None:
    """Fill ``dst`` with the values of ``src``; every rank calls it, and a sharded table comes whole to rank 0.

    Args:
        src: has every name of ``dst``; its sharded tensors are on devices that their process group serves.
        dst: whole tensors.  On other ranks than 0, those of sharded tables stay as they are.

    Raises:
        KeyError: ``src`` lacks a name.
        ValueError: a value is not a tensor.
    """
    for name, target in dst.items():
        value = src[name]
        if isinstance(value, ShardedTensor):
            out = target if dist.get_rank() == 0 else None
            value.gather(out=out, dtype=target.dtype)
        else:
            target.copy_(_checked(name, value))


def state_dict_all_gather_keys(
    state_dict: Mapping[str, Tensor | ShardedTensor], pg: dist.ProcessGroup
) -> list[str]:
    """The names of the state dicts of all ranks of ``pg``, each once, sorted."""
    return sorted(_shards_of_all(dict.fromkeys(state_dict), pg))


def state_dict_to_device(
    state_dict: Mapping[str, Tensor | ShardedTensor], pg: dist.ProcessGroup, device: torch.device
) -> dict[str, Tensor | ShardedTensor]:
    """Copy a state dict to ``device``; every rank of ``pg`` calls it.

    Args:
        state_dict: of this rank.
        pg: ranks, joined by a backend that serves ``device``.
        device: where the copies are.

    Returns:
        The names of all ranks; a sharded tensor that this rank has no part of is there, too.

    Raises:
        ValueError: a value is not a tensor.
    """
    own = {
        name: value.metadata() if isinstance(value, ShardedTensor) else None
        for name, value in state_dict.items()
    }
    moved: dict[str, Tensor | ShardedTensor] = {}
    for name, metadata in sorted(_shards_of_all(own, pg).items()):
        value = state_dict.get(name)
        if metadata is not None:
            shards = value.local_shards() if isinstance(value, ShardedTensor) else []
            moved[name] = _sharded(shards, metadata, pg, device)
        elif value is not None:
            moved[name] = _checked(name, value).to(device)
    return moved


def _shards_of_all(own: Mapping[str, Any], pg: dist.ProcessGroup) -> dict[str, Any]:
    """The entries of all ranks; of one name the first that is not None."""
    ranks: list[Mapping[str, Any]] = [{} for _ in range(dist.get_world_size(pg))]
    dist.all_gather_object(ranks, dict(own), pg)
    found: dict[str, Any] = {}
    for entries in ranks:
        for name, entry in entries.items():
            if found.get(name) is None:
                found[name] = entry
    return found


def _sharded(
    shards: list[Shard],
    metadata: ShardedTensorMetadata,
    pg: dist.ProcessGroup,
    device: torch.device,
) -> ShardedTensor:
    def there(place: ShardMetadata) -> ShardMetadata:
        assert place.placement is not None
        where = f"rank:{place.placement.rank()}/{device}"
        return ShardMetadata(list(place.shard_offsets), list(place.shard_sizes), where)

    whole = ShardedTensorMetadata(
        shards_metadata=[there(place) for place in metadata.shards_metadata],
        size=metadata.size,
        tensor_properties=metadata.tensor_properties,
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(  # noqa: SLF001 - the only way that asks no other rank
        [Shard(shard.tensor.to(device), there(shard.metadata)) for shard in shards],
        whole,
        process_group=pg,
    )


def _checked(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(  # noqa: TRY004 - what users give wrongly is a ValueError
            f"state dict entry {name!r} is of type {type(value).__name__}; leave out what is not a tensor"
        )
    return value
