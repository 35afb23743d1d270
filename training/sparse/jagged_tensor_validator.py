"""The checks of a `KeyedJaggedTensor` as a function, for one that was made with ``validate=False``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from tessera.training.sparse.checks import check_keyed_jagged
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

_log = logging.getLogger(__name__)


class Table(Protocol):
    """What is needed of a table's config."""

    num_embeddings: int
    feature_names: list[str]


def validate_keyed_jagged_tensor(
    kjt: KeyedJaggedTensor, configs: Sequence[Table] | None = None
) -> bool:
    """Check that a batch's fields fit each other, and that its ids are rows.

    Args:
        kjt: the batch.
        configs: tables; None: ids are not looked at.

    Returns:
        Whether each id is a row of its feature's table; those that are not are logged.

    Raises:
        ValueError: lengths, offsets, values, weights or keys do not fit each other.
    """
    keys = kjt.keys()
    if len(set(keys)) != len(keys):
        raise ValueError(f"keys {keys} name a feature twice; give each once")
    lengths, offsets, weights = kjt.lengths_or_none(), kjt.offsets_or_none(), kjt.weights_or_none()
    if lengths is None and offsets is None:
        raise ValueError("lengths and offsets are both None; give one of them")
    if weights is not None and weights.numel() != kjt.values().numel():
        raise ValueError(
            f"weights has {weights.numel()} entries but values has {kjt.values().numel()}; give one per value"
        )
    per_rank = kjt.stride_per_key_per_rank() if kjt.variable_stride_per_key() else None
    check_keyed_jagged(keys, kjt.values(), lengths, offsets, None, (per_rank, None))
    rows = {name: table.num_embeddings for table in configs or () for name in table.feature_names}
    fits = True
    for key, bags in kjt.to_dict().items() if rows and keys else ():
        ids = bags.values()
        if key in rows and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < rows[key]:
            _log.warning(
                "feature %r has ids from %d to %d; its table has %d rows",
                key, int(ids.min()), int(ids.max()), rows[key],
            )  # fmt: skip
            fits = False
    return fits
