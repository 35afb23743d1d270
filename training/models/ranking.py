"""The whole way from raw features to a logit, which training and serving share.

Shapes: ``B`` samples, ``N`` ids of all features, ``L`` labels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.training.models.config import ModelConfig, TableConfig, auto_dim
from tessera.training.models.inputs import ONE_LABEL, ModelInputs, SparseFeature
from tessera.training.modules.choices import DenseMissing
from tessera.training.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.training.modules.hashing import FeatureHasher, HashSpec
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.training.transforms.description import Transforms, plain_transforms
from tessera.training.transforms.preprocessor import FittedSizes, Preprocessor


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
    """Transforms of raw values, missing ones, id hashing, tables and architecture in one module.

    Built by `build_ranking_model`, whose arguments it takes.

    Attributes:
        dense_names: the data's dense features, in column order.
        features: the sparse features: those of the data, in the order of the keys that `forward`
            expects, and those that the transforms make.
        labels: what the model predicts, in the order of its logits.
        scores: what its outputs are; see `ModelConfig.scores`.
        preprocessor: `Preprocessor`.
        encoder: `MissingValueEncoder`.
        hasher: `FeatureHasher`.
        arch: the architecture: dense values ``[B, N]`` and rows' numbers to logits ``[B, L]``.
    """

    def __init__(
        self,
        config: ModelConfig,
        dense_names: Sequence[str],
        sparse_names: Sequence[str],
        *,
        labels: Sequence[str] = ONE_LABEL,
        transforms: Transforms | None = None,
        sizes: FittedSizes | None = None,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.dense_names = tuple(dense_names)
        self.labels = tuple(labels)
        self.scores = config.scores
        own = transforms or plain_transforms(dense_names, sparse_names)
        self.preprocessor = Preprocessor(own, sizes)
        self.features = tuple(settle_features(config, self.preprocessor))
        self.encoder = MissingValueEncoder(len(own.dense_names), config.dense_missing)
        self.hasher = FeatureHasher([HashSpec.of(feature) for feature in self.features])
        inputs = ModelInputs(
            dense_columns=self.encoder.out_features,
            features=self.features,
            labels=self.labels,
            embedding_init=config.embedding_init,
            device=device,
            dense_names=tuple(own.dense_names),
            sides=own.sides,
        )
        self.arch = config.build(inputs)
        self._logit_layers = {
            f"arch.{name}": places
            for layer in config.logit_layers()
            for name, places in self._of_labels(layer).items()
        }
        linear = [name for name, part in self.named_modules() if isinstance(part, nn.Linear)]
        for name in self._logit_layers:
            if name not in linear:
                raise UserError(
                    f"the logit layer {name.removeprefix('arch.')!r} is not an nn.Linear of"
                    f" {type(self.arch).__name__}; name one of"
                    f" {', '.join(own.removeprefix('arch.') for own in linear)}"
                )

    def _of_labels(self, layer: str) -> dict[str, tuple[int, ...]]:
        """The layers that a name of `ModelConfig.logit_layers` stands for, with their labels."""
        places = tuple(range(len(self.labels)))
        if "*" not in layer:
            return {layer: places}
        return {layer.replace("*", str(place)): (place,) for place in places}

    def logit_layers(self) -> dict[str, tuple[int, ...]]:
        """The modules whose outputs are logits (or terms of them), by their dotted names.

        Each is an ``nn.Linear`` of this module, found with ``get_submodule``; with it stand the
        numbers of the labels that its outputs are for, in the outputs' order.
        """
        return self._logit_layers

    def data_features(self) -> tuple[SparseFeature, ...]:
        """The sparse features that `forward` is given."""
        return self.features[: len(self.preprocessor.transforms.sparse)]

    def collections(self) -> dict[str, EmbeddingBagCollection | EmbeddingCollection]:
        """The collections of tables by their dotted names, in the order of their declaration.

        Those that are sharded, as they are while the model is trained, are left out.
        """
        return {
            name: part
            for name, part in self.named_modules()
            if isinstance(part, EmbeddingBagCollection | EmbeddingCollection)
        }

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """``[B, F_dense]`` raw float32 (NaN where missing) and raw int32 or int64 ids to logits.

        They are ``[B]`` for one label and ``[B, L]`` for several.

        Raises:
            KeyError: a sparse feature is missing.
        """
        dense, ids = self.preprocessor(dense_features, sparse_features)
        dense = self.encoder(dense, ids.stride())
        logits: Tensor = self.arch(dense, self.hasher(ids))
        return logits.squeeze(1) if len(self.labels) == 1 else logits


def build_ranking_model(
    config: ModelConfig,
    dense_names: Sequence[str],
    sparse_names: Sequence[str],
    *,
    labels: Sequence[str] = ONE_LABEL,
    transforms: Transforms | None = None,
    sizes: FittedSizes | None = None,
    device: torch.device | str | None = None,
) -> RankingModel:
    """Build the model that ``config`` describes for the features that the data has.

    Args:
        config: the description.
        dense_names: the data's dense features, possibly none.
        sparse_names: the data's sparse features, at least one.
        labels: what the model predicts.
        transforms: what the model does to their raw values; None: nothing.
        sizes: those of what was fitted for the transforms.
        device: where the tables live; ``meta`` leaves their memory to
            `DistributedModelParallel`, so that they never exist twice.

    Raises:
        UserError: config and data do not fit.
    """
    return RankingModel(
        config,
        dense_names,
        sparse_names,
        labels=labels,
        transforms=transforms,
        sizes=sizes,
        device=device,
    )


def settle_features(config: ModelConfig, preprocessor: Preprocessor) -> list[SparseFeature]:
    """The settings of every feature that ``preprocessor`` gives, in its order.

    They are the feature's own, those of its transforms, and the model's defaults.

    Raises:
        UserError: a setting for a feature that the data has not, no features, features that
            share a table but differ in its size or pooling, or a setting that the feature's
            transform decides.
    """
    transforms = preprocessor.transforms
    names = transforms.sparse_names
    if not names:
        raise UserError("the data has no sparse features; a ranking model needs at least one")
    for name in config.tables:
        if name not in names:
            raise UserError(
                f"tables.{name}: the data has no such feature; it has {', '.join(names)}"
            )
    tables = {column.name: column.table for column in transforms.sparse}
    rows = preprocessor.fixed_rows()
    features = [_settle(config, name, tables.get(name), rows.get(name)) for name in names]
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


def _settle(
    config: ModelConfig, name: str, table: str | None, fixed_rows: int | None
) -> SparseFeature:
    """One feature's settings; ``table`` and ``fixed_rows`` are those that the data gives, if any."""
    own = config.tables.get(name, TableConfig())
    if fixed_rows is not None:
        for field in ("rows", "hashing", "out_of_range"):
            if getattr(own, field) is not None:
                raise UserError(
                    f"tables.{name}.{field}={getattr(own, field)!r}: the column's transform makes"
                    " rows of the ids; leave it out"
                )
    rows = fixed_rows or own.rows or config.rows
    dim = own.dim or config.embedding_dim
    return SparseFeature(
        name=name,
        group="id_score_list" if own.weighted else "id_list",
        table=own.table or table or f"t_{name.replace('.', '_')}",
        rows=rows,
        dim=auto_dim(rows) if dim == "auto" else dim,
        pooling=own.pooling or config.pooling,
        hashing="none" if fixed_rows else own.hashing or config.hashing,
        out_of_range="clamp" if fixed_rows else own.out_of_range or config.out_of_range,
    )
