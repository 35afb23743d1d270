"""What a training pipeline runs: a batch on its way to the device, and a model with its loss.

Raw values are transformed and ids hashed on the device when the batch gets there, not within the
forward pass: what the tables are given is then a part of the batch, and a pipeline can send it ahead.

Shapes: ``B`` samples of this rank, ``F`` sparse features, ``N`` ids in all bags, ``L`` labels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tessera.training.data.batch import Batch, PackedBatch
from tessera.training.models.ranking import RankingModel
from tessera.training.models.retrieval import RetrievalArch
from tessera.training.modules.hashing import FeatureHasher
from tessera.training.streamable import Pipelineable
from tessera.training.trainer.graphs import RecordedForward
from tessera.training.trainer.losses import Losses
from tessera.training.trainer.precision import Precision, layers_in
from tessera.training.trainer.ranks import Ranks
from tessera.training.trainer.retrieval import batch_losses
from tessera.training.transforms.preprocessor import Preprocessor


@dataclass(frozen=True)
class Preparation:
    """The part of a `RankingModel` before its weights, on the device of the model.

    Attributes:
        preprocessor: transforms raw values.
        hasher: turns ids into rows.
    """

    preprocessor: Preprocessor
    hasher: FeatureHasher

    def __call__(self, batch: Batch) -> Batch:
        """A batch of raw values, on the device, as the encoder and the tables take it.

        Rows that have ``row_numbers`` are those that the transforms were fitted to.
        """
        dense, ids = self.preprocessor(
            batch.dense_features, batch.sparse_features, batch.row_numbers
        )
        return replace(batch, dense_features=dense, sparse_features=self.hasher(ids))


@dataclass(frozen=True)
class StepBatch(Pipelineable):
    """This rank's part of a step's samples.

    Attributes:
        batch: the part, as the loader gives it; after `to` its ids are the tables' rows.
        samples: all ranks' samples of the step.
        preparation: what prepares it, on the device that `to` is given; None: it is prepared.
    """

    batch: Batch
    samples: int
    preparation: Preparation | None

    def to(self, device: torch.device, non_blocking: bool = False) -> StepBatch:  # noqa: FBT001, FBT002 - as of torch.Tensor
        """The same batch on ``device``, prepared."""
        there = self.batch.to(device, non_blocking=non_blocking)
        if self.preparation is not None:
            there = self.preparation(there)
        return StepBatch(there, self.samples, None)


@dataclass(frozen=True)
class PackedStep(Pipelineable):
    """This rank's part of a step's samples, still packed.

    Attributes:
        batch: the part, as the loader gives it.
        samples: all ranks' samples of the step.
        preparation: what prepares it, on the device that `to` is given.
    """

    batch: PackedBatch
    samples: int
    preparation: Preparation

    def to(self, device: torch.device, non_blocking: bool = False) -> StepBatch:  # noqa: FBT001, FBT002 - as of torch.Tensor
        """The batch on ``device``, prepared."""
        there = self.batch.to(device, non_blocking=non_blocking)
        return StepBatch(self.preparation(there), self.samples, None)


class LossLayer(nn.Module):
    """Losses as a layer, which can be recorded.

    Args:
        losses: of outputs ``[B, L]``, labels and, if there are any, weights; a scalar.
    """

    def __init__(self, losses: Callable[..., Tensor]) -> None:
        super().__init__()
        self._losses = losses

    def forward(self, *given: Tensor) -> Tensor:
        """The loss of a batch."""
        return self._losses(*given)


class ModelWithLoss(nn.Module):
    """The parts of a `RankingModel` that have a state, under their names in it, and the loss.

    Args:
        model: the ranking model; its parts are shared.
        losses: of its labels.
        ranks: who trains together.
        device: where it is trained.
        precision: what the layers compute in; see `tessera.training.trainer.precision`.
    """

    def __init__(
        self,
        model: RankingModel,
        losses: Losses,
        *,
        ranks: Ranks,
        device: torch.device,
        precision: Precision = "fp32",
    ) -> None:
        super().__init__()
        self.preprocessor = model.preprocessor  # its work is done before; see `Preparation`
        self.encoder = model.encoder
        self.arch = model.arch
        self._losses: Callable[..., Tensor] = partial(
            losses, reduction="mean" if ranks.alone else "sum"
        )
        self._ranks = ranks
        # Not the batch's device: where a pipeline traces the model, that is not one yet.
        self._layers = partial(layers_in, precision, device)
        self._for_retrieval = isinstance(model.arch, RetrievalArch)

    def record_losses(self) -> None:
        """Let the losses of a step be replayed; see `tessera.training.trainer.graphs`."""
        self._losses = RecordedForward(LossLayer(self._losses), contextlib.nullcontext)

    def forward(self, step: StepBatch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Score a step's batch, whose ids are rows.

        Returns:
            The loss to be differentiated, and (the loss to be reported, the outputs ``[B, L]``),
            detached.  With one rank both losses are the samples' mean.  With several, the reported
            one is the sum over this rank's samples.  Gradients are averaged over the ranks, so
            the other is scaled in such a way that this average is the gradient of the mean over
            all ranks' samples.
        """
        batch = step.batch
        if self._for_retrieval:
            return self._retrieve(step)
        dense = self.encoder(batch.dense_features, batch.sparse_features.stride())
        with self._layers():
            outputs = self.arch(dense, batch.sparse_features)
        outputs = outputs.float()
        weights = () if batch.weights is None else (batch.weights,)
        reduced = self._losses(outputs, batch.labels, *weights)
        reported = reduced.detach()
        if isinstance(self._losses, RecordedForward):
            reported = reported.clone()  # the next step's will be where this one is
        loss = reduced if self._ranks.alone else reduced * (self._ranks.world_size / step.samples)
        return loss, (reported, outputs.detach())

    def _retrieve(self, step: StepBatch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """`forward` of a model for retrieval, whose batches have candidates."""
        arch: Any = self.arch
        users, items = self.vectors(step.batch)
        losses = batch_losses(users, items, step.batch, self._ranks, temperature=arch.temperature)
        outputs = arch.product(users, items[: len(users)])
        if self._ranks.alone:
            loss = losses.mean()
            return loss, (loss.detach(), outputs.detach())
        total = losses.sum()
        loss = total * (self._ranks.world_size / step.samples)
        return loss, (total.detach(), outputs.detach())

    def vectors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The users' vectors ``[B, D]`` and those of all items of the batch; the model is for retrieval."""
        arch: Any = self.arch
        dense = self.encoder(batch.dense_features, batch.sparse_features.stride())
        with self._layers():
            users, items = arch.vectors(dense, batch.sparse_features, users=batch.size)
        return users.float(), items.float()


class PendingLosses:
    """The losses of steps that were not looked at yet; they stay on the device until they are.

    Args:
        ranks: who trains together.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._losses: list[Tensor] = []
        self._samples: list[int] = []

    def __len__(self) -> int:
        return len(self._losses)

    def add(self, loss: Tensor, *, samples: int) -> None:
        """Take a step's reported loss; see `ModelWithLoss.forward`."""
        self._losses.append(loss)
        self._samples.append(samples)

    def take(self) -> Sequence[float]:
        """The mean loss of each step since the last call, oldest first; all ranks call it.

        It waits for the device.
        """
        if not self._losses:
            return []
        values: list[float] = torch.stack(self._losses).double().tolist()
        if not self._ranks.alone:
            totals = self._ranks.sum(values)
            values = [total / count for total, count in zip(totals, self._samples, strict=True)]
        self._losses, self._samples = [], []
        return values
