"""Which of a model's features and outputs have their values counted."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.serving.package.schema import InputSchema
from tessera.serving.server.metrics.score_counts import NUMBERS_OF_OUTPUT


@dataclass(frozen=True)
class CountedNames:
    """Whose values are counted; the same for all processes of a server.

    Attributes:
        missing: features of which a value can be missing, in the schema's order.
        outside: features of which is known what the training rows held: dense ones, then those
            with a vocabulary.
        outputs: those with one number for each sample, in the schema's order.
    """

    missing: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    @classmethod
    def of(cls, schema: InputSchema) -> CountedNames:
        """Read them from a model's schema; no features where it does not say what the training rows held."""
        dense = schema.dense_features if schema.dense_ranges else ()
        known = [feature.name for feature in schema.features if feature.vocabulary is not None]
        scores = tuple(output.name for output in schema.outputs if output.width == 1)
        return cls(missing=dense, outside=(*dense, *known), outputs=scores)

    def numbers(self) -> int:
        """How many numbers are counted."""
        return len(self.missing) + len(self.outside) + NUMBERS_OF_OUTPUT * len(self.outputs)


NO_NAMES = CountedNames()
