"""Tells which rows of a model's tables were trained since a consumer last asked, under TorchRec's names.

Rows are those of the shards on this rank, counted from the shard's first.  For updates of a served model,
which need no states, `tessera.training.distributed.tables.delta_tracker` keeps one bit per row instead.

    tracker = model.init_torchrec_delta_tracker(DeltaTrackerConfig(consumers=["publisher", "backup"]))
    for batch in batches:
        train(batch)
    rows = tracker.get_unique("publisher")
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from tessera.errors import UserError, unknown_name
from tessera.training.distributed.collections.pooled import ShardedEmbeddingBagCollection
from tessera.training.distributed.collections.unpooled import ShardedEmbeddingCollection
from tessera.training.distributed.model_tracker.delta_store import DeltaStoreTrec
from tessera.training.distributed.model_tracker.types import (
    TrackingMode,
    UniqueRows,
    UpdateMode,
)
from tessera.training.distributed.tables.batched_kernels import Kernel
from tessera.training.optim.fused import EmbOptimType, FusedParams
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

UPDATE_MODE_MAP = {
    TrackingMode.ID_ONLY: UpdateMode.NONE,
    TrackingMode.EMBEDDING: UpdateMode.FIRST,
    TrackingMode.MOMENTUM_LAST: UpdateMode.LAST,
    TrackingMode.MOMENTUM_DIFF: UpdateMode.FIRST,
    TrackingMode.ROWWISE_ADAGRAD: UpdateMode.FIRST,
}
"""Which state of a row stays in each mode."""

SUPPORTED_MODULES = (ShardedEmbeddingCollection, ShardedEmbeddingBagCollection)
"""The modules whose tables are tracked."""

_GROWTH = (TrackingMode.MOMENTUM_DIFF, TrackingMode.ROWWISE_ADAGRAD)
_SUMS_SQUARES = (EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.EXACT_ADAGRAD)


class ModelDeltaTracker(ABC):
    """What is asked of a tracker."""

    DEFAULT_CONSUMER = "default"

    @abstractmethod
    def record_lookup(
        self, kjt: KeyedJaggedTensor, states: Tensor, emb_module: nn.Module | None = None
    ) -> None:
        """Take note of a lookup.

        Args:
            kjt: the rows that were looked up, as ids of the features of ``emb_module``'s shards.
            states: what the lookup gave.
            emb_module: what looked them up.
        """

    @abstractmethod
    def get_unique_ids(self, consumer: str | None = None) -> dict[str, Tensor]:
        """By table the rows ``[n]`` that a consumer was not told of, ascending; it is told now."""

    @abstractmethod
    def get_unique(self, consumer: str | None = None) -> dict[str, UniqueRows]:
        """The same rows with what is kept of each."""

    @abstractmethod
    def clear(self, consumer: str | None = None) -> None:
        """Forget all rows; with a consumer, what it was not told of."""

    @abstractmethod
    def step(self) -> None:
        """Begin a step: what is looked up from now on is of it; `DistributedModelParallel` calls it."""


class ModelDeltaTrackerTrec(ModelDeltaTracker):
    """Tracks the rows of a model's sharded collections on this rank.

    What is looked up is of the current step until `step` is called, as `DistributedModelParallel` does before
    every forward pass.  A consumer is told of whole steps.

    Args:
        model: the model; its sharded collections are tracked from now on.
        consumers: names of those who ask; None: one, `DEFAULT_CONSUMER`.
        delete_on_read: whether rows are forgotten when all consumers were told of them.
        auto_compact: whether rows are put together at every step; otherwise when a consumer asks.
        mode: what is kept of a row.
        fqns_to_skip: names of modules and tables that are not tracked, as parts of their paths.

    Attributes:
        tracked_modules: the collections by their paths.
        store: what is kept.

    Raises:
        UserError: tables that the mode cannot be used for.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        model: nn.Module,
        consumers: list[str] | None = None,
        delete_on_read: bool = True,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        auto_compact: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        mode: TrackingMode = TrackingMode.ID_ONLY,
        fqns_to_skip: Iterable[str] = (),
    ) -> None:
        self._mode, self._delete_on_read, self._auto_compact = mode, delete_on_read, auto_compact
        self._skipped = set(fqns_to_skip)
        self.per_consumer_batch_idx = dict.fromkeys(consumers or [self.DEFAULT_CONSUMER], -1)
        self.curr_batch_idx = 0
        self.store = DeltaStoreTrec(UPDATE_MODE_MAP[mode])
        self.tracked_modules: dict[str, nn.Module] = {}
        self._features: dict[str, list[str]] = {}
        # Per kernel the path of the table of each of its shards; None: it is skipped.
        self._paths: dict[Kernel, list[str | None]] = {}
        for path, module in model.named_modules():
            if isinstance(module, SUPPORTED_MODULES) and not self._skips(path):
                self._track(_without_wrappers(path), module)

    def _skips(self, path: str) -> bool:
        return not self._skipped.isdisjoint(path.split("."))

    def _track(
        self, path: str, module: ShardedEmbeddingCollection | ShardedEmbeddingBagCollection
    ) -> None:
        if self._mode is TrackingMode.EMBEDDING and not isinstance(
            module, ShardedEmbeddingCollection
        ):
            raise UserError(
                f"{path or 'the model'} pools its vectors, and EMBEDDING keeps the vector of each row; use "
                "another TrackingMode, or name it in fqns_to_skip"
            )
        self.tracked_modules[path] = module
        holder = ".".join(part for part in (path, module._holder) if part)  # noqa: SLF001 - where the tables' names are
        for table in module.configs:
            if not self._skips(name := f"{holder}.{table.name}"):
                self._features[name] = list(table.feature_names)
        seen: set[str] = set()
        for kernel in module.table_kernels():
            paths = [f"{holder}.{table.name}" for table in kernel.tables]
            own = [name if name in self._features else None for name in paths]
            for tracked in own:
                if tracked in seen and self._mode is not TrackingMode.ID_ONLY:
                    raise UserError(
                        f"{tracked} has several shards on this rank, whose states are not one's; use "
                        "TrackingMode.ID_ONLY, or place it otherwise"
                    )
                seen.update([] if tracked is None else [tracked])
            self._check_kernel(kernel)
            self._paths[kernel] = own
            kernel.observers.append(self._record)

    def _check_kernel(self, kernel: Kernel) -> None:
        if self._mode in {TrackingMode.ID_ONLY, TrackingMode.EMBEDDING}:
            return
        optimizer = FusedParams.from_dict(kernel.config.fused_params or {}).optimizer
        states = kernel.optimizer_states()
        wrong = self._mode in _GROWTH and optimizer not in _SUMS_SQUARES
        if not states or wrong:
            raise UserError(
                f"table {kernel.tables[0].name!r} is trained by {optimizer.value} in a "
                f"{kernel.config.compute_kernel.value} kernel; {self._mode.name} needs a fused optimizer "
                f"{'that sums squared gradients' if self._mode in _GROWTH else 'with a momentum'}"
            )

    def _record(self, kernel: Kernel, features: KeyedJaggedTensor, vectors: Tensor) -> None:
        self.record_lookup(features, vectors, kernel)

    @torch.no_grad()
    def record_lookup(
        self, kjt: KeyedJaggedTensor, states: Tensor, emb_module: nn.Module | None = None
    ) -> None:
        """Take note of a lookup; called after every one.

        Raises:
            UserError: ``emb_module`` is not a kernel of a tracked collection.
        """
        if not isinstance(emb_module, Kernel) or emb_module not in self._paths:
            raise UserError(
                f"emb_module is a {type(emb_module).__name__} whose tables are not tracked; give a kernel "
                "of a tracked collection"
            )
        counts = kjt.length_per_key()
        ids_by_feature = kjt.values().split_with_sizes(counts)
        vectors = (
            states.split_with_sizes(counts)
            if self._mode is TrackingMode.EMBEDDING
            else [None] * len(counts)
        )
        place = 0
        for table, path in enumerate(self._paths[emb_module]):
            own = slice(place, place + len(emb_module.tables[table].feature_names))
            place = own.stop
            if path is None:
                continue
            ids = torch.cat(ids_by_feature[own]).long()
            found = [vector for vector in vectors[own] if vector is not None]
            kept = torch.cat(found).detach() if found else self._state(emb_module, table, ids)
            self.store.append(self.curr_batch_idx, path, ids, kept)

    def _state(self, kernel: Kernel, table: int, ids: Tensor) -> Tensor | None:
        """What the optimizer has of rows, before the step that looks them up."""
        if self._mode is TrackingMode.ID_ONLY:
            return None
        rows = kernel.states_by_table()[table][0][ids]
        if self._mode in _GROWTH:
            return rows
        return rows.abs() if rows.dim() == 1 else rows.norm(dim=1)

    def step(self) -> None:
        """Begin a step: what is looked up from now on is of it; `DistributedModelParallel` calls it."""
        self.curr_batch_idx += 1
        if self._auto_compact:
            self.trigger_compaction()

    def trigger_compaction(self) -> None:
        """Put the rows of all steps together that no consumer was told of."""
        start = max(0, *self.per_consumer_batch_idx.values())
        if start < self.curr_batch_idx:
            self.compact(start, self.curr_batch_idx)

    def compact(self, start_idx: int, end_idx: int) -> None:
        """See `DeltaStoreTrec.compact`."""
        self.store.compact(start_idx, end_idx)

    def get_latest(self) -> dict[str, Tensor]:
        """By table the first live state of its optimizer, of the rows that are here."""
        return {
            path: states[0]
            for kernel, paths in self._paths.items()
            for path, states in zip(paths, kernel.states_by_table(), strict=True)
            if path is not None and states
        }

    def get_unique_ids(self, consumer: str | None = None) -> dict[str, Tensor]:
        """By table the rows ``[n]`` int64 that a consumer was not told of, ascending; it is told now.

        Raises:
            UserError: an unknown consumer.
        """
        return {path: rows.ids for path, rows in self.get_unique(consumer).items()}

    def get_unique(self, consumer: str | None = None) -> dict[str, UniqueRows]:
        """The same rows with what is kept of each.

        Args:
            consumer: who asks; None: `DEFAULT_CONSUMER`.

        Raises:
            UserError: an unknown consumer.
        """
        consumer = self._known(consumer or self.DEFAULT_CONSUMER)
        end = self.curr_batch_idx + 1
        start = max(self.per_consumer_batch_idx.values())
        if start < end:
            self.compact(start, end)
        found = self.store.get_unique(self.per_consumer_batch_idx[consumer])
        self.per_consumer_batch_idx[consumer] = end
        if self._delete_on_read:
            self.store.delete(min(self.per_consumer_batch_idx.values()))
        if self._mode in _GROWTH:
            latest = self.get_latest()
            for path, rows in found.items():
                if rows.states is not None:
                    rows.states = latest[path][rows.ids] - rows.states
        return found

    def clear(self, consumer: str | None = None) -> None:
        """Forget all rows; with a consumer, what it was not told of.

        Raises:
            UserError: an unknown consumer.
        """
        if consumer is None:
            self.store.delete()
            return
        self.per_consumer_batch_idx[self._known(consumer)] = self.curr_batch_idx + 1
        self.store.delete(min(self.per_consumer_batch_idx.values()))

    def _known(self, consumer: str) -> str:
        if consumer not in self.per_consumer_batch_idx:
            raise unknown_name("consumer", consumer, list(self.per_consumer_batch_idx))
        return consumer

    def get_tracked_modules(self) -> dict[str, nn.Module]:
        """The tracked collections by their paths."""
        return self.tracked_modules

    def fqn_to_feature_names(self) -> dict[str, list[str]]:
        """By path of each tracked table, the features that look up its rows."""
        return self._features

    def kernels(self) -> Iterator[Kernel]:
        """The kernels that are observed."""
        yield from self._paths


def _without_wrappers(path: str) -> str:
    """The path of a module outside of what models are wrapped in."""
    for prefix in ("_dmp_wrapped_module.module.", "_dmp_wrapped_module.", "module."):
        if path.startswith(prefix):
            return path.removeprefix(prefix)
    return "" if path in {"_dmp_wrapped_module", "module"} else path
