"""Interfaces of TorchRec's older way to serve: a factory that makes a model, and a model of named tensors.

Programs that have such classes keep them. Tessera's servers take packages, which `tessera package-model`
makes of a trained model; nothing here is needed for one.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tessera.training.modules.tables import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)


@dataclass
class BatchingMetadata:
    """How the requests' tensors of one input are put together.

    Attributes:
        type: the kind of input, ``dense`` or ``sparse`` for example; the server that reads it says which.
        device: ``cpu`` or ``cuda``.
        pinned: ends of the names of tensors that go to page-locked memory; ``""`` is the input itself.
    """

    type: str
    device: str
    pinned: list[str]


@dataclass
class QualNameMetadata:
    """What a server has to know of one method of a model.

    Attributes:
        need_preproc: whether its inputs are prepared first.
    """

    need_preproc: bool


class PredictFactory(ABC):
    """Makes a trained model for serving and says what a server has to know of it."""

    @abstractmethod
    def create_predict_module(self) -> nn.Module:
        """Return the model, sharded over the ranks of the default process group, with memory for its weights."""

    @abstractmethod
    def batching_metadata(self) -> dict[str, BatchingMetadata]:
        """Return how requests are put together, by the name of the input."""

    def batching_metadata_json(self) -> str:
        """Return `batching_metadata` as JSON."""
        return json.dumps({name: asdict(how) for name, how in self.batching_metadata().items()})

    @abstractmethod
    def result_metadata(self) -> str:
        """Return the kind of the result, from which a server knows how to divide it among requests."""

    @abstractmethod
    def run_weights_independent_tranformations(self, predict_module: nn.Module) -> nn.Module:
        """Return the model after what does not look at its weights, such as tracing (TorchRec's spelling)."""

    @abstractmethod
    def run_weights_dependent_transformations(self, predict_module: nn.Module) -> nn.Module:
        """Return the model after what looks at its weights, such as quantizing."""

    def qualname_metadata(self) -> dict[str, QualNameMetadata]:
        """Return what a server has to know of single methods, by name; nothing unless overridden."""
        return {}

    def qualname_metadata_json(self) -> str:
        """Return `qualname_metadata` as JSON."""
        return json.dumps({name: asdict(what) for name, what in self.qualname_metadata().items()})

    def model_inputs_data(self) -> dict[str, Any]:
        """Return data from which inputs for benchmarks are made; nothing unless overridden."""
        return {}


class PredictModule(nn.Module, ABC):
    """A model that takes named tensors; a subclass says in `predict_forward` how.

    Its state dict is the model's.

    Args:
        module: the model; it is switched to evaluation.
        device: where `predict_forward` runs; None: the current CUDA device at the first call.
    """

    def __init__(self, module: nn.Module, device: str | None = None) -> None:
        super().__init__()
        self._module = module.eval()
        self._device = None if device is None else torch.device(device)

    @property
    def predict_module(self) -> nn.Module:
        """Return the model."""
        return self._module

    @abstractmethod
    def predict_forward(self, batch: dict[str, Tensor]) -> Any:
        """Run the model on a batch of named tensors."""

    def forward(self, batch: dict[str, Tensor]) -> Any:
        """Run `predict_forward` without recording anything for gradients."""
        if self._device is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        with torch.inference_mode():
            return self.predict_forward(batch)

    def state_dict(self, *args: Any, **kwargs: Any) -> Mapping[str, Any]:  # type: ignore[override]
        """Return the model's state dict, under the model's own names."""
        state: Mapping[str, Any] = self._module.state_dict(*args, **kwargs)
        return state


def quantize_feature(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """A forward hook: the inputs with float32 tensors as float16."""
    del module
    return tuple(
        each.half() if isinstance(each, Tensor) and each.dtype is torch.float32 else each
        for each in inputs
    )


def quantize_dense(
    predict_module: PredictModule,
    dtype: torch.dtype,
    additional_embedding_module_type: list[type[nn.Module]] | None = None,
) -> nn.Module:
    """Make the children of a model that are not collections of tables compute in float16, in place.

    Args:
        predict_module: its model's children are changed, and get float16 of float32 inputs.
        dtype: ``torch.half``.
        additional_embedding_module_type: further types of children that stay as they are.

    Returns:
        ``predict_module``.

    Raises:
        NotImplementedError: another type.
    """
    if dtype is not torch.half:
        raise NotImplementedError(f"dtype is {dtype}; give torch.half, the only one that is here")
    tables = (EmbeddingBagCollectionInterface, EmbeddingCollectionInterface)
    for child in predict_module.predict_module.children():
        if isinstance(child, tables) or type(child) in (additional_embedding_module_type or []):
            continue
        child.half().register_forward_pre_hook(quantize_feature)
    return predict_module
