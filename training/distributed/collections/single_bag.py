"""A single ``nn.EmbeddingBag`` whose table is spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tessera.training.distributed.collections.around_pooled import AroundPooledCollection
from tessera.training.distributed.collections.pooled_output import EmbeddingBagCollectionContext
from tessera.training.distributed.collections.sharders import CollectionSharder
from tessera.training.distributed.comm.awaitable import Awaitable, LazyAwaitable
from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.plan.plan_types import ParameterSharding
from tessera.training.distributed.tables.table_module import ShardedTable
from tessera.training.distributed.travel.kjt_list import KJTList
from tessera.training.modules.embedding_configs import (
    TRAINED_TYPES,
    EmbeddingBagConfig,
    PoolingType,
)
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

_TABLE = _FEATURE = "weight"
_POOLING = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}
_DATA_TYPES = {dtype: kind for kind, dtype in TRAINED_TYPES.items()}


class EmbeddingAwaitable(LazyAwaitable[Tensor]):
    """Waits for the vectors of a collection with one feature."""

    def __init__(self, awaitable: Awaitable[KeyedTensor]) -> None:
        super().__init__()
        self._awaitable = awaitable

    def _wait_impl(self) -> Tensor:
        return self._awaitable.wait().values()


def _as_collection(module: nn.EmbeddingBag) -> EmbeddingBagCollection:
    """A collection of one table, which is ``module``'s."""
    unknown = [
        f"{name}={getattr(module, name)}"
        for name in ("max_norm", "padding_idx")
        if getattr(module, name) is not None
    ]
    if module.mode not in _POOLING or unknown:
        raise ValueError(
            f"nn.EmbeddingBag with mode={module.mode!r} {' '.join(unknown)} cannot be sharded; it "
            "takes mode 'sum' or 'mean', without max_norm and padding_idx"
        )
    collection = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                module.num_embeddings,
                module.embedding_dim,
                name=_TABLE,
                feature_names=[_FEATURE],
                pooling=_POOLING[module.mode],
                data_type=_DATA_TYPES[module.weight.dtype],
            )
        ],
        # torch takes per-sample weights of sums only.
        is_weighted=module.mode == "sum",
        device=torch.device("meta"),
    )
    collection.embedding_bags[_TABLE].weight = module.weight
    return collection


class ShardedEmbeddingBag(AroundPooledCollection[Tensor]):
    """An ``nn.EmbeddingBag`` whose table lives where a plan puts it.

    Its one parameter and its state are called ``weight``, as the table is in the plan.  The
    module's ``mode`` is ``sum`` or ``mean``; the other arguments are those of `ShardedCollection`.

    Raises:
        ValueError: the module does what sharded tables do not, or the plan does not fit.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        module: nn.EmbeddingBag,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(
            _as_collection(module),
            table_name_to_parameter_sharding,
            env,
            fused_params,
            device,
            qcomm_codecs_registry,
        )
        self._include_last_offset = module.include_last_offset
        self._is_weighted = module.mode == "sum"
        table = self._inner[0].embedding_bags[_TABLE]
        assert isinstance(table, ShardedTable)
        self._table = (table,)
        for name, parameter in table.named_parameters():
            self.register_parameter(name, parameter)

    @property
    def unsharded_module_type(self) -> type[nn.EmbeddingBag]:
        """Return the type of module that this is the sharded form of."""
        return nn.EmbeddingBag

    def reset_parameters(self) -> None:
        """Give the table new first values."""
        self._inner[0].reset_parameters()

    def input_dist(
        self,
        ctx: EmbeddingBagCollectionContext,
        input: Tensor,  # noqa: A002 - torch's name
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Awaitable[Awaitable[KJTList]]:
        """Begin to send ids to the ranks that hold their rows.

        Args:
            ctx: filled here.
            input: ``[N]`` ids, or ``[B, L]``: bags of ``L`` ids each.
            offsets: with ``[N]``: ``[B]`` where each bag begins (``[B + 1]`` if the module was
                made with ``include_last_offset``).
            per_sample_weights: like ``input``; no gradient goes to them.

        Raises:
            ValueError: arguments that do not go together, as of torch's module.
        """
        if (input.dim() == 2) != (offsets is None):
            raise ValueError(
                f"input has {input.dim()} dimensions and offsets is "
                f"{'not given' if offsets is None else 'given'}; give [N] ids with offsets or "
                "[B, L] without"
            )
        if per_sample_weights is not None and not self._is_weighted:
            raise ValueError("per_sample_weights go with mode 'sum'; this module's is 'mean'")
        if offsets is None:
            lengths = torch.full((input.size(0),), input.size(1), device=input.device)
        else:
            if not self._include_last_offset:
                offsets = torch.cat([offsets, offsets.new_tensor([input.numel()])])
            lengths = offsets[1:] - offsets[:-1]
        weights = per_sample_weights
        if weights is None and self._is_weighted:
            weights = torch.ones_like(input, dtype=torch.float32)
        features = KeyedJaggedTensor(
            [_FEATURE],
            input.reshape(-1),
            weights=None if weights is None else weights.reshape(-1),
            lengths=lengths,
        )
        return self._inner[0].input_dist(ctx, features)

    def _arriving(self, pooled: LazyAwaitable[KeyedTensor]) -> LazyAwaitable[Tensor]:
        return EmbeddingAwaitable(pooled)

    def _save_to_state_dict(
        self,
        destination: dict[str, Any],
        prefix: str,
        keep_vars: bool,  # noqa: FBT001 - torch's signature
    ) -> None:
        self._table[0]._save_to_state_dict(destination, prefix, keep_vars)  # noqa: SLF001 - this module's table

    def _load_from_state_dict(self, *args: Any) -> None:
        self._table[0]._load_from_state_dict(*args)  # noqa: SLF001 - this module's table

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ShardedEmbeddingBag:  # noqa: FBT001, FBT002 - torch's signature
        """Let only pass what leaves the table where it is."""
        self._inner[0]._apply(fn, recurse)  # noqa: SLF001 - as of its collection
        return self


class EmbeddingBagSharder(CollectionSharder[nn.EmbeddingBag, ShardedEmbeddingBag]):
    """Turns ``nn.EmbeddingBag`` into its sharded form; see `CollectionSharder`."""

    _plain, _sharded = nn.EmbeddingBag, ShardedEmbeddingBag

    def shardable_parameters(self, module: nn.EmbeddingBag) -> dict[str, nn.Parameter]:
        """Return the table under the name ``weight``."""
        return dict(module.named_parameters())
