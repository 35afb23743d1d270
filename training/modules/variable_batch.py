"""From one vector per distinct bag back to one per sample, for batches that vary per key."""

from __future__ import annotations

from torch import Tensor

from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


def expand_pooled(
    pooled: list[Tensor], features: KeyedJaggedTensor, feature_names: list[list[str]]
) -> list[Tensor]:
    """The vector of the bag that each sample uses, by the features' inverse indices.

    Args:
        pooled: ``[S_f, D]`` of each feature of each table.
        features: the input that was looked up.
        feature_names: each table's features.

    Returns:
        ``[B, D]`` each; ``pooled`` itself where every key has ``B`` bags.

    Raises:
        ValueError: the batch varies per key and there are no inverse indices.
    """
    if not features.variable_stride_per_key():
        return pooled
    inverse = features.inverse_indices_or_none()
    if inverse is None:
        raise ValueError(
            "the features have different numbers of bags; give inverse_indices= to the "
            "KeyedJaggedTensor, which say which bag each sample uses"
        )
    keys, places = inverse
    of_key = {key: places[index] for index, key in enumerate(keys)}
    expanded: list[Tensor] = []
    for names in feature_names:
        for name in names:
            expanded.append(pooled[len(expanded)].index_select(0, of_key[name]))
    return expanded
