"""Sum bags over a table that is cut by rows with the bits that the whole table would give."""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.kernels.tables import FeatureLookup, TablePlace, make_plan
from tessera.serving.package.schema import FeatureSpec
from tessera.serving.packaging.lookups.tessera_plan import POOLINGS
from tessera.serving.packaging.stable_names import named_in_packages
from tessera.serving.packaging.tables.stored import StoredTables


@named_in_packages("gathered_rows")
def pool_stored_rows(  # noqa: PLR0917 - TorchScript calls it by position
    buffers: list[Tensor],
    places: Tensor,
    plan: Tensor,
    book: Tensor,
    rows: Tensor,
    lengths: Tensor,
    weights: Tensor | None,
    feature: int,
    features: int,
    dim: int,
) -> Tensor:
    """Sum one feature's bags over a table that is cut by rows, in the order of the ids.

    Args:
        buffers: the shards' tables.
        places: ``[shards, 6]`` int64 on the CPU: first row, rows, and where the elements and the
            scales lie (offset and stride in bytes each).
        plan: one row, of a table that begins with its book (if any) and whose rows are a scale and
            a bias (if any) and the elements.
        book: the bytes of the table's book, uint8; empty where its rows need none.
        rows: ``[N]`` of all features.
        lengths: ``[F * B]``.
        weights: ``[N]`` or None.
        feature: which one.
        features: ``F``.
        dim: its columns.

    Returns:
        ``[B, dim]`` float32.
    """
    counts: list[int] = lengths.view(features, -1).sum(dim=1).tolist()
    begin = 0
    for before in range(feature):
        begin += counts[before]
    count = counts[feature]
    own = rows[begin : begin + count]
    header, width = int(plan[0, 0]) - book.size(0), int(plan[0, 1])
    # Two rows at least: the plan's reciprocal of one row has no int64.
    size = max(count, 2)
    buffer = torch.zeros([book.size(0) + size * width], dtype=torch.uint8)
    buffer[: book.size(0)] = book
    together = buffer[book.size(0) :].view(size, width)
    for shard in range(len(buffers)):
        place: list[int] = places[shard].tolist()
        first, held = place[0], place[1]
        at = torch.nonzero((own >= first) & (own < first + held)).squeeze(1)
        local = own[at] - first
        data = buffers[shard].as_strided([held, width - header], [place[3], 1], place[2])
        stored = [data.index_select(0, local)]
        if header > 0:
            scales = buffers[shard].as_strided([held, header], [place[5], 1], place[4])
            stored = [scales.index_select(0, local), data.index_select(0, local)]
        together.index_copy_(0, at, torch.cat(stored, 1))
    plan = plan.clone()
    half = 9223372036854775807  # 2**63 - 1; the reciprocal is (2**64 - 1) // size
    plan[0, 2] = size
    plan[0, 12] = 2 * (half // size) + (2 * (half % size) + 1) // size
    batch = lengths.size(0) // features
    pooled: Tensor = torch.ops.tessera.lookup(
        buffer,
        plan,
        torch.arange(count),
        lengths[feature * batch : (feature + 1) * batch].contiguous(),
        dim,
        None if weights is None else weights[begin : begin + count],
    )
    return pooled


def gathering(feature: FeatureSpec, tables: StoredTables) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments ``places``, ``plan`` and ``book`` of `pool_stored_rows`."""
    table = tables.table(feature.table)
    places = torch.zeros(len(tables.buffers), 6, dtype=torch.int64)
    for piece in table.pieces:
        at = piece.placement
        places[at.shard] = torch.tensor(
            [
                at.row_begin,
                piece.rows,
                piece.data_offset,
                piece.data_stride,
                piece.scale_offset,
                piece.scale_stride,
            ]
        )
    # Every piece has a copy of the table's book.
    piece = table.pieces[0]
    begin, size = piece.scale_offset, table.kind.book_bytes
    book = tables.buffers[piece.placement.shard][begin : begin + size].clone() if size else None
    header = table.kind.header_bytes
    stride = table.kind.row_bytes(table.info.dim)
    place = TablePlace(
        data_offset=size + header,
        row_stride=stride,
        rows=2,
        dim=table.info.dim,
        weight_type=table.kind,
        scale_offset=0,
        scale_stride=stride if header else 0,
        scale_type=table.kind.scale,
    )
    lookup = FeatureLookup(table=place, out_column=0, pooling=POOLINGS[feature.pooling])
    return places, make_plan([lookup]), torch.empty(0, dtype=torch.uint8) if book is None else book
