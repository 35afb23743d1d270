"""A model of `tessera train` as a module that is packaged like any other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from tessera.serving.packaging.evaluate import LabelledBatch
from tessera.serving.packaging.inputs import ModelInputs
from tessera.serving.packaging.source import Source
from tessera.training.data.batch import Batch
from tessera.training.models.ranking import RankingModel
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

_SAMPLES = 2


class ServedRanking(nn.Module):
    """A ranking model with the head that it is served with: logits become probabilities."""

    def __init__(self, model: RankingModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: Tensor, *ids: KeyedJaggedTensor) -> Tensor:
        """Score a batch: ``dense`` ``[B, F_dense]`` float32, NaN where missing, and raw ids.

        The ids are those of the features without weights, of those with weights, or of both groups in
        this order; or of all features in one.  Returns probabilities, in the shape of the model's
        logits, ``[B]`` or ``[B, T]`` float32.
        """
        sparse = ids[0] if len(ids) == 1 else _joined(*ids)
        return torch.sigmoid(self.model(dense, sparse))


def _joined(plain: KeyedJaggedTensor, scored: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Both groups in one, as the model's collections take them: an id without a weight has 1."""
    ones = torch.ones_like(plain.values(), dtype=torch.float32)
    return KeyedJaggedTensor(
        plain.keys() + scored.keys(),
        torch.cat([plain.values().long(), scored.values().long()]),
        torch.cat([ones, scored.weights()]),
        lengths=torch.cat([plain.lengths(), scored.lengths()]),
    )


def ranking_source(model: RankingModel, *, dense_transform: str = "") -> Source:
    """The float32 ``model`` with its served head, what its inputs are called, and a sample batch.

    ``dense_transform`` says what training did to the raw dense values, in words.
    """
    inputs = ModelInputs(
        dense_features=model.dense_names, dense_missing="nan", dense_transform=dense_transform
    )
    dense = torch.zeros(_SAMPLES, len(model.dense_names))
    plain, scored = (
        [feature.name for feature in model.features if feature.group == group]
        for group in ("id_list", "id_score_list")
    )
    ids = [
        KeyedJaggedTensor(
            names,
            torch.zeros(_SAMPLES * len(names), dtype=torch.int64),
            torch.ones(_SAMPLES * len(names)) if names is scored else None,
            lengths=torch.ones(_SAMPLES * len(names), dtype=torch.int32),
        )
        for names in (plain, scored)
        if names
    ]
    return ServedRanking(model), inputs, (dense, *ids)


def labelled(batches: Iterable[Batch]) -> Iterator[LabelledBatch]:
    """Batches of training as `ServedRanking` takes them."""
    for batch in batches:
        yield (batch.dense_features, batch.sparse_features), batch.labels
