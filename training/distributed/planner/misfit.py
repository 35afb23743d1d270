"""The message for tables that fit nowhere: why, and what would help."""

from __future__ import annotations

from tessera.training.distributed.planner.constants import GIB
from tessera.training.distributed.planner.search import options_by_table
from tessera.training.distributed.planner.types import ShardingOption, Topology


def explain_misfit(search_space: list[ShardingOption], topology: Topology, left: Topology) -> str:
    """A message that names the table, how much is missing, and remedies.

    Three cases, the most certain first: a table none of whose ways fits an empty rank; tables
    that take more than all ranks have; tables that would fit in sum but not as they are cut.
    """
    device = topology.compute_device
    kind = "device memory" if device == "cuda" else "host memory"
    rooms = [d.storage.on(device) for d in left.devices]
    reserved = topology.devices[0].storage.on(device) - rooms[0]
    reservation = f"{reserved / GIB:.2f} GiB of it reserved for the rest of the model"
    tables = options_by_table(search_space)

    def largest_shard(option: ShardingOption) -> int:
        return max(shard.used.on(device) for shard in option.shards)

    option = max(
        (min(options, key=largest_shard) for options in tables.values()), key=largest_shard
    )
    missing = largest_shard(option) - max(rooms)
    if missing > 0:
        rows, columns = option.tensor.shape
        return (
            f"table {option.fqn!r} ({rows} x {columns}) fits on no rank: cut {option.sharding_type} with "
            f"kernel {option.compute_kernel}, its largest shard takes "
            f"{largest_shard(option) / GIB:.2f} GiB of {kind} with state, ids and vectors; a rank "
            f"has {max(rooms) / GIB:.2f} GiB left for tables ({reservation}): "
            f"{missing / GIB:.2f} GiB are missing. {_remedies(option, topology)}"
        )
    smallest = {
        fqn: min(option.total_storage.on(device) for option in options)
        for fqn, options in tables.items()
    }
    needed, room = sum(smallest.values()), sum(rooms)
    largest = max(smallest, key=lambda fqn: smallest[fqn])
    option = tables[largest][0]
    if needed > room:
        return (
            f"the tables need {needed / GIB:.2f} GiB of {kind} in their smallest form; "
            f"{topology.world_size} ranks have {room / GIB:.2f} GiB left for tables "
            f"({reservation}, each): {(needed - room) / GIB:.2f} GiB are missing. The largest table "
            f"is {largest!r} with {smallest[largest] / GIB:.2f} GiB. {_remedies(option, topology)}"
        )
    return (
        f"the tables need {needed / GIB:.2f} GiB of {kind} and {topology.world_size} ranks have "
        f"{room / GIB:.2f} GiB left for tables ({reservation}, each), but no arrangement that was "
        f"tried fits: shards are too large for the gaps. The largest table is {largest!r} with "
        f"{smallest[largest] / GIB:.2f} GiB; let it be cut (row_wise, column_wise). "
        f"{_remedies(option, topology)}"
    )


def _remedies(option: ShardingOption, topology: Topology) -> str:
    remedies = ["more ranks", "a smaller batch", "fewer rows", "an optimizer with less state"]
    if topology.compute_device == "cuda":
        remedies.insert(1, "the kernels 'fused_uvm_caching' or 'fused_uvm' (rows in host memory)")
    constraint = option.constraints
    if constraint is not None and constraint.sharding_types is not None:
        remedies.insert(0, f"more sharding types than {constraint.sharding_types}")
    return "What would help: " + ", ".join(remedies) + "."
