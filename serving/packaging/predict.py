"""The served form of a model: six plain tensors in, a dictionary of scores out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tessera.serving.schema import InputSchema
from tessera.training.models.ranking import RankingModel
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


class PredictModule(nn.Module):
    """Builds the jagged tensor, runs the model and turns its logit into a probability.

    Args:
        model: a model over stored tables (`embedding.with_stored_tables`), whose features come
            in the schema's group order: those of ``id_list``, then those of ``id_score_list``.
        schema: the served inputs and the one output.
    """

    def __init__(self, model: RankingModel, schema: InputSchema) -> None:
        super().__init__()
        self.model = model
        self._plain = [feature.name for feature in schema.group("id_list")]
        self._scored = [feature.name for feature in schema.group("id_score_list")]
        self._output = schema.outputs[0].name

    def forward(  # noqa: PLR0917 - the package's six inputs, in their order
        self,
        float_features: Tensor,
        id_list_features_lengths: Tensor,
        id_list_features_values: Tensor,
        id_score_list_features_lengths: Tensor,
        id_score_list_features_values: Tensor,
        id_score_list_features_weights: Tensor,
    ) -> dict[str, Tensor]:
        """Score a batch; the arguments are those of `tessera.serving.runner.HostBatch`.

        Returns:
            Probabilities ``[B]`` float32 under the schema's output name.
        """
        if not self._scored:
            sparse = KeyedJaggedTensor(
                self._plain, id_list_features_values, lengths=id_list_features_lengths
            )
        elif not self._plain:
            sparse = KeyedJaggedTensor(
                self._scored,
                id_score_list_features_values,
                id_score_list_features_weights,
                lengths=id_score_list_features_lengths,
            )
        else:
            # The model's one collection is weighted: an id without a weight has weight 1.
            ones = torch.ones_like(id_list_features_values, dtype=torch.float32)
            sparse = KeyedJaggedTensor(
                self._plain + self._scored,
                torch.cat([id_list_features_values.long(), id_score_list_features_values.long()]),
                torch.cat([ones, id_score_list_features_weights]),
                lengths=torch.cat([id_list_features_lengths, id_score_list_features_lengths]),
            )
        logits = self.model(float_features, sparse)
        return {self._output: torch.sigmoid(logits)}
