"""Collections whose ids pass a feature processor before the lookup."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from tessera.training.modules.embedding_configs import EmbeddingBagConfig
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.modules.feature_processor_ import (
    FeatureProcessor,
    FeatureProcessorsCollection,
)
from tessera.training.modules.tables import EmbeddingBagCollectionInterface
from tessera.training.sparse import selection
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor


def process_each(features: KeyedJaggedTensor, processors: nn.ModuleDict) -> KeyedJaggedTensor:
    """The features, each as its processor gives it back.

    Raises:
        KeyError: a feature without a processor.
    """
    bags = features.to_dict()
    missing = [key for key in bags if key not in processors]
    if missing:
        raise KeyError(f"feature {missing[0]!r} has no processor; there are {sorted(processors)}")
    processed = {key: processors[key](bag) for key, bag in bags.items()}
    return features.with_fields(
        torch.cat([bag.values() for bag in processed.values()]),
        torch.cat([bag.weights() for bag in processed.values()]),
        features.lengths_or_none(),
        features.offsets_or_none(),
    )


class FeatureProcessorDictWrapper(FeatureProcessorsCollection):
    """Processes each feature with a processor of its own.

    Args:
        feature_processors: by feature; every feature of the input needs one.
    """

    def __init__(self, feature_processors: nn.ModuleDict) -> None:
        super().__init__()
        self._feature_processors = feature_processors

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """See `process_each`."""
        return process_each(features, self._feature_processors)


class FeatureProcessedEmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """Puts weights on ids, then looks up and pools.

    Args:
        embedding_bag_collection: a weighted collection.
        feature_processors: one processor per feature, or one for all.

    Raises:
        ValueError: the collection is not weighted, or a feature has no processor.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        feature_processors: Mapping[str, FeatureProcessor] | FeatureProcessorsCollection,
    ) -> None:
        super().__init__()
        if not embedding_bag_collection.is_weighted():
            raise ValueError(
                "embedding_bag_collection is not weighted, so the processors' weights would be "
                "lost; build it with is_weighted=True"
            )
        self._embedding_bag_collection = embedding_bag_collection
        features = [
            name
            for table in embedding_bag_collection.embedding_bag_configs()
            for name in table.feature_names
        ]
        self._feature_names = list(dict.fromkeys(features))
        self._feature_processors: FeatureProcessorsCollection | nn.ModuleDict
        if isinstance(feature_processors, FeatureProcessorsCollection):
            self._feature_processors = feature_processors
        else:
            missing = [name for name in self._feature_names if name not in feature_processors]
            if missing:
                raise ValueError(
                    f"feature {missing[0]!r} has no processor in feature_processors; there are "
                    f"{sorted(feature_processors)}"
                )
            self._feature_processors = nn.ModuleDict(dict(feature_processors))

    def split(self) -> tuple[FeatureProcessorsCollection, EmbeddingBagCollection]:
        """The processors, as one module, and the collection: one after the other they are this module.

        The processors take the collection's features alone.
        """
        processors = self._feature_processors
        if isinstance(processors, nn.ModuleDict):
            processors = FeatureProcessorDictWrapper(processors)
        return processors, self._embedding_bag_collection

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The settings of every table, in the collection's order."""
        return self._embedding_bag_collection.embedding_bag_configs()

    def is_weighted(self) -> bool:
        """True: ids carry the processors' weights."""
        return True

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Process, look up and pool; see `EmbeddingBagCollection.forward`."""
        features = selection.select_features(features, self._feature_names)
        processors = self._feature_processors
        processed: KeyedJaggedTensor = (
            process_each(features, processors)
            if isinstance(processors, nn.ModuleDict)
            else processors(features)
        )
        pooled: KeyedTensor = self._embedding_bag_collection(processed)
        return pooled
