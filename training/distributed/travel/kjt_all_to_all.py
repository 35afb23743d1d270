"""Ids travel to the ranks that hold their rows: first how many, then the ids themselves.

Legend: W ranks, F features that this rank receives, B_r batch of rank r.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tessera.training.distributed.comm.alltoall_sequence import segment_order
from tessera.training.distributed.comm.awaitable import Awaitable, NoWait
from tessera.training.distributed.comm.in_flight import kept
from tessera.training.distributed.travel.batch_kind import batch_kind, check_kinds
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

_LABELS = ("lengths", "values", "strides", "weights")
"""What `KeyedJaggedTensor.dist_labels` may name."""


@lru_cache(maxsize=256)
def _segment_recat(features: int, ranks: int, stagger: int, device: torch.device) -> Tensor:
    sources = torch.arange(ranks).view(stagger, -1).t().flatten()
    recat = sources.unsqueeze(0) * features + torch.arange(features).unsqueeze(1)
    return recat.flatten().to(device, torch.int32)


def get_recat(
    local_split: int,
    num_splits: int,
    stagger: int = 1,
    device: torch.device | None = None,
    batch_size_per_rank: list[int] | None = None,
) -> Tensor | None:
    """Return the order that turns features received source by source into feature by feature.

    Args:
        local_split: F.
        num_splits: W.
        stagger: sources come in the order 0, W/stagger, 2W/stagger, ..., 1, W/stagger + 1, ...:
            with the number of nodes, by place on the node and then by node.
        device: where the result lives; None: the CPU.
        batch_size_per_rank: B_r.

    Returns:
        int32: ``[F * W]``, where each (feature, source) segment is among the (source, feature)
        segments; if the B_r differ, ``[F * sum of B_r]``, the same for each bag; None without
        features.
    """
    if local_split == 0:
        return None
    where = device or torch.device("cpu")
    recat = _segment_recat(local_split, num_splits, stagger, where)
    if batch_size_per_rank is None or len(set(batch_size_per_rank)) <= 1:
        return recat
    sizes = torch.tensor(batch_size_per_rank).repeat_interleave(local_split)
    total = local_split * sum(batch_size_per_rank)
    order = segment_order(
        sizes, _segment_recat(local_split, num_splits, stagger, torch.device("cpu")), total
    )
    return order.to(where, torch.int32)


class SplitsAllToAllAwaitable(Awaitable[list[list[int]]]):
    """Exchanges the sizes of what will be received: an all-to-all of host numbers.

    Entry r of each input tensor, ``[W]`` int64, goes to rank r of ``pg``; they may also be the rows of one
    tensor, which is fewer calls.  ``wait()`` gives per input tensor the ``W`` numbers that were received;
    the host waits for them there, and for the device if the tensors are on one.
    """

    def __init__(self, input_tensors: list[Tensor] | Tensor, pg: dist.ProcessGroup) -> None:
        super().__init__()
        self._kinds = len(input_tensors)
        rows = input_tensors if isinstance(input_tensors, Tensor) else torch.stack(input_tensors)
        self._sent = rows.t().reshape(-1)
        self._received = torch.empty_like(self._sent)
        work = dist.all_to_all_single(self._received, self._sent, group=pg, async_op=True)
        self._work: dist.Work | None = kept(work, self._sent)

    def _wait_impl(self) -> list[list[int]]:
        assert self._work is not None, "splits are waited for once"
        self._work.wait()
        self._work = None
        arrived: list[list[int]] = self._received.view(-1, self._kinds).t().tolist()
        return arrived


def sizes_to_send(
    features: KeyedJaggedTensor, splits: list[int], tensor_splits: list[list[int]]
) -> list[list[int]]:
    """The sizes that go before one tensor of ids, ``[W]`` each.

    The first row is the batch's kind, then there is one for each tensor that a batch may have, and one
    for the batch size; what this batch does not have is 0, so that there are as many rows on a rank whose
    batch is of another kind.  The ids per feature come last: the receiver then knows where its features begin without
    asking the device once more.

    Args:
        features: what is sent, features in the ranks' order.
        splits: ``[W]`` features for each rank.
        tensor_splits: per tensor to send, entries for each rank.
    """
    counts = features.length_per_key()
    firsts = [0, *accumulate(splits)]
    absent = [0] * len(splits)
    sent = dict(zip(features.dist_labels(), tensor_splits, strict=True))
    rows = [[batch_kind(features)] * len(splits), *(sent.get(label, absent) for label in _LABELS)]
    varies = features.variable_stride_per_key()
    rows.append(absent if varies else [features.stride()] * len(splits))
    rows.extend(
        [
            counts[first + place] if place < own else 0
            for first, own in zip(firsts, splits, strict=False)
        ]
        for place in range(max(splits))
    )
    return rows


def _to_exchange(sizes: list[list[int]], pg: dist.ProcessGroup, device: torch.device) -> Tensor:
    """The sizes as rows of a tensor where the ranks exchange them: on the CPU if ``pg`` has a backend for it.

    NCCL's stream holds the collectives of the previous step's vectors and gradients, and sizes that are
    sent through it arrive after them.  A host that waits for the sizes then has no kernels ready for a
    device which is done with that step.
    """
    backends = (part.partition(":")[0] for part in dist.get_backend_config(pg).split(","))
    where = torch.device("cpu") if "cpu" in backends else device
    return torch.tensor(sizes, dtype=torch.int64).to(where, non_blocking=True)


class KJTAllToAllTensorsAwaitable(Awaitable[KeyedJaggedTensor]):
    """Waits for ids that are being sent.

    The arguments that are not listed are those of `KJTSplitsAllToAllMeta`.

    Args:
        output_splits: per tensor, entries that come from each rank.
        stride_per_rank: B_r; None if the batch varies per feature.
        length_per_key: ``[F]`` ids of each feature that arrive; None: the result asks the device.

    Attributes:
        input_splits: by label.
        output_splits: by label.
        recat: see `get_recat`.
        stride_per_rank: B_r, in rank order, or None.
    """

    def __init__(  # noqa: PLR0917 - the reference's signature
        self,
        pg: dist.ProcessGroup,
        input: KeyedJaggedTensor,  # noqa: A002 - the reference's name
        splits: list[int],
        input_splits: list[list[int]],
        output_splits: list[list[int]],
        input_tensors: list[Tensor],
        labels: list[str],
        keys: list[str],
        device: torch.device,
        stagger: int = 1,
        stride_per_rank: list[int] | None = None,
        length_per_key: list[int] | None = None,
    ) -> None:
        super().__init__()
        self._length_per_key = length_per_key
        self.input_splits = dict(zip(labels, input_splits, strict=True))
        self.output_splits = dict(zip(labels, output_splits, strict=True))
        self.stride_per_rank = stride_per_rank
        self._world_size = pg.size()
        self._keys, self._stagger = keys, stagger
        self._input = input
        self.recat: Tensor | None = None
        self._works: list[dist.Work] = []
        self._received: list[Tensor] = []
        # Alive until they are sent.
        self._sent = input_tensors
        if self._world_size == 1:
            return
        self.recat = get_recat(
            splits[pg.rank()], self._world_size, stagger, device, stride_per_rank
        )
        for tensor, send, receive in zip(input_tensors, input_splits, output_splits, strict=True):
            sent = tensor.detach().contiguous()
            received = torch.empty(sum(receive), dtype=sent.dtype, device=device)
            work = dist.all_to_all_single(received, sent, receive, send, group=pg, async_op=True)
            self._received.append(received)
            self._works.append(kept(work, sent))

    def _wait_impl(self) -> KeyedJaggedTensor:
        if self._world_size == 1:
            return self._input.sync()
        for work in self._works:
            work.wait()
        self._works, self._sent = [], []
        return type(self._input).dist_init(
            keys=self._keys,
            tensors=self._received,
            variable_stride_per_key=self._input.variable_stride_per_key(),
            num_workers=self._world_size,
            recat=self.recat,
            stride_per_rank=self.stride_per_rank,
            stagger=self._stagger,
            length_per_key=self._length_per_key,
        )


@dataclass
class KJTSplitsAllToAllMeta:
    """What is to be sent for one sharding, not yet begun: its sizes can go with those of others.

    Attributes:
        features: what is sent to the ranks of ``pg``.
        splits: ``[W]`` features that each rank gets.
        splits_tensors: the sizes to exchange, ``[W]`` each, or as the rows of one tensor.
        input_splits: per tensor of the features, how much each rank gets of it.
        input_tensors: the tensors of the features.
        labels: what each of them is.
        keys: ``[F]`` the features that this rank gets.
        device: where the tensors arrive.
        stagger: see `get_recat`.
    """

    pg: dist.ProcessGroup
    features: KeyedJaggedTensor
    splits: list[int]
    splits_tensors: list[Tensor] | Tensor
    input_splits: list[list[int]]
    input_tensors: list[Tensor]
    labels: list[str]
    keys: list[str]
    device: torch.device
    stagger: int

    @classmethod
    def of(
        cls, pg: dist.ProcessGroup, features: KeyedJaggedTensor, splits: list[int], stagger: int
    ) -> KJTSplitsAllToAllMeta:
        """For features that a `KJTAllToAll` with these arguments would send."""
        rank, device = pg.rank(), features.values().device
        input_splits = features.dist_splits(splits)
        first = sum(splits[:rank])
        return cls(
            pg=pg,
            features=features,
            splits=splits,
            splits_tensors=_to_exchange(sizes_to_send(features, splits, input_splits), pg, device),
            input_splits=input_splits,
            input_tensors=features.dist_tensors(),
            labels=features.dist_labels(),
            keys=features.keys()[first : first + splits[rank]],
            device=device,
            stagger=stagger,
        )

    def send_tensors(self, exchanged: list[list[int]]) -> KJTAllToAllTensorsAwaitable:
        """Begin to send; ``exchanged`` holds each rank's number for each of ``splits_tensors``.

        Raises:
            ValueError: the batch of another rank is of another kind; every rank raises it.
        """
        kinds, *rest = exchanged
        check_kinds(kinds, self.pg.rank())
        sizes = dict(zip(_LABELS, rest, strict=False))
        batch_sizes, *ids = rest[len(_LABELS) :]
        varies = self.features.variable_stride_per_key()
        return KJTAllToAllTensorsAwaitable(
            pg=self.pg,
            input=self.features,
            splits=self.splits,
            input_splits=self.input_splits,
            output_splits=[sizes[label] for label in self.labels],
            input_tensors=self.input_tensors,
            labels=self.labels,
            keys=self.keys,
            device=self.device,
            stagger=self.stagger,
            stride_per_rank=None if varies else batch_sizes,
            length_per_key=[sum(counts) for counts in ids[: len(self.keys)]],
        )


class KJTAllToAllSplitsAwaitable(Awaitable[KJTAllToAllTensorsAwaitable]):
    """Sizes under way; ``wait()`` starts the way of the ids.

    The arguments are those of `KJTSplitsAllToAllMeta`; ``tensor_splits`` are its
    ``input_splits``.
    """

    def __init__(  # noqa: PLR0917 - the reference's signature
        self,
        pg: dist.ProcessGroup,
        input: KeyedJaggedTensor,  # noqa: A002 - the reference's name
        splits: list[int],
        labels: list[str],
        tensor_splits: list[list[int]],
        input_tensors: list[Tensor],
        keys: list[str],
        device: torch.device,
        stagger: int = 1,
    ) -> None:
        super().__init__()
        self._request = KJTSplitsAllToAllMeta(
            pg, input, splits, [], tensor_splits, input_tensors, labels, keys, device, stagger
        )
        sizes = sizes_to_send(input, splits, tensor_splits)
        self._sizes: Awaitable[list[list[int]]] = (
            SplitsAllToAllAwaitable(_to_exchange(sizes, pg, device), pg)
            if pg.size() > 1
            else NoWait(sizes)  # A single rank receives what it sends.
        )

    def _wait_impl(self) -> KJTAllToAllTensorsAwaitable:
        return self._request.send_tensors(self._sizes.wait())


class KJTAllToAll(nn.Module):
    """Sends each rank the bags of its features, and gathers all ranks' bags of the own ones.

    Args:
        pg: the ranks.
        splits: ``[W]`` features for each rank, the same on all ranks; the input's keys come in
            the ranks' order.
        stagger: see `get_recat`.

    Attributes:
        pg, splits, stagger: as given.

    With features A, B for rank 0 and C for rank 1, rank 0 gets A and B of rank 0's samples and
    then of rank 1's, and rank 1 gets C of both.
    """

    def __init__(self, pg: dist.ProcessGroup, splits: list[int], stagger: int = 1) -> None:
        super().__init__()
        if len(splits) != pg.size():
            raise ValueError(f"splits {splits} must hold one number per rank ({pg.size()})")
        self.pg, self.splits, self.stagger = pg, splits, stagger
        bounds = [0, *accumulate(splits)]
        self._own = slice(bounds[pg.rank()], bounds[pg.rank() + 1])

    def forward(self, input: KeyedJaggedTensor) -> Awaitable[KJTAllToAllTensorsAwaitable]:  # noqa: A002 - the reference's name
        """Begin to send; the first wait ends the exchange of sizes, the second that of ids.

        Args:
            input: ``sum of splits`` features of B samples.

        Returns:
            Awaitable of an awaitable of ``splits[own rank]`` features of ``sum of B_r`` samples.
        """
        with torch.no_grad():
            return KJTAllToAllSplitsAwaitable(
                pg=self.pg,
                input=input,
                splits=self.splits,
                labels=input.dist_labels(),
                tensor_splits=input.dist_splits(self.splits),
                input_tensors=input.dist_tensors(),
                keys=input.keys()[self._own],
                device=input.values().device,
                stagger=self.stagger,
            )
