"""The model, its optimizers and the loss, joined for training."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tessera.errors import UserError
from tessera.training.config import ExperimentConfig
from tessera.training.data.batch import Batch
from tessera.training.data.columns import LabelColumn
from tessera.training.distributed.collections.pooled import EmbeddingBagCollectionSharder
from tessera.training.distributed.collections.sharders import CollectionSharder
from tessera.training.distributed.collections.unpooled import EmbeddingCollectionSharder
from tessera.training.distributed.model.model_parallel import DistributedModelParallel
from tessera.training.first_order_config import FirstOrderOptimizerConfig
from tessera.training.models.ranking import build_ranking_model
from tessera.training.models.retrieval import RetrievalArch
from tessera.training.models.terms import FirstOrder
from tessera.training.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tessera.training.optim.fused import EmbOptimType
from tessera.training.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from tessera.training.optim.optimizers import SGD, Adagrad, in_backward_optimizer_filter
from tessera.training.trainer.averages import WeightAverages
from tessera.training.trainer.checkpoint_file import Checkpoint
from tessera.training.trainer.graphs import record_layers
from tessera.training.trainer.losses import Losses
from tessera.training.trainer.placement import caches_rows, plan_for
from tessera.training.trainer.precision import layers_in, prepare_layers, vectors_in
from tessera.training.trainer.ranks import Ranks
from tessera.training.trainer.retrieval import ItemSampler
from tessera.training.trainer.retrieval_evaluation import RetrievalData
from tessera.training.trainer.step import ModelWithLoss, Preparation, StepBatch
from tessera.training.transforms.description import Transforms
from tessera.training.transforms.fitting import Fitted

DEFAULT_EPS = 1e-8
NO_MEMORY = "can't allocate memory"  # how torch's CPU allocator puts it

# A config leaves out what tells exact updates from the approximate ones that FBGEMM had before.
_FUSED = {kind.name.lower().removeprefix("exact_"): kind for kind in EmbOptimType}
_FIRST_ORDER = {"sgd": SGD, "adagrad": Adagrad}
_DENSE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}

_FUSED_ON_GPUS = ("adam", "adamw", "sgd")
"""Optimizers of which torch has one kernel for all weights: the CPU has a tenth of the calls to make."""


@dataclass(kw_only=True)
class Assembly:
    """What a step works on.  The tables' optimizer acts within the backward pass.

    Attributes:
        model: a `ModelWithLoss`; it takes a `StepBatch` that is on the device.
        preparation: makes of raw values what the model takes, on its device.
        logit_layers: see `RankingModel.logit_layers`.
        losses: of the model's labels.
        dense_optimizer: of every parameter that is not a table.
        peaks: the peak learning rates of these and of the tables.
        fused_peaks: that of each of the fused optimizer's groups, in their order.
        ranks: who trains together.
        averages: of the weights; None: none are made.
        retrieval: of a model for retrieval, what is known of the items.
    """

    model: DistributedModelParallel
    preparation: Preparation
    logit_layers: dict[str, tuple[int, ...]]
    losses: Losses
    dense_optimizer: torch.optim.Optimizer
    peaks: tuple[float, float]
    fused_peaks: tuple[float, ...]
    ranks: Ranks
    averages: WeightAverages | None = None
    retrieval: RetrievalData | None = None
    _factor: float | None = None

    def on_device(self, batch: Batch, *, samples: int) -> StepBatch:
        """A batch of rows that are not trained on, as a step works on it; does not wait for the copy."""
        batch.row_numbers = None  # the transforms were not fitted to them
        given = StepBatch(batch, samples, self.preparation)
        return given.to(self.model.device, non_blocking=True)

    def item_sampler(self, *, seed: int) -> ItemSampler | None:
        """What adds the items that its steps draw to the batches of a model for retrieval."""
        if self.retrieval is None:
            return None
        return ItemSampler(
            catalogue=self.retrieval.catalogue,
            item_id=self.retrieval.item_id,
            settings=self.retrieval.settings,
            seed=seed,
            part=(self.ranks.rank, self.ranks.world_size),
        )

    def vectors(self, step: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The users' and the items' vectors ``[B, D]`` of a batch; the model is one for retrieval."""
        module = self.model.module
        assert isinstance(module, ModelWithLoss)
        return module.vectors(step.batch)

    def product(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """The logits ``[B, 1]`` of pairs of vectors; the model is one for retrieval."""
        arch = self.model.module.arch
        assert isinstance(arch, RetrievalArch)
        return arch.product(users, items)

    def begin_at(self, means: Sequence[float]) -> None:
        """Let fresh weights answer the labels' means on average, instead of a half or 0.

        The biases of every logit layer begin at the log-odds of binary labels' means, and at the
        means of others.  Otherwise the first steps teach that number to whatever is quickest, the rows
        of the tables that they meet among it, and an id that was never met stays without it.
        """
        begin = [
            _log_odds(mean) if label.task == "binary" else mean
            for label, mean in zip(self.losses.labels, means, strict=True)
        ]
        with torch.no_grad():
            for name, places in self.logit_layers.items():
                bias = self.model.module.get_submodule(name).bias
                assert isinstance(bias, torch.Tensor), name
                bias.copy_(bias.new_tensor([begin[place] for place in places]))

    def learning_rates(self) -> tuple[float, float]:
        """The learning rates of the last step, of the dense part and of the tables."""
        factor = 1.0 if self._factor is None else self._factor
        dense, embedding = self.peaks
        return dense * factor, embedding * factor

    def averaged(self) -> AbstractContextManager[None]:
        """The model with the averages for its weights, where there are some; every rank enters it."""
        return contextlib.nullcontext() if self.averages is None else self.averages.in_use()

    def average_tensors(self) -> dict[str, torch.Tensor]:
        """The averages by the names of the weights; none where none are made, or not yet."""
        return {} if self.averages is None else self.averages.tensors

    def state(self) -> dict[str, Any]:
        """The `Checkpoint` fields ``model``, ``average`` and those of the optimizers.

        Their tensors are the live ones, not copies.
        """
        return {
            "model": dict(self.model.state_dict()),
            "average": self.average_tensors(),
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
        """Take over the weights and their averages alone.

        Raises:
            CheckpointError, RuntimeError: they are of another model.
        """
        self.model.load_state_dict(checkpoint.model)
        if self.averages is not None:
            self.averages.begin(checkpoint.average)
            if checkpoint.average:
                # As in `load`.
                from tessera.training.distributed.checkpoint.save_and_load import load_whole_tensors  # noqa: PLC0415

                load_whole_tensors(self.averages.tensors, checkpoint.average)

    def set_learning_rates(self, factor: float) -> None:
        """Set all learning rates to their peaks times ``factor``, for the steps that follow."""
        if factor == self._factor:
            return
        self._factor = factor
        dense, _ = self.learning_rates()
        for group in self.dense_optimizer.param_groups:
            group["lr"] = dense
        fused = self.model.fused_optimizer.param_groups
        for group, peak in zip(fused, self.fused_peaks, strict=True):
            group["lr"] = peak * factor


def _log_odds(mean: float) -> float:
    rate = min(max(mean, 1e-6), 1 - 1e-6)
    return math.log(rate / (1 - rate))


def _give_first_order_optimizer(config: FirstOrderOptimizerConfig | None, model: nn.Module) -> None:
    """Let the first-order weights of ids be updated as ``config`` says, if it says something."""
    if config is None:
        return
    parts = [part for part in model.modules() if isinstance(part, FirstOrder)]
    if not parts:
        raise UserError(
            "in section 'train': first_order_optimizer is given, but the model has no first-order weights;"
            " set model.first_order to true, or leave it out"
        )
    given: dict[str, float] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if config.name == "adagrad":
        given["eps"] = DEFAULT_EPS
    for part in parts:
        tables = part.embedding_bag_collection.parameters()
        apply_optimizer_in_backward(_FIRST_ORDER[config.name], tables, given)


def assemble(
    config: ExperimentConfig,
    *,
    labels: Sequence[LabelColumn],
    transforms: Transforms,
    fitted: Fitted,
    ranks: Ranks,
    device: torch.device,
    retrieval: RetrievalData | None = None,
) -> Assembly:
    """Build the model for these features, with fresh weights from torch's generator.

    A model for retrieval needs ``retrieval``.  Of a run that is taken up, only the sizes of ``fitted`` are known, and its state is empty.

    Raises:
        UserError: the config does not fit the features or the labels, or the tables do not fit the
            ranks or the memory.
    """
    try:
        # "meta": the tables get their memory once, where they are trained.
        ranking = build_ranking_model(
            config.model,
            [column.name for column in transforms.dense],
            [column.name for column in transforms.sparse],
            labels=[label.name for label in labels],
            transforms=transforms,
            sizes=fitted.sizes,
            device="meta",
        )
    except UserError as error:
        raise UserError(f"in section 'model': {error}") from error
    if fitted.state:
        ranking.preprocessor.load_state_dict(fitted.state)
    preparation = Preparation(ranking.preprocessor.to(device), ranking.hasher.to(device))
    _give_first_order_optimizer(config.train.first_order_optimizer, ranking)
    losses = Losses.of(
        labels,
        label_weights=config.train.label_weights,
        positive_weights=config.train.positive_weights,
    )
    precision = config.train.precision
    model = ModelWithLoss(ranking, losses, ranks=ranks, device=device, precision=precision)
    embedding, dense = config.train.embedding_optimizer, config.train.dense_optimizer
    fused = {
        "optimizer": _FUSED[embedding.name],
        "learning_rate": embedding.learning_rate,
        "eps": DEFAULT_EPS if embedding.eps is None else embedding.eps,
        "weight_decay": embedding.weight_decay,
        **({"prefetch_pipeline": True} if caches_rows(config) else {}),
        # The hasher has made rows of all ids; a look at each takes a GPU as long as the lookup.
        **({"bounds_check_mode": "none"} if device.type == "cuda" else {}),
    }
    sharders: list[CollectionSharder[Any, Any]] = [
        EmbeddingBagCollectionSharder({**fused, **vectors_in(precision, device)}),
        EmbeddingCollectionSharder(fused),
    ]
    if not ranks.alone:
        # What every rank holds is alike until here; each draws its own shards' rows, and dropout.
        torch.manual_seed(config.train.seed + 1_000_003 * ranks.rank)
    table_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    try:
        parallel = DistributedModelParallel(
            model,
            env=ranks.env,
            device=device,
            sharders=list(sharders),
            plan=plan_for(model, sharders, config, ranks, device),
        )
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and NO_MEMORY not in str(error):
            raise
        raise UserError(
            f"in section 'model': the weights take {table_bytes / 1e9:,.1f} GB, which is more than "
            "the memory has; lower rows or embedding_dim, or spread the tables over more ranks"
        ) from error
    layers = ranking.logit_layers()
    prepare_layers(parallel.module, precision, device, logit_layers=layers)
    if config.train.cuda_graphs:
        arch = parallel.module.get_submodule("arch")
        record_layers(arch, partial(layers_in, precision, device, caches=False))
        assert isinstance(parallel.module, ModelWithLoss)
        parallel.module.record_losses()
    parameters = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    return Assembly(
        model=parallel,
        preparation=preparation,
        logit_layers=layers,
        losses=losses,
        dense_optimizer=_DENSE[dense.name](
            list(parameters.values()),
            lr=dense.learning_rate,
            weight_decay=dense.weight_decay,
            **({"fused": True} if device.type == "cuda" and dense.name in _FUSED_ON_GPUS else {}),
        ),
        peaks=(dense.learning_rate, embedding.learning_rate),
        fused_peaks=tuple(group["lr"] for group in parallel.fused_optimizer.param_groups),
        ranks=ranks,
        averages=(
            None if config.train.average is None else WeightAverages(config.train.average, parallel)
        ),
        retrieval=retrieval,
    )
