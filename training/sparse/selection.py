"""Features picked out of a batch by name, also inside traced and scripted models."""

import torch

from tessera.training.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

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


def bags_in_order(features: KeyedJaggedTensor, names: list[str]) -> list[JaggedTensor]:
    """The bags of the features called ``names``, in that order; a name may stand there twice.

    Where the input's keys are ``names`` the bags are taken by place, so that a name that stands there
    twice may have other ids each time.

    Raises:
        KeyError: a feature is missing.
    """
    if features.keys() == names:
        parts = features.split([1 for _ in names])
        return [parts[place].to_dict()[name] for place, name in enumerate(names)]
    bags = features.to_dict()
    return [bags[name] for name in names]


def bags_of(
    features: KeyedJaggedTensor,
    names: list[str],
    by_place: bool,  # noqa: FBT001 - TorchScript compiles it
) -> list[JaggedTensor]:
    """The bags of the features called ``names``, in that order; ``by_place``: as `bags_in_order` takes them."""
    if by_place:
        return bags_in_order(features, names)
    bags = features.to_dict()
    return [bags[name] for name in names]


# A traced graph holds the calls.  torch.fx sees them in this module only: call them by the module.
torch.fx.wrap("select_features")
torch.fx.wrap("bags_in_order")
