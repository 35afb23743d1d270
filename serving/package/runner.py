"""What a server needs of a model: one batch in, one tensor per output out.

The interface is this narrow so that another kind of artifact can stand beside TorchScript.
Shapes: ``B`` samples, ``F`` features of a group, ``N`` ids of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tessera.serving.package.schema import Group, InputSchema


SHARED_METHOD = "forward_shared"
"""A package's second method, where it has one: `HostBatch.tensors` and then `HostBatch.sharing`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBatch:
    """The arguments of the package's ``forward``, on the host; or of `SHARED_METHOD`.

    Nothing here is checked: sizes and ids come from a server that has refused whatever does
    not hold.  What must hold: ``sum(lengths) == len(values)`` per group, no negative length,
    weights as many as ids.  An id may be any 64-bit number.  An absent group has empty tensors.

    Attributes:
        float_features: ``[B, F_dense]`` float32.
        id_list_features_lengths: ``[F * B]`` int32, feature-major.
        id_list_features_values: ``[N]`` int32 or int64.
        id_score_list_features_lengths: ``[F * B]`` int32, feature-major.
        id_score_list_features_values: ``[N]`` int32 or int64.
        id_score_list_features_weights: ``[N]`` float32.
        batch_size: ``B``.
        id_list_features_shared: ``[F]`` bool, which features are given once for many samples: they
            have ``R`` bags each, one per shared row, where the others have ``B``.  None: none is.
        shared_row_index: ``[B]`` int32, the row of each sample, in ``[0, R)``; None likewise.
    """

    float_features: Tensor
    id_list_features_lengths: Tensor
    id_list_features_values: Tensor
    id_score_list_features_lengths: Tensor
    id_score_list_features_values: Tensor
    id_score_list_features_weights: Tensor
    batch_size: int
    id_list_features_shared: Tensor | None = None
    shared_row_index: Tensor | None = None

    @classmethod
    def of(
        cls,
        dense: Tensor,
        plain: tuple[Tensor, Tensor],
        scored: tuple[Tensor, Tensor, Tensor] | None = None,
        sharing: tuple[Tensor, Tensor] | None = None,
    ) -> HostBatch:
        """The batch of ``dense`` ``[B, F_dense]`` and both groups' lengths and ids.

        ``scored`` has the weights as well, and is None where no feature has any; ``sharing`` is
        what `sharing` gives.
        """
        none = torch.empty(0, dtype=torch.int32)
        lengths, ids, weights = scored or (none, none.long(), none.float())
        shared, row_index = sharing or (None, None)
        return cls(
            float_features=dense,
            id_list_features_lengths=plain[0],
            id_list_features_values=plain[1],
            id_score_list_features_lengths=lengths,
            id_score_list_features_values=ids,
            id_score_list_features_weights=weights,
            batch_size=len(dense),
            id_list_features_shared=shared,
            shared_row_index=row_index,
        )

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The six tensors in ``forward``'s order."""
        return (
            self.float_features,
            self.id_list_features_lengths,
            self.id_list_features_values,
            self.id_score_list_features_lengths,
            self.id_score_list_features_values,
            self.id_score_list_features_weights,
        )

    def sharing(self) -> tuple[Tensor, Tensor] | None:
        """The two tensors that only `SHARED_METHOD` takes, if this batch has them."""
        if self.id_list_features_shared is None or self.shared_row_index is None:
            return None
        return self.id_list_features_shared, self.shared_row_index


class Runner(Protocol):
    """A loaded model.

    Several worker threads call `forward` at once.  Each has called ``torch.set_num_threads``
    itself: the setting does not reach threads that exist already.
    """

    @property
    def shares_rows(self) -> bool:
        """Whether it takes batches with shared rows."""
        ...

    def forward(self, batch: HostBatch) -> dict[str, Tensor]:
        """Score one batch.

        Args:
            batch: see `HostBatch`; its memory may be reused once this returns.

        Returns:
            Each output by name: ``[B]`` or ``[B, width]`` float32 on the CPU, in the schema's
            order of outputs.
        """
        ...


class TorchScriptRunner:
    """Runs a scripted module that has `HostBatch.tensors`'s six arguments.

    Args:
        module: called with the six tensors; returns a tensor per output name.  It must not
            keep state between calls.
    """

    def __init__(self, module: Callable[..., Any]) -> None:
        self._module = module
        self._shared: Callable[..., Any] | None = getattr(module, SHARED_METHOD, None)

    @property
    def shares_rows(self) -> bool:
        """See `Runner.shares_rows`."""
        return self._shared is not None

    def forward(self, batch: HostBatch) -> dict[str, Tensor]:
        """Score one batch; see `Runner.forward`."""
        sharing = batch.sharing()
        outputs: dict[str, Tensor]
        # The mode belongs to the calling thread, so it is entered on each call.
        with torch.inference_mode():
            if sharing is None:
                outputs = self._module(*batch.tensors())
            elif self._shared is None:
                raise RuntimeError(f"the model has no {SHARED_METHOD}")
            else:
                outputs = self._shared(*batch.tensors(), *sharing)
        return outputs


def as_shared(batch: HostBatch) -> HostBatch:
    """The same samples as rows that each is used once: every second feature is a shared one."""
    features = batch.id_list_features_lengths.numel() // batch.batch_size
    return replace(
        batch,
        id_list_features_shared=torch.arange(features) % 2 == 0,
        shared_row_index=torch.arange(batch.batch_size, dtype=torch.int32),
    )


def zero_batch(
    schema: InputSchema, batch_size: int, *, wide_ids: bool, ids_per_bag: int = 1
) -> HostBatch:
    """A batch of zeros that fits ``schema``, for warming a model up.

    Args:
        schema: the model's inputs.
        batch_size: ``B``.
        wide_ids: int64 ids instead of int32.
        ids_per_bag: length of every bag.
    """
    id_type = torch.int64 if wide_ids else torch.int32

    def lengths(group: Group) -> Tensor:
        return torch.full((len(schema.group(group)) * batch_size,), ids_per_bag, dtype=torch.int32)

    def values(group: Group) -> Tensor:
        count = len(schema.group(group)) * batch_size * ids_per_bag
        return torch.zeros(count, dtype=id_type)

    scored = values("id_score_list")
    return HostBatch.of(
        torch.zeros(batch_size, len(schema.dense_features)),
        (lengths("id_list"), values("id_list")),
        (lengths("id_score_list"), scored, torch.zeros(scored.numel())),
    )
