"""Ids that a module hashes itself, hashed by the lookup instead where nothing else reads them.

`tessera.training.modules.hashing.FeatureHasher` is some dozen operators over all ids.  The stored tables'
lookup applies the same rules on its way, so a hasher whose ids go into lookups and nowhere else is
left out of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from tessera.training.modules.hashing import FeatureHasher, HashSpec
from tessera.training.modules.mc_modules import ManagedCollisionCollection
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.training.transforms.preprocessor import Preprocessor

Value = TypeVar("Value")


class KeepIds(nn.Module):
    """Stands where the module hashes ids that the stored tables' lookups hash themselves."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """``features`` unchanged."""
        return features


def find_hashers(module: nn.Module) -> dict[str, FeatureHasher]:
    """The module's hashers by their qualified names."""
    return {path: part for path, part in module.named_modules() if isinstance(part, FeatureHasher)}


def hash_specs(hashers: Iterable[FeatureHasher]) -> dict[str, HashSpec]:
    """By feature, how the hashers turn raw ids into rows."""
    return {spec.name: spec for hasher in hashers for spec in hasher.specs}


@dataclass(frozen=True)
class UsedVocabulary:
    """The vocabulary of a feature.

    Attributes:
        number: its place among the vocabularies of its `Preprocessor`.
        ids: how many it holds.
    """

    number: int
    ids: int


def vocabulary_features(module: nn.Module) -> dict[str, UsedVocabulary]:
    """The features whose ids a `Preprocessor` of the module looks up; the first of several, as in an ensemble."""
    found: dict[str, UsedVocabulary] = {}
    for part in module.modules():
        if isinstance(part, Preprocessor) and part.vocabulary is not None:
            names = list(part.transforms.vocabularies)
            for column in part.transforms.sparse:
                if column.vocabulary is not None:
                    ids = part.vocabulary.sizes[column.vocabulary]
                    used = UsedVocabulary(names.index(column.vocabulary), ids)
                    found.setdefault(column.name, used)
    return found


def mapped_features(module: nn.Module) -> set[str]:
    """The features whose ids the module's managed collision modules map to rows."""
    return {
        name
        for part in module.modules()
        if isinstance(part, ManagedCollisionCollection)
        for table in part.embedding_configs()
        for name in table.feature_names
    }


class HashedIds(TorchFunctionMode):
    """While a module runs in this mode, watches who reads the ids that its hashers gave.

    Attributes:
        elsewhere: the names of the hashers whose ids something else than a lookup reads, or that
            drop features of their input.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: set[str] = set()
        self._hashed: dict[int, tuple[str, Tensor]] = {}
        self._lookups = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note a read of hashed ids, and call the function."""
        del types
        if not self._lookups:
            for value in values_in((args, kwargs or {}), Tensor):
                if id(value) in self._hashed:
                    self.elsewhere.add(self._hashed[id(value)][0])
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self, module: nn.Module, lookups: Iterable[nn.Module]) -> Iterator[None]:
        """Watch the hashers of ``module``; ``lookups`` are its parts that may read what they give."""
        handles: list[RemovableHandle] = []
        for path, hasher in find_hashers(module).items():
            handles.append(hasher.register_forward_hook(self._note(path)))
        for lookup in lookups:
            handles.append(lookup.register_forward_pre_hook(self._enter))
            handles.append(lookup.register_forward_hook(self._leave))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, path: str) -> Callable[..., None]:
        def note(
            hasher: nn.Module, given: tuple[KeyedJaggedTensor], found: KeyedJaggedTensor
        ) -> None:
            del hasher
            if set(given[0].keys()) != set(found.keys()):
                self.elsewhere.add(path)
            # The tensor is kept, so that no other one gets its number.
            self._hashed[id(found.values())] = (path, found.values())

        return note

    def _enter(self, *_: object) -> None:
        self._lookups += 1

    def _leave(self, *_: object) -> None:
        self._lookups -= 1


def values_in(nested: Any, kind: type[Value]) -> Iterator[Value]:
    """What of a kind lies in nested tuples, lists and dictionaries."""
    if isinstance(nested, tuple | list | dict):
        for item in nested.values() if isinstance(nested, dict) else nested:
            yield from values_in(item, kind)
    elif isinstance(nested, kind):
        yield nested
