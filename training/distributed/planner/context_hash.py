"""Whether two planners would make the same plan, told by a hash of what goes into it.

Memory is rounded to two digits: hosts of one kind differ by some megabytes, and a restarted job should
find its plan again.  What is hashed is TorchRec's choice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tessera.training.distributed.planner.constraints import ParameterConstraints
    from tessera.training.distributed.planner.hardware import Topology


def hash_sha256_str(hashable_list: list[Any]) -> str:
    """The SHA-256 of a list's text, in hexadecimal."""
    return hashlib.sha256(str(hashable_list).encode()).hexdigest()


def hash_sha256_to_int(hashable_list: list[Any]) -> int:
    """The SHA-256 of a list's text as a number."""
    return int(hash_sha256_str(hashable_list), 16)


def topology_parts(topology: Topology) -> list[tuple[str, Any]]:
    """What a plan depends on of a topology, the same in every process."""
    parts = dict(vars(topology))
    links = topology.comms_bandwidths
    kind = type(links).__qualname__
    parts["comms_bandwidths"] = (kind, links.intra_host_bw, links.inter_host_bw)
    parts["devices"] = [
        [_rounded(size) for size in (each.storage.hbm, each.storage.ddr, each.storage.ssd)]
        for each in topology.devices
    ]
    return sorted(parts.items())


def _rounded(size: int) -> str:
    return f"{size:.1e}"


def hash_planner_context_inputs(  # noqa: PLR0917 - the signature TorchRec users know
    topology: Topology,
    batch_size: int,
    enumerator: Any,
    storage_reservation: Any,
    constraints: Mapping[str, ParameterConstraints] | None,
    hash_function: Callable[[list[Any]], int] = hash_sha256_to_int,
) -> int:
    """A number that is the same for inputs of equal plans, in every process.

    Args:
        topology: the ranks.
        batch_size: samples per rank and step.
        enumerator: an `EmbeddingEnumerator` that has listed the ways (``last_stored_search_space``).
        storage_reservation: one that has reserved memory (``last_reserved_topology``).
        constraints: by table name.
        hash_function: of a list of what is told apart.

    Raises:
        ValueError: no ways were listed, or no memory was reserved.
    """
    return hash_function(
        _inputs(topology, batch_size, enumerator, storage_reservation, constraints)
    )


def hash_planner_context_inputs_str(  # noqa: PLR0917 - the signature TorchRec users know
    topology: Topology,
    batch_size: int,
    enumerator: Any,
    storage_reservation: Any,
    constraints: Mapping[str, ParameterConstraints] | None,
    hash_function: Callable[[list[Any]], str] = hash_sha256_str,
) -> str:
    """`hash_planner_context_inputs` as a text."""
    return hash_function(
        _inputs(topology, batch_size, enumerator, storage_reservation, constraints)
    )


def _inputs(
    topology: Topology,
    batch_size: int,
    enumerator: Any,
    storage_reservation: Any,
    constraints: Mapping[str, ParameterConstraints] | None,
) -> list[Any]:
    space = getattr(enumerator, "last_stored_search_space", None)
    if space is None:
        raise ValueError("the enumerator has listed no ways yet; call enumerate first")
    left = getattr(storage_reservation, "last_reserved_topology", None)
    if left is None:
        raise ValueError("the storage reservation has reserved nothing yet; call reserve first")
    ways = [
        [
            option.fqn,
            option.sharding_type,
            option.compute_kernel,
            [(list(shard.size), list(shard.offset)) for shard in option.shards],
            option.cache_params,
        ]
        for option in space
    ]
    return [
        topology_parts(topology),
        batch_size,
        ways,
        type(storage_reservation).__name__,
        topology_parts(left),
        sorted((constraints or {}).items()),
    ]
