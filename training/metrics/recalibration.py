"""Predictions of a model that was trained on a sample of the negative examples, for all of them.

He et al. 2014, "Practical lessons from predicting clicks on ads at Facebook", section 6.3: with the share ``c`` of
negatives kept, a prediction ``p`` stands for ``p / (p + (1 - p) / c)``.
"""

from __future__ import annotations

from torch import Tensor


def recalibrated(predictions: Tensor, coefficient: float) -> Tensor:
    """Predictions ``p`` as ``p / (p + (1 - p) / coefficient)``; of the same shape."""
    return predictions / (predictions + (1.0 - predictions) / coefficient)
