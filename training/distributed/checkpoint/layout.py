"""How a model and its optimizer become named tensors, and get them back under another plan.

Names: ``model.<entry of the state dict>`` and ``optimizer.<parameter>.<state>``.  A tensor is
saved whole whatever the plan; who holds which part of it is the plan's alone.

One kind of state depends on the plan: one number per row, where the columns of a table are cut
into k shards, is k numbers per row, ``[rows, k]``.  Loaded under another cut, a column shard
gets the mean of the saved shards' numbers, weighted by how many of its columns each covered; where they are equal,
exactly that number.  For sums or averages of mean squares, which is what all row-wise states
are, that mean is what the wider shard would have gathered itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from tessera.training.distributed.checkpoint.basics import CheckpointError
from tessera.training.distributed.checkpoint.reader import Piece, narrowed
from tessera.training.distributed.tables.kernels.optimizer_state import sharded
from tessera.training.optim.keyed import KeyedOptimizer

MODEL = "model."
OPTIMIZER = "optimizer."


@dataclass(frozen=True)
class Content:
    """Names everything that is saved of a model and an optimizer.

    Attributes:
        tensors: by name; live memory, ``ShardedTensor`` or plain.
        numbers: states that are not tensors, by name.
        columns: by optimized parameter with row-wise shards: where its column shards begin, and
            its number of columns at the end.
        groups: the optimizer's parameter groups, as plain values; None: they are not saved.
    """

    tensors: dict[str, Tensor]
    numbers: dict[str, float]
    columns: dict[str, list[int]]
    groups: list[dict[str, Any]] | None


def content_of(model: Mapping[str, Any], optimizer: KeyedOptimizer | None) -> Content:
    """Name every tensor and every plain value of a model's state dict and its optimizer.

    Raises:
        CheckpointError: a state that is neither a tensor nor a number.
    """
    for name, value in model.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"entry {name!r} of the model's state dict is a {type(value).__name__}; only "
                "tensors are saved"
            )
    content = Content({MODEL + name: value for name, value in model.items()}, {}, {}, None)
    if optimizer is None:
        return content
    saved = optimizer.state_dict()
    for parameter, states in saved["state"].items():
        for key, value in states.items():
            name, what = f"{OPTIMIZER}{parameter}.{key}", f"state {key!r} of {parameter!r}"
            if isinstance(value, Tensor):
                content.tensors[name] = _placed(what, value, model.get(parameter))
            elif isinstance(value, (int, float)):
                content.numbers[name] = value
            else:
                raise CheckpointError(
                    f"{what} is a {type(value).__name__}; only tensors and numbers are saved"
                )
    for parameter, value in optimizer.params.items():
        bounds = column_bounds(model.get(parameter, value))
        if bounds is not None:
            content.columns[parameter] = bounds
    return replace(content, groups=saved.get("param_groups"))


def _placed(what: str, state: Tensor, table: Any) -> Tensor:
    """A state of a dense optimizer over a table's shard, with the shard's place; others as is."""
    if not isinstance(table, ShardedTensor) or isinstance(state, ShardedTensor) or not state.dim():
        return state
    shards = table.local_shards()
    if len(shards) == 1:
        places, shape = [shards[0].metadata], shards[0].tensor.shape
        if state.shape in {shape, shape[:1]}:
            group = table._process_group  # noqa: SLF001 - it has no other name
            rowwise = state.shape != shape
            return sharded([state], places, table.metadata(), group, rowwise=rowwise)
    raise CheckpointError(
        f"{what} has shape {list(state.shape)} and belongs to {len(shards)} shards of a table on "
        "this rank; states of one number per weight or per row, of one shard, are saved"
    )


def column_bounds(table: Any) -> list[int] | None:
    """Where a table's column shards begin, then its columns; None: it is not a sharded table."""
    if not isinstance(table, ShardedTensor) or len(_shape(table)) != 2:
        return None
    starts = {shard.shard_offsets[1] for shard in table.metadata().shards_metadata}
    return [*sorted(starts), _shape(table)[1]]


def _shape(value: Tensor) -> tuple[int, ...]:
    """The whole tensor's shape; ``ShardedTensor.size`` would warn at each call that it is deprecated."""
    return tuple(value.metadata().size if isinstance(value, ShardedTensor) else value.shape)


def local_parts(value: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """The parts of a tensor that are on this rank, each with where it begins."""
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield tuple(shard.metadata.shard_offsets), shard.tensor
    else:
        yield (0,) * value.dim(), value


def _fill_with_mean(source: Tensor, target: Tensor, weights: list[int]) -> None:
    """Fill a part of a row-wise state with the weighted mean over the source's columns."""
    own = [column for column, weight in enumerate(weights) if weight]
    values = source.view(source.size(0), len(weights))[:, own]
    factors = torch.tensor([weights[column] for column in own], dtype=torch.float64)
    mean = (values.double() @ factors / factors.sum()).to(values.dtype)
    equal = (values == values[:, :1]).all(dim=1)
    target.copy_(torch.where(equal, values[:, 0], mean).view(target.shape))


class Source(Protocol):
    """Whole tensors by name, of which parts can be read."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """A tensor's shape; None: there is no such tensor."""

    def read(self, pieces: Iterable[Piece]) -> None:
        """Fill the target of every piece with what was saved."""


class WholeTensors:
    """Offers tensors in memory, by name, as a `Source`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        """A tensor's shape; None: there is no such tensor."""
        return tuple(self._tensors[name].shape) if name in self._tensors else None

    def read(self, pieces: Iterable[Piece]) -> None:
        """Fill the target of every piece with what was saved."""
        for piece in pieces:
            saved = self._tensors[piece.name]
            piece.target.copy_(narrowed(saved, piece.offsets, piece.target.shape))


@torch.no_grad()
def fill(saved: Source, content: Content, saved_columns: Mapping[str, list[int]]) -> None:
    """Read every tensor of ``content`` in place, under whatever plan it was saved.

    Raises:
        CheckpointError: a tensor is missing or of another shape.
    """
    pieces: list[Piece] = []
    conversions: list[Callable[[], None]] = []
    for name, value in content.tensors.items():
        shape = saved.shape(name)
        if shape is None:
            raise CheckpointError(f"the checkpoint has no {name!r}")
        parameter = name[len(OPTIMIZER) :].rpartition(".")[0] if name.startswith(OPTIMIZER) else ""
        then = saved_columns.get(parameter)
        now = content.columns.get(parameter)
        rowwise = parameter and _is_rowwise(value, now, shape, then)
        if not rowwise or _shards(then) == _shards(now) == 1 or (then == now):
            if shape != _shape(value):
                raise CheckpointError(
                    f"{name!r} has shape {list(shape)} in the checkpoint and {list(_shape(value))} here"
                )
            pieces += [Piece(name, offsets, part) for offsets, part in local_parts(value)]
            continue
        for offsets, part in local_parts(value):
            piece, conversion = _convert(name, shape, offsets, part, then=then, now=now)
            pieces.append(piece)
            conversions.append(conversion)
    saved.read(pieces)
    for convert in conversions:
        convert()


def _shards(columns: list[int] | None) -> int:
    return 1 if columns is None else len(columns) - 1


def _is_rowwise(
    value: Tensor, now: list[int] | None, shape: tuple[int, ...], then: list[int] | None
) -> bool:
    """Whether a state has one number per row and column shard, here and in the checkpoint."""

    def fits(size: tuple[int, ...], columns: list[int] | None) -> bool:
        count = _shards(columns)
        return len(size) == 1 if count == 1 else len(size) == 2 and size[1] == count

    return fits(_shape(value), now) and fits(shape, then)


def _convert(
    name: str,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    part: Tensor,
    *,
    then: list[int] | None,
    now: list[int] | None,
) -> tuple[Piece, Callable[[], None]]:
    """Read all column shards' numbers of the part's rows; weigh them by shared columns."""
    whole = (then or now or [0, 1])[-1]
    cut_then, cut_now = then or [0, whole], now or [0, whole]
    shard = offsets[1] if len(offsets) > 1 else 0
    start, stop = cut_now[shard], cut_now[shard + 1]
    weights = [max(0, min(stop, last) - max(start, first)) for first, last in pairwise(cut_then)]
    source = torch.empty((part.size(0), *shape[1:]), dtype=part.dtype)
    piece = Piece(name, (offsets[0],) + (0,) * (len(shape) - 1), source)
    return piece, partial(_fill_with_mean, source, part, weights)
