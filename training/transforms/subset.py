"""`preprocessor_of`: what a fitted `Preprocessor` does to some of its columns alone."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from tessera.training.transforms.description import Transforms
from tessera.training.transforms.kinds.vocabulary import VocabularyLookup
from tessera.training.transforms.preprocessor import FittedSizes, Preprocessor
from tessera.training.transforms.transform import DenseStage


def preprocessor_of(whole: Preprocessor, names: Collection[str]) -> Preprocessor:
    """A preprocessor for the columns and crosses ``names``, with the fitted values of ``whole``.

    Crosses and steps that read other columns need these to be among the names.  It has no target
    statistics.  What it gives for a column has the bits that ``whole`` gives.
    """
    given = whole.transforms
    own = Transforms(
        dense=tuple(column for column in given.dense if column.name in names),
        sparse=tuple(column for column in given.sparse if column.name in names),
        labels=given.labels,
        crosses={name: cross for name, cross in given.crosses.items() if name in names},
    )
    sizes = {}
    if whole.vocabulary is not None:
        sizes = {name: whole.vocabulary.sizes[name] for name in own.vocabularies}
    part = Preprocessor(own, FittedSizes(vocabularies=sizes))
    _copy_stages(whole, part)
    if part.vocabulary is not None and whole.vocabulary is not None:
        part.vocabulary.load_state_dict(_vocabulary_state(whole.vocabulary, part.vocabulary))
    return part.eval()


def _copy_stages(whole: Preprocessor, part: Preprocessor) -> None:
    """Copy the columns' fitted values: the stages of both may be cut in other ways."""
    steps = _steps(whole)
    for stage in _stages(part):
        for place, settings in enumerate(stage.settings):
            if settings is None:
                continue
            source, column = steps[part.transforms.dense[place].name].pop(0)
            there = dict(source.named_buffers())
            for name, values in stage.named_buffers():
                if name in stage.state_dict():
                    _copy(there[name][column], values[place])


def _copy(value: Tensor, into: Tensor) -> None:
    """Copy one column's fitted value; a list of bounds is as long as the longest of its stage needs."""
    if value.dim():
        length = min(len(value), len(into))
        into[:length] = value[:length]
    else:
        into.copy_(value)


def _stages(preprocessor: Preprocessor) -> list[DenseStage]:
    return [stage for stage in preprocessor.stages if isinstance(stage, DenseStage)]


def _steps(whole: Preprocessor) -> dict[str, list[tuple[torch.nn.Module, int]]]:
    """By dense column, the stages that take its steps, in order, and its place in them."""
    found: dict[str, list[tuple[torch.nn.Module, int]]] = {
        column.name: [] for column in whole.transforms.dense
    }
    for stage in _stages(whole):
        for place, settings in enumerate(stage.settings):
            if settings is not None:
                found[whole.transforms.dense[place].name].append((stage, place))
    return found


def _vocabulary_state(whole: VocabularyLookup, part: VocabularyLookup) -> dict[str, Tensor]:
    """The entries of the vocabularies that are kept, in their order, at their new places."""
    starts, at = {}, 0
    for name, size in whole.sizes.items():
        starts[name] = at
        at += size
    places = torch.full_like(whole.places_U, -1)
    at = 0
    for name, size in part.sizes.items():
        own = (whole.places_U >= starts[name]) & (whole.places_U < starts[name] + size)
        places = torch.where(own, whole.places_U - starts[name] + at, places)
        at += size
    kept = places >= 0
    seeds = whole.seeds_V[torch.tensor([whole.names.index(name) for name in part.names])]
    if not bool(kept.any()):
        return part.state_dict() | {"seeds_V": seeds}
    return {"keys_U": whole.keys_U[kept], "places_U": places[kept], "seeds_V": seeds}
