"""Which of the new ids of a managed collision module are counted at all.

Shapes: ``U`` different ids.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ThresholdFilter = Callable[[Tensor], tuple[Tensor, float | Tensor]]
"""From the counts ``[U]`` to which of these ids are counted, ``[U]`` bool, and the threshold."""


def dynamic_threshold_filter(
    id_counts: Tensor, threshold_skew_multiplier: float = 10.0
) -> tuple[Tensor, Tensor]:
    """Keep the ids that came more often than a multiple of the mean count.

    Args:
        id_counts: ``[U]`` how often each id came.
        threshold_skew_multiplier: the multiple.

    Returns:
        ``[U]`` bool, and the threshold: the multiple times the mean of ``id_counts``.
    """
    threshold = id_counts.sum() / max(id_counts.numel(), 1) * threshold_skew_multiplier
    return id_counts > threshold, threshold


def average_threshold_filter(id_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the ids that came more often than the mean; as `dynamic_threshold_filter` with multiple 1."""
    return dynamic_threshold_filter(id_counts, 1.0)


def probabilistic_threshold_filter(
    id_counts: Tensor, per_id_probability: float = 0.01
) -> tuple[Tensor, Tensor]:
    """Keep an id with a chance that grows with its count, as if each occurrence were a draw of its own.

    Args:
        id_counts: ``[U]`` how often each id came.
        per_id_probability: the chance that one occurrence lets its id in.

    Returns:
        ``[U]`` bool, and ``[U]`` float32 uniform numbers: an id is kept where its chance
        ``1 - (1 - per_id_probability) ** count`` is greater.
    """
    chances = 1 - torch.pow(1 - per_id_probability, id_counts)
    thresholds = torch.rand(id_counts.size(), device=id_counts.device)
    return chances > thresholds, thresholds
