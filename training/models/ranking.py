"""The whole way from raw features to a logit, which training and serving share.

Shapes: ``B`` samples, ``N`` ids of all features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.training.models.config import ModelConfig, TableConfig
from tessera.training.models.inputs import ModelInputs, SparseFeature
from tessera.training.modules.choices import DenseMissing
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.modules.hashing import FeatureHasher, HashSpec
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


class MissingValueEncoder(nn.Module):
    """Dense features without NaN.

    Args:
        features: dense features of the input; 0 makes a column of ones, which gives the bottom
            MLP something to learn a constant vector from.
        missing: ``indicator`` puts a 0/1 column per feature behind the values, ``zero`` does
            not.
    """

    def __init__(self, features: int, missing: DenseMissing) -> None:
        super().__init__()
        self.features = features
        self.missing = missing

    @property
    def out_features(self) -> int:
        """Columns of the output."""
        if self.features == 0:
            return 1
        return self.features * (2 if self.missing == "indicator" else 1)

    def forward(self, dense: Tensor, batch_size: int) -> Tensor:
        """``[B, features]`` float32, NaN where missing, to ``[B, out_features]``."""
        if self.features == 0:
            return dense.new_ones([batch_size, 1])
        missing = torch.isnan(dense)
        filled = dense.masked_fill(missing, 0.0)
        if self.missing == "zero":
            return filled
        return torch.cat([filled, missing.to(torch.float32)], dim=1)


class RankingModel(nn.Module):
    """Missing values, id hashing, tables and architecture in one module.

    Built by `build_ranking_model`, whose arguments it takes.

    Attributes:
        dense_names: the dense features, in column order.
        features: the sparse features, in the order of the keys that `forward` expects.
        encoder: `MissingValueEncoder`.
        hasher: `FeatureHasher`.
        arch: the architecture: dense values ``[B, N]`` and rows' numbers to logits ``[B, 1]``.
    """

    def __init__(
        self,
        config: ModelConfig,
        dense_names: Sequence[str],
        sparse_names: Sequence[str],
        *,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.dense_names = tuple(dense_names)
        self.features = tuple(settle_features(config, sparse_names))
        self.encoder = MissingValueEncoder(len(dense_names), config.dense_missing)
        self.hasher = FeatureHasher([HashSpec.of(feature) for feature in self.features])
        inputs = ModelInputs(
            dense_columns=self.encoder.out_features,
            features=self.features,
            embedding_init=config.embedding_init,
            device=device,
        )
        self.arch = config.build(inputs)
        self._logit_layers = tuple(f"arch.{name}" for name in config.logit_layers())
        linear = [name for name, part in self.named_modules() if isinstance(part, nn.Linear)]
        for name in self._logit_layers:
            if name not in linear:
                raise UserError(
                    f"the logit layer {name.removeprefix('arch.')!r} is not an nn.Linear of"
                    f" {type(self.arch).__name__}; name one of"
                    f" {', '.join(own.removeprefix('arch.') for own in linear)}"
                )

    def logit_layers(self) -> tuple[str, ...]:
        """Dotted names of the modules whose outputs are logits (or terms of them).

        Each is an ``nn.Linear`` of this module, found with ``get_submodule``.
        """
        return self._logit_layers

    def collections(self) -> dict[str, EmbeddingBagCollection]:
        """The collections of tables by their dotted names, in the order of their declaration.

        Those that are sharded, as they are while the model is trained, are left out.
        """
        return {
            name: part
            for name, part in self.named_modules()
            if isinstance(part, EmbeddingBagCollection)
        }

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """``[B, F_dense]`` float32 (NaN where missing) and raw int32 or int64 ids to logits ``[B]``.

        Raises:
            KeyError: a sparse feature is missing.
        """
        dense = self.encoder(dense_features, sparse_features.stride())
        logits: Tensor = self.arch(dense, self.hasher(sparse_features))
        return logits.squeeze(1)


def build_ranking_model(
    config: ModelConfig,
    dense_names: Sequence[str],
    sparse_names: Sequence[str],
    *,
    device: torch.device | str | None = None,
) -> RankingModel:
    """Build the model that ``config`` describes for the features that the data has.

    Args:
        config: the description.
        dense_names: the data's dense features, possibly none.
        sparse_names: the data's sparse features, at least one.
        device: where the tables live; ``meta`` leaves their memory to
            `DistributedModelParallel`, so that they never exist twice.

    Raises:
        UserError: config and data do not fit.
    """
    return RankingModel(config, dense_names, sparse_names, device=device)


def settle_features(config: ModelConfig, sparse_names: Sequence[str]) -> list[SparseFeature]:
    """Every feature's settings, from the model's defaults and the feature's own.

    Raises:
        UserError: a setting for a feature that the data has not, no features, or features that
            share a table but differ in its size or pooling.
    """
    if not sparse_names:
        raise UserError("the data has no sparse features; a ranking model needs at least one")
    for name in config.tables:
        if name not in sparse_names:
            raise UserError(
                f"tables.{name}: the data has no such feature; it has {', '.join(sparse_names)}"
            )
    features = [_settle(config, name) for name in sparse_names]
    first: dict[str, SparseFeature] = {}
    for feature in features:
        other = first.setdefault(feature.table, feature)
        for trait in ("rows", "dim", "pooling"):
            if getattr(other, trait) != getattr(feature, trait):
                raise UserError(
                    f"features {other.name} and {feature.name} share table {feature.table!r} but "
                    f"have {trait} {getattr(other, trait)} and {getattr(feature, trait)}; give "
                    "both the same"
                )
    return features


def _settle(config: ModelConfig, name: str) -> SparseFeature:
    own = config.tables.get(name, TableConfig())
    return SparseFeature(
        name=name,
        group="id_score_list" if own.weighted else "id_list",
        table=own.table or f"t_{name.replace('.', '_')}",
        rows=own.rows or config.rows,
        dim=own.dim or config.embedding_dim,
        pooling=own.pooling or config.pooling,
        hashing=own.hashing or config.hashing,
        out_of_range=own.out_of_range or config.out_of_range,
    )
