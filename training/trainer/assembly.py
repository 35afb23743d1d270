"""The model, its optimizers and the loss, joined for training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from tessera.errors import UserError
from tessera.training.config import ExperimentConfig
from tessera.training.data.batch import Batch
from tessera.training.distributed.collections.pooled import EmbeddingBagCollectionSharder
from tessera.training.distributed.model.model_parallel import DistributedModelParallel
from tessera.training.models.ranking import RankingModel, build_ranking_model
from tessera.training.optim.fused import EmbOptimType
from tessera.training.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from tessera.training.optim.optimizers import in_backward_optimizer_filter
from tessera.training.trainer.checkpoint import Checkpoint
from tessera.training.trainer.placement import plan_for
from tessera.training.trainer.ranks import Ranks

DEFAULT_EPS = 1e-8
NO_MEMORY = "can't allocate memory"  # how torch's CPU allocator puts it

_FUSED = {
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "sgd": EmbOptimType.EXACT_SGD,
    "adam": EmbOptimType.ADAM,
    "partial_rowwise_adam": EmbOptimType.PARTIAL_ROWWISE_ADAM,
    "lamb": EmbOptimType.LAMB,
    "partial_rowwise_lamb": EmbOptimType.PARTIAL_ROWWISE_LAMB,
    "lars_sgd": EmbOptimType.LARS_SGD,
    "lion": EmbOptimType.LION,
}
_DENSE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}


@dataclass(kw_only=True)
class Assembly:
    """What a step works on.  The tables' optimizer acts within the backward pass.

    Attributes:
        model: the ranking model; ``model(dense, sparse) -> logits [B]``.
        dense_optimizer: of every parameter that is not a table.
        dense_learning_rate: peak learning rate of these.
        embedding_learning_rate: peak learning rate of the tables.
        ranks: who trains together.
    """

    model: DistributedModelParallel
    dense_optimizer: torch.optim.Optimizer
    dense_learning_rate: float
    embedding_learning_rate: float
    ranks: Ranks
    _factor: float | None = None

    def step(self, batch: Batch, *, samples: int, learning_rate_factor: float) -> float:
        """One step on all ranks' batches together; their mean loss.

        If the loss is not finite nothing is changed.

        Args:
            batch: this rank's part of the step's samples; it may be empty.
            samples: all ranks' samples.
            learning_rate_factor: on both peak learning rates.
        """
        self._set_learning_rates(learning_rate_factor)
        if self.model.device.type != "cpu":
            batch = batch.to(self.model.device)
        logits = self.model(batch.dense_features, batch.sparse_features)
        if self.ranks.alone:
            loss = functional.binary_cross_entropy_with_logits(logits, batch.labels)
            value = loss.item()
        else:
            total = functional.binary_cross_entropy_with_logits(
                logits, batch.labels, reduction="sum"
            )
            value = self.ranks.sum([total.item()])[0] / samples
            # Gradients are averaged over the ranks: their mean is to be that of the mean loss.
            loss = total * (self.ranks.world_size / samples)
        if math.isfinite(value):
            self.dense_optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            self.dense_optimizer.step()
        return value

    def begin_at(self, positive_rate: float) -> None:
        """Let fresh weights answer ``positive_rate`` on average, instead of a half.

        The bias of every logit layer begins at its log-odds.  Otherwise the first steps teach that number
        to whatever is quickest, the rows of the tables that they meet among it, and an id
        that was never met stays without it.
        """
        rate = min(max(positive_rate, 1e-6), 1 - 1e-6)
        model = self.model.module
        assert isinstance(model, RankingModel), type(model)
        with torch.no_grad():
            for name in model.logit_layers():
                bias = model.get_submodule(name).bias
                assert isinstance(bias, torch.Tensor), name
                bias.fill_(math.log(rate / (1 - rate)))

    def learning_rates(self) -> tuple[float, float]:
        """Those of the last step: (dense part, tables)."""
        factor = 1.0 if self._factor is None else self._factor
        return self.dense_learning_rate * factor, self.embedding_learning_rate * factor

    def state(self) -> dict[str, Any]:
        """The `Checkpoint` fields ``model``, ``fused_optimizer`` and ``dense_optimizer``.

        Their tensors are the live ones, not copies.
        """
        return {
            "model": dict(self.model.state_dict()),
            "fused_optimizer": self.model.fused_optimizer.state_dict(),
            "dense_optimizer": self.dense_optimizer.state_dict(),
        }

    def keyed_optimizer(self) -> CombinedOptimizer:
        """Both optimizers as one, by names; it shares their states."""
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        return CombinedOptimizer(
            [
                self.model.fused_optimizer,
                KeyedOptimizerWrapper(dense, lambda _: self.dense_optimizer),
            ]
        )

    def load(self, checkpoint: Checkpoint) -> None:
        """Take over weights and optimizer state, whole ones into the shards of this rank.

        Raises:
            ValueError, KeyError, RuntimeError: they are of another model.
        """
        self.load_model(checkpoint)
        if self.ranks.alone:
            self.model.fused_optimizer.load_state_dict(checkpoint.fused_optimizer)
        else:
            # It takes a while to import that a run of one rank need not wait.
            from tessera.training.distributed.checkpoint.save_and_load import load_whole_states  # noqa: PLC0415

            load_whole_states(self.model.fused_optimizer, checkpoint.fused_optimizer)
        self.dense_optimizer.load_state_dict(checkpoint.dense_optimizer)
        self._factor = None

    def load_model(self, checkpoint: Checkpoint) -> None:
        """Take over the weights alone.

        Raises:
            RuntimeError: they are of another model.
        """
        self.model.load_state_dict(checkpoint.model)

    def _set_learning_rates(self, factor: float) -> None:
        if factor == self._factor:
            return
        self._factor = factor
        dense, embedding = self.learning_rates()
        for group in self.dense_optimizer.param_groups:
            group["lr"] = dense
        for group in self.model.fused_optimizer.param_groups:
            group["lr"] = embedding


def assemble(
    config: ExperimentConfig,
    *,
    dense_names: Sequence[str],
    sparse_names: Sequence[str],
    ranks: Ranks,
    device: torch.device,
) -> Assembly:
    """Build the model for these features, with fresh weights from torch's generator.

    Raises:
        UserError: the model's config does not fit the features, or the tables do not fit the
            ranks or the memory.
    """
    try:
        # "meta": the tables get their memory once, where they are trained.
        model = build_ranking_model(config.model, dense_names, sparse_names, device="meta")
    except UserError as error:
        raise UserError(f"in section 'model': {error}") from error
    embedding, dense = config.train.embedding_optimizer, config.train.dense_optimizer
    sharder = EmbeddingBagCollectionSharder(
        fused_params={
            "optimizer": _FUSED[embedding.name],
            "learning_rate": embedding.learning_rate,
            "eps": DEFAULT_EPS if embedding.eps is None else embedding.eps,
            "weight_decay": embedding.weight_decay,
        }
    )
    if not ranks.alone:
        # What every rank holds is alike until here; each draws its own shards' rows, and dropout.
        torch.manual_seed(config.train.seed + 1_000_003 * ranks.rank)
    table_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    try:
        parallel = DistributedModelParallel(
            model,
            device=device,
            sharders=[sharder],
            plan=plan_for(model, sharder, config, ranks),
        )
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and NO_MEMORY not in str(error):
            raise
        raise UserError(
            f"in section 'model': the weights take {table_bytes / 1e9:,.1f} GB, which is more than "
            "the memory has; lower rows or embedding_dim, or spread the tables over more ranks"
        ) from error
    parameters = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    return Assembly(
        model=parallel,
        dense_optimizer=_DENSE[dense.name](
            list(parameters.values()),
            lr=dense.learning_rate,
            weight_decay=dense.weight_decay,
        ),
        dense_learning_rate=dense.learning_rate,
        embedding_learning_rate=embedding.learning_rate,
        ranks=ranks,
    )
