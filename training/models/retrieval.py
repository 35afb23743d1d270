"""What models for retrieval have beside a logit: vectors of users and of items.

Shapes: ``B`` samples, ``N`` dense columns, ``D`` numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.training.models.inputs import ModelInputs, SparseFeature
from tessera.training.models.ranking import MissingValueEncoder, RankingModel
from tessera.training.modules.choices import FeatureSide
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.modules.hashing import FeatureHasher, HashSpec
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.training.transforms.preprocessor import Preprocessor
from tessera.training.transforms.subset import preprocessor_of

TowerSide = Literal["user", "item"]


class OneTower(nn.Module):
    """One tower with the tables of its features.

    Args:
        tables: one vector per feature.
        tower: from the dense values and the vectors to ``[B, D]``.
        features: the features in the order of the tower's input.
        dense_columns: columns of the dense values; 0: the tower takes none.
    """

    def __init__(
        self,
        tables: EmbeddingBagCollection,
        tower: nn.Module,
        features: Sequence[str],
        *,
        dense_columns: int,
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = tables
        self.tower = tower
        self._takes_dense = dense_columns > 0
        place, of_feature = dense_columns, {}
        for table in tables.embedding_bag_configs():
            for name in table.feature_names:
                of_feature[name] = range(place, place + table.embedding_dim)
                place += table.embedding_dim
        columns = [*range(dense_columns), *(c for name in features for c in of_feature[name])]
        self.columns: Tensor
        self.register_buffer("columns", torch.tensor(columns), persistent=False)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """``[B, dense columns]`` and the features' rows to ``[B, D]``."""
        values: Tensor = self.embedding_bag_collection(sparse).values()
        if self._takes_dense:
            values = torch.cat([dense, values], dim=1)
        vectors: Tensor = self.tower(values.index_select(1, self.columns))
        return vectors


@runtime_checkable
class RetrievalArch(Protocol):
    """An architecture whose logit is the product of a user's and an item's vector."""

    temperature: float

    def vectors(
        self, dense: Tensor, sparse: KeyedJaggedTensor, *, users: int
    ) -> tuple[Tensor, Tensor]:
        """The vectors of the first ``users`` samples' users ``[users, D]``, and of all items ``[B, D]``."""
        ...

    def product(self, user: Tensor, item: Tensor) -> Tensor:
        """Both ``[B, D]`` to logits ``[B, 1]``."""
        ...

    def one(self, side: TowerSide, inputs: ModelInputs) -> OneTower:
        """The tower of one side over tables of its features alone."""
        ...


def tower_of(feature: str, sides: Sequence[FeatureSide | None]) -> TowerSide:
    """The tower of a feature that is made of columns of these sides.

    Raises:
        UserError: a side is missing, they are of both towers, or there is none, as of target statistics.
    """
    if not sides:
        raise UserError(
            f"{feature} is made of labels; arch two_tower takes no target statistics, so leave it out"
        )
    towers = {"item" if side == "item" else "user" for side in sides}
    if None in sides:
        raise UserError(
            f"the feature {feature} has no side; arch two_tower needs to know whose it is, so give"
            " side: user, item or context in data.columns"
        )
    if len(towers) > 1:
        raise UserError(
            f"the feature {feature} is made of columns of the user and of the item; no tower of arch"
            " two_tower is given both, so leave it out"
        )
    return "item" if "item" in towers else "user"


class TowerModel(nn.Module):
    """One side of a `RankingModel`, from raw values to vectors; made by `tower_model`.

    Attributes:
        dense_names: the side's dense features of the data, in column order.
        features: the side's sparse features: those of the data, then those that transforms make.
    """

    def __init__(self, model: RankingModel, preprocessor: Preprocessor, side: TowerSide) -> None:
        super().__init__()
        transforms = preprocessor.transforms
        self.dense_names = tuple(column.name for column in transforms.dense)
        settled = {feature.name: feature for feature in model.features}
        self.features = tuple(settled[name] for name in transforms.sparse_names)
        self._given = len(transforms.sparse)
        self.preprocessor = preprocessor
        self.encoder = MissingValueEncoder(len(transforms.dense_names), model.encoder.missing)
        self.hasher = FeatureHasher([HashSpec.of(feature) for feature in self.features])
        inputs = ModelInputs(
            dense_columns=self.encoder.out_features,
            features=self.features,
            device="meta",
            dense_names=tuple(transforms.dense_names),
        )
        assert isinstance(model.arch, RetrievalArch)
        self.arch = model.arch.one(side, inputs)

    def data_features(self) -> tuple[SparseFeature, ...]:
        """The sparse features that `forward` is given."""
        return self.features[: self._given]

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """``[B, F_dense]`` raw float32 (NaN where missing) and raw ids to vectors ``[B, D]``."""
        dense, ids = self.preprocessor(dense_features, sparse_features)
        dense = self.encoder(dense, ids.stride())
        vectors: Tensor = self.arch(dense, self.hasher(ids))
        return vectors


def tower_model(model: RankingModel, side: TowerSide) -> TowerModel:
    """The user's or the item's tower of a trained model, whose weights it shares.

    Raises:
        UserError: the model is not one for retrieval.
    """
    if not isinstance(model.arch, RetrievalArch):
        raise UserError(
            f"--tower {side}: the model is a {type(model.arch).__name__}, which has no towers; train one"
            " with model.arch=two_tower"
        )
    transforms = model.preprocessor.transforms
    own = [n for n, sides in transforms.sides.items() if sides and tower_of(n, sides) == side]
    tower = TowerModel(model, preprocessor_of(model.preprocessor, own), side)
    return tower.eval()
