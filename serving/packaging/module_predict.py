"""The served form of any module: six plain tensors in, a dictionary of outputs out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tessera.serving.package.schema import InputSchema
from tessera.serving.packaging.inputs import ArgumentKind, named_outputs
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


class ModulePredict(nn.Module):
    """Builds the module's arguments and names its outputs.

    Args:
        module: over stored tables (`tessera.serving.packaging.packed_collections`).
        arguments: the kinds of its arguments, in order.
        schema: the served inputs and outputs.
        samples: the outputs for some batch: their shapes and types.
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: tuple[ArgumentKind, ...],
        schema: InputSchema,
        samples: dict[str, Tensor],
    ) -> None:
        super().__init__()
        self.module = module
        self._arguments = arguments
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
        given: dict[ArgumentKind, Tensor | KeyedJaggedTensor] = {"dense": float_features}
        if "id_list" in self._arguments:
            given["id_list"] = KeyedJaggedTensor(
                self._plain, id_list_features_values, lengths=id_list_features_lengths
            )
        if "id_score_list" in self._arguments:
            given["id_score_list"] = KeyedJaggedTensor(
                self._scored,
                id_score_list_features_values,
                id_score_list_features_weights,
                lengths=id_score_list_features_lengths,
            )
        found = self.module(*(given[kind] for kind in self._arguments))
        outputs = named_outputs(found, self._outputs[0])
        return {name: self._finished(name, outputs[name]) for name in self._outputs}

    def _finished(self, name: str, value: Tensor) -> Tensor:
        if name in self._columns:
            value = value.squeeze(1)
        return value.float() if name in self._casts else value
