"""Where dense values lie in the range of what the training rows held, by feature.

0 is the least value that a training row had and 1 the largest.  The buckets are the same for every feature and in both
servers, so that features, models and versions can be compared.
"""

from __future__ import annotations

import numpy as np

from tessera.serving.package.schema import InputSchema

RANGE_BUCKETS = (0.0, 0.0001, 0.001, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Upper bounds: counts and amounts, whose largest value is far above all others, lie near 0.  What is at or below the
least is in the first bucket, what is above the largest behind the last bound."""

NUMBERS_OF_RANGE = len(RANGE_BUCKETS) + 2
"""What is counted of one feature: its buckets with the one above every bound, and the sum of positions."""


class RangeCounter:
    """Counts dense values, of the features of which a training row had one.

    Attributes:
        numbers_GN: ``[G, NUMBERS_OF_RANGE]`` float64 for G such features in the schema's order: values by bucket, then
            the sum of their positions, each bounded to 0 and 1.

    Args:
        schema: the model's inputs.
    """

    def __init__(self, schema: InputSchema) -> None:
        places: list[int] = []
        least: list[float] = []
        most: list[float] = []
        for place, own in enumerate(schema.dense_ranges):
            if own.least is None or own.most is None:
                continue
            places.append(place)
            least.append(own.least)
            most.append(own.most)
        self._places_G = np.array(places, np.int64)
        self._least_G = np.array(least, np.float64)
        width_G = np.array(most, np.float64) - self._least_G
        self._scale_G = np.divide(1, width_G, out=np.zeros_like(width_G), where=width_G > 0)
        bounds_GK = self._least_G[:, None] + np.array(RANGE_BUCKETS) * width_G[:, None]
        self._upper_GK = bounds_GK.astype(np.float32)
        self._upper_GK[:, -1] = most  # whatever the sum was rounded to
        self.numbers_GN = np.zeros((len(places), NUMBERS_OF_RANGE))

    def count(self, dense_NF: np.ndarray) -> None:
        """Count the values of N samples, which are NaN where they are missing."""
        values_NG = dense_NF[:, self._places_G]
        present_G = np.count_nonzero(~np.isnan(values_NG), axis=0)
        # Comparisons with NaN are false, so that a missing value is above nothing.
        above_GK = [np.count_nonzero(values_NG > upper_G, axis=0) for upper_G in self._upper_GK.T]
        left_G = np.stack([present_G, *above_GK, np.zeros_like(present_G)], axis=1)
        self.numbers_GN[:, :-1] -= np.diff(left_G, axis=1)
        position_NG = (values_NG - self._least_G) * self._scale_G
        self.numbers_GN[:, -1] += np.nan_to_num(np.clip(position_NG, 0, 1), nan=0.0).sum(axis=0)
