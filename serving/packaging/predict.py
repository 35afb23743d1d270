"""The served form of a module: six plain tensors in, a dictionary of outputs out."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from tessera.serving.package.schema import InputSchema
from tessera.serving.packaging.inputs import ArgumentKind, named_outputs
from tessera.serving.packaging.passes.padding import first_rows, pad_dense, pad_lengths
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

# Their branches depend on the batch: tracing keeps them whole, scripting compiles them.
fx.wrap("pad_dense")
fx.wrap("pad_lengths")
fx.wrap("first_rows")


class Predict(nn.Module):
    """Builds the arguments of a module over stored tables, and names its outputs.

    ``arguments`` are their kinds, in order; ``samples`` the outputs for some batch, with their shapes
    and types.  A ``padded`` module gets whole blocks of samples (`tessera.serving.packaging.passes.padding`).
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: tuple[ArgumentKind, ...],
        schema: InputSchema,
        samples: dict[str, Tensor],
        *,
        padded: bool,
    ) -> None:
        super().__init__()
        self.module = module
        self._arguments = arguments
        self._padded = padded
        self._plain = [feature.name for feature in schema.group("id_list")]
        self._scored = [feature.name for feature in schema.group("id_score_list")]
        self._outputs = [output.name for output in schema.outputs]
        self._columns = {name for name, value in samples.items() if value.shape[1:] == (1,)}
        self._casts = {n for n, value in samples.items() if value.dtype != torch.float32}

    def forward(  # noqa: PLR0917 - the package's six inputs, in their order
        self,
        float_features: Tensor,
        id_list_features_lengths: Tensor,
        id_list_features_values: Tensor,
        id_score_list_features_lengths: Tensor,
        id_score_list_features_values: Tensor,
        id_score_list_features_weights: Tensor,
    ) -> dict[str, Tensor]:
        """Run a batch; the arguments are those of `tessera.serving.package.runner.HostBatch`.

        Returns:
            Each output, ``[B]`` or ``[B, k]`` float32.
        """
        dense = float_features
        plain_lengths, scored_lengths = id_list_features_lengths, id_score_list_features_lengths
        if self._padded:
            plain_lengths = pad_lengths(plain_lengths, float_features)
            scored_lengths = pad_lengths(scored_lengths, float_features)
            dense = pad_dense(dense)
        given: dict[ArgumentKind, Tensor | KeyedJaggedTensor] = {"dense": dense}
        if "id_list" in self._arguments:
            given["id_list"] = KeyedJaggedTensor(
                self._plain, id_list_features_values, lengths=plain_lengths
            )
        if "id_score_list" in self._arguments:
            given["id_score_list"] = KeyedJaggedTensor(
                self._scored,
                id_score_list_features_values,
                id_score_list_features_weights,
                lengths=scored_lengths,
            )
        found = self.module(*(given[kind] for kind in self._arguments))
        outputs = named_outputs(found, self._outputs[0])
        return {name: self._finished(name, outputs[name], float_features) for name in self._outputs}

    def _finished(self, name: str, value: Tensor, dense: Tensor) -> Tensor:
        if name in self._columns:
            value = value.squeeze(1)
        value = value.float() if name in self._casts else value
        return first_rows(value, dense) if self._padded else value
