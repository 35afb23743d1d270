"""One pass over a split without training."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tessera.training.data.dataset import View
from tessera.training.data.loader import BatchLoader
from tessera.training.data.users import users_of
from tessera.training.trainer.assembly import Assembly
from tessera.training.trainer.retrieval_evaluation import Queries, item_vectors
from tessera.training.trainer.split_metrics import SplitMetrics


def evaluate(
    assembly: Assembly,
    view: View,
    *,
    batch_size: int,
    should_stop: Callable[[], bool] = lambda: False,
    user_feature: str | None = None,
) -> SplitMetrics | None:
    """The metrics of a model on every row of ``view``, in the view's order.

    Where averages of the weights are made, they stand in for the weights.  The model is put into eval
    mode for the pass and back into its mode after it.  Each rank computes its part of every batch; every
    rank gets the metrics of all.

    Args:
        assembly: the model and the ranks that evaluate together.
        view: the rows.
        batch_size: rows of a forward pass, of all ranks together.
        user_feature: the one that says whose row it is, to keep its ids for standard errors; None: keep none.
        should_stop: asked before every batch, all ranks alike; True ends the pass, with None.
    """
    model, ranks = assembly.model, assembly.ranks
    retrieval = assembly.retrieval
    queries = None if retrieval is None else Queries(data=retrieval, ranks=ranks)
    metrics = SplitMetrics(assembly.losses.labels, assembly.losses.weights, len(view))
    columns = len(metrics.by_label)
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
        with assembly.averaged(), torch.no_grad():
            for number, batch in enumerate(loader.epoch(0)):
                if should_stop():
                    return None
                there = assembly.on_device(batch, samples=loader.batch_rows(number))
                if queries is None:
                    _, (_, outputs) = model(there)
                else:
                    users, items = assembly.vectors(there)
                    outputs = assembly.product(users, items)
                    queries.update(batch, users)
                labels = batch.labels.view(-1, columns)
                if user_feature is not None:
                    ids = torch.from_numpy(users_of(batch, user_feature))
                    metrics.add_users(ranks.joined(ids).numpy())
                if ranks.alone:
                    metrics.update(outputs.cpu(), labels)
                else:
                    all_rows = ranks.joined(torch.cat([outputs.cpu(), labels], dim=1))
                    metrics.update(all_rows[:, :columns], all_rows[:, columns:])
            if queries is not None and retrieval is not None:
                metrics.retrieval = queries.compute(
                    item_vectors(
                        retrieval,
                        ranks,
                        lambda batch, rows: assembly.vectors(
                            assembly.on_device(batch, samples=rows)
                        )[1],
                        batch_size=batch_size,
                    )
                )
    finally:
        model.train(was_training)
    return metrics
