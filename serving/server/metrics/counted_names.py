"""Which of a model's features and outputs have their values counted."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.serving.package.schema import InputSchema
from tessera.serving.server.metrics.range_counts import NUMBERS_OF_RANGE
from tessera.serving.server.metrics.score_counts import NUMBERS_OF_OUTPUT


@dataclass(frozen=True)
class CountedNames:
    """Whose values are counted; the same for all processes of a server.

    Attributes:
        missing: features of which a value can be missing, in the schema's order.
        outside: features of which is known what the training rows held: dense ones, then those
            with a vocabulary.
        ranged: dense features of which a training row had a value, in the schema's order.
        outputs: those with one number for each sample, in the schema's order.
    """

    missing: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    ranged: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    @classmethod
    def of(cls, schema: InputSchema) -> CountedNames:
        """Read them from a model's schema; no features where it does not say what the training rows held."""
        dense = schema.dense_features if schema.dense_ranges else ()
        known = [feature.name for feature in schema.features if feature.vocabulary is not None]
        scores = tuple(output.name for output in schema.outputs if output.width == 1)
        ranged = tuple(
            name
            for name, own in zip(schema.dense_features, schema.dense_ranges, strict=False)
            if own.least is not None and own.most is not None
        )
        return cls(missing=dense, outside=(*dense, *known), ranged=ranged, outputs=scores)

    def numbers(self) -> int:
        """How many numbers are counted."""
        single = len(self.missing) + len(self.outside)
        return single + NUMBERS_OF_RANGE * len(self.ranged) + NUMBERS_OF_OUTPUT * len(self.outputs)


NO_NAMES = CountedNames()
