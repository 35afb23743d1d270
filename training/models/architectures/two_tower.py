"""``arch: two_tower``: a vector of the user, a vector of the item, and their product.

Sources: Covington, Adams and Sargin, "Deep Neural Networks for YouTube Recommendations" (2016); Yi et al.,
"Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations" (2019); Yang et al.,
"Mixed Negative Sampling for Learning Two-tower Neural Networks in Recommendations" (2020).

Shapes: ``B`` samples, ``N`` dense columns, ``W`` columns of a tower's input, ``D`` of its vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.training import field_checks as check
from tessera.training.models.config import DeepModelConfig, RetrievalSettings, architecture
from tessera.training.models.dlrm_parts import SparseArch
from tessera.training.models.inputs import ModelInputs
from tessera.training.models.retrieval import OneTower, TowerSide, tower_of
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.modules.mlp import MLP
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

Similarity = Literal["cosine", "dot"]

_TINY = 1e-24  # of the square of a vector's length; vectors of zeros stay zeros


class Tower(nn.Module):
    """An MLP, whose last layer has no activation; under ``cosine`` its output has length 1.

    Args:
        in_features: ``W``.
        layers: columns after each hidden layer; there may be none.
        out_features: ``D``.
        similarity: ``cosine`` divides the vector by its length.
        dropout: of hidden outputs, while training.
        batch_norm: whether hidden layers are normalised over the batch.
    """

    def __init__(
        self,
        in_features: int,
        layers: Sequence[int],
        out_features: int,
        *,
        similarity: Similarity,
        dropout: float,
        batch_norm: bool,
    ) -> None:
        super().__init__()
        hidden: list[nn.Module] = []
        if layers:
            hidden = [MLP(in_features, list(layers), dropout=dropout, batch_norm=batch_norm)]
        self.model = nn.Sequential(
            *hidden, nn.Linear(layers[-1] if layers else in_features, out_features)
        )
        self._normalised = similarity == "cosine"

    def forward(self, values: Tensor) -> Tensor:
        """``[B, W]`` to ``[B, D]``."""
        vector: Tensor = self.model(values)
        if not self._normalised:
            return vector
        square = vector.square().sum(dim=1, keepdim=True).clamp(min=_TINY)
        return vector / square.sqrt()


class TwoTower(nn.Module):
    """Both towers over one collection of tables, so that a user's history may look up items' rows.

    Args:
        tables: one vector per feature; embedding dimensions may differ.
        towers: of the user and of the item.
        dense: by tower, which of the ``N`` dense columns it is given.
        features: by tower, which features.
        dense_columns: ``N``.
        temperature: what the product of two vectors is divided by.
        embedding_dropout: of the looked-up vectors, while training.
    """

    def __init__(
        self,
        tables: EmbeddingBagCollection,
        towers: dict[TowerSide, Tower],
        *,
        dense: dict[TowerSide, list[int]],
        features: dict[TowerSide, list[str]],
        dense_columns: int,
        temperature: float,
        embedding_dropout: float,
    ) -> None:
        super().__init__()
        self.sparse_arch = SparseArch(tables, dropout=embedding_dropout)
        self.user, self.item = towers["user"], towers["item"]
        self.features = features
        self.temperature = temperature
        self.user_columns: Tensor
        self.item_columns: Tensor
        place, of_feature = dense_columns, {}
        for name, dim in zip(
            self.sparse_arch.sparse_feature_names, self.sparse_arch.dims, strict=True
        ):
            of_feature[name] = range(place, place + dim)
            place += dim
        for side in towers:
            columns = [*dense[side], *(c for name in features[side] for c in of_feature[name])]
            self.register_buffer(f"{side}_columns", torch.tensor(columns), persistent=False)

    def vectors(
        self, dense: Tensor, sparse: KeyedJaggedTensor, *, users: int
    ) -> tuple[Tensor, Tensor]:
        """The vectors of the first ``users`` samples' users ``[users, D]``, and of all items ``[B, D]``."""
        values = torch.cat([dense, self.sparse_arch.pooled(sparse)], dim=1)
        user: Tensor = self.user(values[:users].index_select(1, self.user_columns))
        item: Tensor = self.item(values.index_select(1, self.item_columns))
        return user, item

    def product(self, user: Tensor, item: Tensor) -> Tensor:
        """Both ``[B, D]`` to logits ``[B, 1]``."""
        return (user * item).sum(dim=1, keepdim=True) / self.temperature

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """``[B, N]`` and the features' rows to logits ``[B, 1]``."""
        values = torch.cat([dense, self.sparse_arch.pooled(sparse)], dim=1)
        user: Tensor = self.user(values.index_select(1, self.user_columns))
        item: Tensor = self.item(values.index_select(1, self.item_columns))
        return self.product(user, item)

    def one(self, side: TowerSide, inputs: ModelInputs) -> OneTower:
        """The tower of one side over tables of its features alone, whose weights are shared.

        ``inputs`` has these features alone.
        """
        own = inputs.collection()
        rows = dict(self.sparse_arch.embedding_bag_collection.named_parameters())
        state = {name: rows[name] for name, _ in own.named_parameters()}
        own.load_state_dict(state, assign=True)
        tower = self.user if side == "user" else self.item
        return OneTower(
            own,
            tower,
            self.features[side],
            dense_columns=inputs.dense_columns if inputs.dense_names else 0,
        )


@architecture
@dataclass(frozen=True, kw_only=True)
class TwoTowerConfig(DeepModelConfig):
    """`TwoTower`, trained by a softmax over the items of the batch.

    Features of side ``user`` and ``context`` go to the user's tower, those of side ``item`` to the
    item's.  Every feature needs a side, and the data a ``data.item_id``.

    Attributes:
        user_layers: hidden layers of the user's tower.
        item_layers: hidden layers of the item's tower.
        output_dim: numbers of a tower's vector.
        similarity: ``cosine`` divides both vectors by their lengths; ``dot`` does not.
        temperature: what the product of the two vectors is divided by; None: 0.05 under ``cosine``, 1
            under ``dot``.
        sampled_negatives: items that are drawn in every step uniformly from all items of the training
            rows, and stand beside those of the batch as negatives; of all ranks together.
        popularity_correction: whether the log of how often an item is met as a negative is taken off
            its logit in the loss, so that frequent items are not pushed away for being frequent.
    """

    arch: Literal["two_tower"] = "two_tower"
    scores: ClassVar[Literal["logits", "raw"]] = "raw"

    user_layers: tuple[int, ...] = (128,)
    item_layers: tuple[int, ...] = (128,)
    output_dim: int = 64
    similarity: Similarity = "cosine"
    temperature: float | None = None
    sampled_negatives: int = 0
    popularity_correction: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least_one(self, "user_layers item_layers output_dim")
        check.one_of(self, "similarity", Similarity)
        check.positive(self, "temperature")
        check.not_negative(self, "sampled_negatives")

    def retrieval(self) -> RetrievalSettings:
        """See `ModelConfig.retrieval`."""
        return RetrievalSettings(
            sampled_negatives=self.sampled_negatives,
            popularity_correction=self.popularity_correction,
        )

    def build(self, inputs: ModelInputs) -> nn.Module:
        """See `ModelConfig.build`."""
        if len(inputs.labels) > 1:
            raise UserError(
                f"the data has {len(inputs.labels)} labels ({', '.join(inputs.labels)}); arch two_tower"
                " learns from one, so give the others the kind ignore"
            )
        sides = {name: tower_of(name, of) for name, of in inputs.sides.items()}
        features: dict[TowerSide, list[str]] = {"user": [], "item": []}
        for feature in inputs.features:
            features[tower_of(feature.name, inputs.sides.get(feature.name, (None,)))].append(
                feature.name
            )
        dense: dict[TowerSide, list[int]] = {"user": [], "item": []}
        count = len(inputs.dense_names)
        for column in range(inputs.dense_columns if count else 0):
            dense[sides[inputs.dense_names[column % count]]].append(column)
        dims = {feature.name: feature.dim for feature in inputs.features}
        towers: dict[TowerSide, Tower] = {}
        layers: dict[TowerSide, tuple[int, ...]] = {
            "user": self.user_layers,
            "item": self.item_layers,
        }
        for side, hidden in layers.items():
            if not features[side]:
                raise UserError(
                    f"no feature of ids has the side {side}; the {side}'s tower needs one, so give a"
                    f" column of data.columns side: {side}"
                )
            width = len(dense[side]) + sum(dims[name] for name in features[side])
            towers[side] = Tower(
                width,
                hidden,
                self.output_dim,
                similarity=self.similarity,
                dropout=self.dropout,
                batch_norm=self.batch_norm,
            )
        usual = 0.05 if self.similarity == "cosine" else 1.0
        return TwoTower(
            inputs.collection(),
            towers,
            dense=dense,
            features=features,
            dense_columns=inputs.dense_columns,
            temperature=usual if self.temperature is None else self.temperature,
            embedding_dropout=self.embedding_dropout,
        )

    def logit_layers(self) -> tuple[str, ...]:
        """None: a product has no bias."""
        return ()
