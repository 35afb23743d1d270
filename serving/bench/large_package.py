"""A package of any size within seconds: its tables are written as they are stored, and never exist in float32.

`write_repeated` does so for a ranking model whose tables are on the device meta, and `make_large` for the one of
`tessera.serving.bench.forward`.  Of that, rows are drawn once, for as many as make `_DRAWN_BYTES`, and repeated
through the tables with other scales, so that two rows of a request are the same only by chance.

The tables are in memory once and go from there into the file: torch, which would write and read them twice more, sees
small stand-ins (`tessera.serving.packaging.write.stream`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from tessera.kernels.row_types import RowType, row_type
from tessera.serving.bench.forward import TABLES, dlrm
from tessera.serving.package.manifest import ShardingPlan, TableInfo
from tessera.serving.package.runner import TorchScriptRunner
from tessera.serving.package.torchscript import optimize
from tessera.serving.packaging.collections.find import find_tables
from tessera.serving.packaging.options import Origin, PackageOptions
from tessera.serving.packaging.ranking import ranking_source
from tessera.serving.packaging.servable import make_servable
from tessera.serving.packaging.tables.quantize import SourceTable, check_width
from tessera.serving.packaging.tables.shard import plan_shards
from tessera.serving.packaging.tables.spill import SPILLED_FROM_BYTES
from tessera.serving.packaging.tables.stored import (
    StoredPiece,
    StoredTable,
    StoredTables,
    lay_out,
    views,
)
from tessera.serving.packaging.write.package import write_servable
from tessera.training.bench.harness import in_own_process
from tessera.training.models.ranking import RankingModel

DIM = 64
ROW_BYTES = DIM + 4
_DRAWN_BYTES = 16 << 20
_LARGEST = 0.05  # of the elements of a row; what tables of a trained model have


def make_large(
    folder: Path,
    gigabytes: float,
    *,
    name: str,
    device: str = "cpu",
    seed: int = 0,
    shards: int = 1,
) -> Path:
    """A package in ``folder`` whose int8 tables have about so many bytes; one that is there is taken.

    It is made in a process of its own, which holds the tables in memory once. Packages of another ``seed`` have other rows.
    """
    rows = int(gigabytes * 1e9 / TABLES / ROW_BYTES)
    others = f"{f'-{seed}' if seed else ''}{f'-{shards}-shards' if shards > 1 else ''}"
    path = folder / f"large-{name}-{rows}-{device}{others}.pt"
    if not path.exists():
        options = PackageOptions(name=name, device=device, shards=shards)
        in_own_process(write_large, path, rows, options, seed)
    return path


def write_large(path: Path, rows: int, options: PackageOptions, seed: int = 0) -> None:
    """The package with tables of so many rows, in this process."""
    write_repeated(dlrm(rows, "murmur3", device="meta"), path, options, _rows(seed))


def write_repeated(
    model: RankingModel, path: Path, options: PackageOptions, rows: torch.Tensor
) -> None:
    """Package ``model``, whose tables are on the device meta, with ``rows`` over and over in each of them.

    ``rows`` is ``[n, D]`` float32, ``D`` being the width of every table; the rows of a table begin with the first.

    Raises:
        UserError: ``D`` does not fit the type of ``options.dtype``, or what `write_servable` raises.
    """
    _stand_in(model)
    source = ranking_source(model, None)
    found = find_tables(source[0])
    kind = row_type(options.dtype)
    tables, plan = _stored(found.sources, kind, rows, options)
    servable = make_servable(source, options, stored=(tables, plan))
    runner = TorchScriptRunner(optimize(servable.scripted))
    large = [buffer for buffer in tables.buffers if buffer.nbytes >= SPILLED_FROM_BYTES]
    write_servable(servable, runner, path, options, origin=Origin(), evaluation=None, spilled=large)


def _stand_in(model: nn.Module) -> None:
    """Give tables on the device meta values that take no memory: nobody looks at them."""
    for part in model.modules():
        if isinstance(part, nn.EmbeddingBag) and part.weight.is_meta:
            part.weight = nn.Parameter(torch.zeros(1, 1).expand(part.weight.shape))


def _stored(
    sources: Sequence[SourceTable], kind: RowType, rows: torch.Tensor, options: PackageOptions
) -> tuple[StoredTables, ShardingPlan]:
    for source in sources:
        check_width(source, kind)
    kinds, for_gpu = {one.name: kind for one in sources}, options.device == "cuda"
    plan = plan_shards(sources, kinds, shards=options.shards, device=options.device)
    pieces, sizes = lay_out(plan.placements, kinds, for_gpu=for_gpu)
    buffers = tuple(torch.zeros(size, dtype=torch.uint8) for size in sizes)
    kind = kind.fitted([rows])
    encoded = kind.encode(rows)
    # Few large copies, which torch divides between threads.
    encoded = encoded.repeat(max(1, _DRAWN_BYTES // encoded.nbytes), 1)
    stored = []
    for source, piece in zip(sources, pieces, strict=True):
        _fill(buffers[piece.placement.shard], piece, kind, encoded)
        info = TableInfo(
            name=source.name,
            rows=source.rows,
            dim=source.dim,
            dtype=kind.name,
            bytes=source.rows * kind.row_bytes(source.dim),
            bytes_fp32=source.rows * source.dim * 4,
            max_abs_error=0.0,  # they were never anything else
            rmse=0.0,
            relative_rmse=0.0,
        )
        stored.append(StoredTable(info=info, kind=kind, pieces=(piece,)))
    return StoredTables(buffers=buffers, tables=tuple(stored), for_gpu=for_gpu), plan


def _rows(seed: int) -> torch.Tensor:
    """``[n, DIM]`` float32: rows of random numbers, each of another size."""
    count = _DRAWN_BYTES // ROW_BYTES
    generator = torch.Generator().manual_seed(seed)
    sizes = _LARGEST * torch.rand(count, 1, generator=generator)
    return sizes * (2 * torch.rand(count, DIM, generator=generator) - 1)


def _fill(buffer: torch.Tensor, piece: StoredPiece, kind: RowType, encoded: torch.Tensor) -> None:
    if kind.book is not None:
        book = buffer.narrow(0, piece.scale_offset, kind.book_bytes)
        book.copy_(kind.book.view(torch.uint8))
    header, data = views(buffer, piece, kind)
    for begin in range(0, piece.rows, len(encoded)):
        count = min(len(encoded), piece.rows - begin)
        header[begin : begin + count] = encoded[:count, : kind.header_bytes]
        data[begin : begin + count] = encoded[:count, kind.header_bytes :]
