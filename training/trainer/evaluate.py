"""One pass over a split without training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tessera.training.data.dataset import DatasetView
from tessera.training.data.loader import BatchLoader
from tessera.training.trainer.metrics import BinaryMetrics


def evaluate(
    model: nn.Module,
    view: DatasetView,
    *,
    batch_size: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> BinaryMetrics | None:
    """The metrics of ``model`` on every row of ``view``, in the view's order.

    The model is put into eval mode for the pass and back into its mode after it.

    Args:
        model: ``forward(dense_features, sparse_features) -> logits [B]``.
        view: the rows.
        batch_size: rows of a forward pass.
        should_stop: asked before every batch; True ends the pass early.

    Returns:
        The filled `BinaryMetrics` (five bytes a row), or None if the pass was ended early.
    """
    metrics = BinaryMetrics(len(view))
    loader = BatchLoader(view, batch_size=batch_size, shuffle=False, seed=0)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for batch in loader.epoch(0):
                if should_stop():
                    return None
                logits = model(batch.dense_features, batch.sparse_features)
                metrics.update(logits, batch.labels)
    finally:
        model.train(was_training)
    return metrics
