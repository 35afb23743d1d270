"""The served form of a model: six plain tensors in, a dictionary of scores out."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from tessera.serving.package.schema import InputSchema
from tessera.serving.packaging.same_bits import pad_dense, pad_lengths, sigmoid_of_rows
from tessera.training.models.ranking import RankingModel
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

# Their branches depend on the batch: tracing keeps them whole, scripting compiles them.
fx.wrap("pad_dense")
fx.wrap("pad_lengths")
fx.wrap("sigmoid_of_rows")


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
        """Score a batch; the arguments are those of `tessera.serving.package.runner.HostBatch`.

        Returns:
            Probabilities ``[B]`` float32 under the schema's output name.
        """
        plain_lengths = pad_lengths(id_list_features_lengths, float_features)
        scored_lengths = pad_lengths(id_score_list_features_lengths, float_features)
        if not self._scored:
            sparse = KeyedJaggedTensor(self._plain, id_list_features_values, lengths=plain_lengths)
        elif not self._plain:
            sparse = KeyedJaggedTensor(
                self._scored,
                id_score_list_features_values,
                id_score_list_features_weights,
                lengths=scored_lengths,
            )
        else:
            # The model's one collection is weighted: an id without a weight has weight 1.
            ones = torch.ones_like(id_list_features_values, dtype=torch.float32)
            sparse = KeyedJaggedTensor(
                self._plain + self._scored,
                torch.cat([id_list_features_values.long(), id_score_list_features_values.long()]),
                torch.cat([ones, id_score_list_features_weights]),
                lengths=torch.cat([plain_lengths, scored_lengths]),
            )
        logits = self.model(pad_dense(float_features), sparse)
        return {self._output: sigmoid_of_rows(logits, float_features)}
