"""Each id of a batch is sent and looked up once, however often it comes."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

_index_dedup = False


def get_ec_index_dedup() -> bool:
    """Whether collections that are sharded from now on send each id once."""
    return _index_dedup


def set_ec_index_dedup(val: bool) -> None:  # noqa: FBT001 - the reference's signature
    """Choose whether collections that are sharded from now on send each id once.

    False by default; ``use_index_dedup`` of a sharder asks for it for its own collections.
    """
    global _index_dedup  # noqa: PLW0603 - one switch for the process, as in the reference
    _index_dedup = val


class IndexDeduplicator:
    """Removes repeated ids of a feature.

    Args:
        rows: ``[F]`` rows of each feature's table.
        device: of the ids.
    """

    def __init__(self, rows: list[int], device: torch.device | None = None) -> None:
        # One more than the rows: all ids that are not rows are one id.
        bounds = [0, *accumulate(count + 1 for count in rows)]
        self._firsts = torch.tensor(bounds[:-1], dtype=torch.int64, device=device)
        self._bounds = torch.tensor(bounds, dtype=torch.int64, device=device)
        self._rows = torch.tensor(rows, dtype=torch.int64, device=device)

    def deduplicate(self, features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Tensor]:
        """The ids that there are, and where each id's is.

        Args:
            features: ``F`` features with ``N`` ids.

        Returns:
            ``F`` features of one bag each, ids ascending; and ``[N]`` int64: the place among them
            of each id.  Ids that are not rows become one id that is not a row either, for the lookup to
            treat as it is told.

        Raises:
            IndexError: on a CPU, an id is not a row of its table.
        """
        ids = features.values()
        sizes = torch.tensor(features.length_per_key(), device=ids.device)
        # Features get ranges of their own, so that one pass serves all.
        firsts = torch.repeat_interleave(self._firsts, sizes, output_size=ids.numel())
        rows = torch.repeat_interleave(self._rows, sizes, output_size=ids.numel())
        outside = (ids < 0) | (ids >= rows)
        self._check(features, outside, rows)
        shifted = torch.where(outside, rows, ids) + firsts
        unique, places = torch.unique(shifted, return_inverse=True)
        counts = torch.searchsorted(unique, self._bounds).diff()
        unique -= torch.repeat_interleave(self._firsts, counts, output_size=unique.numel())
        alone = KeyedJaggedTensor(
            keys=features.keys(),
            values=unique.to(ids.dtype),
            lengths=counts.to(features.lengths().dtype),
            stride=1,
            validate=False,
        )
        return alone, places

    def _check(self, features: KeyedJaggedTensor, outside: Tensor, rows: Tensor) -> None:
        """On the CPU only: elsewhere looking would wait for the device once more."""
        if outside.device.type == "cpu" and outside.any():
            ids = features.values()
            place = int(outside.nonzero()[0])
            bounds = features.offset_per_key()
            feature = max(f for f, first in enumerate(bounds[:-1]) if first <= place)
            raise IndexError(
                f"feature {features.keys()[feature]!r} has id {int(ids[place])}, but its table has "
                f"rows 0 to {int(rows[place]) - 1}; hash or clamp ids first "
                "(tessera.training.modules.hashing)"
            )
