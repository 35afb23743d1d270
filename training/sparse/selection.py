"""Features picked out of a batch by name, also inside traced and scripted models."""

import torch

from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

# Annotations are not postponed here: TorchScript compiles these functions by themselves.


def select_features(features: KeyedJaggedTensor, names: list[str]) -> KeyedJaggedTensor:
    """The features called ``names``, in that order; a name may stand there twice.

    The order of the input's keys is looked at in each call, so a traced model takes features in
    any order, and more than it needs.

    Raises:
        KeyError: a feature is missing.
    """
    if features.keys() == names:
        return features
    places = features.index_per_key()
    chosen: list[int] = []
    for name in names:
        if name not in places:
            raise KeyError(f"feature '{name}' is missing; the input has {features.keys()}")
        chosen.append(places[name])
    return features.permute(chosen)


# A traced graph holds the call.  torch.fx sees it in this module only: call it by the module.
torch.fx.wrap("select_features")
