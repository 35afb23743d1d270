"""One pass over a split without training."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tessera.training.data.dataset import DatasetView
from tessera.training.data.loader import BatchLoader
from tessera.training.distributed.model.model_parallel import DistributedModelParallel
from tessera.training.trainer.metrics import BinaryMetrics
from tessera.training.trainer.ranks import Ranks


def evaluate(
    model: DistributedModelParallel,
    view: DatasetView,
    *,
    batch_size: int,
    ranks: Ranks,
    should_stop: Callable[[], bool] = lambda: False,
) -> BinaryMetrics | None:
    """The metrics of ``model`` on every row of ``view``, in the view's order.

    The model is put into eval mode for the pass and back into its mode after it.  Each rank
    computes its part of every batch; every rank gets the metrics of all.

    Args:
        model: ``forward(dense_features, sparse_features) -> logits [B]``.
        view: the rows.
        batch_size: rows of a forward pass, of all ranks together.
        ranks: who evaluates together.
        should_stop: asked before every batch; True ends the pass early.  All ranks must be
            given the same answer.

    Returns:
        The filled `BinaryMetrics` (five bytes a row), or None if the pass was ended early.
    """
    metrics = BinaryMetrics(len(view))
    loader = BatchLoader(
        view,
        batch_size=batch_size,
        shuffle=False,
        seed=0,
        part=(ranks.rank, ranks.world_size),
    )
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for batch in loader.epoch(0):
                if should_stop():
                    return None
                there = batch if model.device.type == "cpu" else batch.to(model.device)
                logits = model(there.dense_features, there.sparse_features)
                if ranks.alone:
                    metrics.update(logits, batch.labels)
                else:
                    both = torch.stack([logits.cpu(), batch.labels], dim=1)
                    all_rows = ranks.joined(both)
                    metrics.update(all_rows[:, 0], all_rows[:, 1])
    finally:
        model.train(was_training)
    return metrics
