"""Rows of tensors, and bags, to the ranks that they are for: first how many, then the rows themselves.

Where there is one rank, or no process group, nothing travels.

Legend: ``W`` ranks, ``N`` rows or bags, ``n`` entries of all bags.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tessera.training.distributed.comm.awaitable import Awaitable
from tessera.training.distributed.comm.in_flight import kept
from tessera.training.distributed.comm.transport import Pending, start_all_to_all
from tessera.training.sparse.jagged_tensor import JaggedTensor


def _alone(pg: dist.ProcessGroup | None) -> bool:
    return pg is None or pg.size() == 1


def _on_host(sent: Tensor, received: Tensor) -> tuple[list[int], list[int]]:
    """Two tensors ``[W]`` of one device as lists; an accelerator is waited for once."""
    if sent.device.type == "cpu":
        return sent.tolist(), received.tolist()
    both = torch.stack([sent, received]).tolist()
    return both[0], both[1]


def _entries_of(lengths: Sequence[Tensor], bags: Tensor) -> list[list[int]]:
    """How many entries the bags of each rank have, those that go and those that come; an accelerator is waited for once.

    Args:
        lengths: of the bags that go and of those that come, ``[N]`` each.
        bags: ``[2 * W]``, how many of them go to and come from each rank.
    """
    running = torch.cat([lengths[0].new_zeros(1), *lengths]).cumsum(0, dtype=torch.int64)
    ends = running.index_select(0, bags.cumsum(0).to(running.device)).tolist()
    sums = [end - begin for begin, end in pairwise([0, *ends])]
    return [sums[: len(sums) // 2], sums[len(sums) // 2 :]]


def _start(
    pg: dist.ProcessGroup, rows: Tensor, send: Sequence[int], receive: Sequence[int]
) -> Pending:
    """Begin to send ``rows`` ``[N, ...]``, ``send[r]`` of them to rank ``r``."""
    rest = list(rows.shape[1:])
    width = torch.Size(rest).numel()
    flat = rows.detach().contiguous().view(-1)
    pending = start_all_to_all(
        pg, flat, [count * width for count in send], [count * width for count in receive]
    )
    return pending.then(lambda received: received.view(sum(receive), *rest))


class TensorAllToAllValuesAwaitable(Awaitable[Tensor]):
    """Rows that are being sent.

    Args:
        pg: the ranks.
        input: ``[N, ...]``, in the order of their destinations.
        input_splits: ``[W]``, rows to each rank.
        output_splits: ``[W]``, rows from each rank.
        device: where the rows arrive, that of ``input``.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup | None,
        input: Tensor,  # noqa: A002 - the name TorchRec users know
        input_splits: Tensor,
        output_splits: Tensor,
        device: torch.device,
    ) -> None:
        super().__init__()
        del device
        self._here = input
        self._pending: Pending | None = None
        if pg is not None and not _alone(pg):
            self._pending = _start(pg, input, *_on_host(input_splits, output_splits))

    def _wait_impl(self) -> Tensor:
        return self._here if self._pending is None else self._pending.wait()


class TensorAllToAllSplitsAwaitable(Awaitable[TensorAllToAllValuesAwaitable]):
    """The numbers of rows that are being exchanged; the rows are sent when they are known.

    Args:
        pg: the ranks.
        input: ``[N, ...]``, in the order of their destinations.
        splits: ``[W]`` int32 or int64, rows to each rank.
        device: where the rows are.

    Attributes:
        output_splits: ``[W]``, rows from each rank; filled when this is waited for.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup | None,
        input: Tensor,  # noqa: A002 - the name TorchRec users know
        splits: Tensor,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._pg, self._input, self._splits, self._device = pg, input, splits, device
        self.output_splits = splits
        self._work: dist.Work | None = None
        if not _alone(pg):
            self.output_splits = torch.empty_like(splits)
            sent = splits.contiguous()
            work = dist.all_to_all_single(self.output_splits, sent, group=pg, async_op=True)
            self._work = kept(work, sent)

    def _wait_impl(self) -> TensorAllToAllValuesAwaitable:
        if self._work is not None:
            self._work.wait()
        return TensorAllToAllValuesAwaitable(
            self._pg, self._input, self._splits, self.output_splits, self._device
        )


class TensorAllToAll(nn.Module):
    """Sends rows to ranks that do not know how many will come.

    Args:
        pg: the ranks.
    """

    def __init__(self, pg: dist.ProcessGroup | None) -> None:
        super().__init__()
        self._pg = pg

    def forward(
        self,
        input: Tensor,  # noqa: A002 - the name TorchRec users know
        splits: Tensor,
    ) -> TensorAllToAllSplitsAwaitable:
        """Begin with the numbers of rows.

        Args:
            input: ``[N, ...]``, in the order of their destinations.
            splits: ``[W]`` int32 or int64, rows to each rank.

        Returns:
            Wait twice for the rows of all ranks, in the order of the ranks.
        """
        return TensorAllToAllSplitsAwaitable(self._pg, input, splits, input.device)


class TensorValuesAllToAll(nn.Module):
    """Sends rows to ranks that know how many will come.

    Args:
        pg: the ranks.
    """

    def __init__(self, pg: dist.ProcessGroup | None) -> None:
        super().__init__()
        self._pg = pg

    def forward(
        self,
        input: Tensor,  # noqa: A002 - the name TorchRec users know
        input_splits: Tensor,
        output_splits: Tensor,
    ) -> TensorAllToAllValuesAwaitable:
        """Begin to send the rows; the arguments are those of `TensorAllToAllValuesAwaitable`."""
        return TensorAllToAllValuesAwaitable(
            self._pg, input, input_splits, output_splits, input.device
        )


class JaggedTensorAllToAll(Awaitable[JaggedTensor]):
    """Bags that are being sent: making it waits for their lengths, ``wait`` for their entries.

    Args:
        jt: ``N`` bags in the order of their destinations.
        num_items_to_send: ``[W]``, bags to each rank.
        num_items_to_receive: ``[W]``, bags from each rank.
        pg: the ranks.
    """

    def __init__(
        self,
        jt: JaggedTensor,
        num_items_to_send: Tensor,
        num_items_to_receive: Tensor,
        pg: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        self._here = jt
        self._pending: list[Pending] = []
        if pg is None or _alone(pg):
            return
        lengths = jt.lengths()
        bags = torch.cat([num_items_to_send, num_items_to_receive])
        counts = bags.tolist()
        ranks = len(counts) // 2
        self._lengths = _start(pg, lengths, counts[:ranks], counts[ranks:]).wait()
        # Sums, and not all lengths, go to the host.
        send, receive = _entries_of([lengths, self._lengths], bags)
        weights = jt.weights_or_none()
        for part in [jt.values(), *([] if weights is None else [weights])]:
            self._pending.append(_start(pg, part, send, receive))

    def _wait_impl(self) -> JaggedTensor:
        if not self._pending:
            return self._here
        parts = [pending.wait() for pending in self._pending]
        return JaggedTensor(
            parts[0], parts[1] if len(parts) > 1 else None, self._lengths, validate=False
        )


def exchange_with_bags(
    pg: dist.ProcessGroup, ids: Tensor, counts: Tensor, bags: JaggedTensor
) -> tuple[Tensor, JaggedTensor]:
    """Send ids and their bags to ranks that do not know how many will come, in two collectives.

    The first tells how many, the second has all of a rank behind one another, as bytes.  An accelerator is waited
    for once.

    Args:
        pg: the ranks.
        ids: ``[N]`` int64, in the order of their destinations.
        counts: ``[W]`` int64, ids to each rank.
        bags: ``N * F`` of them, of an id behind one another, with lengths ``[N, F]`` int64.

    Returns:
        The ids that came, ``[M]``, in the order of the ranks, and their bags with int64 lengths ``[M * F]``.
    """
    lengths, weights = bags.lengths(), bags.weights_or_none()
    running = torch.cat([counts.new_zeros(1), lengths.sum(1)]).cumsum(0)
    ends = torch.cat([counts.new_zeros(1), counts]).cumsum(0)
    splits = torch.stack([counts, running.index_select(0, ends).diff()], 1)
    announced = torch.empty_like(splits)
    work = dist.all_to_all_single(announced, splits, group=pg, async_op=True)
    kept(work, splits).wait()
    send, receive = torch.stack([splits, announced]).tolist()
    # In a row an id and its lengths; in another part what the bags hold.
    rows = torch.cat([ids.unsqueeze(1), lengths], 1)
    parts = [rows.view(-1), bags.values(), *([] if weights is None else [weights])]
    sizes = [
        rows.size(1) * rows.element_size(),
        *(part.element_size() for part in parts[1:]),
    ]

    def in_bytes(numbers: list[list[int]]) -> list[list[int]]:
        return [
            [count * sizes[0], *(entries * size for size in sizes[1:])]
            for count, entries in numbers
        ]

    send, receive = in_bytes(send), in_bytes(receive)
    pieces = zip(
        *(
            part.contiguous().view(torch.uint8).split_with_sizes(list(own))
            for part, own in zip(parts, zip(*send, strict=True), strict=True)
        ),
        strict=True,
    )
    sent = torch.cat([piece for of_rank in pieces for piece in of_rank])
    came = _start(pg, sent, [*map(sum, send)], [*map(sum, receive)]).wait()
    own = came.split_with_sizes([size for of_rank in receive for size in of_rank])
    found = [
        torch.cat(own[place :: len(parts)]).view(part.dtype) for place, part in enumerate(parts)
    ]
    heads = found[0].view(-1, rows.size(1))
    return heads[:, 0], JaggedTensor(
        found[1],
        found[2] if weights is not None else None,
        heads[:, 1:].flatten(),
        validate=False,
    )
